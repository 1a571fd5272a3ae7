"""Whom to trust: small policies that compose, and the trust file that they are read from.

A trust file is TOML:

    threshold = 1

    [[keys]]
    name = "lab"
    pem = "lab.key.pub"        # relative to the trust file; or: public = "<64 hex digits>"
    targets = ["rtx4090"]      # optional: for these targets only
    images = ["sha256:..."]    # optional: for runs in these images only

A record has one signature, so the threshold can only be 1. A file without keys is an error: it would trust nobody
while it looks like a policy.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import Field, StringConstraints, ValidationError, model_validator
from securesystemslib.signer import SSlibKey

from config.errors import UsageError
from config.schema import Model
from verify.keys import load_public, public_from_hex

MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Evidence:
    """What a policy may look at: the key that signed, and what the signed record says of its target and image."""

    keyid: str
    target: str
    image_digest: str


class Policy(Protocol):
    """A question about evidence."""

    def unmet(self, evidence: Evidence) -> str | None:
        """Why the evidence does not meet the policy, or None when it does."""


@dataclass(frozen=True)
class SignedBy:
    """The record is signed by this key. `name` is what its owner is called."""

    name: str
    key: SSlibKey

    def unmet(self, evidence: Evidence) -> str | None:
        """See Policy."""
        if evidence.keyid == self.key.keyid:
            return None
        return f"not signed by {self.name} ({self.key.keyid[:16]})"


@dataclass(frozen=True)
class ForTargets:
    """The record is of one of these targets."""

    targets: tuple[str, ...]

    def unmet(self, evidence: Evidence) -> str | None:
        """See Policy."""
        if evidence.target in self.targets:
            return None
        return f"target {evidence.target!r} is not one of {', '.join(self.targets)}"


@dataclass(frozen=True)
class InImages:
    """The run was made in one of these container images."""

    images: tuple[str, ...]

    def unmet(self, evidence: Evidence) -> str | None:
        """See Policy."""
        if evidence.image_digest in self.images:
            return None
        return f"image {evidence.image_digest or 'none'!r} is not one that the policy names"


class AllOf:
    """Every part is met. Without parts it would be met by anything, so that is an error.

    Raises:
        UsageError: there is no part.
    """

    def __init__(self, parts: Sequence[Policy]) -> None:
        self.parts = _some(parts)

    def unmet(self, evidence: Evidence) -> str | None:
        """See Policy."""
        reasons = [reason for part in self.parts if (reason := part.unmet(evidence)) is not None]
        return " and ".join(reasons) or None


class AnyOf:
    """At least one part is met.

    Raises:
        UsageError: there is no part.
    """

    def __init__(self, parts: Sequence[Policy]) -> None:
        self.parts = _some(parts)

    def unmet(self, evidence: Evidence) -> str | None:
        """See Policy."""
        reasons = [part.unmet(evidence) for part in self.parts]
        return None if None in reasons else "; ".join(reason for reason in reasons if reason is not None)


def _some(parts: Sequence[Policy]) -> tuple[Policy, ...]:
    if not parts:
        raise UsageError("a policy without parts", needed="at least one key", remedy="add [[keys]] to the trust file")
    return tuple(parts)


class TrustedKey(Model):
    """One `[[keys]]` table of a trust file."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=100)]
    pem: str = ""
    public: str = ""
    targets: tuple[str, ...] | None = Field(default=None, strict=False, min_length=1)
    images: tuple[Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")], ...] | None = Field(
        default=None, strict=False, min_length=1
    )

    @model_validator(mode="after")
    def _one_key(self) -> TrustedKey:
        if bool(self.pem) == bool(self.public):
            raise ValueError("a key has either pem or public")
        return self


class TrustFile(Model):
    """A trust file as it is written."""

    threshold: Literal[1] = 1
    keys: tuple[TrustedKey, ...] = Field(strict=False, min_length=1)


def load_policy(path: Path) -> Policy:
    """Read a trust file.

    Raises:
        UsageError: it cannot be read, is not of the form above, names no key, or names one twice.
    """
    remedy = "see verify/policy.py for the form of a trust file"
    try:
        if path.stat().st_size > MAX_BYTES or not path.is_file():
            raise UsageError(f"trust file {path} is not a small text file", remedy=remedy)
        raw = tomllib.loads(path.read_bytes().decode("utf-8"))
        trust = TrustFile.model_validate(raw)
    except OSError as error:
        raise UsageError(f"trust file {path} cannot be read: {error.strerror}", remedy=remedy) from None
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()[:3])
        raise UsageError(f"trust file {path}: {faults}", remedy=remedy) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"trust file {path} is not TOML: {error}", remedy=remedy) from None
    parts = [_key_policy(key, path.parent) for key in trust.keys]
    ids = [part.key.keyid for part, _ in parts]
    if len(set(ids)) != len(ids):
        raise UsageError(f"trust file {path} names a key twice", remedy="one [[keys]] table a key")
    return AnyOf([policy for _, policy in parts])


def _key_policy(entry: TrustedKey, folder: Path) -> tuple[SignedBy, Policy]:
    key = load_public(folder / entry.pem) if entry.pem else public_from_hex(entry.public)
    signed = SignedBy(entry.name, key)
    parts: list[Policy] = [signed]
    if entry.targets:
        parts.append(ForTargets(entry.targets))
    if entry.images:
        parts.append(InImages(entry.images))
    return signed, AllOf(parts)
