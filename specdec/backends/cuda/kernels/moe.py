"""Mixtures of experts for up to 16 rows: every chosen expert is read once, and the choice stays on the device.

Each program belongs to one entry ``t * k + j`` of the table of choices and runs only if that entry is the first with
its expert. It then computes all rows that chose the expert, each at its own row of the 16-row tile, so that a row's
bits do not depend on other rows. The experts' results are added in the order of the slots, not of completion.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.backends.cuda.kernels import packed
from specdec.backends.cuda.kernels.launch import dtype_of, interpreting, launch, rounded
from specdec.backends.cuda.kernels.norm import strided
from specdec.backends.cuda.kernels.packed import DENSE, FP8, Layout, Tile, silu_product
from specdec.backends.cuda.weights import ExpertStack
from specdec.errors import ShapeError


@triton.jit
def _matrix(addresses_ptr, expert, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Pointers to the codes, scales and global scales of an expert; byte codes and dense values are 16-byte aligned."""
    codes = tl.load(addresses_ptr + expert * 3)
    scales = tl.load(addresses_ptr + expert * 3 + 1)
    whole = tl.load(addresses_ptr + expert * 3 + 2)
    if FORMAT == DENSE:
        w = tl.multiple_of(codes.to(tl.pointer_type(DTYPE)), 16)
        return w, w, w
    elif FORMAT == FP8:
        w = tl.multiple_of(codes.to(tl.pointer_type(tl.uint8)), 16)
        s = scales.to(tl.pointer_type(tl.float32))
        return w, s, s
    else:
        w = tl.multiple_of(codes.to(tl.pointer_type(tl.uint8)), 16)
        s = tl.multiple_of(scales.to(tl.pointer_type(tl.uint8)), 16)
        return w, s, whole.to(tl.pointer_type(tl.float32))


