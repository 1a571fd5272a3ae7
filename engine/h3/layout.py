"""Where text, conditioning, audio and target video lie in MiniMax-H3's packed document, found from SGLang's own
tensors.

SGLang packs one request as [text | conditioning frames | audio | target video | padding to a multiple of 64] (0.5.17,
`minimax_h3/packed_sequence.py`). The sizes follow from the prompt and the request, so nothing here knows them
beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from config.errors import EnvironmentRefused
from config.schema import Span

Rows = tuple[int, int]
"""A half-open range (start, stop) of rows of the packed document."""


class LayoutError(EnvironmentRefused):
    """The packed document is not one that the sparse-attention policies are defined for."""

    def __init__(self, found: str, *, needed: str) -> None:
        super().__init__(
            found,
            needed=needed,
            remedy="use SGLang 0.5.17 and a t2va or fl2va request; other packings are not supported",
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.found, self.needed))


def _rebuild(found: str, needed: str) -> LayoutError:
    return LayoutError(found, needed=needed)


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """The rows of one packed document; all ranges are half-open.

    Attributes:
        total_tokens: rows of the packed tensors, padding included.
        live_tokens: rows of the document; `padding_tokens` rows follow them.
        padding_tokens: total_tokens - live_tokens.
        text: rows of the prompt.
        condition: rows of the conditioning frames; None in a text-only request.
        audio: rows of the generated audio.
        video: rows of the generated video, the last of the document.
        prefix_tokens: rows before the generated video.
        cu_seqlens: SGLang's segment boundaries, unchanged.
    """

    total_tokens: int
    live_tokens: int
    padding_tokens: int
    text: Rows
    condition: Rows | None
    audio: Rows
    video: Rows
    prefix_tokens: int
    cu_seqlens: tuple[int, ...]

    def sink_range(self, policy: Span) -> Rows:
        """The key rows that every query block reads exactly: all before the video, the text alone, or none, as (0, 0).

        The published H100 and A100 adapters take the whole prefix, the RTX adapters the text alone (NVlabs/Sana,
        sol-engine).

        Raises:
            ValueError: `policy` is not "prefix", "text" or "none".
        """
        return self._span(policy)

    def dense_rows_range(self, policy: Span) -> Rows:
        """The query rows that attend densely, chosen by the same names as `sink_range`.

        Raises:
            ValueError: `policy` is not "prefix", "text" or "none".
        """
        return self._span(policy)

    def _span(self, policy: Span) -> Rows:
        if policy == "prefix":
            return (0, self.prefix_tokens)
        if policy == "text":
            return self.text
        if policy == "none":
            return (0, 0)
        raise ValueError(f'unknown policy {policy!r}; one of "prefix", "text", "none"')


def find_layout(
    *,
    text_positions: Tensor,
    image_positions: Tensor,
    audio_positions: Tensor,
    cu_seqlens_host: Sequence[int],
    condition_rows: int,
) -> PackedLayout:
    """Find and check the layout of a packed document.

    Positions on a device are brought to the host, which waits for it: call this once a request, not once a forward.

    Args:
        text_positions: [text] integer rows of the live prompt tokens.
        image_positions: [condition + video] integer rows, conditioning frames first.
        audio_positions: [audio] integer rows.
        cu_seqlens_host: segment boundaries: 0, live_tokens and, where there is padding, total_tokens.
        condition_rows: how many of `image_positions` are conditioning rows; for SGLang's forward, the positions that
            `img_pos_for_infer_output_info` leaves out.

    Raises:
        LayoutError: a modality is absent or not one ascending run, runs overlap or leave a gap, the video is not the
            end of the document, or the boundaries do not describe one document and its padding.
    """
    cu_seqlens = tuple(int(value) for value in cu_seqlens_host)
    live_tokens, total_tokens = _segments(cu_seqlens)
    image_rows = int(image_positions.numel())
    if not 0 <= condition_rows < image_rows:
        raise LayoutError(
            f"{condition_rows} of {image_rows} image rows are conditioning rows",
            needed="0 or more conditioning rows, and at least one generated video row",
        )
    text = _run("text", text_positions)
    condition = _run("condition", image_positions.reshape(-1)[:condition_rows]) if condition_rows else None
    audio = _run("audio", audio_positions)
    video = _run("video", image_positions.reshape(-1)[condition_rows:])
    named = {"text": text, "condition": condition, "audio": audio, "video": video}
    _check_tiling({name: rows for name, rows in named.items() if rows is not None}, live_tokens)
    if video[1] != live_tokens:
        raise LayoutError(
            f"the generated video is rows {_show(video)} of a document of {live_tokens} rows",
            needed="the generated video as the end of the document",
        )
    return PackedLayout(
        total_tokens=total_tokens,
        live_tokens=live_tokens,
        padding_tokens=total_tokens - live_tokens,
        text=text,
        condition=condition,
        audio=audio,
        video=video,
        prefix_tokens=video[0],
        cu_seqlens=cu_seqlens,
    )


def _segments(cu_seqlens: tuple[int, ...]) -> Rows:
    """(live_tokens, total_tokens) of boundaries that hold one document and at most one segment of padding."""
    ascending = all(a <= b for a, b in zip(cu_seqlens, cu_seqlens[1:], strict=False))
    if len(cu_seqlens) not in (2, 3) or cu_seqlens[0] != 0 or cu_seqlens[1] < 1 or not ascending:
        raise LayoutError(
            f"the segment boundaries are {cu_seqlens}",
            needed="0, the document's rows and, after padding, the total, in ascending order",
        )
    return cu_seqlens[1], cu_seqlens[-1]


def _run(name: str, positions: Tensor) -> Rows:
    """The half-open range of `positions`, which have to be one ascending run without gaps."""
    rows = positions.detach().reshape(-1).cpu()
    if rows.numel() == 0:
        raise LayoutError(f"the document has no {name} rows", needed=f"at least one {name} row")
    steps = rows[1:] - rows[:-1]
    if bool((steps != 1).any()):
        at = int((steps != 1).nonzero()[0])
        raise LayoutError(
            f"the {name} rows jump from {int(rows[at])} to {int(rows[at + 1])}",
            needed=f"the {name} rows as one ascending run",
        )
    return int(rows[0]), int(rows[-1]) + 1


def _check_tiling(runs: dict[str, Rows], live_tokens: int) -> None:
    """Check that `runs` cover [0, live_tokens), every row exactly once."""
    covered = 0
    before = "the start"
    for name, (start, stop) in sorted(runs.items(), key=lambda item: item[1]):
        if start < covered:
            raise LayoutError(
                f"the {name} rows {_show((start, stop))} overlap {before}, which ends at row {covered}",
                needed="text, condition, audio and video rows that are disjoint",
            )
        if start > covered:
            raise LayoutError(
                f"rows {_show((covered, start))} between {before} and the {name} rows belong to nothing",
                needed=f"text, condition, audio and video rows that cover all {live_tokens} rows of the document",
            )
        covered, before = stop, f"the {name} rows"
    if covered != live_tokens:
        raise LayoutError(
            f"text, condition, audio and video end at row {covered}, the document at row {live_tokens}",
            needed="segment boundaries whose first segment is the whole document",
        )


def _show(rows: Rows) -> str:
    return f"[{rows[0]}, {rows[1]})"
