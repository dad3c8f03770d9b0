"""Causal attention of a few query rows over a KV cache: splits at fixed positions, folded in a fixed order.

Keys are cut into splits that start at absolute positions: ``FINE`` keys each up to position ``REACH``, ``COARSE`` after
it (short contexts need the parallelism, long ones fewer partial sums). A program takes every n-th split and writes one
partial softmax per split, row and head; a second launch folds them in ascending order. So the bits of a row at position
p depend only on the keys 0..p, not on other rows, the length of the pass, the capacity, or the number of programs:

- blocks of keys begin at the same positions in every pass, and the weight of masked keys is exactly 0;
- a block that is masked for a row leaves the row's maximum, sum and values unchanged (the factor is exp2(0) = 1);
- the fold of a row takes only the splits up to p.

The M dimension of the products is 16 pairs of (row, head of one KV head), with heads running fastest, for any T. Rows
of a matrix product should be independent on tensor cores, and 16 is one instruction's tile (``mma.m16n8k16``), so a
row's bits depend neither on its index in the tile nor on the other pairs. The tests check this on a device. One effect
crosses rows: a later row's value has weight 0, so a value that is not finite makes the rows before it in the pass NaN.

Scores, softmax and sums are float32; weights are rounded to act for the product with the values.
Source of the partial softmax: Milakov and Gimelshein 2018, arXiv:1805.02867, section 3.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.backends.cuda.kernels.launch import FIRST, LENGTH, SECOND, interpreting, launch, raised, rounded
from specdec.errors import ShapeError

FINE = tl.constexpr(128)
REACH = tl.constexpr(8192)
COARSE = tl.constexpr(512)

BLOCK_M = 16  # pairs of row and head in one program
FOLD = 8  # splits whose sums are added at once
PROBED = 8 + int(FINE.value) * (1 if interpreting() else FOLD)  # rows with a second split, or more than one fold
PROGRAMS = 256  # programs of a launch, over all KV heads: two for every SM


@triton.jit
def splits_of(end):
    """The number of splits that cover keys 0..end-1."""
    fine = tl.cdiv(tl.minimum(end, REACH), FINE)
    return fine + tl.cdiv(tl.maximum(end - REACH, 0), COARSE)


@triton.jit
def split_start(split):
    """The first position of a split."""
    fine: tl.constexpr = REACH // FINE
    return tl.minimum(split, fine) * FINE + tl.maximum(split - fine, 0) * COARSE


def count_splits(length: int) -> int:
    """``splits_of`` on the host."""
    reach = int(REACH.value)
    return -(-min(length, reach) // int(FINE.value)) + -(-max(length - reach, 0) // int(COARSE.value))


@triton.jit
def weigh(scores, visible, top, total):
    """One block of a running softmax.

    Args:
        scores: float32 ``[M, N]`` in units of log 2; ``visible [M, N]``.
        top: ``[M]``, the maximum so far, -inf if nothing was visible; total: ``[M]``, the sum so far.

    Returns: weights ``[M, N]``, the factor ``[M]`` of all sums so far, and the new ``top`` and ``total``.
    """
    scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)  # -inf minus -inf would be NaN
    weights = tl.exp2(scores - base[:, None])
    factor = tl.exp2(top - base)
    return weights, factor, highest, total * factor + tl.sum(weights, 1)


@triton.jit(do_not_specialize=["T", "most"])
def _attend_splits(
    q,
    row,
    sums,
    stats,
    scale,
    T,
    most,
    NKV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    kv = tl.program_id(1)
    dtype: tl.constexpr = q.dtype.element_ty
    length = tl.load(row + LENGTH).to(tl.int32)  # positions are below 2^31; offsets are not
    keys = tl.multiple_of(tl.load(row + FIRST).to(tl.pointer_type(dtype)), 16)
    values = tl.multiple_of(tl.load(row + SECOND).to(tl.pointer_type(dtype)), 16)
    end = length + T

    pair = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    t, head = pair // GROUP, kv * GROUP + pair % GROUP
    d = tl.arange(0, BLOCK_D)
    real = (t < T)[:, None] & (d < D)[None, :]
    query = raised(tl.load(q + (t * (NKV * GROUP) + head)[:, None] * D + d[None, :], mask=real, other=0.0))
    position = length + t

    n = tl.arange(0, BLOCK_N)
    for split in range(tl.program_id(0), tl.minimum(splits_of(end), most), tl.num_programs(0)):
        last = tl.minimum(split_start(split + 1), end)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for block in range(split_start(split), last, BLOCK_N):
            key_at = block + n
            written = (key_at < last)[:, None] & (d < D)[None, :]  # slots after the pass may hold anything, even NaN
            offset = (key_at.to(tl.int64) * NKV + kv)[:, None] * D + d[None, :]
            key = raised(tl.load(keys + offset, mask=written, other=0.0))
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            visible = (key_at < last)[None, :] & (key_at[None, :] <= position[:, None])
            weights, factor, top, total = weigh(scores, visible, top, total)
            value = raised(tl.load(values + offset, mask=written, other=0.0))
            weights = raised(rounded(weights, dtype))
            mixed = tl.dot(weights, value, mixed * factor[:, None], input_precision="ieee")
        at = (split * T.to(tl.int64) + t) * (NKV * GROUP) + head
        tl.store(stats + 2 * at, top, mask=t < T)
        tl.store(stats + 2 * at + 1, total, mask=t < T)
        tl.store(sums + at[:, None] * D + d[None, :], mixed, mask=real)


@triton.jit(do_not_specialize=["T", "gate_row", "gate_head", "most"], do_not_specialize_on_alignment=["gate"])
def fold_splits(
    sums,
    stats,
    row,
    gate,
    out,
    T,
    gate_row,
    gate_head,
    most,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    GATED: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One row and head: ``sum_s exp2(top_s - top) mixed_s / sum_s exp2(top_s - top) total_s``, gated, rounded once."""
    t = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    count = splits_of(tl.load(row + LENGTH).to(tl.int32) + t + 1)
    pair = t * HEADS + head
    pairs = T.to(tl.int64) * HEADS
    s = tl.arange(0, FOLD)
    top = tl.full([FOLD], float("-inf"), tl.float32)
    for first in range(0, tl.minimum(count, most), FOLD):
        at = (first + s) * pairs + pair
        top = tl.maximum(top, tl.load(stats + 2 * at, mask=first + s < count, other=float("-inf")))
    highest = tl.max(top, 0)  # finite: every split up to the row's position has a visible key
    total = 0.0
    mixed = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, tl.minimum(count, most), FOLD):
        used = first + s < count
        at = (first + s) * pairs + pair
        factor = tl.exp2(tl.load(stats + 2 * at, mask=used, other=float("-inf")) - highest)
        total += tl.sum(factor * tl.load(stats + 2 * at + 1, mask=used, other=0.0), 0)
        part = tl.load(sums + at[:, None] * D + d[None, :], mask=used[:, None] & (d < D)[None, :], other=0.0)
        mixed += tl.sum(factor[:, None] * part, 0)
    mixed = tl.where(count <= most, mixed / total, float("nan"))  # makes a cache that exceeds max_length obvious
    if GATED:
        opening = tl.load(gate + t.to(tl.int64) * gate_row + head * gate_head + d, mask=d < D, other=0.0)
        mixed = mixed / (1.0 + tl.exp(-opening.to(tl.float32)))
    tl.store(out + pair * D + d, rounded(mixed, out.dtype.element_ty), mask=d < D)


