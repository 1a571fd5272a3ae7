"""`sol benchmark`: from a target's name to a signed, verified run record."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console

from config.env import refuse_influences
from config.errors import EnvironmentRefused, Exit, Interrupted, InvalidRecord, SolError, UsageError
from config.hold import hold
from config.lock import Lock, load_target, nearest, resolve
from config.record import ATTESTATION, BENCHMARK, ENVIRONMENT, LOCK, CheckpointFound, Environment
from config.schema import ARMS, ArmName, Checkpoint, Target
from engine.checkpoint.store import checkpoint_folder, ensure, found, list_files, verify_synthetic
from engine.doctor import Severity, examine, require_healthy
from engine.environment import capture
from engine.evidence import RunRecord, write_model
from engine.run import mend, require_green, run_arms
from engine.summary import summarise
from entrypoints.console import make_console
from entrypoints.progress import Progress
from entrypoints.signing import close_and_sign
from entrypoints.verify import print_verification
from verify.files import Files
from verify.keys import load_signer
from verify.reader import read_status
from verify.strictjson import parse_model

COMPARABLE = (
    "image_digest",
    "differences",
    "source_revision",
    "python",
    "recipe_sha256",
    "packages",
    "sglang_sources",
    "torch",
    "cuda",
    "driver",
    "cpu",
    "gpus",
    "checkpoint",
    "env",
    "ffmpeg",
)
"""Fields of environment.json that must be the same before samples are added to a record. The record keeps the one that
it was begun with, `differences` with it: what is added must not be more open than that says."""

WRITTEN = "is still being written, or signed, by another process"
WAIT = "wait for its end"


@dataclass(frozen=True)
class BenchmarkOptions:
    """The command line."""

    target: str
    arms: list[str]
    samples: int | None
    overrides: list[str]
    out: Path
    resume: Path | None
    key: Path | None
    sign: bool
    checkpoint: Path | None
    as_json: bool


def run_benchmark(options: BenchmarkOptions) -> Exit:
    """Run, record, sign, verify, print.

    Raises:
        SolError: whatever stopped it; the record, where there is one already, says aborted and keeps what it has.
    """
    with contextlib.ExitStack() as locks:  # of the record, until it is signed
        return run_locked(options, locks)


def run_locked(options: BenchmarkOptions, locks: contextlib.ExitStack) -> Exit:
    """`run_benchmark`, with a place for the lock of the record that it makes or adds to.

    Raises:
        SolError: as `run_benchmark`.
    """
    console = make_console(stderr=options.as_json)
    lock = resolve(options.target, options.overrides)
    refuse_influences(os.environ, lock)
    target = load_target(options.target, options.overrides)
    arms = chosen_arms(target, options.arms)
    samples = options.samples or target.defaults.samples
    out = options.resume.parent if options.resume else options.out
    if options.key and not options.sign:
        raise UsageError("--key beside --no-sign", needed="one of the two", remedy="leave one of them out")
    if options.key:
        load_signer(options.key)  # refused now, and not after hours
    if options.resume:
        require_open(options.resume)
    announce(console, lock, arms, samples)

    checks = examine(target, out)
    require_healthy(checks)
    for check in checks:
        if check.severity is Severity.WARNING:
            console.print(f"warning: {check.name}: {check.found}; {check.remedy}", markup=False)

    forwards, expected = target.request.forwards, target.defaults.expected
    with (
        interrupts_raise(),
        Progress(console, arms, samples, forwards, target.warmup.forwards, expected) as progress,
    ):
        progress.part("checkpoint")
        folder, weights, notes = provide_checkpoint(target.checkpoint, options.checkpoint, progress)
        warned = [f"{check.name}: {check.found}" for check in checks if check.severity is Severity.WARNING]
        environment = capture(lock, weights, notes, warned)
        record = open_record(options.resume, out, lock, environment, locks)
        console.print(f"record {record.path}", markup=False, soft_wrap=True)
        try:
            outcomes = run_arms(record, lock, folder, arms, samples, logs=out / "logs", observer=progress)
        except BaseException as error:
            abort(console, record, error, options)
            raise
    record.set_status("complete")
    if not options.sign:
        console.print(f"not signed: `sol sign {record.path}` closes it", markup=False, soft_wrap=True)
        require_green(outcomes)
        return Exit.PASSED
    close_and_sign(record.path, options.key)
    verdict = print_verification(record.path, as_json=options.as_json)
    require_green(outcomes)
    return verdict


def chosen_arms(target: Target, asked: list[str]) -> list[ArmName]:
    """The arms to run, in the vocabulary's order.

    Raises:
        UsageError: the target has no such arm.
    """
    known = [arm for arm in ARMS if arm in target.arms]
    if "all" in asked:
        return known
    for arm in asked:
        if arm not in known:
            raise UsageError(f"target {target.name!r} has no arm {arm!r}", remedy=nearest(arm, [*known, "all"]))
    wanted = asked or target.defaults.arms
    return [arm for arm in known if arm in wanted]


def announce(console: Console, lock: Lock, arms: list[ArmName], samples: int) -> None:
    """Say what is about to be run."""
    state = "open" if lock.overrides else "locked"
    console.print(
        f"target {lock.target}, lock {lock.digest[:12]} ({state}), arms {', '.join(arms)}, {samples} sample(s) each"
    )
    for override in lock.overrides:
        console.print(f"  open: {override.key} = {override.value!r} (locked {override.locked!r})", markup=False)
    target = lock.resolved
    for arm in arms:
        if target.never_gated(arm):
            console.print(
                f"warning: no forward of the warm-up is sparse in arm {arm}: it cannot be gated and will end INVALID; "
                f"the first {target.sol_attn.dense_steps} forwards are dense, and the last of a longer warm-up is "
                "computed with --set warmup.compute_last=true"
            )


def provide_checkpoint(
    checkpoint: Checkpoint, own: Path | None, progress: Progress
) -> tuple[Path, CheckpointFound, list[str]]:
    """The weights, verified: folder, what was found, and what makes the run open.

    Raises:
        CheckpointError: absent, or not what the lock asks for.
    """
    if own is not None and not (own / checkpoint.partition).is_dir():
        raise UsageError(
            f"{own} has no folder {checkpoint.partition}", remedy="name the folder that holds the partition"
        )
    if checkpoint.kind == "hub":
        return provide_published(checkpoint, own, progress)
    if own is not None:
        files = list_files(own)
        return own.absolute(), found(checkpoint, files), [f"weights come from --checkpoint, {len(files)} files"]
    folder = ensure(checkpoint, on_part=lambda part: progress.part(f"writing the synthetic checkpoint: {part}"))
    progress.part("verifying the checkpoint")
    weights, notes = verify_synthetic(checkpoint, folder)
    return folder, weights, notes


def provide_published(
    checkpoint: Checkpoint, own: Path | None, progress: Progress
) -> tuple[Path, CheckpointFound, list[str]]:
    """Published weights: verified where they lie, fetched first when they are not in the cache.

    Raises:
        CheckpointError: not what was published, or not to be had.
        EnvironmentRefused: too little disk for what is missing.
    """
    from engine.checkpoint.fetch import Options, fetch
    from engine.checkpoint.published import verify_published

    if own is not None:
        progress.part("verifying the checkpoint")
        weights = verify_published(checkpoint, own.absolute())
    else:
        progress.part("the published checkpoint")
        weights = fetch(checkpoint, checkpoint_folder(checkpoint), Options(), progress)
    return weights.folder, weights.found, list(weights.notes)


def require_open(resume: Path) -> None:
    """Refuse to add to what is no record, to one that is signed and to one that is being written.

    Raises:
        UsageError: it is one of these.
    """
    if not (resume / LOCK).is_file():
        raise UsageError(f"{resume} is not a run record", remedy="name a directory that `sol benchmark` made")
    require_unsigned(resume)
    if read_status(Files(resume)).state == "running":
        raise UsageError(f"{resume} {WRITTEN}", remedy=WAIT)


def require_unsigned(resume: Path) -> None:
    """Refuse to add to a signed record.

    Raises:
        UsageError: it is signed.
    """
    if (resume / ATTESTATION).exists():
        raise UsageError(f"{resume} is signed, and a signed record is closed", remedy="start a new run")


def open_record(
    resume: Path | None, out: Path, lock: Lock, environment: Environment, locks: contextlib.ExitStack
) -> RunRecord:
    """A new record, or an unsigned one of the same lock and machine to add to. Its directory is locked from here on.

    Raises:
        UsageError: the record to add to is signed, still being written, or of another lock.
        EnvironmentRefused: it cannot be written, or this machine is not the one that began it.
    """
    if resume is None:
        record = RunRecord.create(out.absolute(), lock)
        locks.enter_context(hold(record.path))
        record.write_environment(environment)
        return record
    require_open(resume)
    if not locks.enter_context(hold(resume)):
        raise UsageError(f"{resume} {WRITTEN}", remedy=WAIT)
    require_unsigned(resume)  # who held it until now may have signed it
    record = RunRecord(resume.absolute())
    before: Lock = parse_model(Lock, read(resume, LOCK), LOCK)
    if before.digest != lock.digest:
        raise UsageError(
            f"{resume} was begun with lock {before.digest[:12]}",
            needed=f"{lock.digest[:12]}, this command's",
            remedy="give the same target and the same --set values",
        )
    old: Environment = parse_model(Environment, read(resume, ENVIRONMENT), ENVIRONMENT)
    changed = [name for name in COMPARABLE if getattr(old, name) != getattr(environment, name)]
    if changed:
        shown = [compared(name, getattr(old, name), getattr(environment, name)) for name in changed]
        raise EnvironmentRefused(
            f"the machine or the software differs from the record's in {', '.join(shown)}",
            needed="the same, so that samples may stand beside each other",
            remedy="start a new run",
        )
    mend(record)
    record.set_status("running")
    return record


def read(record: Path, name: str) -> bytes:
    """One file of a record.

    Raises:
        InvalidRecord: it cannot be read.
    """
    try:
        return (record / name).read_bytes()
    except OSError as error:
        raise InvalidRecord(f"{record / name}: {error.strerror}", remedy="start a new run") from error


def compared(name: str, old: object, new: object) -> str:
    """A field that differs, with both values where they are texts."""
    if name == "differences":
        old, new = ("; ".join(map(str, value)) if isinstance(value, tuple) else value for value in (old, new))
    if isinstance(old, str) and isinstance(new, str):
        return f"{name} (the record's: {old or 'none'}; now: {new or 'none'})"
    return name


def abort(console: Console, record: RunRecord, error: BaseException, options: BenchmarkOptions) -> None:
    """Close a record whose run ended early, with what it has: status and summary. It is not signed, since a signed
    record is closed and a run that was stopped after hours could not go on. Each step may fail on a full disk; none
    hides the error.

    Raises:
        Interrupted: the same, with the commands that go on.
        EnvironmentRefused: the record could not be written.
    """
    reason = error.found if isinstance(error, SolError) else (str(error) or type(error).__name__)
    with contextlib.suppress(OSError):
        record.set_status("aborted", reason)
    with contextlib.suppress(OSError, ValueError):
        write_model(record.path / BENCHMARK, summarise(record.path))
    if isinstance(error, OSError):
        raise EnvironmentRefused(
            f"the record {record.path} could not be written: {error.strerror or error}",
            needed="free space and write access until the end of the run",
            remedy="free some space; what was finished is in the record, and --resume adds to it",
        ) from error
    console.print(f"aborted, not signed; what was finished is in {record.path}", markup=False, soft_wrap=True)
    if isinstance(error, Interrupted):
        sign = shlex.join(["sol", "sign", str(record.path)])
        raise Interrupted(
            error.found,
            remedy=f"`{resume_command(record, options)}` adds to the record; `{sign}` closes and signs it as it is",
        ) from None


def resume_command(record: RunRecord, options: BenchmarkOptions) -> str:
    """What to type to add to a record."""
    words = ["sol", "benchmark", options.target, "--resume", str(record.path)]
    words += [word for arm in options.arms for word in ("--arm", arm)]
    words += [word for override in options.overrides for word in ("--set", override)]
    words += ["--checkpoint", str(options.checkpoint)] if options.checkpoint else []
    return shlex.join(words)


@contextlib.contextmanager
def interrupts_raise() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise Interrupted, so that every `finally` runs: workers end, the record is closed."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(f"interrupted by {signal.Signals(number).name}", remedy="type the command again")

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
