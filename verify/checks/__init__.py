"""Every check that is put to a record, by name. A name is part of the interface: attestations list it."""

from __future__ import annotations

from verify.checks import (
    attention,
    benchmark,
    cache,
    complete,
    environment,
    gate,
    latents,
    lock,
    media,
    request,
    telemetry,
    timing,
)
from verify.findings import Check, Finding, run_check
from verify.reader import Record

CHECKS: tuple[Check, ...] = (
    Check("record-status", "Did the run come to its end?", complete.status),
    Check("record-files", "Is every file there, and none that does not belong?", complete.files),
    Check("record-events", "Is every event there?", complete.events),
    Check("record-outcomes", "Did every arm end as it should?", complete.outcomes),
    Check("lock-digest", "Is the lock what its digest says?", lock.digests),
    Check("lock-known", "Is it a shipped lock, or an open one that says how it differs?", lock.known),
    Check("environment-differences", "What does the run itself say makes it open?", environment.differences),
    Check("environment-warnings", "What did the doctor warn of?", environment.warnings),
    Check("environment-recipe", "Is the recipe the lock's?", environment.recipe),
    Check("environment-hardware", "Is the machine the target's?", environment.hardware),
    Check("environment-checkpoint", "Are the weights the lock's?", environment.checkpoint),
    Check("environment-sources", "Are SGLang's sources the pinned ones?", environment.sources),
    Check("environment-packages", "Are the packages those of the recipe?", environment.packages),
    Check("request-asked", "Are seeds and steps the lock's?", request.asked),
    Check("request-forwards", "Did every forward run once, in order?", request.forwards),
    Check("request-layout", "Is the document packed as the policy expects?", request.layout),
    Check("attention-backends", "Did the attention that was asked for run?", attention.backends),
    Check("attention-policy", "Was every layer dense or sparse as the policy says?", attention.policy),
    Check("attention-densities", "Are the routed blocks possible?", attention.densities),
    Check("cache-decisions", "Do the cache's decisions follow from their signals?", cache.decisions),
    Check("cache-ranks", "Did all ranks decide alike?", cache.ranks),
    Check("gate-happened", "Was every sparse arm gated before it was measured?", gate.happened),
    Check("gate-configured", "Was it gated with the lock's limits, on the arm's own options?", gate.configured),
    Check("gate-verdict", "Does the verdict follow from the statistics?", gate.verdict),
    Check("gate-exact", "Is the slice's output attention, in float64?", gate.exact),
    Check("gate-sparse", "Is the slice's real-tau output Sol-Attn, in float64?", gate.sparse),
    Check("gate-routes", "Do the route counts follow from Q and K?", gate.routes),
    Check("timing-nested", "Do forwards, loops and requests fit into each other?", timing.nested),
    Check("timing-monotonic", "Do the clocks run forwards?", timing.monotonic),
    Check("latents-told", "Are the loops' results told, finite and possible?", latents.told),
    Check("latents-repeatable", "Do a CPU run's loops repeat?", latents.repeatable),
    Check("media-decoded", "Is the video what timing.json says?", media.decoded),
    Check("media-asked", "Is the video what was asked for?", media.asked),
    Check("media-repeatable", "Does a CPU run repeat?", media.repeatable),
    Check("telemetry", "Was the GPU undisturbed?", telemetry.telemetry),
    Check("benchmark-derived", "Does benchmark.json follow from the raw files?", benchmark.derived),
)


def run_checks(record: Record) -> list[Finding]:
    """Put every check to a record, in order."""
    return [finding for check in CHECKS for finding in run_check(check, record)]
