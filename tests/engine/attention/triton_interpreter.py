"""Triton 3.6's interpreter, mended in three places where it does not compute what the compiled kernels do.

To be imported after TRITON_INTERPRET=1 is in the environment and before a kernel runs.

* A loop bound that is a kernel argument: scalars are kept as one-element arrays, which NumPy >= 2.4 no longer turns
  into Python integers.
* float32 to bfloat16 truncates; the compiler rounds to nearest, ties to even.
* A matrix product takes the bits of bfloat16 operands for integers; here they are widened to float32, which is exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor
_convert_float = interpreter._convert_float


def _with_integers(tensor: Any, scope: Any) -> None:
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _to_nearest(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    if (source, target, rounding) != (tl.float32, tl.bfloat16, None):
        return _convert_float(data, source, target, rounding)
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    def widened(x: Any) -> Any:
        if x.dtype.scalar == tl.bfloat16:
            return (x.data.astype(np.uint32) << 16).view(np.float32)
        return x.data

    return interpreter.TensorHandle(np.matmul(widened(a), widened(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)


interpreter._patch_lang_tensor = _with_integers
interpreter._convert_float = _to_nearest
interpreter.InterpreterBuilder.create_dot = _dot
