"""The run: an arm after the other, each in a fresh process, into one record."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from config.errors import GateFailed, InvalidRecord, SolError
from config.lock import Lock
from config.record import BENCHMARK, Outcome
from config.schema import ArmName, Target
from engine.cgroup import oom_kills
from engine.evidence import RunRecord, mend_torn_line, write_model
from engine.h3.spec import SPEC_VARIABLE, ArmSpec, RequestSpec
from engine.summary import summarise
from engine.telemetry import Sampler
from engine.warden import Warden

POLL_SECONDS = 0.25
GRACE_SECONDS = 5.0
OUT_OF_MEMORY = (
    "the kernel killed a process of this control group for memory (oom_kill); raise the memory limit or end what else "
    "runs in it"
)
"""Told apart from a crash: both end by signal 9, and only the control group's counter knows (field report 14)."""


class Observer(Protocol):
    """Whoever wants to see the run go on."""

    def on_arm(self, arm: str) -> None:
        """An arm's process is about to be started."""

    def on_event(self, arm: str, event: dict[str, Any]) -> None:
        """An event of an arm appeared."""

    def tick(self) -> None:
        """Called several times a second while an arm runs."""


class ArmDied(SolError):
    """An arm's process ended without finishing its requests (exit 1)."""


@dataclass(frozen=True)
class ArmOutcome:
    """How an arm ended."""

    arm: ArmName
    outcome: Outcome
    reason: str


def requests_of(target: Target, samples: int, first: int) -> tuple[RequestSpec, ...]:
    """One process's requests: the warm-up, then `samples` measured ones, numbered from `first`."""
    request, warmup = target.request, target.warmup
    measured = (
        RequestSpec(
            sample=first + index, phase="measured", seed=request.seed, num_inference_steps=request.num_inference_steps
        )
        for index in range(1, samples + 1)
    )
    before = RequestSpec(sample=first, phase="warmup", seed=warmup.seed, num_inference_steps=warmup.num_inference_steps)
    return (before, *measured)


def run_arms(
    record: RunRecord,
    lock: Lock,
    checkpoint: Path,
    arms: Sequence[ArmName],
    samples: int,
    *,
    logs: Path,
    observer: Observer,
) -> list[ArmOutcome]:
    """Run arms into a record and derive its benchmark.json. A red gate, or none, ends its arm, not the run.

    Args:
        record: a record whose status is running.
        lock: what to run.
        checkpoint: the verified weights.
        arms: which arms, in order.
        samples: measured samples of each arm.
        logs: where each arm's output goes. Not into the record: SGLang prints paths.
        observer: sees every event as it appears.

    Raises:
        ArmDied: an arm's process ended before its requests were done; the record keeps what it has.
        OSError: the record cannot be written.
    """
    outcomes: list[ArmOutcome] = []
    with Warden(record.path) as warden:
        for arm in arms:
            observer.on_arm(arm)
            first = record.next_sample(arm)
            spec = ArmSpec(
                record=str(record.path),
                arm=arm,
                lock=lock,
                checkpoint=str(checkpoint),
                requests=requests_of(lock.resolved, samples, first),
            )
            outcome = run_arm(record, spec, logs / f"{record.path.name}-{arm}.log", warden, observer)
            outcomes.append(outcome)
            write_model(record.path / BENCHMARK, summarise(record.path))
            if outcome.outcome not in ("complete", "gate_failed", "ungated"):
                raise ArmDied(
                    f"arm {arm} ended early {during(record, arm)}: {outcome.reason}",
                    needed="all requests done",
                    remedy=f"its output is in {logs / f'{record.path.name}-{arm}.log'}; what was finished is in the "
                    f"record, and `sol benchmark {lock.target} --resume {record.path} --arm {arm}` adds to it with the "
                    "same --set values",
                )
    return outcomes


