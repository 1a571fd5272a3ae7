"""Does benchmark.json follow from the raw files?"""

from __future__ import annotations

from config.record import BENCHMARK
from verify.derive import derive, differences
from verify.findings import Scribe
from verify.reader import Record

SHOWN = 5


def derived(record: Record, say: Scribe) -> None:
    """Every figure of benchmark.json is derived again, by other code, and is the same."""
    if record.benchmark is None:
        say.invalid("there is no summary to compare", "run the benchmark again", BENCHMARK)
        return
    found = list(differences(record.benchmark.model_dump(mode="json"), derive(record).model_dump(mode="json")))
    for sentence in found[:SHOWN]:
        say.invalid(sentence, "take benchmark.json as it was written, or derive it again", BENCHMARK)
    if len(found) > SHOWN:
        say.invalid(f"{len(found) - SHOWN} more figures differ", "see above", BENCHMARK)
    say.conclude("every figure follows from the raw files")
