"""Is the lock one that we know, and is it what its digest says?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from config.canonical import sha256_bytes, sha256_json
from config.lock import Lock, shipped_locks
from config.record import LOCK
from verify.findings import Scribe
from verify.reader import Record

AS_WRITTEN = "take lock.json as it was written"


def digests(record: Record, say: Scribe) -> None:
    """Digest of the lock, of its recipe and of its prompt follow from what they cover."""
    lock, target = record.lock, record.target
    if sha256_json(lock.values) != lock.digest:
        say.invalid(f"the values have digest {sha256_json(lock.values)}, the lock says {lock.digest}", AS_WRITTEN, LOCK)
    if sha256_json(record.recipe.files) != record.recipe.sha256:
        say.invalid("the recipe's digest is not that of its files", AS_WRITTEN, LOCK)
    if sha256_bytes(target.request.prompt_text.encode()) != target.request.prompt_sha256:
        say.invalid("the prompt's digest is not that of its text", AS_WRITTEN, LOCK)
    if target.name != lock.target:
        say.invalid(f"the lock is of target {lock.target!r}, its values of {target.name!r}", AS_WRITTEN, LOCK)
    say.conclude(f"lock {lock.digest[:12]} of target {lock.target}", LOCK)


def known(record: Record, say: Scribe) -> None:
    """The lock ships with this release, or is one that ships with the overrides that it lists, and no others."""
    lock, shipped = record.lock, shipped_locks()
    base = shipped.get(lock.base_digest)
    if not lock.overrides:
        if lock.digest != lock.base_digest:
            say.invalid("the lock differs from its target and lists no override", AS_WRITTEN, LOCK)
        elif base is None:
            say.fail(
                f"lock {lock.digest[:12]} is not one that ships with this release ({len(shipped)} do)",
                "use the release that made the record, or a newer one",
                LOCK,
            )
        else:
            say.ok(f"the shipped lock of target {lock.target}", LOCK)
    elif base is None:
        say.warn("open, and the lock that it departs from does not ship with this release", "use a newer release", LOCK)
    else:
        _overrides(lock, base, say)


def _overrides(lock: Lock, base: Lock, say: Scribe) -> None:
    ours, theirs = dict(_leaves(base.values)), dict(_leaves(lock.values))
    changed = {key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)}
    listed = {override.key: override for override in lock.overrides}
    if lock.digest == lock.base_digest:
        say.invalid("the lock lists overrides and has the digest of its target", AS_WRITTEN, LOCK)
    hidden, idle = sorted(changed - set(listed)), sorted(set(listed) - changed)
    if hidden:
        say.invalid(f"values differ from the target and are not listed: {', '.join(hidden)}", AS_WRITTEN, LOCK)
    if idle:
        say.invalid(f"overrides are listed that change nothing: {', '.join(idle)}", AS_WRITTEN, LOCK)
    for key in sorted(changed & set(listed)):
        if (listed[key].locked, listed[key].value) != (ours.get(key), theirs.get(key)):
            say.invalid(f"the override of {key} does not say what was changed", AS_WRITTEN, LOCK)
    listing = ", ".join(f"{override.key} = {override.value!r}" for override in lock.overrides)
    if not hidden and not idle:
        say.warn(f"open: {listing}", "an open run verifies no published claim; run without --set", LOCK)


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{place}.{key}" if place else key)
    else:
        yield place, value
