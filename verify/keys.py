"""Ed25519 keys as files, and as the `signer.json` of a record.

A private key is PKCS#8 PEM with mode 0600, a public key SubjectPublicKeyInfo PEM beside it with `.pub` appended. A
key's id is what securesystemslib computes: SHA-256 over the canonical JSON of {"keytype", "keyval": {"public": 64 hex
digits}, "scheme"}. It follows from the key alone, so that nobody can give a key another one's id.
"""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from securesystemslib.signer import CryptoSigner, SSlibKey

from config.errors import InvalidRecord, UsageError
from config.record import SIGNER, Signer

MAX_KEY_BYTES = 64 * 1024


def keygen(private: Path) -> tuple[Path, Path, str]:
    """Make a key pair; the public key's file has `.pub` appended. Returns both paths and the key id.

    Raises:
        UsageError: one of the files exists (a key is never overwritten), or cannot be written.
    """
    if not private.name:
        raise UsageError(f"{str(private)!r} is no file's name", remedy="name a new file")
    public = private.with_name(private.name + ".pub")
    signer = CryptoSigner.generate_ed25519()
    pem = Ed25519PublicKey.from_public_bytes(bytes.fromhex(_hex(signer.public_key))).public_bytes(
        Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
    )
    for path in (private, public):
        if path.exists() or path.is_symlink():
            raise UsageError(
                f"{path} exists", needed="a new file: keys are never overwritten", remedy="name another file"
            )
    _write_new(private, signer.private_bytes, 0o600)
    try:
        _write_new(public, pem, 0o644)
    except UsageError:
        private.unlink(missing_ok=True)  # half a pair would stand in the way of the next try
        raise
    return private, public, signer.public_key.keyid


def _write_new(path: Path, data: bytes, mode: int) -> None:
    made = False
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        made = True
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
    except OSError as error:
        if made:
            path.unlink(missing_ok=True)
        raise UsageError(
            f"{path} cannot be written: {error.strerror}", remedy="name a file in a writable folder"
        ) from None


def load_signer(path: Path) -> CryptoSigner:
    """The private key of a file.

    Raises:
        UsageError: it cannot be read, others may read it, or it is not an unencrypted Ed25519 private key.
    """
    data = _read(path)
    if path.stat().st_mode & 0o077:
        raise UsageError(f"{path} can be read by others", needed="mode 0600", remedy=f"chmod 600 {path}")
    try:
        key = load_pem_private_key(data, None)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path} is not a private key: {error}", remedy="make one with `sol keygen`") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"{path} is not an Ed25519 key", remedy="make one with `sol keygen`")
    return CryptoSigner(key)


def load_public(path: Path) -> SSlibKey:
    """The public key of a PEM file.

    Raises:
        UsageError: it cannot be read or is not an Ed25519 public key.
    """
    try:
        key = load_pem_public_key(_read(path))
    except ValueError as error:
        raise UsageError(f"{path} is not a public key: {error}", remedy="name the .pub file of `sol keygen`") from None
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(f"{path} is not an Ed25519 key", remedy="name the .pub file of `sol keygen`")
    return SSlibKey.from_crypto(key)


def public_from_hex(public: str) -> SSlibKey:
    """The public key with these 64 lower-case hex digits.

    Raises:
        UsageError: they are not a public key.
    """
    try:
        raw = bytes.fromhex(public)
        if len(raw) != 32 or raw.hex() != public:
            raise ValueError("not 64 lower-case hex digits")
        return SSlibKey.from_crypto(Ed25519PublicKey.from_public_bytes(raw))
    except ValueError as error:
        raise UsageError(f"{public[:80]!r} is not an Ed25519 public key: {error}") from None


def as_signer_json(key: SSlibKey) -> Signer:
    """A public key as `signer.json` holds it."""
    return Signer(keyid=key.keyid, keytype="ed25519", scheme="ed25519", public=_hex(key))


def from_signer_json(signer: Signer) -> SSlibKey:
    """The key of `signer.json`, whose id must follow from it.

    Raises:
        InvalidRecord: the id belongs to another key, or the digits are no key.
    """
    try:
        key = public_from_hex(signer.public)
    except UsageError as error:
        raise InvalidRecord(f"{SIGNER}: {error.found}", remedy="take the record as it was signed") from None
    if key.keyid != signer.keyid:
        raise InvalidRecord(
            f"{SIGNER} gives its key the id {signer.keyid[:16]}, its own is {key.keyid[:16]}",
            remedy="take the record as it was signed",
        )
    return key


def _hex(key: SSlibKey) -> str:
    return str(key.keyval["public"])


def _read(path: Path) -> bytes:
    try:
        if not path.is_file() or path.stat().st_size > MAX_KEY_BYTES:
            raise UsageError(f"{path} is not a key file", remedy="make a key pair with `sol keygen`")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}", remedy="make a key pair with `sol keygen`") from None