def attend(
    q: Tensor, row: Tensor, *, kv_heads: int, scale: float, gate: Tensor | None = None, max_length: int
) -> Tensor:
    """Attention of ``q [T, nq, D]`` over the KV cache of ``row``, which already holds the pass's keys and values.

    Row t sees positions 0..LENGTH+t. With ``gate [T, nq, D]`` the result is multiplied by ``sigmoid(gate)`` before
    rounding. q is contiguous; gate may be a view with any strides, the last one 1.

    Args:
        row: the cache's row of the address table; keys and values in q's dtype.
        scale: scale of the scores.
        max_length: a bound on LENGTH + T, such as the cache's capacity; it sizes the partial sums and does not affect
            the bits. Rows beyond it become NaN.

    Returns: ``[T, nq * D]`` act. Raises: ShapeError.
    """
    T, nq, dim = q.shape
    if nq % kv_heads or not q.is_contiguous() or (gate is not None and (gate.shape != q.shape or gate.stride(2) != 1)):
        raise ShapeError(
            f"attention of q {tuple(q.shape)} with {kv_heads} KV heads"
            + ("" if gate is None else f" and gate {tuple(gate.shape)}")
        )
    most, sums, stats = partial_sums(T * nq, dim, max_length, q.device)
    group = nq // kv_heads
    launch(
        _attend_splits,
        (min(most, max(1, PROGRAMS // kv_heads)), kv_heads, triton.cdiv(T * group, BLOCK_M)),
        q,
        row,
        sums,
        stats,
        scale * math.log2(math.e),
        T,
        most,
        NKV=kv_heads,
        GROUP=group,
        D=dim,
        **tiling(q.dtype, dim),
    )
    return fold(sums, stats, row, most, T, nq, dim, q.dtype, gate).view(T, nq * dim)


def tiling(dtype: torch.dtype, dim: int) -> dict[str, Any]:
    """Constexprs and options of a split's program; they depend only on dtype and head size."""
    wide = triton.next_power_of_2(max(dim, 16))
    block_n = max(16, min(128, 2**14 // (wide * dtype.itemsize)))  # 16 KiB of keys at once
    stages = 1 if dtype == torch.float32 else 3  # float32 products do not use tensor cores and need the registers
    return {"BLOCK_M": BLOCK_M, "BLOCK_N": block_n, "BLOCK_D": wide, "num_warps": 4, "num_stages": stages}


def partial_sums(pairs: int, dim: int, max_length: int, device: torch.device) -> tuple[int, Tensor, Tensor]:
    """Return the maximum number of splits, and float32 memory for sums ``[splits, pairs, dim]`` and statistics."""
    most = count_splits(max_length)
    sums = torch.empty(most, pairs, dim, dtype=torch.float32, device=device)
    return most, sums, torch.empty(most, pairs, 2, dtype=torch.float32, device=device)


def fold(
    sums: Tensor,
    stats: Tensor,
    row: Tensor,
    most: int,
    T: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    gate: Tensor | None = None,
) -> Tensor:
    """The second launch: ``[T, heads, dim]``."""
    out = torch.empty(T, heads, dim, dtype=dtype, device=sums.device)
    gate_row, gate_head = (0, 0) if gate is None else (gate.stride(0), gate.stride(1))
    launch(
        fold_splits,
        (T, heads),
        sums,
        stats,
        row,
        gate,
        out,
        T,
        gate_row,
        gate_head,
        most,
        HEADS=heads,
        D=dim,
        GATED=gate is not None,
        FOLD=FOLD,
        BLOCK_D=triton.next_power_of_2(dim),
        num_warps=2 if dim <= 256 else 4,
    )
    return out
