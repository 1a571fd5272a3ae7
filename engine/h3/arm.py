"""One arm's process, `python -m engine.h3.arm`: load SGLang's pipeline, run the requests, leave the evidence.

SGLang spawns its workers, and a spawned worker executes this module's top level again under the name `__mp_main__`.
Whatever must be replaced inside SGLang is therefore replaced at the top level, in driver and workers alike.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

STARTED = time.monotonic()

from config.errors import Exit  # noqa: E402
from config.record import ArmEnd, ArmStart, LoadEnd, RequestEnd, RequestStart, Timing  # noqa: E402
from config.schema import Target  # noqa: E402
from engine.evidence import EventLog, write_model  # noqa: E402
from engine.h3.spec import ArmSpec, RequestSpec, spec_from_environment  # noqa: E402


def prepare_cpu(spec: ArmSpec) -> list[str]:
    """Install the CPU stand-ins that the target needs. Driver and worker both validate requests, so both get them."""
    target = spec.lock.resolved
    from engine.checkpoint.presets import PRESETS
    from engine.h3 import cpu

    installed = [cpu.declare_torchvision_operators(), cpu.install_small_targets(), cpu.install_denoising_on_cpu()]
    if target.checkpoint.kind == "synthetic":
        installed.append(cpu.install_shrunken_vaes(PRESETS[target.checkpoint.preset]))
    if target.offload.components:
        installed.append(cpu.install_cpu_streams())
    return installed


def prepare_cuda() -> list[str]:
    """Stand in for compiled packages that CUDA 12.8 has no wheel of, and for absent ones that the model never uses."""
    from engine.h3 import sgl_kernel_stand_in, unused_packages

    return [*sgl_kernel_stand_in.install(), *unused_packages.install()]


def prepare(spec: ArmSpec) -> list[str]:
    """Install what the machine lacks, before SGLang is imported, in the driver and in every worker."""
    return prepare_cpu(spec) if spec.lock.resolved.hardware.kind == "cpu" else prepare_cuda()


def prepare_weights(spec: ArmSpec) -> list[str]:
    """Let the loaders take synthetic weights whose files hold no data."""
    from engine.checkpoint.deferred import install_deferred_loading, lacks_data

    if spec.lock.resolved.checkpoint.kind != "synthetic" or not lacks_data(Path(spec.checkpoint)):
        return []
    return [install_deferred_loading()]


def prepare_worker(spec: ArmSpec) -> None:
    """Install stand-ins and seams in a spawned worker and say so in its events."""
    from engine.h3 import mapped, output, seams
    from engine.h3.tracker import Tracker

    rank = worker_rank(multiprocessing.current_process().name)
    log = EventLog(spec.folder / f"events-rank{rank}.jsonl", "worker", STARTED)
    installed = prepare(spec) + prepare_weights(spec)
    tracker = Tracker(spec, rank, log)
    if spec.lock.resolved.offload.mapped:
        installed.append(mapped.install_mapped_weights())
    installed += seams.install(tracker)
    if os.environ.get(output.UNMUXED_VARIABLE):
        installed.append(output.keep_tensors(tracker))
    log.write(ArmStart, arm=spec.arm, rank=rank, seams=tuple(installed), notes=spec.lock.resolved.notes)


def worker_rank(process_name: str) -> int:
    """The rank of a worker, which SGLang puts into the process's name (`sglang-diffusionWorker-<rank>`)."""
    return int(process_name.rsplit("-", 1)[1])


