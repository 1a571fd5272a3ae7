"""Canonical JSON (RFC 8785) and SHA-256, so that a digest does not depend on machine, key order or white space."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import rfc8785


def canonical_json(value: Any) -> bytes:
    """RFC 8785 bytes of a JSON value.

    Raises:
        rfc8785.CanonicalizationError: for NaN, infinities, integers beyond 2**53 and types that JSON lacks.
    """
    return rfc8785.dumps(value)


def sha256_bytes(data: bytes) -> str:
    """SHA-256 of `data` as 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_json(value: Any) -> str:
    """SHA-256 of the canonical JSON of `value`."""
    return sha256_bytes(canonical_json(value))


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, read in pieces.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
