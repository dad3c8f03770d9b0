"""Gumbel noise for the tokens of rows of logits, and their probabilities as integers, whose sums have no order."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.backends.cuda.kernels.launch import RAISE, interpreting, launch

UNIT = 2**40  # the share of the best token; a sum over 2^22 tokens fits int64


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
    """Standard Gumbel noise of uint32 words, float32.

    ``-log(-log(1 - w))``: small values of ``-log(1 - w)`` decide a maximum, so they keep the precision of w.
    """
    w = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = 1.0 - w
    lost = 1.0 - rest
    tiny = lost == 0.0
    safe = tl.where(rest < 2.98e-8, 2.98e-8, rest)  # w rounds to 1
    spent = tl.where(tiny, w, -_logarithm(safe) * tl.div_rn(w, tl.where(tiny, 1.0, lost)))
    return -_logarithm(spent)


@triton.jit
def _perturb(
    below, ids, key, scores, shares, count, size, MAPPED: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    row, column = at // size, at % size
    nats = tl.load(below + at, mask=mask, other=0.0)
    names = column
    if MAPPED:
        names = tl.load(ids + column, mask=mask, other=0).to(tl.int64)
    tl.store(scores + at, nats + gumbel(word(names, tl.load(key + 1) + row, tl.load(key))), mask=mask)
    tl.store(shares + at, (tl.exp(nats) * UNIT).to(tl.int64), mask=mask)


def perturb(below: Tensor, key: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``below + G(seed, position, id)`` float32 and ``exp(below)`` in units of 2^-40, int64, of every element.

    Args:
        below: float32 ``[T, n]``, at most 0: logits over the temperature, less the best one of the row.
        key: int64 ``[2]`` on the device: the seed, and the position of row 0; row t is at the t-th after it.
        ids: int32 ``[n]``, the token ids of the columns; without them, 0 to n - 1.
    """
    below = below.contiguous()
    rows, size = below.shape
    scores, shares = torch.empty_like(below), torch.empty(rows, size, dtype=torch.int64, device=below.device)
    block = 2**15 if interpreting() else 512
    launch(
        _perturb,
        (triton.cdiv(rows * size, block),),
        below,
        below if ids is None else ids,
        key,
        scores,
        shares,
        rows * size,
        size,
        MAPPED=ids is not None,
        UNIT=UNIT,
        BLOCK=block,
    )
    return scores, shares
