"""`sol`: the command of the bundle. Each verb is a module of this room; a verb whose part is not installed says how
to get it."""

from __future__ import annotations

import contextlib
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from config.errors import EnvironmentRefused, Exit, Interrupted, SolError
from entrypoints.console import discard_output, make_console

app = typer.Typer(
    name="sol",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Measure the published MiniMax-H3 benchmarks on this machine, and verify what somebody else measured.\n\n"
    "Without a GPU, start with: [bold]sol benchmark cpu[/bold]. "
    "To check a result from elsewhere: [bold]sol verify DIR --trust FILE[/bold].",
    epilog="Exit codes: 0 passed, 1 failed, 2 usage, 10 environment, 11 checkpoint, 12 gate, 13 invalid record, "
    "14 untrusted or unsigned, 130 interrupted.",
)
OUT = Path("runs")

Target = Annotated[
    str, typer.Argument(help="A target of config/targets, for example cpu or rtx4090.", metavar="TARGET")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Change one value; the run is then open, never locked. Repeatable."
    ),
]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where run records go.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Trust = Annotated[
    Path | None, typer.Option("--trust", metavar="FILE", help="Whose signatures count (TOML); see the README.")
]
Record = Annotated[Path, typer.Argument(metavar="DIR", help="A run record.")]


class Weights(StrEnum):
    """Values of --weights."""

    SYNTHETIC = "synthetic"


def weights_overrides(target: str, weights: Weights | None) -> list[str]:
    """What --weights stands for, as --set values: none where the target's weights are synthetic already."""
    from config.lock import load_target

    if weights is None or load_target(target).checkpoint.kind == "synthetic":
        return []
    return [f"checkpoint.{value}" for value in ("kind=synthetic", 'repo=""', 'revision=""', "preset=full", "seed=0")]


@app.command("print")
def print_(target: Target, set_: Set = None, json_: Json = False) -> None:
    """Show what a target runs: every locked value with its digest, or a list of targets for TARGET = all."""
    from entrypoints.print_ import show

    show(target, set_ or [], as_json=json_)


@app.command()
def doctor(
    target: Target,
    set_: Set = None,
    out: Out = OUT,
    json_: Json = False,
    fix_hints: Annotated[
        bool, typer.Option("--fix-hints", help="Print the commands that mend what is wrong, to copy.")
    ] = False,
) -> None:
    """Check whether this machine can run a target. Exit 10 when it cannot."""
    with part("engine"):
        from entrypoints.doctor import report_health

    with part("engine"):
        report_health(target, set_ or [], out, as_json=json_, fix_hints=fix_hints)


@app.command()
def synth(
    target: Target,
    set_: Set = None,
    force: Annotated[bool, typer.Option("--force", help="Write it anew although it is there.")] = False,
) -> None:
    """Write a target's synthetic checkpoint into the cache and verify it."""
    with part("engine"):
        from entrypoints.synth import synthesise

    with part("engine"):
        synthesise(target, set_ or [], force=force)


@app.command()
def fetch(
    target: Annotated[str, typer.Argument(help="A target with published weights.", metavar="[TARGET]")] = "rtx4090",
    dest: Annotated[
        Path | None, typer.Option("--dest", metavar="DIR", help="Where to put it instead of the cache ($SOL_CACHE).")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, max=64, help="Files fetched at once.")] = 4,
    verify_only: Annotated[
        bool, typer.Option("--verify-only", help="Check what is there; never touch the network.")
    ] = False,
    rehash: Annotated[bool, typer.Option("--rehash", help="Hash every file, also those verified before.")] = False,
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="Acknowledge the weights' licence; asked for once.")
    ] = False,
    json_: Json = False,
) -> None:
    """Fetch and verify a target's published checkpoint (144 GB); what is there already is not fetched again.

    A gated repository needs a token: HF_TOKEN_FILE names a file or a container's secret that holds it, HF_TOKEN holds
    it itself. HF_ENDPOINT names another hub. Stopped at any moment, it goes on where it was.
    """
    with part("engine"):
        from entrypoints.fetch import FetchOptions, fetch_and_print

    options = FetchOptions(
        target=target,
        dest=dest,
        jobs=jobs,
        verify_only=verify_only,
        rehash=rehash,
        accept_licence=accept_licence,
        as_json=json_,
    )
    with part("engine"):
        fetch_and_print(options)


