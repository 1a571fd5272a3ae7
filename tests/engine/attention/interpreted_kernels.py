"""Runs the kernels on small tensors in Triton's interpreter and saves what they computed.

A process of its own, because Triton decides when a kernel is defined whether it is interpreted:
``python interpreted_kernels.py FILE`` computes every case of CASES and of ROTARY.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.attention.call import SolAttentionOptions, ThreshType, TokenRange


@dataclass(frozen=True)
class Case:
    """A call. data: how q, k and v look; group: query blocks that share a list."""

    name: str
    tokens: int
    heads: int
    thresh_type: ThreshType = "diag"
    sink: TokenRange = (0, 0)
    dense_rows: TokenRange = (0, 0)
    tau: float = 1.0
    data: str = "normal"
    magnitude: float = 1.0
    group: int = 3

    @property
    def options(self) -> SolAttentionOptions:
        return SolAttentionOptions(128**-0.5, self.tau, self.thresh_type, self.sink, self.dense_rows, return_lse=True)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v [1, T, H, 128]: views of one fused tensor that goes on, as NaN, behind the document."""
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(self.tokens, 3, self.heads, 128, generator=generator) * self.magnitude
        if self.data == "equal keys":
            x[:, 1] = x[0, 1]
        fused = torch.full((self.tokens + 25, 3, self.heads, 128), float("nan"), dtype=torch.bfloat16)
        fused[: self.tokens] = x.bfloat16()
        q, k, v = (fused[None, : self.tokens, i] for i in range(3))
        return q, k, v


CASES = [
    Case("one token", 1, 1, sink=(0, 1), dense_rows=(0, 1), group=2),
    Case("63 tokens", 63, 3, group=1),
    Case("64 tokens, exact", 64, 1, "exact"),
    Case("65 tokens, a dense row", 65, 2, dense_rows=(3, 4)),
    Case("whole blocks, all rows dense", 640, 1, tau=0.5, dense_rows=(0, 640)),
    Case("prefix sink and dense prefix that cut a block", 999, 2, sink=(0, 100), dense_rows=(0, 150)),
    Case("exact, sink and dense rows inside", 1000, 1, "exact", (500, 600), (400, 900), group=2),
    Case("sink and dense rows at the end", 999, 1, sink=(990, 999), dense_rows=(950, 999)),
    Case("everything routed", 300, 1, tau=-1000.0),
    Case("no variance", 500, 1, data="equal keys"),
    Case("tiny", 300, 1, magnitude=1e-4),
    Case("huge", 300, 1, magnitude=1e4),
    Case("more blocks than a routing step", 4500, 1, group=3),
]


def compute(case: Case) -> dict[str, torch.Tensor]:
    """The public call (which takes the pointer kernels here), the lists of the case's group, and a repaired output."""
    from engine.attention import sol_attention
    from engine.attention.kernels import attend_pointer, count_routes
    from engine.attention.kernels.lists import route
    from engine.attention.kernels.summaries import summarise

    q, k, v = case.tensors()
    options = case.options
    out = torch.full((1, case.tokens, case.heads, 128), float("nan"), dtype=torch.bfloat16)
    result = sol_attention(
        q, k, v, tau=options.tau, thresh_type=options.thresh_type, sink=options.sink, dense_rows=options.dense_rows,
        backend="native", return_lse=True, out=out,
    )  # fmt: skip
    summaries = summarise(q, k, v, options.thresh_type)
    lists = route(summaries, options, case.tokens, case.group)
    lists.flags[::2] = 1  # every other query block of the first head, or of one head more
    lists.flags[-1] = 1
    repaired, lse = torch.zeros_like(out), torch.zeros_like(result.lse)
    attend_pointer.repair(q[0], k[0], v[0], repaired[0], lse[0], summaries, lists, options)
    return {
        "out": result.out, "lse": result.lse, "counts": result.route_counts,
        "q_mean": summaries.q_mean, "k_mean": summaries.k_mean, "v_sum": summaries.v_sum,
        "entries": lists.entries, "lengths": lists.lengths, "bits": lists.bits, "group_counts": lists.counts,
        "shift": torch.tensor(lists.shift), "reference": lists.reference,
        "counts_alone": count_routes(q, k, options),
        "flags": lists.flags, "repaired": repaired, "repaired_lse": lse,
    }  # fmt: skip


# dtype, tokens, query heads, key heads, head size, rotated channels
ROTARY = [
    (torch.float16, 5, 17, 2, 64, 48),
    (torch.bfloat16, 3, 1, 1, 128, 128),
    (torch.float16, 1, 4, 4, 96, 96),
]


def rotary_tensors(dtype, tokens, q_heads, k_heads, size, rotated, device="cpu"):
    """positions [T], q and k [T, heads, size], cache [9, rotated]."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(tokens, q_heads, size, generator=generator)
    k = torch.randn(tokens, k_heads, size, generator=generator)
    angle = torch.randn(9, rotated // 2, generator=generator)
    cache = torch.cat((angle.cos(), angle.sin()), -1)
    positions = torch.randint(9, (tokens,), generator=generator)
    return (positions.to(device), *(x.to(device, dtype) for x in (q, k, cache)))


def rotate(case, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    from engine.attention.kernels.rotary import rotary_embedding

    positions, q, k, cache = rotary_tensors(*case, device=device)
    rotary_embedding(positions, q.view(len(q), -1), k.view(len(k), -1), q.shape[-1], cache)
    return q, k


def rotate_plainly(case, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """The arithmetic of the VAE's plain PyTorch branch, rounding for rounding."""
    positions, q, k, cache = rotary_tensors(*case, device=device)
    cos, sin = (x.repeat(1, 2)[positions][:, None] for x in cache.chunk(2, -1))

    def plainly(x: torch.Tensor) -> torch.Tensor:
        turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        low, high = turned.chunk(2, -1)
        scaled = turned * cos
        scaled.add_(torch.cat((-high, low), -1) * sin)
        return torch.cat((scaled, rest), -1)

    return plainly(q), plainly(k)


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(Path(__file__).parent))
    import triton_interpreter  # noqa: F401

    torch.set_num_threads(1)
    torch.save({"calls": [compute(case) for case in CASES], "rotary": [rotate(case) for case in ROTARY]}, sys.argv[1])
