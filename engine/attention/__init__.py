"""Sol-Attn: sparse attention of MiniMax-H3's sparse arms, one public call over several backends."""

from engine.attention.call import SolAttentionOptions, SolAttentionResult
from engine.attention.dispatch import BackendUnsupported, sol_attention, sol_attention_packed, unsupported_reason

__all__ = [
    "BackendUnsupported",
    "SolAttentionOptions",
    "SolAttentionResult",
    "sol_attention",
    "sol_attention_packed",
    "unsupported_reason",
]
