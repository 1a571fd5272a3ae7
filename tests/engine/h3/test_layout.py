"""The packed document's layout against SGLang's real packer, and against documents that are wrong in one way each."""

from __future__ import annotations

import pickle
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from config.errors import Exit
from engine.h3.layout import LayoutError, PackedLayout, find_layout
from tests.engine import sglang_on_cpu

PACKER = "sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.minimax_h3.packed_sequence"


@pytest.fixture(scope="module")
def packer() -> ModuleType:
    """SGLang's packer, imported for the CPU (about 15 s in a fresh process)."""
    return sglang_on_cpu.module(PACKER)


def layout_of(packed: dict[str, Any]) -> PackedLayout:
    """As the seam calls it: conditioning rows are those that SGLang does not update."""
    return find_layout(
        text_positions=packed["text_pos"],
        image_positions=packed["img_pos"],
        audio_positions=packed["audio_pos"],
        cu_seqlens_host=packed["cu_seqlens"].tolist(),
        condition_rows=int((~packed["update_mask"]).sum()),
    )


def test_published_document_has_38247_rows(packer: ModuleType) -> None:
    """1344x768, 124 frames, 537 prompt tokens: 37 latent frames of 24 x 42 rows and 2 x 207 audio rows."""
    layout = layout_of(
        packer.minimax_h3_packed_sequence(
            text_len=537, latent_t=37, latent_h=48, latent_w=84, audio_t=207, include_keyframe_cond=False
        )
    )
    assert layout == PackedLayout(
        total_tokens=38272,
        live_tokens=38247,
        padding_tokens=25,
        text=(0, 537),
        condition=None,
        audio=(537, 951),
        video=(951, 38247),
        prefix_tokens=951,
        cu_seqlens=(0, 38247, 38272),
    )
    assert layout.video[1] - layout.video[0] == 37296
    assert layout.sink_range("prefix") == layout.dense_rows_range("prefix") == (0, 951)
    assert layout.sink_range("text") == layout.dense_rows_range("text") == (0, 537)
    assert layout.sink_range("none") == layout.dense_rows_range("none") == (0, 0)


@pytest.mark.parametrize("keyframes", [[0], [-1], [0, -1]], ids=str)
def test_fl2va_conditioning_frames_belong_to_the_prefix(packer: ModuleType, keyframes: list[int]) -> None:
    layout = layout_of(
        packer.minimax_h3_packed_sequence(
            text_len=100,
            latent_t=7,
            latent_h=8,
            latent_w=14,
            audio_t=37,
            include_keyframe_cond=True,
            keyframe_frame_indices=keyframes,
            frame_count=22,
        )
    )
    rows = 28 * len(keyframes)
    assert layout.text == (0, 100)
    assert layout.condition == (100, 100 + rows)
    assert layout.audio == (100 + rows, 174 + rows)
    assert layout.video == (174 + rows, 174 + rows + 7 * 28)
    assert layout.sink_range("prefix") == (0, 174 + rows)
    assert layout.sink_range("text") == (0, 100)


@pytest.mark.parametrize("text_len", [1, 30, 62, 63])
def test_layout_agrees_with_sglangs_tags_row_by_row(packer: ModuleType, text_len: int) -> None:
    """62 text rows make the document a multiple of 64, so that SGLang adds no padding (its last segment is empty)."""
    packed = packer.minimax_h3_packed_sequence(
        text_len=text_len, latent_t=4, latent_h=4, latent_w=8, audio_t=17, include_keyframe_cond=False
    )
    layout = layout_of(packed)
    tags = [-1] * layout.total_tokens
    for tag, rows in ((1, layout.text), (2, layout.audio), (0, layout.video)):
        tags[slice(*rows)] = [tag] * (rows[1] - rows[0])
    assert tags == packed["token_tags"].tolist()
    assert layout.total_tokens == packed["seq_len"]
    assert (layout.padding_tokens == 0) == (text_len == 62)


def test_a_reference_video_document_is_refused(packer: ModuleType) -> None:
    """ref2va puts reference audio away from the generated audio; no published policy says what is its prefix."""
    packed = packer.minimax_h3_packed_sequence_ref2va_blocks(
        text_len=20,
        latent_t=2,
        latent_h=4,
        latent_w=4,
        audio_t=5,
        ref_blocks=[{"kind": "video_audio", "ref_audio_t": 3, "latent_t": 1, "latent_h": 4, "latent_w": 4}],
    )
    with pytest.raises(LayoutError, match="the audio rows jump from"):
        layout_of(packed)


# --- documents made here ---------------------------------------------------------------------------------------------

lengths = st.integers(1, 40)


