"""Minimal Gluon kernels that show what compute-sanitizer's racecheck makes of warp specialisation.

None of this computes anything that anybody needs: ``engine.attention.sanitize`` runs them as its controls.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

WORD = 42


@gluon.jit
def _store(p_out):
    gl.store(p_out, 1)


@gluon.jit
def _store_too(p_out):
    gl.store(p_out + 1, 1)


@gluon.jit
def dispatch_only(p_out):
    """Two partitions that share nothing: whatever is reported here comes from how Triton starts partitions."""
    gl.warp_specialize([(_store, (p_out,)), (_store_too, (p_out,))], [1], [24])


@gluon.jit
def _write(word, ready, VALUE: gl.constexpr):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    word.store(gl.full([1], VALUE, gl.int32, ONE))
    mbarrier.arrive(ready, count=1)


@gluon.jit
def _read(p_out, word, ready, WAIT: gl.constexpr):
    EVERY: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if WAIT:
        mbarrier.wait(ready, 0)
    gl.store(p_out, gl.max(word.load(EVERY), 0))


@gluon.jit
def _hand_over(p_out, WAIT: gl.constexpr, VALUE: gl.constexpr):
    word = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    gl.warp_specialize([(_read, (p_out, word, ready, WAIT)), (_write, (word, ready, VALUE))], [1], [24])


@gluon.jit
def ordered_word(p_out, VALUE: gl.constexpr):
    """A worker partition stores a word and arrives at a barrier; the default one waits for it and loads the word."""
    _hand_over(p_out, True, VALUE)


@gluon.jit
def planted_race(p_out, VALUE: gl.constexpr):
    """The same without the wait: a race."""
    _hand_over(p_out, False, VALUE)


def run(device: torch.device) -> dict[str, int]:
    """Launch the controls once each, one block; returns the word that each left (planted_race: anything)."""
    words = {}
    for kernel in (dispatch_only, ordered_word, planted_race):
        out = torch.zeros(2, dtype=torch.int32, device=device)
        constants = {} if kernel is dispatch_only else {"VALUE": WORD}
        kernel[(1,)](out, **constants, num_warps=4)
        words[kernel.__name__] = int(out[0])
    return words
