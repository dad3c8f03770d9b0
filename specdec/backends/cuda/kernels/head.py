"""The output head: full logits, or the best or sampled token without writing ``[T, V]`` logits.

``best`` and ``sample`` reduce each tile of the vocabulary in the epilogue of its product, and a second launch folds the
tiles of a row in ascending order. Ties go to the lowest token id. A NaN logit makes the row's id -1.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.backends.cuda.kernels import gemm, norm, packed
from specdec.backends.cuda.kernels.gemm import check_rows, x_tile
from specdec.backends.cuda.kernels.launch import MAX_ROWS, RAISE, interpreting, launch
from specdec.backends.cuda.kernels.norm import RMS, Rms, strided
from specdec.backends.cuda.kernels.packed import Layout
from specdec.backends.cuda.kernels.tiles import Tile
from specdec.backends.cuda.weights import Weight
from specdec.errors import ShapeError

LAST = tl.constexpr(2**31 - 1)  # greater than every token id


@attrs.frozen(eq=False)
class HeadStats:
    """Statistics of the logits of each row: ``ids`` int32 (-1: a logit is NaN), ``values`` float32 (the raw logit of
    that id), ``log_sum`` float32 (the log-sum-exp of the raw logits). All ``[T]``, on the device."""

    ids: Tensor
    values: Tensor
    log_sum: Tensor


@attrs.frozen(eq=False)
class Noise:
    """The key of Gumbel noise for tokens, as in ``specdec.sampling``; row t is at position ``key[1] + t``.

    ``key`` int64 ``[2]`` (seed, position of row 0) and ``scale`` float32 ``[1]`` (1 / temperature) are on the device,
    so that a captured graph can be replayed with different values.
    """

    key: Tensor
    scale: Tensor

    @classmethod
    def of(cls, seed: int, position: int, temperature: float, device: torch.device) -> Noise:
        """Copy the seed, position and scale to the device."""
        signed = (seed + 2**63) % 2**64 - 2**63
        key = torch.tensor([signed, position], dtype=torch.int64, device=device)
        return cls(key, torch.tensor([1.0 / temperature], dtype=torch.float32, device=device))


@triton.jit
def _fused(a, b, c):
    """``a * b + c``, rounded once."""
    if RAISE:  # the interpreter rounds twice; in float64 the product is exact
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def word(ids, position, seed):
    """The Philox4x32-10 word of each token id: uint32, in the broadcast shape of ``ids`` and ``position``.

    Counter (id // 4, position, 0, 0), word id % 4. Source: Salmon et al. 2011, "Parallel random numbers: as easy as
    1, 2, 3", section 3.2.
    """
    c0 = (ids >> 2).to(tl.uint64) + position.to(tl.uint64) * 0
    c1 = position.to(tl.uint64) + c0 * 0
    c2 = c0 * 0
    c3 = c0 * 0
    LOW: tl.constexpr = 0xFFFFFFFF
    k0 = seed.to(tl.uint64) & LOW
    k1 = seed.to(tl.uint64) >> 32
    for _ in tl.static_range(10):
        left = (c0 & LOW) * 0xD2511F53
        right = (c2 & LOW) * 0xCD9E8D57
        c0 = ((right >> 32) ^ c1 ^ k0) & LOW
        c2 = ((left >> 32) ^ c3 ^ k1) & LOW
        c1 = right & LOW
        c3 = left & LOW
        k0 = (k0 + 0x9E3779B9) & LOW
        k1 = (k1 + 0xBB67AE85) & LOW
    place = ids & 3
    return tl.where(place == 0, c0, tl.where(place == 1, c1, tl.where(place == 2, c2, c3))).to(tl.uint32)


@triton.jit
def _logarithm(x):
    """log of positive normal float32: x = 2^e m, m in [2^-1/2, 2^1/2), log m = 2 artanh((m - 1) / (m + 1))."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    s = tl.div_rn(m - 1.0, m + 1.0)
    square = s * s
    p = tl.full(x.shape, 2.0 / 9, tl.float32)
    p = _fused(p, square, tl.full(x.shape, 2.0 / 7, tl.float32))
    p = _fused(p, square, tl.full(x.shape, 2.0 / 5, tl.float32))
    p = _fused(p, square, tl.full(x.shape, 2.0 / 3, tl.float32))
    p = _fused(p, square, tl.full(x.shape, 2.0, tl.float32))
    return _fused(exponent.to(tl.float32), tl.full(x.shape, 0.69314718, tl.float32), p * s)


@triton.jit
def gumbel(words):
    """Standard Gumbel noise of uint32 words, float32, with the operations of the CPU kernel in its order."""
    w = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = 1.0 - w
    lost = 1.0 - rest
    tiny = lost == 0.0
    safe = tl.where(rest < 2.98e-8, 2.98e-8, rest)  # w rounds to 1
    spent = tl.where(tiny, w, -_logarithm(safe) * tl.div_rn(w, tl.where(tiny, 1.0, lost)))
    return -_logarithm(spent)


@triton.jit(do_not_specialize=["T"])
def head_kernel(
    x_ptr,
    x_stride,
    T,
    w_ptr,
    scales_ptr,
    globals_ptr,
    norm_ptr,
    eps,
    ids_ptr,
    key_ptr,
    noise_scale_ptr,
    floats_ptr,
    tile_ids_ptr,
    N,
    K,
    FORMAT: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    PROLOGUE: tl.constexpr,
    MAPPED: tl.constexpr,
    NOISE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    NORM_BLOCK: tl.constexpr,
):
    """One tile of the vocabulary per program. Write every row's best score, its logit, maximum and sum of exponentials
    to ``floats [tiles, 16, 4]``, and its best id to ``tile_ids [tiles, 16]``."""
    tile = tl.program_id(0)
    rows = tl.arange(0, 16)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = tl.minimum(columns, N - 1).to(tl.int64)
    if PROLOGUE == RMS:
        scale = norm.inverse_rms(x_ptr, x_stride, rows, T, K, eps, NORM_BLOCK)
    else:
        scale = tl.zeros((16,), tl.float32)
    acc = tl.zeros((16, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        x = x_tile(x_ptr, x_stride, x_ptr, x_stride, norm_ptr, eps, scale, rows, T, start, K, PROLOGUE, BLOCK_K, EVEN_K)
        acc = packed.multiply(
            x, acc, w_ptr, scales_ptr, inside, start, K, FORMAT, BLOCK_N, BLOCK_K, SCALE_N, SCALE_K, EVEN_K
        )
    logits = packed.finish(acc, globals_ptr, inside, FORMAT)
    wrong = (tl.max((logits != logits).to(tl.int32), 1)) > 0
    logits = tl.where((columns < N)[None, :], logits, float("-inf"))
    ids = columns
    if MAPPED:
        ids = tl.load(ids_ptr + inside)
    ids = tl.where(columns < N, ids, LAST)[None, :] + tl.zeros((16, BLOCK_N), tl.int32)
    score = logits
    if NOISE:
        position = (tl.load(key_ptr + 1) + rows)[:, None] + tl.zeros((16, BLOCK_N), tl.int64)
        noise = gumbel(word(ids, position, tl.load(key_ptr)))
        score = _fused(logits, tl.load(noise_scale_ptr) + tl.zeros((16, BLOCK_N), tl.float32), noise)
        score = tl.where((columns < N)[None, :], score, float("-inf"))
    top = tl.max(score, 1)
    id = tl.min(tl.where(score == top[:, None], ids, LAST), 1)
    value = tl.max(tl.where(ids == id[:, None], logits, float("-inf")), 1)
    largest = tl.max(logits, 1)
    shift = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
    total = tl.sum(tl.exp(logits - shift[:, None]), 1)
    at = tile.to(tl.int64) * 16 + rows
    present = rows < T
    tl.store(floats_ptr + at * 4, top, mask=present)
    tl.store(floats_ptr + at * 4 + 1, value, mask=present)
    tl.store(floats_ptr + at * 4 + 2, largest, mask=present)
    tl.store(floats_ptr + at * 4 + 3, total, mask=present)
    tl.store(tile_ids_ptr + at, tl.where(wrong, -1, id), mask=present)


@triton.jit
def fold_kernel(floats_ptr, tile_ids_ptr, tiles, ids_ptr, values_ptr, log_sum_ptr, BLOCK: tl.constexpr):
    """One row per program. Fold the statistics of its tiles in ascending order, ``BLOCK`` tiles at a time."""
    row = tl.program_id(0)
    top = tl.full((), float("-inf"), tl.float32)
    value = tl.full((), float("-inf"), tl.float32)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    best = tl.full((), LAST, tl.int32)
    wrong = tl.full((), 0, tl.int32)
    for start in range(0, tiles, BLOCK):
        here = start + tl.arange(0, BLOCK)
        at = here.to(tl.int64) * 16 + row
        mask = here < tiles
        scores = tl.load(floats_ptr + at * 4, mask=mask, other=float("-inf"))
        values = tl.load(floats_ptr + at * 4 + 1, mask=mask, other=float("-inf"))
        maxima = tl.load(floats_ptr + at * 4 + 2, mask=mask, other=float("-inf"))
        sums = tl.load(floats_ptr + at * 4 + 3, mask=mask, other=0.0)
        ids = tl.load(tile_ids_ptr + at, mask=mask, other=LAST)
        wrong = tl.maximum(wrong, tl.max((ids < 0).to(tl.int32), 0))
        block_top = tl.max(scores, 0)
        block_best = tl.min(tl.where(scores == block_top, ids, LAST), 0)
        block_value = tl.max(tl.where(ids == block_best, values, float("-inf")), 0)
        better = (block_top > top) | ((block_top == top) & (block_best < best))
        top = tl.where(better, block_top, top)
        value = tl.where(better, block_value, value)
        best = tl.where(better, block_best, best)
        both = tl.maximum(largest, tl.max(maxima, 0))
        shift = tl.where(tl.abs(both) == float("inf"), 0.0, both)
        total = total * tl.exp(largest - shift) + tl.sum(sums * tl.exp(maxima - shift), 0)
        largest = both
    tl.store(ids_ptr + row, tl.where(wrong > 0, -1, best))
    tl.store(values_ptr + row, tl.where(wrong > 0, float("nan"), value))
    tl.store(log_sum_ptr + row, tl.where(wrong > 0, float("nan"), largest + tl.log(total)))


@triton.jit(do_not_specialize=["T"])
def _perturbed_kernel(x_ptr, T, ids_ptr, key_ptr, scale_ptr, out_ptr, N, MAPPED: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.arange(0, 16)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < T)[:, None] & (columns < N)[None, :]
    at = rows[:, None].to(tl.int64) * N + columns[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    ids = columns
    if MAPPED:
        ids = tl.load(ids_ptr + columns, mask=columns < N, other=0)
    position = (tl.load(key_ptr + 1) + rows)[:, None] + tl.zeros((16, BLOCK), tl.int64)
    noise = gumbel(word(ids[None, :] + tl.zeros((16, BLOCK), tl.int32), position, tl.load(key_ptr)))
    tl.store(out_ptr + at, _fused(x, tl.load(scale_ptr) + tl.zeros((16, BLOCK), tl.float32), noise), mask=mask)


def perturbed(x: Tensor, noise: Noise, *, ids: Tensor | None = None) -> Tensor:
    """``x [T, N] * noise.scale + G(seed, position, id)`` as in ``sample``: float32 ``[T, N]``.

    ``ids`` int32 ``[N]``: token ids of the columns; without it, 0 to N - 1. Raises: ShapeError above 16 rows.
    """
    check_rows(len(x))
    x = x.contiguous()
    rows, size = x.shape
    out = torch.empty_like(x)
    block = 1024 if interpreting() else 128
    launch(
        _perturbed_kernel,
        (-(-size // block),),
        x,
        rows,
        x if ids is None else ids,
        noise.key,
        noise.scale,
        out,
        size,
        MAPPED=ids is not None,
        BLOCK=block,
    )
    return out


def logits(
    x: Tensor, weight: Weight, *, prologue: Rms | None = None, tile: Tile | None = None, out: Tensor | None = None
) -> Tensor:
    """``x [T, K] @ w.T``: float32 ``[T, V]``. Raises: ShapeError above 16 rows."""
    return gemm.float32_product(x, weight, prologue=prologue, tile=tile or head_tile(weight), out=out)


def best(
    x: Tensor,
    weight: Weight,
    *,
    ids: Tensor | None = None,
    prologue: Rms | None = None,
    tile: Tile | None = None,
    out: HeadStats | None = None,
) -> HeadStats:
    """The best token of every row of ``x [T, K]``, its logit, and the row's log-sum-exp.

    ``ids`` int32 ``[V]``: the token ids of a pruned head's rows (all others count as -inf); without it, 0 to V - 1.
    Raises: ShapeError above 16 rows.
    """
    return _stats(x, weight, ids, prologue, None, tile, out)


def sample(
    x: Tensor,
    weight: Weight,
    *,
    noise: Noise,
    ids: Tensor | None = None,
    prologue: Rms | None = None,
    tile: Tile | None = None,
    out: HeadStats | None = None,
) -> HeadStats:
    """``argmax_v(logit_v / temperature + G(seed, position, v))`` of every row; values and log_sum are of raw logits.

    Raises: ShapeError above 16 rows.
    """
    return _stats(x, weight, ids, prologue, noise, tile, out)


def head_tile(weight: Weight) -> Tile:
    """The tile of a head, without slices of K: a vocabulary has enough tiles, and its statistics need complete sums."""
    layout = Layout.of(weight)
    if interpreting():
        return Tile(512 if weight.shape[0] > 256 else 256, min(layout.most_k, 128), stages=3)
    block_n = 64 if layout.bits > 8 else 128
    step = block_n * layout.most_k * layout.bits // 8
    return Tile(block_n, layout.most_k, stages=min(max(3, 1 + -(-24_000 // step)), 6))


def _stats(
    x: Tensor,
    weight: Weight,
    ids: Tensor | None,
    prologue: Rms | None,
    noise: Noise | None,
    tile: Tile | None,
    out: HeadStats | None,
) -> HeadStats:
    rows = len(x)
    check_rows(rows)
    vocabulary, k = weight.shape
    if x.shape[1] != k:
        raise ShapeError(f"rows of {x.shape[1]} values do not fit a head of {k} columns")
    if ids is not None and len(ids) != vocabulary:
        raise ShapeError(f"a head of {vocabulary} rows came with {len(ids)} token ids")
    layout, tile = Layout.of(weight), tile or head_tile(weight)
    x, stride = strided(x)
    tiles = -(-vocabulary // tile.block_n)
    floats = torch.empty(tiles * MAX_ROWS * 4, dtype=torch.float32, device=x.device)
    tile_ids = torch.empty(tiles * MAX_ROWS, dtype=torch.int32, device=x.device)
    if out is None:
        out = HeadStats(
            torch.empty(rows, dtype=torch.int32, device=x.device),
            torch.empty(rows, dtype=torch.float32, device=x.device),
            torch.empty(rows, dtype=torch.float32, device=x.device),
        )
    launch(
        head_kernel,
        (tiles,),
        x,
        stride,
        rows,
        *layout.tensors,
        x if prologue is None else prologue.weight,
        0.0 if prologue is None else prologue.eps,
        x if ids is None else ids,
        x if noise is None else noise.key,
        x if noise is None else noise.scale,
        floats,
        tile_ids,
        vocabulary,
        k,
        **layout.constexprs,
        PROLOGUE=0 if prologue is None else int(RMS.value),
        MAPPED=ids is not None,
        NOISE=noise is not None,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        EVEN_K=k % tile.block_k == 0,
        NORM_BLOCK=norm.block_of(k),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    launch(
        fold_kernel,
        (rows,),
        floats,
        tile_ids,
        tiles,
        out.ids,
        out.values,
        out.log_sum,
        BLOCK=min(1024, max(16, triton.next_power_of_2(tiles))),
        num_warps=4,
    )
    return out


def best_reference(x: Tensor, weight: Weight, *, ids: Tensor | None = None, prologue: Rms | None = None) -> HeadStats:
    """``best`` in float64."""
    rows = gemm.linear_reference(x, weight, prologue=prologue)
    values, at = rows.max(-1)
    at = (rows == values[:, None]).int().argmax(-1)  # ties go to the lowest
    chosen = at if ids is None else ids.long()[at]
    return HeadStats(chosen.int(), values, torch.logsumexp(rows, -1))