@given(text=lengths, condition=st.integers(0, 40), audio=lengths, video=lengths, padding=st.integers(0, 63))
def test_any_document_in_sglangs_order_is_found(
    text: int, condition: int, audio: int, video: int, padding: int
) -> None:
    prefix = text + condition + audio
    live = prefix + video
    image = list(range(text, text + condition)) + list(range(prefix, live))
    layout = find_layout(
        text_positions=torch.arange(text, dtype=torch.int32),
        image_positions=torch.tensor(image).reshape(1, -1),
        audio_positions=torch.arange(text + condition, prefix),
        cu_seqlens_host=(0, live, live + padding),
        condition_rows=condition,
    )
    assert (layout.live_tokens, layout.total_tokens, layout.padding_tokens) == (live, live + padding, padding)
    assert layout.text == (0, text)
    assert layout.condition == ((text, text + condition) if condition else None)
    assert layout.audio == (text + condition, prefix)
    assert layout.video == (prefix, live)
    assert layout.prefix_tokens == prefix


def document() -> dict[str, Any]:
    """text 0-9, condition 10-13, audio 14-19, video 20-39, padding 40-63."""
    return {
        "text_positions": torch.arange(10),
        "image_positions": torch.cat((torch.arange(10, 14), torch.arange(20, 40))),
        "audio_positions": torch.arange(14, 20),
        "cu_seqlens_host": [0, 40, 64],
        "condition_rows": 4,
    }


def rows(*ranges: tuple[int, int]) -> Tensor:
    return torch.cat([torch.arange(start, stop) for start, stop in ranges])


WRONG = {
    "no text": ({"text_positions": rows((0, 0))}, "has no text rows"),
    "no audio": ({"audio_positions": rows((0, 0))}, "has no audio rows"),
    "no image": ({"image_positions": rows((0, 0))}, "4 of 0 image rows are conditioning rows"),
    "all condition": ({"condition_rows": 24}, "24 of 24 image rows are conditioning rows"),
    "negative condition": ({"condition_rows": -1}, "-1 of 24 image rows"),
    "condition not counted": ({"condition_rows": 0}, "the video rows jump from 13 to 20"),
    "condition miscounted": ({"condition_rows": 3}, "the video rows jump from 13 to 20"),
    "text hole": ({"text_positions": rows((0, 4), (5, 10))}, "the text rows jump from 3 to 5"),
    "audio descending": ({"audio_positions": rows((14, 20)).flip(0)}, "the audio rows jump from 19 to 18"),
    "audio twice": ({"audio_positions": rows((14, 17), (16, 20))}, "the audio rows jump from 16 to 16"),
    "text over condition": ({"text_positions": rows((0, 11))}, "the condition rows .* overlap the text rows"),
    "audio over video": ({"audio_positions": rows((14, 21))}, "the video rows .* overlap the audio rows"),
    "gap at the start": ({"text_positions": rows((1, 10))}, r"rows \[0, 1\) between the start and the text rows"),
    "gap inside": (
        {"audio_positions": rows((15, 20))},
        r"rows \[14, 15\) between the condition rows and the audio rows",
    ),
    "live too long": ({"cu_seqlens_host": [0, 41, 64]}, "end at row 40, the document at row 41"),
    "live too short": ({"cu_seqlens_host": [0, 39, 64]}, "end at row 40, the document at row 39"),
    "video not last": (
        {"image_positions": rows((10, 14), (14, 34)), "audio_positions": rows((34, 40))},
        r"the generated video is rows \[14, 34\) of a document of 40 rows",
    ),
    "no boundaries": ({"cu_seqlens_host": []}, "the segment boundaries are"),
    "not from zero": ({"cu_seqlens_host": [1, 40, 64]}, "the segment boundaries are"),
    "two documents": ({"cu_seqlens_host": [0, 20, 40, 64]}, "the segment boundaries are"),
    "empty document": ({"cu_seqlens_host": [0, 0, 64]}, "the segment boundaries are"),
    "descending": ({"cu_seqlens_host": [0, 40, 32]}, "the segment boundaries are"),
}


def test_the_right_document_is_accepted() -> None:
    layout = find_layout(**document())
    assert (layout.text, layout.condition, layout.audio, layout.video) == ((0, 10), (10, 14), (14, 20), (20, 40))
    assert (layout.sink_range("prefix"), layout.dense_rows_range("text")) == ((0, 20), (0, 10))
    assert find_layout(**document() | {"cu_seqlens_host": (0, 40)}).padding_tokens == 0


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_document_is_refused_with_what_is_wrong(name: str) -> None:
    change, message = WRONG[name]
    with pytest.raises(LayoutError, match=message) as caught:
        find_layout(**document() | change)
    assert caught.value.needed and caught.value.remedy
    assert caught.value.exit_code == Exit.ENVIRONMENT


def test_an_unknown_policy_is_refused() -> None:
    layout = find_layout(**document())
    for method in (layout.sink_range, layout.dense_rows_range):
        with pytest.raises(ValueError, match="unknown policy 'suffix'"):
            method("suffix")  # type: ignore[arg-type]


def test_the_error_survives_the_way_back_from_a_worker_process() -> None:
    with pytest.raises(LayoutError) as caught:
        find_layout(**document() | {"cu_seqlens_host": []})
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is LayoutError and str(again) == str(caught.value)
