"""What the user brings to a fetch: a token, and an acknowledged licence."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from config.errors import CheckpointError, UsageError
from engine.checkpoint.store import cache_root, user_cache
from engine.evidence import utc_now, write_atomically

SECRET = Path("/run/secrets/hf_token")
"""Where Docker and Podman put a secret of this name."""
ACCEPT_VARIABLE = "SOL_ACCEPT_LICENCE"
LICENCE = (
    "{repo} is under the MiniMax H3 Community License (https://huggingface.co/{repo}). It asks for a separate "
    "authorisation in the EU, the UK, the US and South Korea, and the weights may not be handed on inside an image."
)


def token(environ: Mapping[str, str] = os.environ) -> str | None:
    """The hub's token: $HF_TOKEN_FILE, the secret `hf_token`, $HF_TOKEN, or the one that `hf auth login` stored.

    Raises:
        UsageError: the file that is named cannot be read or is empty.
    """
    named = environ.get("HF_TOKEN_FILE")
    path = Path(named) if named else SECRET
    if named or path.is_file():
        try:
            text = path.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"HF_TOKEN_FILE names {path}, which cannot be read: {getattr(error, 'strerror', 'not text')}",
                remedy="mount the file or secret into the container, readable by this user",
            ) from None
        if named and len(text.split()) != 1:
            raise UsageError(f"{path} does not hold one token", remedy="put the token alone on its first line")
        if text:  # a secret that nobody filled is mounted empty
            return text
    from huggingface_hub import get_token

    return environ.get("HF_TOKEN", "").strip() or get_token()


def licence_notes(repo: str) -> tuple[Path, Path]:
    """Where an acknowledgement may be kept: beside the checkpoints, or in the user's own cache."""
    name = f"{repo.replace('/', '--')}.txt"
    return cache_root() / "licences" / name, user_cache() / "licences" / name


def acknowledged(repo: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the licence of a repository was acknowledged, now or before."""
    return environ.get(ACCEPT_VARIABLE, "").lower() in ("1", "yes", "true") or any(
        note.is_file() for note in licence_notes(repo)
    )


def acknowledge(repo: str) -> None:
    """Remember the acknowledgement; a cache that cannot be written only means that the question comes again."""
    for note in licence_notes(repo):
        with contextlib.suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(note, f"{utc_now()} {LICENCE.format(repo=repo)}\n".encode())
            return


def require_licence(repo: str) -> None:
    """Refuse before the first byte.

    Raises:
        CheckpointError: nobody has acknowledged the licence here.
    """
    if not acknowledged(repo):
        raise CheckpointError(
            f"the licence of {repo} is not acknowledged",
            needed=LICENCE.format(repo=repo),
            remedy=f"read it, then type `sol fetch TARGET --accept-licence` once, or set {ACCEPT_VARIABLE}=yes",
        )
