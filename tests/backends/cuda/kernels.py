"""Kernels that only tests launch."""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.backends.cuda.kernels import head


@triton.jit
def noise_kernel(words_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """Gumbel noise of words given as int32 bits."""
    at = tl.arange(0, BLOCK)
    words = tl.load(words_ptr + at, mask=at < count, other=7).to(tl.uint32, bitcast=True)
    tl.store(out_ptr + at, head.gumbel(words), mask=at < count)


@triton.jit
def narrow_kernel(x_ptr, out_ptr, stride, count, BLOCK: tl.constexpr):
    """Addresses made with a product of two 32-bit variables: what no kernel of the backend may do."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + row * stride + at, tl.load(x_ptr + row * stride + at, mask=at < count), mask=at < count)


@triton.jit
def open_rows_kernel(key_ptr, out_ptr, rows, EVERY: tl.constexpr, BLOCK: tl.constexpr):
    """Leave rows open now and then, by the positions that they decide."""
    row = tl.arange(0, BLOCK)
    position = tl.load(key_ptr + 1) + row
    tl.store(out_ptr + row, row * 0 - 2, mask=(row < rows) & (position % EVERY == 0))
