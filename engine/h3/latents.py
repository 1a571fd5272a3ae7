"""What the denoising loop leaves, digested: the only evidence of what an arm changes numerically that no decoder blurs.

It costs a measured request one copy of both latents to the host, after the loop has ended and inside the request and
its denoising stage: 14.4 MB for 38,247 tokens, and nothing more on the device. Digest, sum and samples are
taken after the worker has answered, and the driver waits for them before it sends the next request.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from config.record import LATENTS_SEAM, SAMPLE_STEP, SAMPLED_ELEMENTS, Latents, LatentTensor
from engine.h3.output import SCHEDULER, digest
from engine.h3.tracker import Tracker


def observe_latents(tracker: Tracker, stage: Any) -> str:
    """Tell of each answered request what its loop left. Changes no result; to be installed on rank 0 alone.

    Args:
        tracker: the worker's.
        stage: SGLang's MiniMaxH3DenoisingStage, which leaves `latents` [1, C, F, H, W] and `audio_latents` [C, D, T]
            on the batch; decoding may then change both in place.
    """
    scheduler = importlib.import_module(SCHEDULER).Scheduler
    run_full_loop, answer = stage._run_full_loop, scheduler.return_result
    kept: list[dict[str, torch.Tensor]] = []

    def kept_loop(self: Any, batch: Any, server_args: Any) -> None:
        kept.clear()
        run_full_loop(self, batch, server_args)
        left = {"video": batch.latents, "audio": batch.audio_latents}
        kept.append({name: tensor.detach().to("cpu", copy=True) for name, tensor in left.items()})

    def answered(self: Any, output_batch: Any, *args: Any, **kwargs: Any) -> None:
        answer(self, output_batch, *args, **kwargs)
        while kept:
            tensors = kept.pop()
            # The driver ends an arm at a request that failed, and no event may come after that end.
            if not getattr(output_batch, "error", None):
                described = {name: describe(tensor) for name, tensor in tensors.items()}
                tracker.log.write(Latents, sample=tracker.sample, **described)

    stage._run_full_loop, scheduler.return_result = kept_loop, answered
    return LATENTS_SEAM


def describe(tensor: torch.Tensor) -> LatentTensor:
    """Shape, dtype, digest, sum of squares and sampled elements of a tensor on the host, as `LatentTensor` defines
    them.

    Raises:
        pydantic.ValidationError: the dtype is none of those that a record knows.
    """
    known = digest(tensor)
    wide = tensor.flatten().to(torch.float64)
    finite = torch.isfinite(wide)
    values = wide[sampled_indices(wide.numel())]
    return LatentTensor(
        **known.model_dump(),
        not_finite=int((~finite).sum()),
        sum_squares=float(wide[finite].square().sum()),
        values=tuple(value if good else None for value, good in zip(values.tolist(), values.isfinite(), strict=True)),
    )


def sampled_indices(elements: int) -> torch.Tensor:
    """Which of `elements` elements in row-major order are kept, by the rule of `LatentTensor`: one of each of
    m = min(1,024, elements) even parts.

    Returns:
        int64 [m], strictly increasing.
    """
    count = min(SAMPLED_ELEMENTS, elements)
    i = torch.arange(count, dtype=torch.int64)
    return i * elements // count + (i * SAMPLE_STEP % 2**32 * (elements // count) >> 32)
