"""The manifest of the published checkpoint."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.checkpoint import COLUMNS, ManifestEntry, entry_for, manifest, of_partition, parse

HEADER = "\t".join(COLUMNS)


def test_sizes_add_up_to_what_a_public_catalogue_states() -> None:
    assert len(manifest()) == 59
    assert sum(entry.bytes for entry in manifest()) == 144_051_030_183
    beside = {entry.path for entry in manifest()} - {entry.path for entry in of_partition("FL2VA")}
    assert beside == {"LICENSE", "modular_model_index.json"}, "of the repository, not of the folder that is fetched"


def test_one_file_has_no_hash() -> None:
    assert [entry.path for entry in manifest() if entry.sha256 is None] == ["modular_model_index.json"]


def test_the_same_file_in_three_folders_has_one_hash() -> None:
    hashes = {entry.sha256 for entry in manifest() if entry.path.endswith("/vocab.json")}
    assert len(hashes) == 1


def test_a_shard_is_found_by_its_number() -> None:
    entry = entry_for("FL2VA/transformer/diffusion_pytorch_model-00013-of-00013.safetensors")
    assert entry is not None and entry.bytes == 4242305176
    assert entry_for("FL2VA/transformer/sub/x-00013-of-00013.safetensors") is None
    assert entry_for("FL2VA/text_encoder/model-00013-of-00013.safetensors") is None
    assert entry_for("FL2VA/pipeline.py") is None


def test_no_path_is_claimed_twice() -> None:
    for entry in manifest():
        path = entry.path.replace("*", "model")
        assert [other.path for other in manifest() if other.matches(path)] == [entry.path]


@pytest.mark.parametrize(
    "text",
    ["", "path\tbytes", f"{HEADER}\na\t1", f"{HEADER}\na\tx\t", f"{HEADER}\na\t1\tabc", f"{HEADER}\na\t-1\t"],
    ids=["empty", "header", "columns", "size", "hash", "negative"],
)
def test_a_wrong_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


paths = st.lists(
    st.text("abc-._0", min_size=1, max_size=6).filter(lambda s: s not in (".", "..")), min_size=1, max_size=3
)
rows = st.lists(
    st.tuples(
        paths.map("/".join), st.integers(0, 2**50), st.none() | st.binary(min_size=32, max_size=32).map(bytes.hex)
    ),
    max_size=5,
)


@given(rows)
def test_reads_back_what_was_written(rows: list[tuple[str, int, str | None]]) -> None:
    text = "# a remark\n" + HEADER + "\n" + "".join(f"{p}\t{size}\t{digest or ''}\n" for p, size, digest in rows)
    entries = tuple(ManifestEntry(path=p, bytes=size, sha256=digest) for p, size, digest in rows)
    assert parse(text) == entries
    assert all(entry.matches(entry.path) for entry in entries)
