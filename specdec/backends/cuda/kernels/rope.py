"""Per-head RMS norm and rotary embedding, and the kernel that writes a pass's keys and values to its cache.

Each program handles one head of one row, so the bits of a row cannot depend on other rows.

The angle of position p is ``p * inv_freq[j]`` in float32, as the ops contract says. Its cosine and sine do not use the
device's functions: the fast ones lose all precision far from 0, and the exact ones need memory for the reduction.
Instead, the quarter turns are subtracted in float64 (exact to 1e-10 for up to 10^6 of them), and two Taylor polynomials
in float32 follow. Their first omitted terms are ``r^11 / 11!`` and ``r^12 / 12!`` at ``|r| <= pi/4``: below 2e-9.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.backends.cuda.kernels.launch import CAPACITY, FIRST, LENGTH, SECOND, launch, rounded
from specdec.errors import ShapeError


@triton.jit
def cos_and_sin(angle):
    """Cosine and sine of float32 angles, to about one unit in the last place of 1."""
    wide = angle.to(tl.float64)
    quarters = tl.floor(wide * 0.6366197723675814 + 0.5)
    r = (wide - quarters * 1.5707963267948966).to(tl.float32)
    quadrant = quarters.to(tl.int64) & 3
    square = r * r
    sin = square * (square * (1 / 362880) - 1 / 5040) + 1 / 120
    sin = r + r * square * (square * sin - 1 / 6)
    cos = square * (1 / 40320 - square * (1 / 3628800)) - 1 / 720
    cos = 1.0 + square * (square * (square * cos + 1 / 24) - 0.5)
    odd = (quadrant & 1) != 0
    turned_cos, turned_sin = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    turned_cos = tl.where(((quadrant + 1) & 2) != 0, -turned_cos, turned_cos)
    return turned_cos, tl.where((quadrant & 2) != 0, -turned_sin, turned_sin)


@triton.jit
def _rotated(
    x, weight, eps, inv_freq, position, D: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr, BLOCK_D: tl.constexpr
):
    """One head ``x [D]``, normed with ``weight`` and rotated to ``position``: ``[BLOCK_D]`` float32."""
    d = tl.arange(0, BLOCK_D)
    first, turned = d < HALF, d < 2 * HALF
    pair = tl.where(first, d + HALF, d - HALF)  # the other half of d's rotary pair
    own = tl.load(x + d, mask=d < D, other=0.0).to(tl.float32)
    other = tl.load(x + pair, mask=turned, other=0.0).to(tl.float32)
    if NORMED:
        factor = tl.rsqrt(tl.sum(own * own, 0) / D + eps)
        own = own * factor * tl.load(weight + d, mask=d < D, other=0.0)
        other = other * factor * tl.load(weight + pair, mask=turned, other=0.0)
    frequency = tl.load(inv_freq + tl.where(first, d, pair), mask=turned, other=0.0)
    cos, sin = cos_and_sin(position.to(tl.float32) * frequency)
    return tl.fma(own, cos, other * tl.where(first, -sin, sin))  # explicit: contraction is not left to the compiler


# Not specialised on alignment: the width of loads determines the order of the norm's sum.
@triton.jit(
    do_not_specialize=["q_row", "q_head", "k_row", "k_head", "v_row", "v_head"],
    do_not_specialize_on_alignment=["q", "k", "v"],
)
def _rotate_and_write(
    q,
    k,
    v,
    q_weight,
    k_weight,
    eps,
    inv_freq,
    row,
    out,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    NQ: tl.constexpr,
    NKV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    Q_NORMED: tl.constexpr,
    K_NORMED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    dtype: tl.constexpr = out.dtype.element_ty
    slot = tl.load(row + LENGTH) + t  # also the position
    if head < NQ:
        turned = _rotated(q + t * q_row + head * q_head, q_weight, eps, inv_freq, slot, D, HALF, Q_NORMED, BLOCK_D)
        tl.store(out + (t * NQ + head) * D + d, rounded(turned, dtype), mask=d < D)
    else:
        kv = head - NQ
        turned = _rotated(k + t * k_row + kv * k_head, k_weight, eps, inv_freq, slot, D, HALF, K_NORMED, BLOCK_D)
        value = tl.load(v + t * v_row + kv * v_head + d, mask=d < D, other=0.0)
        keys = tl.multiple_of(tl.load(row + FIRST).to(tl.pointer_type(dtype)), 16)
        values = tl.multiple_of(tl.load(row + SECOND).to(tl.pointer_type(dtype)), 16)
        # the host rejects a pass that does not fit; this check keeps writes inside the cache
        room = tl.where(slot < tl.load(row + CAPACITY), D, 0)
        at = (slot * NKV + kv) * D + d
        tl.store(keys + at, rounded(turned, dtype), mask=d < room)
        tl.store(values + at, value, mask=d < room)


@triton.jit(do_not_specialize=["start", "x_row", "x_head"], do_not_specialize_on_alignment=["x"])
def _norm_rope(
    x,
    weight,
    eps,
    inv_freq,
    row,
    start,
    out,
    x_row,
    x_head,
    N: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    FROM_ROW: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    position = t
    if FROM_ROW:
        position += tl.load(row + LENGTH)
    else:
        position += start
    turned = _rotated(x + t * x_row + head * x_head, weight, eps, inv_freq, position, D, HALF, NORMED, BLOCK_D)
    tl.store(out + (t * N + head) * D + d, rounded(turned, out.dtype.element_ty), mask=d < D)


def rotate_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    inv_freq: Tensor,
    row: Tensor,
) -> Tensor:
    """Norm and rotate q and k, and write k and v to the cache after its committed rows.

    Args:
        q: ``[T, nq, D]`` act, k and v ``[T, nkv, D]``; views with any strides, the last one 1 (such as the query half
            of an interleaved query-gate projection).
        q_norm: float32 ``[D]`` weight of the norm, None for no norm; k_norm likewise.
        inv_freq: float32 ``[R / 2]`` on the device.
        row: the KV cache's row of the address table. Row t is at position LENGTH + t.

    Returns: rotated queries ``[T, nq, D]``, contiguous, rounded once.
    Raises: ShapeError.
    """
    T, nq, dim = q.shape
    nkv = k.shape[1]
    half = inv_freq.shape[0]
    if k.shape != (T, nkv, dim) or v.shape != k.shape or 2 * half > dim:
        raise ShapeError(
            f"rotary embedding of q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} over {2 * half} dimensions"
        )
    _unit_stride(q=q, k=k, v=v)
    out = torch.empty(T, nq, dim, dtype=q.dtype, device=q.device)
    launch(
        _rotate_and_write,
        (T, nq + nkv),
        q,
        k,
        v,
        q_norm,
        k_norm,
        eps,
        inv_freq,
        row,
        out,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        NQ=nq,
        NKV=nkv,
        D=dim,
        HALF=half,
        Q_NORMED=q_norm is not None,
        K_NORMED=k_norm is not None,
        BLOCK_D=triton.next_power_of_2(dim),
        num_warps=1,
    )
    return out


def norm_rope(x: Tensor, weight: Tensor | None, eps: float, inv_freq: Tensor, position: Tensor | int) -> Tensor:
    """Norm every head of ``x [T, n, D]`` (any strides, the last one 1) and rotate it: ``[T, n, D]``, rounded once.

    ``position`` of the first row is a number, or a cache's row of the address table, to use its LENGTH.
    Same bits as ``rotate_and_write``. Raises: ShapeError.
    """
    T, heads, dim = x.shape
    half = inv_freq.shape[0]
    if 2 * half > dim:
        raise ShapeError(f"rotary embedding of {2 * half} dimensions of heads of {dim}")
    _unit_stride(x=x)
    out = torch.empty(T, heads, dim, dtype=x.dtype, device=x.device)
    from_row = isinstance(position, Tensor)
    launch(
        _norm_rope,
        (T, heads),
        x,
        weight,
        eps,
        inv_freq,
        position if from_row else None,
        0 if from_row else position,
        out,
        x.stride(0),
        x.stride(1),
        N=heads,
        D=dim,
        HALF=half,
        NORMED=weight is not None,
        FROM_ROW=from_row,
        BLOCK_D=triton.next_power_of_2(dim),
        num_warps=1,
    )
    return out


def _unit_stride(**arrays: Tensor) -> None:
    for name, array in arrays.items():
        if array.stride(-1) != 1 and array.shape[-1] > 1:
            raise ShapeError(f"the last axis of {name} has stride {array.stride(-1)}, kernels take 1")
