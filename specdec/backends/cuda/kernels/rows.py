"""Kernels over rows: embedding of token ids on the device, concatenation, sums and gating of activations, GELU."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.backends.cuda.kernels import packed
from specdec.backends.cuda.kernels.launch import LENGTH, dtype_of, launch, rounded

_BLOCK = 1024  # values that one program moves


@triton.jit
def _embed(table, ids, out, row_stride, vocabulary, hidden, BLOCK: tl.constexpr):
    t = tl.program_id(0)
    token = tl.load(ids + t).to(tl.int64)
    token = tl.where((token >= 0) & (token < vocabulary), token, 0)  # a head that found no token says -1
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(table + token * row_stride + at, at < hidden)
    tl.store(out + t * hidden + at, row, at < hidden)


def embed(table: Tensor, ids: Tensor) -> Tensor:
    """Look up ids ``[T]`` int32 on the device in ``table [V, H]``: ``[T, H]``; row 0 for an id out of range."""
    rows, hidden = len(ids), table.shape[1]
    out = torch.empty(rows, hidden, dtype=table.dtype, device=table.device)
    block = min(_BLOCK, triton.next_power_of_2(hidden))
    launch(
        _embed,
        (rows, triton.cdiv(hidden, block)),
        table,
        ids,
        out,
        table.stride(0),
        table.shape[0],
        hidden,
        BLOCK=block,
    )
    return out


@triton.jit
def _concat(a, b, out, heads, left, right, a_row, a_head, a_value, b_row, b_head, b_value, BLOCK: tl.constexpr):
    place = tl.program_id(0)
    t = (place // heads).to(tl.int64)
    h = place % heads
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(a + t * a_row + h * a_head + at * a_value, at < left)
    behind = at - left
    second = tl.load(b + t * b_row + h * b_head + behind * b_value, (behind >= 0) & (behind < right))
    row = out + place.to(tl.int64) * (left + right)
    tl.store(row + at, tl.where(at < left, first, second), at < left + right)


def concat(a: Tensor, b: Tensor) -> Tensor:
    """Concatenate ``[T, (n,) A]`` and ``[T, (n,) B]`` of one dtype and any strides: ``[T, (n,) A + B]``."""
    wide_a, wide_b = (x if x.ndim == 3 else x.unsqueeze(1) for x in (a, b))
    rows, heads, left = wide_a.shape
    right = wide_b.shape[2]
    out = torch.empty(*a.shape[:-1], left + right, dtype=a.dtype, device=a.device)
    block = min(_BLOCK, triton.next_power_of_2(left + right))
    launch(
        _concat,
        (rows * heads, triton.cdiv(left + right, block)),
        wide_a,
        wide_b,
        out,
        heads,
        left,
        right,
        *wide_a.stride(),
        *wide_b.stride(),
        BLOCK=block,
    )
    return out


@triton.jit
def _gelu(x, stride, out, size, BLOCK: tl.constexpr, OUT: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + t * stride + at, at < size).to(tl.float32)
    # sigmoid(2 y) = (1 + tanh(y)) / 2, with y = sqrt(2 / pi) (a + 0.044715 a^3)
    gate = tl.sigmoid(a * tl.fma(a * a, 0.0713548162726, 1.5957691216057))
    tl.store(out + t * size + at, rounded(a * gate, OUT), at < size)


@triton.jit(do_not_specialize=["first"])
def _scale(x, stride, out, size, factor, beta, length, first, row, BLOCK: tl.constexpr, OUT: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    if row is not None:
        first = tl.load(row + LENGTH)
    factor *= 1.0 + beta * tl.log(1.0 + ((first + t) // length).to(tl.float32))
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + t * stride + at, at < size).to(tl.float32)
    tl.store(out + t * size + at, rounded(a * factor, OUT), at < size)


def gelu(x: Tensor) -> Tensor:
    """GELU with tanh of ``x [T, I]``, the last axis dense: the same shape and dtype, contiguous."""
    return _mapped(_gelu, x)


def scale(x: Tensor, factor: float) -> Tensor:
    """``x [T, I]``, the last axis dense, times ``factor``: the same shape and dtype, contiguous."""
    return _mapped(_scale, x, factor, 0.0, 1, *_place(0))  # with a beta of 0, by factor exactly


def grow(x: Tensor, beta: float, length: int, first: Tensor | int) -> Tensor:
    """``x [T, I]``, the last axis dense, times ``1 + beta ln(1 + floor(p / length))``; row t is at p = ``first`` + t.

    ``first`` as in ``add``. Returns: the same shape and dtype, contiguous.
    """
    return _mapped(_scale, x, 1.0, beta, length, *_place(first))


def _place(first: Tensor | int) -> tuple[int, Tensor | None]:
    """A kernel's arguments ``first`` and ``row``."""
    return (0, first) if isinstance(first, Tensor) else (first, None)


def _mapped(kernel: Any, x: Tensor, *arguments: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Launch a kernel over the rows of ``x [T, I]``: the same shape, in ``dtype`` or else that of ``x``."""
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=dtype or x.dtype, device=x.device)
    block = min(_BLOCK, triton.next_power_of_2(size))
    stride = x.stride(0) if rows > 1 else size  # that of a single row is arbitrary
    grid = rows, triton.cdiv(size, block)
    launch(kernel, grid, x, stride, out, size, *arguments, BLOCK=block, OUT=dtype_of(out.dtype))
    return out


@triton.jit
def _silu_product(gate, gate_row, out, size, up, up_row, BLOCK: tl.constexpr, OUT: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(gate + t * gate_row + at, at < size).to(tl.float32)
    b = tl.load(up + t * up_row + at, at < size).to(tl.float32)
    tl.store(out + t * size + at, rounded(packed.silu_product(a, b), OUT), at < size)


def silu_product(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
    """``silu(gate) * up`` of two ``[T, I]``, the last axis dense, in float32 and rounded once to ``dtype``."""
    return _mapped(_silu_product, gate, up, up.stride(0), dtype=dtype)


@triton.jit(do_not_specialize=["first"])
def _add(a, a_row, out, size, b, b_row, rows, first, row, BLOCK: tl.constexpr, OUT: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    if row is not None:
        first = tl.load(row + LENGTH)
    other = tl.minimum(first + t, rows - 1)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(a + t * a_row + at, at < size).to(tl.float32)
    right = tl.load(b + other * b_row + at, at < size).to(tl.float32)
    tl.store(out + t * size + at, rounded(left + right, OUT), at < size)


def add(a: Tensor, b: Tensor, first: Tensor | int = 0) -> Tensor:
    """``a [T, H]`` plus the rows of ``b [P, H]`` from row ``first`` on, rounded once: ``[T, H]``.

    ``first`` is a number, or a cache's row of the address table, to use its LENGTH. The last axis of both is dense.
    """
    return _mapped(_add, a, b, b.stride(0), b.shape[0], *_place(first))
