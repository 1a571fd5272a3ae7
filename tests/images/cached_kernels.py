"""Makes every call that a run makes of Triton kernels, for one architecture, with a compiler that refuses to work.

    cached_kernels.py CAPABILITY HEADS THRESH_TYPE SYNTHETIC

Needs docker/ on the path, and TRITON_CACHE_DIR. Prints the names of the kernels that were found in the
cache; raises at the first that is not there. Runs in an image as well as beside the checkout.
"""

from __future__ import annotations

import json
import sys
from typing import Any, NoReturn
from unittest import mock

import sglang_kernels
import triton_kernels
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import build


def refuse(*arguments: Any, **options: Any) -> NoReturn:
    raise SystemExit("not in the cache: something would be compiled")


if __name__ == "__main__":
    kernels: list[Any] = []
    capability, heads = int(sys.argv[1]), int(sys.argv[2])
    sglang_kernels.prepare()
    with mock.patch.object(CUDABackend, "add_stages", refuse), mock.patch.object(build, "_build", refuse):
        with triton_kernels.pretended(capability, kernels):
            triton_kernels.call_all(capability, heads, sys.argv[3], sys.argv[4] == "True")
        triton_kernels.build_launchers(kernels)
    print(json.dumps(sorted(kernel.name for kernel in kernels)))
