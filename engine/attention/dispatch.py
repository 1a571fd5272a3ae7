"""The public call: checks its arguments, asks the chosen backend whether it can, and runs that one or none."""

from __future__ import annotations

import importlib
from typing import cast

import torch

from config.errors import EnvironmentRefused
from engine.attention.call import Backend, SolAttentionOptions, SolAttentionResult, ThreshType, TokenRange

# name -> module with `supports` and `attend` (call.Backend); imported at the first use, since the kernels need Triton
# and the adapter needs Sana's package.
BACKENDS = {
    "reference": "engine.attention.reference",
    "native": "engine.attention.kernels",
    "sana": "engine.attention.sana",
}


REMEDY = "mend what it names, or choose an arm whose attention backend this machine can run"


class BackendUnsupported(EnvironmentRefused):
    """The backend asked for cannot do the call; ``found`` says why. Nothing was computed, and no other was tried."""


def _load(name: str) -> Backend:
    if name not in BACKENDS:
        raise ValueError(f"attention backend is {name!r}; needed: one of {', '.join(sorted(BACKENDS))}")
    try:
        return cast(Backend, importlib.import_module(BACKENDS[name]))
    except ImportError as error:
        raise BackendUnsupported(f"attention backend {name!r} cannot be imported: {error}", remedy=REMEDY) from error


def unsupported_reason(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: SolAttentionOptions
) -> str | None:
    """Why backend ``name`` cannot do this call, or None when it can. Raises ValueError for an unknown name."""
    try:
        return _load(name).supports(q, k, v, options)
    except BackendUnsupported as error:
        return error.found


def sol_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    tau: float = 1.0,
    thresh_type: ThreshType = "diag",
    sink: TokenRange = (0, 0),
    dense_rows: TokenRange = (0, 0),
    backend: str = "reference",
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> SolAttentionResult:
    """Sol-Attn: non-causal self-attention in which blocks of keys with a low score are approximated by their mean.

    q, k, v: [1, T, H, D], one shape, dtype and device, any strides whose last is 1.
    scale: softmax scale, D ** -0.5 when None. tau, thresh_type, sink, dense_rows, return_lse: see SolAttentionOptions.
    backend: which implementation; there is no fall-back to another.
    out: where to write the output ([1, T, H, D], last stride 1); allocated when None.

    Raises ValueError for arguments that no backend could take, BackendUnsupported when this one cannot.
    """
    options = SolAttentionOptions(
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        tau=float(tau),
        thresh_type=thresh_type,
        sink=sink,
        dense_rows=dense_rows,
        return_lse=return_lse,
    )
    _check(q, k, v, options, out)
    implementation = _load(backend)
    reason = implementation.supports(q, k, v, options)
    if reason is not None:
        raise BackendUnsupported(f"attention backend {backend!r} cannot do this call: {reason}", remedy=REMEDY)
    return implementation.attend(q, k, v, options, out)


def sol_attention_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, live_rows: int, **options: object
) -> SolAttentionResult:
    """Sol-Attn of a packed document: q, k, v [rows, H, D], of which the first ``live_rows`` are the document.

    Rows behind them are padding: never read, and zero in the output ([rows, H, D]). ``route_counts`` and ``lse`` are of
    the live rows alone. Keyword arguments as for ``sol_attention``. Raises ValueError when live_rows is not in 1..rows.
    """
    if q.ndim != 3 or not 1 <= live_rows <= q.shape[0]:
        raise ValueError(f"packed q is {tuple(q.shape)} with {live_rows} live rows; needed: [rows, H, D], 1..rows live")
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    out[live_rows:] = 0
    document = [x[None, :live_rows] for x in (q, k, v)]
    result = sol_attention(*document, **options, out=out[None, :live_rows])  # type: ignore[arg-type]
    return SolAttentionResult(out, result.route_counts, result.lse, result.backend)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: SolAttentionOptions, out: torch.Tensor | None
) -> None:
    if q.ndim != 4 or q.shape[0] != 1 or min(q.shape) < 1:
        raise ValueError(f"q has shape {tuple(q.shape)}; needed: [1, T, H, D], none of them zero")
    named = {"k": k, "v": v} if out is None else {"k": k, "v": v, "out": out}
    for name, x in named.items():
        if (x.shape, x.dtype, x.device) != (q.shape, q.dtype, q.device):
            found = f"{tuple(x.shape)} {x.dtype} on {x.device}"
            raise ValueError(f"{name} is {found}; needed: q's, {tuple(q.shape)} {q.dtype} on {q.device}")
    for name, x in {"q": q, **named}.items():
        if x.stride(-1) != 1:
            raise ValueError(f"{name} has strides {x.stride()}; needed: last stride 1")
    if options.thresh_type not in ("diag", "exact"):
        raise ValueError(f"thresh_type is {options.thresh_type!r}; needed: 'diag' or 'exact'")
    for name, (start, stop) in {"sink": options.sink, "dense_rows": options.dense_rows}.items():
        if not 0 <= start <= stop <= q.shape[1]:
            raise ValueError(f"{name} is ({start}, {stop}); needed: 0 <= start <= stop <= T = {q.shape[1]}")