class Driver:
    """The arm's own process: it sends the requests and holds the stopwatch."""

    def __init__(self, spec: ArmSpec) -> None:
        self.spec, self.target = spec, spec.lock.resolved
        self.log = EventLog(spec.folder / "events-rank0.jsonl", "driver", STARTED)
        self.generator: Any = None
        self.last_error = ""
        self.unmuxed = ""
        self.finished = False

    def run(self) -> Exit:
        """Load, run every request, stop. Returns the process's exit code."""
        installed = prepare(self.spec) + self.prepare_output()
        self.log.write(ArmStart, arm=self.spec.arm, rank=0, seams=tuple(installed), clock=STARTED)
        self.load()
        for request in self.spec.requests:
            if not self.serve(request):
                return self.fail()
            if self.is_ungated():
                return self.end_ungated()
        self.finished = True
        with contextlib.suppress(Exception):
            self.generator.shutdown()
        self.log.write(ArmEnd, outcome="complete")
        return Exit.PASSED

    def prepare_output(self) -> list[str]:
        """Decide once whether requests are muxed; the workers, spawned later, inherit the decision. Names of seams."""
        from engine.h3 import output

        os.environ.pop(output.UNMUXED_VARIABLE, None)
        self.unmuxed = output.why_not_muxed(self.target)
        if not self.unmuxed:
            return []
        os.environ[output.UNMUXED_VARIABLE] = self.unmuxed
        return [output.expect_no_file()]

    def load(self) -> None:
        """Start SGLang's worker and wait until its pipeline is ready."""
        from sglang.multimodal_gen import DiffGenerator

        from engine.h3.server_arguments import free_ports, server_arguments

        scheduler_port, master_port = free_ports(2)
        self.generator = DiffGenerator.from_pretrained(
            local_mode=True,
            **server_arguments(
                self.target,
                self.spec.policy,
                Path(self.spec.checkpoint),
                scheduler_port=scheduler_port,
                master_port=master_port,
            ),
        )
        self.keep_errors()
        for process in self.generator.local_scheduler_process:
            threading.Thread(target=self.watch, args=(process,), daemon=True).start()
        self.log.write(LoadEnd, seconds=time.monotonic() - STARTED)

    def keep_errors(self) -> None:
        """SGLang logs a worker's error and returns None; the record needs its text."""
        send = self.generator._send_to_scheduler_and_wait_for_response

        def sending(requests: Any) -> Any:
            output = send(requests)
            self.last_error = str(output.error or "")
            return output

        self.generator._send_to_scheduler_and_wait_for_response = sending

    def watch(self, process: Any) -> None:
        """End the arm when a worker dies: SGLang's client would wait for its answer without end."""
        process.join()
        if not self.finished:
            code = process.exitcode
            how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
            with contextlib.suppress(OSError):
                self.log.write(ArmEnd, outcome="error", reason=f"SGLang's worker {process.name} {how}")
            os._exit(Exit.FAILED)

    def serve(self, request: RequestSpec) -> bool:
        """Run one request; its sample counts from the moment its timing.json exists."""
        from engine.h3.server_arguments import request_arguments

        folder = self.spec.folder / f"sample-{request.sample}"
        folder.mkdir(parents=True, exist_ok=True)
        out = folder / "out.mp4"
        self.log.write(RequestStart, **request.model_dump())
        began = time.perf_counter()
        result = self.generator.generate(
            sampling_params_kwargs=request_arguments(
                self.target, seed=request.seed, num_inference_steps=request.num_inference_steps, output=out
            )
        )
        seconds = time.perf_counter() - began
        # At once: what follows decodes videos and waits for digests, which is no time of the request.
        self.log.write(RequestEnd, sample=request.sample, seconds=seconds)
        left = None if result is None else self.what_is_left(request.sample, out)
        if result is None or left is None or not self.has_latents(request.sample):
            return False
        metrics = result.metrics or {}
        timing = Timing(
            sample=request.sample,
            phase=request.phase,
            seed=request.seed,
            num_inference_steps=request.num_inference_steps,
            seconds=seconds,
            sglang_total_ms=metrics.get("total_duration_ms"),
            sglang_stages_ms={name: float(value) for name, value in metrics.get("stages", {}).items()},
            sglang_steps_ms=tuple(float(value) for value in metrics.get("steps", ())),
            **left,
        )
        write_model(folder / "timing.json", timing)
        return True

    def what_is_left(self, sample: int, out: Path) -> dict[str, Any] | None:
        """The `media` or `output` of timing.json; None, with the reason kept, where the request left neither."""
        if not self.unmuxed:
            from engine.media import observe_media

            return {"media": observe_media(out)} if out.is_file() else None
        from engine.h3.output import wait_for_output

        found = wait_for_output(self.spec.folder / "events-rank0.jsonl", sample, self.unmuxed)
        if found is None:
            self.last_error = f"the worker did not digest the output tensors of sample {sample} in time"
            return None
        return {"output": found}

    def has_latents(self, sample: int) -> bool:
        """Wait until the worker has told the request's latents, so that the next one is not timed with that work."""
        from engine.h3.output import wait_for_event

        found = wait_for_event(self.spec.folder / "events-rank0.jsonl", sample, "latents")
        if found is None:
            self.last_error = f"the worker did not digest the latents of sample {sample} in time"
        return found is not None

    def fail(self) -> Exit:
        """Say how the arm ended and stop. A red gate is told apart from every other fault by what the worker wrote."""
        red = not all(self.gate_verdicts())
        reason = self.last_error or "SGLang gave no result; its log has the reason"
        self.finished = True
        self.log.write(ArmEnd, outcome="gate_failed" if red else "error", reason=reason[:2000])
        with contextlib.suppress(Exception):
            self.generator.shutdown()
        return Exit.GATE if red else Exit.FAILED

    def is_ungated(self) -> bool:
        """Whether the arm is sparse and a rank has no gate. Asked when a request, hence the warm-up, is done."""
        return self.spec.policy.sparse != "none" and len(self.gate_verdicts()) < self.target.parallel.num_gpus

    def end_ungated(self) -> Exit:
        """Stop after a warm-up without a sparse call: a gate inside a measured request would be timed with it."""
        self.finished = True
        self.log.write(ArmEnd, outcome="ungated", reason=ungated_reason(self.target, self.spec.policy.cache))
        with contextlib.suppress(Exception):
            self.generator.shutdown()
        return Exit.INVALID_RECORD

    def gate_verdicts(self) -> list[bool]:
        """The verdict of every rank's gate in this process."""
        from config.record import GateReport

        files = self.spec.gate_folder().glob("gate-rank*.json")
        return [GateReport.model_validate_json(path.read_bytes()).passed for path in files]


def ungated_reason(target: Target, cached: bool) -> str:
    """Why a warm-up held no sparse call, and what would give it one."""
    forwards, sol = target.warmup.forwards, target.sol_attn
    reason = f"the warm-up's {forwards} forwards held no sparse call, so no gate ran and nothing was measured; "
    if forwards <= sol.dense_steps:
        least = sol.dense_steps + 2
        return f"{reason}the first {sol.dense_steps} are dense: set warmup.num_inference_steps to at least {least}"
    if cached and not target.warmup.compute_last:
        return f"{reason}the cache reused all after the {sol.dense_steps} dense ones: set warmup.compute_last=true"
    return f"{reason}the leading sol_attn.dense_layers={sol.dense_layers} blocks are dense, and the model has no more"


def main() -> int:
    """Run the arm that the environment names."""
    return int(Driver(spec_from_environment()).run())


if __name__ == "__mp_main__":
    prepare_worker(spec_from_environment())

if __name__ == "__main__":
    sys.exit(main())
