"""A kernel that only a test compiles."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def narrow_kernel(x_ptr, out_ptr, stride, count, BLOCK: tl.constexpr):
    """Addresses made with a product of two 32-bit variables: what no kernel of the backend may do."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + row * stride + at, tl.load(x_ptr + row * stride + at, mask=at < count), mask=at < count)
