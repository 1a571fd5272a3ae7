"""Synthetic weights: each element a pure function of (seed, name, index)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from config.schema import Checkpoint
from engine.checkpoint.draw import uniform
from engine.checkpoint.store import list_files, verify_synthetic, write_synthetic

TINY = Checkpoint(kind="synthetic", preset="tiny", seed=0)


def philox_4x64_10(counter: int, key: tuple[int, int]) -> list[int]:
    """Philox-4x64-10 in integers (Salmon et al., SC 2011), written from the paper: the independent reference."""
    mask = 2**64 - 1
    words = [counter >> (64 * i) & mask for i in range(4)]
    k0, k1 = key
    for _ in range(10):
        p0, p1 = words[0] * 0xD2E7470EE14C6C93, words[2] * 0xCA5A826395121157
        words = [(p1 >> 64) ^ words[1] ^ k0, p1 & mask, (p0 >> 64) ^ words[3] ^ k1, p0 & mask]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return words


def test_elements_equal_the_generator_of_the_paper() -> None:
    digest = hashlib.sha256(b"7/blocks.0.weight").digest()
    key = (int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little"))
    # numpy increments the counter before it draws, so the first four words come from counter 1
    words = philox_4x64_10(1, key) + philox_4x64_10(2, key)
    expected = [np.float32(((word >> 40) * 2.0**-23 - 1.0) * 0.5) for word in words]
    assert uniform(7, "blocks.0.weight", (8,), 0.5).tolist() == [float(value) for value in expected]


def test_names_and_seeds_give_other_numbers_and_a_prefix_the_same() -> None:
    first = uniform(0, "a", (1000,), 1.0)
    assert np.array_equal(first[:10], uniform(0, "a", (10,), 1.0))
    for other in (uniform(1, "a", (1000,), 1.0), uniform(0, "b", (1000,), 1.0)):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.15
    assert first.min() >= -1.0 and first.max() < 1.0
    assert abs(float(first.var()) - 1 / 3) < 0.05


@pytest.mark.e2e
def test_the_tiny_checkpoint_is_the_one_that_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOL_CACHE", str(tmp_path))
    parts: list[str] = []
    write_synthetic(TINY, on_part=parts.append)
    folder = tmp_path / "synthetic-tiny-seed0" / "MiniMax-H3"
    weights, notes = verify_synthetic(TINY, folder)
    assert notes == []
    assert weights.files == list_files(folder)
    assert parts[0] == "index" and parts[-1] == "VAEs"