def run_arm(record: RunRecord, spec: ArmSpec, log: Path, warden: Warden, observer: Observer) -> ArmOutcome:
    """Run one arm's process to its end and say how it ended; the whole process group is gone afterwards."""
    record.arm_folder(spec.arm)
    before = seen = sum(1 for _ in record.events(spec.arm))
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", prefix="sol-arm-", suffix=".json") as handle, log.open("wb") as output:
        handle.write(spec.model_dump_json())
        handle.flush()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.h3.arm"],
            env=arm_environment(spec, Path(handle.name)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        warden.watch(process.pid)
        killed_before, sampler, reason = oom_kills(), None, ""
        try:
            sampler = Sampler(record.arm_folder(spec.arm), process.pid, spec.lock.resolved.hardware.gpu_count)
            while process.poll() is None:
                seen = follow(record, spec.arm, seen, observer)
                observer.tick()
                time.sleep(POLL_SECONDS)
        except BaseException as error:
            reason = str(error) or type(error).__name__
            end_group(process, GRACE_SECONDS)
            raise
        finally:
            end_group(process, 0)
            code = process.wait()
            if sampler is not None:
                sampler.stop()
            warden.watch(0)
            out_of_memory = oom_kills() > killed_before
            with contextlib.suppress(OSError):
                close_arm(record, spec.arm, code, OUT_OF_MEMORY if out_of_memory else reason, before)
    follow(record, spec.arm, seen, observer)
    own = list(record.events(spec.arm))[before:]
    bounds = [event for event in own if event["event"] in ("arm_start", "arm_end")]
    if not bounds or bounds[-1]["event"] != "arm_end":  # not even close_arm could write one
        return ArmOutcome(arm=spec.arm, outcome="aborted", reason="its last event could not be written: disk full")
    last = bounds[-1]
    said = last["reason"]
    if out_of_memory and last["outcome"] == "error":  # the driver lived on and saw a worker end, not why
        said = f"{said}; {OUT_OF_MEMORY}"
    return ArmOutcome(arm=spec.arm, outcome=last["outcome"], reason=said)


def arm_environment(spec: ArmSpec, spec_file: Path) -> dict[str, str]:
    """The arm's environment: the caller's, the locked variables, and no way to a hub."""
    target = spec.lock.resolved
    environment = {**os.environ, **target.env, SPEC_VARIABLE: str(spec_file)}
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if target.hardware.kind == "cpu":
        environment["SGLANG_DIFFUSION_PLATFORM_OVERRIDE"] = "cpu"
    return environment


def follow(record: RunRecord, arm: str, seen: int, observer: Observer) -> int:
    """Hand on the events that appeared since the last look; returns how many there are now."""
    events = list(record.events(arm))
    for event in events[seen:]:
        observer.on_event(arm, event)
    return len(events)


def end_group(process: subprocess.Popen[bytes], grace: float) -> None:
    """End a process and its whole group: SIGTERM, up to `grace` seconds of patience, SIGKILL."""
    with contextlib.suppress(ProcessLookupError):
        if grace:
            os.killpg(process.pid, signal.SIGTERM)
            deadline = time.monotonic() + grace
            while time.monotonic() < deadline:
                process.poll()  # reaps the leader: a zombie would keep the group alive
                os.killpg(process.pid, 0)
                time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)


def close_arm(record: RunRecord, arm: str, code: int, reason: str, before: int = 0) -> None:
    """Give an arm's events an end where its process could not write one; `before` events are of earlier processes."""
    last: dict[str, Any] = {}
    for event in list(record.events(arm))[before:]:
        if event["event"] in ("arm_start", "arm_end"):
            last = event
    if last.get("event") == "arm_end":
        return
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    record.end_arm(arm, "aborted", reason or f"the arm's process {how}")


def mend(record: RunRecord) -> None:
    """Put right what a kill left, before anything is added: half samples and half lines go, an arm that was cut gets
    its end, and one whose only process ended before its first event was never begun."""
    record.discard_unfinished()
    for folder in (record.path / "arms").glob("*/"):
        for path in folder.glob("*.jsonl"):
            mend_torn_line(path)
        if any(event["event"] == "arm_start" for event in record.events(folder.name)):
            close_arm(record, folder.name, 0, "the process that ran the benchmark was killed")
        else:
            shutil.rmtree(folder)


def during(record: RunRecord, arm: str) -> str:
    """What the arm's last process was doing: loading, or a request that did not come back."""
    doing = "before it started"
    for event in record.events(arm):
        if event["source"] != "driver":
            continue
        if event["event"] == "arm_start":
            doing = "while loading"
        elif event["event"] == "request_start":
            doing = f"in sample {event['sample']} ({event['phase']})"
        elif event["event"] in ("load_end", "request_end"):
            doing = "between two requests"
    return doing


def require_green(outcomes: Sequence[ArmOutcome]) -> None:
    """Raise for a red or missing gate, after everything else was run and recorded.

    Raises:
        GateFailed: at least one arm's gate was red.
        InvalidRecord: at least one sparse arm's warm-up held no sparse call.
    """
    red = [outcome for outcome in outcomes if outcome.outcome == "gate_failed"]
    if red:
        raise GateFailed(
            f"the Real-QKV gate was red in {', '.join(outcome.arm for outcome in red)}: {red[0].reason}",
            remedy="the record says FAILED; nothing timed in that arm counts",
        )
    ungated = [outcome for outcome in outcomes if outcome.outcome == "ungated"]
    if ungated:
        raise InvalidRecord(
            f"arm {', '.join(outcome.arm for outcome in ungated)} was never gated: {ungated[0].reason}",
            remedy="the record is INVALID; run it again with a warm-up in which the gate can run",
        )