@app.command()
def benchmark(
    target: Target,
    arm: Annotated[
        list[str] | None, typer.Option("--arm", metavar="ARM", help="Which arm; repeatable; `all` for every arm.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, max=1000, help="Measured samples of each arm, after one warm-up.")
    ] = None,
    set_: Set = None,
    weights: Annotated[
        Weights | None,
        typer.Option("--weights", help="synthetic: random ones of the published shapes, in an open run."),
    ] = None,
    out: Out = OUT,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="RUN", help="Add arms or samples to an unsigned record.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", metavar="PEM", help="Sign with this key; without, with a key of its own.")
    ] = None,
    sign_: Annotated[
        bool, typer.Option("--sign/--no-sign", help="Sign at the end, or leave the record open for --resume.")
    ] = True,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", metavar="DIR", help="Weights in a directory of your own.")
    ] = None,
    json_: Json = False,
) -> None:
    """Run a target's locked benchmark: checkpoint, gate, samples, run record, signature, verdict."""
    with part("engine"):
        from entrypoints.benchmark import BenchmarkOptions, run_benchmark

    options = BenchmarkOptions(
        target=target,
        arms=arm or [],
        samples=samples,
        overrides=[*weights_overrides(target, weights), *(set_ or [])],
        out=out,
        resume=resume,
        key=key,
        sign=sign_,
        checkpoint=checkpoint,
        as_json=json_,
    )
    with part("engine"):
        raise typer.Exit(int(run_benchmark(options)))


@app.command()
def keygen(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The private key (PEM); FILE.pub gets the public one.")],
) -> None:
    """Make an Ed25519 signing key. An existing file is never overwritten."""
    from entrypoints.signing import make_key

    make_key(path)


@app.command()
def sign(
    record: Record,
    key: Annotated[Path | None, typer.Option("--key", metavar="PEM", help="Without, a key of its own is made.")] = None,
) -> None:
    """Check a record, close it and sign it. What the checks found is part of what is signed."""
    from entrypoints.signing import sign_record

    raise typer.Exit(int(sign_record(record, key)))


@app.command()
def verify(record: Record, trust: Trust = None, json_: Json = False) -> None:
    """Verify a run record: signature, files, lock, gate, caches, densities, media, published claims. Needs no GPU."""
    from entrypoints.verify import verify_and_print

    raise typer.Exit(int(verify_and_print(record, trust, as_json=json_)))


@app.command()
def report(record: Record, json_: Json = False) -> None:
    """Show what a record measured: arms, times, ratios, densities, gate. Judges nothing; `sol verify` does."""
    from entrypoints.report import show_report

    show_report(record, as_json=json_)


@app.command()
def roofline(
    target: Target,
    set_: Set = None,
    record: Annotated[
        Path | None, typer.Option("--record", metavar="RUN", help="A record of the target: what share it reached.")
    ] = None,
    density: Annotated[
        float | None, typer.Option("--density", metavar="D", help="Of the sparse forwards, 0 to 1; else the published.")
    ] = None,
    computed: Annotated[
        int | None,
        typer.Option("--computed", metavar="N", help="Forwards that the cache computes; else the published."),
    ] = None,
    json_: Json = False,
) -> None:
    """Show the FLOPs, bytes and least times of a target's request, and the share of them that a record reached."""
    from entrypoints.roofline import show_roofline

    show_roofline(target, set_ or [], record, density=density, computed=computed, as_json=json_)


class part:  # noqa: N801 - reads as a statement: `with part("engine"):`
    """Turns a missing package of one room into what to install."""

    def __init__(self, room: str) -> None:
        self._room = room

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ModuleNotFoundError):
            raise EnvironmentRefused(
                f"this verb needs the {self._room} part, and the package {error.name!r} is not installed",
                needed="the packages that run a benchmark; what is installed here verifies results",
                remedy="in a checkout type `make demo`; elsewhere use the target's image",
            ) from error


def main() -> None:
    """Entry point: a SolError becomes its message and its exit code, never a traceback."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C, before a verb has handlers of its own
        signal.signal(number, signal.default_int_handler)
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()  # here, where it can still be told that there is no space
    except SolError as error:
        fail(error)
    except typer.Abort:
        fail(Interrupted("interrupted"))
    except KeyboardInterrupt:
        fail(Interrupted("interrupted"))
    except BrokenPipeError:  # the reader of a pipe went away: as a shell tells it of any program
        discard_output()
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        with contextlib.suppress(OSError):
            discard_output()
        fail(
            EnvironmentRefused(
                f"{error.filename or 'the output'} could not be read or written: {error.strerror or error}",
                needed="free space, and the right to read and write there",
                remedy="mend that and repeat the command; what was finished stays",
            )
        )
    except Exception as error:
        show = getattr(error, "show", None)  # click's own usage errors know how to show themselves
        if show is None:
            raise
        show()
        sys.exit(getattr(error, "exit_code", Exit.USAGE))
    sys.exit(code or 0)


def fail(error: SolError) -> None:
    """Print one error and leave with its code."""
    make_console(stderr=True).print(f"sol: {error}", markup=False, soft_wrap=True)
    sys.exit(int(error.exit_code))


if __name__ == "__main__":
    main()