@triton.jit(do_not_specialize=["T"])
def experts_kernel(
    x_ptr,
    x_row,
    x_slot,
    T,
    choices_ptr,
    first_ptr,
    second_ptr,
    out_ptr,
    N,
    K,
    CHOSEN,
    FORMAT: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    PAIR: tl.constexpr,
    DTYPE: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Programs: entries (t, j) of ``choices [T, CHOSEN]`` times tiles of N. ``out [T, CHOSEN, N]`` act.

    Entry (t, j) reads x at ``t * x_row + j * x_slot``: row t of x for gate and up (``x_slot`` 0), its part for down.
    """
    place = tl.program_id(0)
    expert = tl.load(choices_ptr + place)
    rows = tl.arange(0, 16)
    slots = tl.arange(0, PLACES)
    present = (rows < T)[:, None] & (slots < CHOSEN)[None, :]
    table = tl.load(choices_ptr + rows[:, None].to(tl.int64) * CHOSEN + slots[None, :], mask=present, other=-1)
    mine = (table == expert) & present
    everywhere = rows[:, None] * CHOSEN + slots[None, :]
    first = tl.min(tl.min(tl.where(mine, everywhere, 2147483647), 1), 0)
    if first == place:
        slot = tl.min(tl.where(mine, slots[None, :], PLACES), 1)
        chose = slot < PLACES
        slot = tl.where(chose, slot, 0).to(tl.int64)
        wide = rows.to(tl.int64)
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = tl.minimum(columns, N - 1).to(tl.int64)
        w, s, g = _matrix(first_ptr, expert.to(tl.int64), FORMAT, DTYPE)
        w2, s2, g2 = w, s, g
        if PAIR:
            w2, s2, g2 = _matrix(second_ptr, expert.to(tl.int64), FORMAT, DTYPE)
        x_at = x_ptr + (wide * x_row + slot * x_slot)[:, None]
        acc = tl.zeros((16, BLOCK_N), tl.float32)
        acc2 = tl.zeros((16, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            inner = start + tl.arange(0, BLOCK_K)
            mask = chose[:, None]
            if not EVEN_K:
                mask = mask & (inner < K)[None, :]
            x = tl.load(x_at + inner[None, :], mask=mask, other=0.0)
            acc = packed.multiply(x, acc, w, s, inside, start, K, FORMAT, BLOCK_N, BLOCK_K, SCALE_N, SCALE_K, EVEN_K)
            if PAIR:
                acc2 = packed.multiply(
                    x, acc2, w2, s2, inside, start, K, FORMAT, BLOCK_N, BLOCK_K, SCALE_N, SCALE_K, EVEN_K
                )
        acc = packed.finish(acc, g, inside, FORMAT)
        if PAIR:
            acc = silu_product(acc, packed.finish(acc2, g2, inside, FORMAT))
        at = out_ptr + ((wide * CHOSEN + slot) * N)[:, None] + columns[None, :]
        tl.store(at, rounded(acc, DTYPE), mask=chose[:, None] & (columns < N)[None, :])


@triton.jit
def combine_kernel(
    parts_ptr,
    weights_ptr,
    shared_ptr,
    shared_stride,
    x_ptr,
    x_stride,
    gate_ptr,
    residual_ptr,
    residual_stride,
    out_ptr,
    N,
    K,
    CHOSEN,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One row and one block of columns per program. Add parts in slot order, then shared expert and residual."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = columns < N
    total = tl.zeros((BLOCK_N,), tl.float32)
    for slot in range(0, CHOSEN):
        part = tl.load(parts_ptr + (row * CHOSEN + slot) * N + columns, mask=mask, other=0.0)
        total += tl.load(weights_ptr + row * CHOSEN + slot) * part.to(tl.float32)
    if SHARED:
        common = tl.load(shared_ptr + row * shared_stride + columns, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            sums = tl.zeros((BLOCK_K,), tl.float32)
            for start in range(0, K, BLOCK_K):
                inner = start + tl.arange(0, BLOCK_K)
                x = tl.load(x_ptr + row * x_stride + inner, mask=inner < K, other=0.0).to(tl.float32)
                sums += x * tl.load(gate_ptr + inner, mask=inner < K, other=0.0).to(tl.float32)
            common = common * tl.sigmoid(tl.sum(sums, 0))
        total += common
    total += tl.load(residual_ptr + row * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + columns, rounded(total, OUT), mask=mask)


def _experts(x: Tensor, choices: Tensor, first: ExpertStack, second: ExpertStack | None, out: Tensor) -> Tensor:
    """One launch of ``experts_kernel``; x is ``[T, K]``, or ``[T, k, K]`` with a row for every slot."""
    rows, chosen = choices.shape
    layout = Layout.of(first[0])
    tile = Tile.of(layout, 32)  # narrow for all sizes, since eight experts of 512 columns must fill a device
    n, k = first.shape[1:]
    x_row, x_slot = (x.stride(0), x.stride(1)) if x.dim() == 3 else (strided(x)[1], 0)
    launch(
        experts_kernel,
        (rows * chosen, -(-n // tile.block_n)),
        x,
        x_row,
        x_slot,
        rows,
        choices,
        first.addresses,
        (second or first).addresses,
        out,
        n,
        k,
        chosen,
        **layout.constexprs,
        PAIR=second is not None,
        DTYPE=dtype_of(x.dtype),
        PLACES=triton.next_power_of_2(chosen),
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        EVEN_K=k % tile.block_k == 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gates: ExpertStack,
    ups: ExpertStack,
    downs: ExpertStack,
    residual: Tensor,
    *,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """``residual + sum_j w_j expert_j(x) (+ sigmoid(shared_gate x) shared(x))``: ``[T, H]`` in x's dtype.

    ``x`` and ``residual`` are ``[T, H]`` of up to 16 rows, ``ids [T, k]`` int32 and ``weights [T, k]`` float32; a row's
    experts must all differ. gates and ups are stacks of ``[I, H]``, downs of ``[H, I]``. ``shared [T, H]`` is an
    expert's result for every row, ``shared_gate [1, H]`` in act dtype. Each expert's result is rounded to x's dtype;
    the sum runs in float32, slot by slot, then the shared expert, then the residual, and is rounded once.

    Raises: ShapeError for experts that do not fit.
    """
    rows, chosen = ids.shape
    if x.shape[1] != gates.shape[2] or downs.shape[1:] != (x.shape[1], gates.shape[1]) or ups.shape != gates.shape:
        raise ShapeError(
            f"experts of {list(gates.shape)}, {list(ups.shape)} and {list(downs.shape)} do not fit rows of {x.shape[1]}"
        )
    x, x_stride = strided(x)
    ids, weights = ids.contiguous(), weights.contiguous()
    inner = torch.empty(rows, chosen, gates.shape[1], dtype=x.dtype, device=x.device)
    _experts(x, ids, gates, ups, inner)
    parts = torch.empty(rows, chosen, x.shape[1], dtype=x.dtype, device=x.device)
    _experts(inner, ids, downs, None, parts)
    common, common_stride = (x, x_stride) if shared is None else strided(shared)
    residual, residual_stride = strided(residual)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    n = x.shape[1]
    block = 4096 if interpreting() else 256
    launch(
        combine_kernel,
        (rows, -(-n // block)),
        parts,
        weights,
        common,
        common_stride,
        x,
        x_stride,
        x if shared_gate is None else shared_gate,
        residual,
        residual_stride,
        out,
        n,
        n,
        chosen,
        SHARED=shared is not None,
        GATED=shared_gate is not None,
        OUT=dtype_of(x.dtype),
        BLOCK_N=block,
        BLOCK_K=min(2048, triton.next_power_of_2(n)),
        num_warps=4,
    )
    return out
