"""Causal attention over compressed rows: every head reads the same rows, whose first entries are also the values.

For the splits, their order and row invariance, see ``attention``. Here the M dimension is all heads of a row, and a row
of D values is read as two tiles: the value part, used for scores and mixing, and the remaining (rotary) part, used only
for scores. Each is padded to a power of two by its mask.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.2, with the up-projections absorbed (appendix C).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.backends.cuda.kernels.attention import fold, partial_sums, split_start, splits_of, weigh
from specdec.backends.cuda.kernels.launch import CAPACITY, FIRST, LENGTH, launch, raised, rounded
from specdec.errors import ShapeError

BLOCK_M = 16  # pairs of row and head in one program
PROGRAMS = 256  # programs of a launch: two for every SM


@triton.jit(do_not_specialize=["x_row"])
def _write_rows(x, row, x_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    slot = tl.load(row + LENGTH) + t
    rows = tl.multiple_of(tl.load(row + FIRST).to(tl.pointer_type(x.dtype.element_ty)), 16)
    room = tl.where(slot < tl.load(row + CAPACITY), D, 0)  # the host rejects a pass that does not fit
    tl.store(rows + slot * D + d, tl.load(x + t * x_row + d, mask=d < D, other=0.0), mask=d < room)


@triton.jit(do_not_specialize=["T", "most"])
def _attend_latent_splits(
    q,
    row,
    sums,
    stats,
    scale,
    T,
    most,
    N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    dtype: tl.constexpr = q.dtype.element_ty
    length = tl.load(row + LENGTH).to(tl.int32)
    rows = tl.multiple_of(tl.load(row + FIRST).to(tl.pointer_type(dtype)), 16)
    end = length + T

    pair = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    t = pair // N
    real, position = t < T, length + t
    v, r = tl.arange(0, BLOCK_V), DV + tl.arange(0, BLOCK_R)
    query = q + pair[:, None] * D
    query_v = raised(tl.load(query + v[None, :], mask=real[:, None] & (v < DV)[None, :], other=0.0))
    query_r = raised(tl.load(query + r[None, :], mask=real[:, None] & (r < D)[None, :], other=0.0))

    n = tl.arange(0, BLOCK_N)
    for split in range(tl.program_id(0), tl.minimum(splits_of(end), most), tl.num_programs(0)):
        last = tl.minimum(split_start(split + 1), end)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        mixed = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        for block in range(split_start(split), last, BLOCK_N):
            at = block + n
            written = (at < last)[:, None]  # slots after the pass may hold anything, even NaN
            key = rows + at.to(tl.int64)[:, None] * D
            key_v = raised(tl.load(key + v[None, :], mask=written & (v < DV)[None, :], other=0.0))
            key_r = raised(tl.load(key + r[None, :], mask=written & (r < D)[None, :], other=0.0))
            scores = tl.dot(query_v, tl.trans(key_v), input_precision="ieee")
            scores = tl.dot(query_r, tl.trans(key_r), scores, input_precision="ieee") * scale
            visible = (at < last)[None, :] & (at[None, :] <= position[:, None])
            weights, factor, top, total = weigh(scores, visible, top, total)
            mixed = tl.dot(raised(rounded(weights, dtype)), key_v, mixed * factor[:, None], input_precision="ieee")
        part = split * (T.to(tl.int64) * N) + pair
        tl.store(stats + 2 * part, top, mask=real)
        tl.store(stats + 2 * part + 1, total, mask=real)
        sum_at = sums + part[:, None] * DV + v[None, :]
        tl.store(sum_at, mixed, mask=real[:, None] & (v < DV)[None, :])


def attend_latent(q: Tensor, rows_in: Tensor, row: Tensor, *, scale: float, value_dims: int, max_length: int) -> Tensor:
    """Append ``rows_in [T, D]`` to the latent cache of ``row``, and attend with q ``[T, n, D]``.

    Row t sees positions 0..LENGTH+t; keys are whole rows, values their first ``value_dims`` entries. q is contiguous;
    rows_in may have any row stride. ``max_length`` as in ``attention.attend``.

    Returns: ``[T, n, value_dims]`` act. Raises: ShapeError.
    """
    T, heads, dims = q.shape
    if rows_in.shape != (T, dims) or not 0 < value_dims <= dims or not q.is_contiguous() or rows_in.stride(1) != 1:
        raise ShapeError(
            f"latent attention of q {tuple(q.shape)} over rows {tuple(rows_in.shape)} "
            f"with {value_dims} value dimensions"
        )
    launch(_write_rows, (T,), rows_in, row, rows_in.stride(0), D=dims, BLOCK_D=triton.next_power_of_2(dims))
    most, sums, stats = partial_sums(T * heads, value_dims, max_length, q.device)
    tiles = triton.cdiv(T * heads, BLOCK_M)
    wide = max(16, triton.next_power_of_2(value_dims))
    launch(
        _attend_latent_splits,
        (min(most, PROGRAMS), tiles),
        q,
        row,
        sums,
        stats,
        scale * math.log2(math.e),
        T,
        most,
        N=heads,
        D=dims,
        DV=value_dims,
        BLOCK_M=BLOCK_M,
        BLOCK_N=max(16, min(64, 2**14 // (wide * q.element_size()))),
        BLOCK_V=wide,
        BLOCK_R=max(16, triton.next_power_of_2(dims - value_dims)),
        num_warps=4,
        num_stages=1 if q.dtype == torch.float32 else 3,
    )
    return fold(sums, stats, row, most, T, heads, value_dims, q.dtype)
