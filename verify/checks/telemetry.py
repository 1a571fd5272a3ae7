"""Was the GPU undisturbed while it was measured?"""

from __future__ import annotations

from verify.findings import Scribe
from verify.reader import Record


def telemetry(record: Record, say: Scribe) -> None:
    """A CUDA target has one telemetry file a GPU and arm."""
    if record.target.hardware.kind == "cpu":
        say.skip("a CPU target has no GPU to watch")
        return
    for arm in record.arms.values():
        for gpu in range(record.target.parallel.num_gpus):
            name = f"{arm.folder}telemetry-gpu{gpu}.jsonl"
            if name not in record.files:
                say.invalid(
                    "the file is missing: throttling and foreign load cannot be excluded", "run the arm again", name
                )
    say.skip("the content of telemetry files is not judged: schema 1 does not define it")
