"""Errors that a user sees: each says what was found, what was needed and the remedy, and carries a stable exit code."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every `sol` verb. They are part of the interface: a script may rely on them."""

    PASSED = 0
    FAILED = 1
    USAGE = 2
    ENVIRONMENT = 10
    CHECKPOINT = 11
    GATE = 12
    INVALID_RECORD = 13
    UNTRUSTED = 14
    INTERRUPTED = 130


class SolError(Exception):
    """A failure with a diagnosis for a human.

    Args:
        found: what was found, one sentence.
        needed: what was needed instead; empty when `found` says it already.
        remedy: what to do or type next.
    """

    exit_code: Exit = Exit.FAILED

    def __init__(self, found: str, *, needed: str = "", remedy: str = "") -> None:
        self.found = found
        self.needed = needed
        self.remedy = remedy
        super().__init__(found)

    def __str__(self) -> str:
        parts = [self.found]
        if self.needed:
            parts.append(f"needed: {self.needed}")
        if self.remedy:
            parts.append(f"remedy: {self.remedy}")
        return "\n  ".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process boundaries (spawned workers); keyword-only arguments would be lost by default.
        return (_rebuild, (type(self), self.found, self.needed, self.remedy))


def _rebuild(kind: type[SolError], found: str, needed: str, remedy: str) -> SolError:
    return kind(found, needed=needed, remedy=remedy)


class UsageError(SolError):
    """A name, key, value or option that does not exist or has the wrong type (exit 2)."""

    exit_code = Exit.USAGE


class EnvironmentRefused(SolError):
    """The machine, a program or a package is not what the target needs (exit 10)."""

    exit_code = Exit.ENVIRONMENT


class CheckpointError(SolError):
    """The checkpoint is absent, incomplete or not the one that the lock names (exit 11)."""

    exit_code = Exit.CHECKPOINT


class GateFailed(SolError):
    """The Real-QKV gate is red: nothing that was timed in that arm counts (exit 12)."""

    exit_code = Exit.GATE


class InvalidRecord(SolError):
    """A run record is incomplete, contradictory or changed after signing (exit 13)."""

    exit_code = Exit.INVALID_RECORD


class Untrusted(SolError):
    """A record without a signature, or signed by a key that the trust policy does not name (exit 14)."""

    exit_code = Exit.UNTRUSTED


class Interrupted(SolError):
    """The run was ended by SIGINT or SIGTERM (exit 130)."""

    exit_code = Exit.INTERRUPTED
