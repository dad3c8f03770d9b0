"""The gated delta rule for a few rows in one launch: convolution, gates, recurrence, a state per row, and the ring.

One program owns ``BLOCK_V`` columns of one value head's matrix and keeps them in registers for all rows. It also
convolves the q and k channels of its key head; repeating this in every program of the head costs less than a launch.
The recurrence runs token by token in float32 with the same instructions for any number of rows (T is a runtime value),
and without tensor cores. So the outputs and states of a pass of T rows have the bits of T one-row passes. The chunked
form (``delta_chunked``) rounds differently and is for prompts.

A pass writes the following, so that any number of its rows can be committed:

- the state after row t to slot ``(SLOT + 1 + t) % S`` of the cache; S > T preserves the committed state;
- the raw row t to row ``(LENGTH + t) % W`` of the ring; W >= taps - 1 + T preserves the rows that the next pass reads.

A pass reads its own rows from its input and older ones from the ring; u is rounded to act after the convolution.
Source: Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464, equation 10; the gates are those of its section 3.4's code,
in the notation of ``specdec.backends.ops``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own convention)
import triton
import triton.language as tl
from torch import Tensor

from specdec.backends.cuda.kernels.launch import FIRST, LENGTH, RING, SECOND, SLOT, SLOTS, launch, rounded
from specdec.backends.ops import DeltaShape
from specdec.errors import ShapeError, UnsupportedError

MAX_TAPS = 4
BLOCK_V = 16  # columns of a matrix in one program
UNIT_EPS = 1e-6  # inside the root of the l2 norm


@triton.jit
def convolved(x0, x1, x2, x3, w0, w1, w2, w3, dtype: tl.constexpr):
    """silu of four taps, the newest last, rounded to act; float32. Explicit fma fixes the contraction."""
    total = tl.fma(x3, w3, tl.fma(x2, w2, tl.fma(x1, w1, x0 * w0)))
    return rounded(total / (1.0 + tl.exp(-total)), dtype).to(tl.float32)


@triton.jit
def tap(weight, channel, known, J: tl.constexpr, TAPS: tl.constexpr):
    """Weights of tap J of 4, float32; zeros if the convolution has fewer taps."""
    if J >= 4 - TAPS:
        return tl.load(weight + channel * TAPS + (J - (4 - TAPS)), mask=known, other=0.0)
    else:
        return tl.zeros(channel.shape, tl.float32)


@triton.jit
def before(ring, length, rows, channel, known, BACK: tl.constexpr, TAPS: tl.constexpr, C: tl.constexpr):
    """The raw row BACK rows before the pass, float32; zeros before the first token, or if no tap reaches it."""
    position = length - BACK
    at = (tl.maximum(position, 0) % rows).to(tl.int64) * C + channel
    if TAPS > BACK:
        return tl.load(ring + at, mask=known & (position + channel * 0 >= 0), other=0.0).to(tl.float32)
    else:
        return tl.zeros(channel.shape, tl.float32)


@triton.jit
def log1p(x):
    """log(1 + x) for 0 <= x <= 1, as 2 artanh(x / (2 + x)) with terms up to z^17; the next one is below 2e-10."""
    z = x / (2.0 + x)
    s = z * z
    high = s * (s * (1 / 17) + 1 / 15) + 1 / 13
    high = s * (s * (s * high + 1 / 11) + 1 / 9) + 1 / 7
    return 2.0 * z * (s * (s * (s * high + 1 / 5) + 1 / 3) + 1.0)


@triton.jit
def decay_of(a, rate, bias):
    """exp(g) with ``g = -rate * softplus(a + bias)``, float32."""
    x = a + bias
    return tl.exp(-rate * (tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))))


@triton.jit
def unit(x, EPS: tl.constexpr):
    """``x [D]`` divided by its l2 norm."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + EPS)


# Not specialised on alignment: the width of loads determines the order of the l2 norm's sum.
@triton.jit(do_not_specialize=["T", "x_row", "a_row", "b_row"], do_not_specialize_on_alignment=["x", "a", "b"])
def _delta_rows(
    x,
    a,
    b,
    weight,
    a_log,
    dt_bias,
    row,
    out,
    T,
    x_row,
    a_row,
    b_row,
    q_scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TAPS: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    C: tl.constexpr = 2 * HK * DK + HV * DV
    dtype: tl.constexpr = x.dtype.element_ty
    head = tl.program_id(1)
    key_head = head // (HV // HK)
    length = tl.load(row + LENGTH).to(tl.int32)
    states = tl.multiple_of(tl.load(row + FIRST).to(tl.pointer_type(tl.float32)), 16)
    ring = tl.multiple_of(tl.load(row + SECOND).to(tl.pointer_type(dtype)), 16)
    slots, slot = tl.load(row + SLOTS), tl.load(row + SLOT)
    ring_rows = tl.load(row + RING).to(tl.int32)

    i, j = tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    i_real, j_real = i < DK, j < DV
    cq, ck, cv = key_head * DK + i, (HK + key_head) * DK + i, 2 * HK * DK + head * DV + j
    # each channel's raw rows are written by one program: q and k by the first of a key head, v by its own
    writes_keys = i < tl.where((tl.program_id(0) == 0) & (head % (HV // HK) == 0), DK, 0)

    # the window of three rows before the pass, and the weights of four taps
    q1, k1, v1 = (
        before(ring, length, ring_rows, cq, i_real, 1, TAPS, C),
        before(ring, length, ring_rows, ck, i_real, 1, TAPS, C),
        before(ring, length, ring_rows, cv, j_real, 1, TAPS, C),
    )
    q2, k2, v2 = (
        before(ring, length, ring_rows, cq, i_real, 2, TAPS, C),
        before(ring, length, ring_rows, ck, i_real, 2, TAPS, C),
        before(ring, length, ring_rows, cv, j_real, 2, TAPS, C),
    )
    q3, k3, v3 = (
        before(ring, length, ring_rows, cq, i_real, 3, TAPS, C),
        before(ring, length, ring_rows, ck, i_real, 3, TAPS, C),
        before(ring, length, ring_rows, cv, j_real, 3, TAPS, C),
    )
    wq0, wq1 = tap(weight, cq, i_real, 0, TAPS), tap(weight, cq, i_real, 1, TAPS)
    wq2, wq3 = tap(weight, cq, i_real, 2, TAPS), tap(weight, cq, i_real, 3, TAPS)
    wk0, wk1 = tap(weight, ck, i_real, 0, TAPS), tap(weight, ck, i_real, 1, TAPS)
    wk2, wk3 = tap(weight, ck, i_real, 2, TAPS), tap(weight, ck, i_real, 3, TAPS)
    wv0, wv1 = tap(weight, cv, j_real, 0, TAPS), tap(weight, cv, j_real, 1, TAPS)
    wv2, wv3 = tap(weight, cv, j_real, 2, TAPS), tap(weight, cv, j_real, 3, TAPS)
    rate, bias = tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)

    in_state = (head * DK + i)[:, None] * DV + j[None, :]
    real = i_real[:, None] & j_real[None, :]
    size: tl.constexpr = HV * DK * DV
    state = tl.load(states + slot * size + in_state, mask=real, other=0.0)

    # load row 0; in the loop, row t + 1 is loaded while row t is computed
    q_raw = tl.load(x + cq, mask=i_real, other=0.0)
    k_raw = tl.load(x + ck, mask=i_real, other=0.0)
    v_raw = tl.load(x + cv, mask=j_real, other=0.0)
    a_raw, b_raw = tl.load(a + head), tl.load(b + head)
    for t in range(T):
        at = ring + ((length + t) % ring_rows).to(tl.int64) * C
        tl.store(at + cq, q_raw, mask=writes_keys)
        tl.store(at + ck, k_raw, mask=writes_keys)
        tl.store(at + cv, v_raw, mask=j_real)
        q0, k0, v0 = q_raw.to(tl.float32), k_raw.to(tl.float32), v_raw.to(tl.float32)
        gate_a, gate_b = a_raw.to(tl.float32), b_raw.to(tl.float32)

        ahead = tl.minimum(t + 1, T - 1).to(tl.int64)  # after the last row, it is read again but not used
        q_raw = tl.load(x + ahead * x_row + cq, mask=i_real, other=0.0)
        k_raw = tl.load(x + ahead * x_row + ck, mask=i_real, other=0.0)
        v_raw = tl.load(x + ahead * x_row + cv, mask=j_real, other=0.0)
        a_raw, b_raw = tl.load(a + ahead * a_row + head), tl.load(b + ahead * b_row + head)

        q = unit(convolved(q3, q2, q1, q0, wq0, wq1, wq2, wq3, dtype), EPS) * q_scale
        k = unit(convolved(k3, k2, k1, k0, wk0, wk1, wk2, wk3, dtype), EPS)
        v = convolved(v3, v2, v1, v0, wv0, wv1, wv2, wv3, dtype)
        q3, k3, v3 = q2, k2, v2
        q2, k2, v2 = q1, k1, v1
        q1, k1, v1 = q0, k0, v0

        state = state * decay_of(gate_a, rate, bias)
        error = (v - tl.sum(state * k[:, None], 0)) / (1.0 + tl.exp(-gate_b))
        state = tl.fma(
            tl.broadcast_to(k[:, None], BLOCK_K, BLOCK_V), tl.broadcast_to(error[None, :], BLOCK_K, BLOCK_V), state
        )
        mixed = tl.sum(state * q[:, None], 0)
        tl.store(out + (t * HV + head) * DV + j, rounded(mixed, dtype), mask=j_real)
        slot = tl.where(slot + 1 < slots, slot + 1, 0)
        tl.store(states + slot * size + in_state, state, mask=real)


@triton.jit(do_not_specialize=["T", "x_row"], do_not_specialize_on_alignment=["x"])
def _conv_window(
    x, weight, row, out, T, x_row, C: tl.constexpr, TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr
):
    dtype: tl.constexpr = x.dtype.element_ty
    length = tl.load(row + LENGTH).to(tl.int32)
    ring = tl.multiple_of(tl.load(row + SECOND).to(tl.pointer_type(dtype)), 16)
    ring_rows = tl.load(row + RING).to(tl.int32)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    known = c < C
    first = tl.program_id(0) * BLOCK_T
    w0, w1 = tap(weight, c, known, 0, TAPS), tap(weight, c, known, 1, TAPS)
    w2, w3 = tap(weight, c, known, 2, TAPS), tap(weight, c, known, 3, TAPS)
    x3 = _raw(x, ring, length, ring_rows, first, x_row, c, known, 3, TAPS, C)
    x2 = _raw(x, ring, length, ring_rows, first, x_row, c, known, 2, TAPS, C)
    x1 = _raw(x, ring, length, ring_rows, first, x_row, c, known, 1, TAPS, C)
    source, target = x + first.to(tl.int64) * x_row + c, out + first.to(tl.int64) * C + c
    for _ in range(first, tl.minimum(first + BLOCK_T, T)):
        x0 = tl.load(source, mask=known, other=0.0).to(tl.float32)
        tl.store(target, convolved(x3, x2, x1, x0, w0, w1, w2, w3, dtype).to(dtype), mask=known)
        x3, x2, x1 = x2, x1, x0
        source += x_row
        target += C


@triton.jit
def _raw(x, ring, length, ring_rows, first, x_row, c, known, BACK: tl.constexpr, TAPS: tl.constexpr, C: tl.constexpr):
    """The raw row BACK rows before row ``first``, of this pass or from the ring, float32."""
    if first >= BACK:
        raw = tl.load(x + (first - BACK).to(tl.int64) * x_row + c, mask=known, other=0.0).to(tl.float32)
    else:
        raw = before(ring, length + first, ring_rows, c, known, BACK, TAPS, C)
    return raw


def delta_rows(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    row: Tensor,
    shape: DeltaShape,
) -> Tensor:
    """``conv_window`` and ``gated_delta`` of a pass of up to 16 rows over the delta cache of ``row``.

    Args:
        qkv: raw rows ``[T, C]`` act; a and b ``[T, Hv]`` act. Views with any row stride, the last stride 1.
        conv_weight: float32 ``[C, taps]``, contiguous; the last tap applies to the newest row.
        a_log: float32 ``[Hv]``; dt_bias likewise.
        row: the cache's row of the address table, with more than T slots and a ring of at least taps - 1 + T rows.

    Returns: ``[T, Hv, Dv]`` act. Raises: ShapeError, UnsupportedError for more than 4 taps.
    """
    T = qkv.shape[0]
    _check(qkv, conv_weight, shape.kernel, shape.channels)
    if a.shape != (T, shape.value_heads) or b.shape != a.shape or a.stride(1) != 1 or b.stride(1) != 1:
        raise ShapeError(f"gates of {T} rows and {shape.value_heads} heads, got {tuple(a.shape)}, {tuple(b.shape)}")
    block_k = triton.next_power_of_2(shape.key_dim)
    warps = max(1, block_k * qkv.element_size() // 256)  # float32 rows need the registers of two warps
    out = torch.empty(T, shape.value_heads, shape.value_dim, dtype=qkv.dtype, device=qkv.device)
    launch(
        _delta_rows,
        (triton.cdiv(shape.value_dim, BLOCK_V), shape.value_heads),
        qkv,
        a,
        b,
        conv_weight,
        a_log,
        dt_bias,
        row,
        out,
        T,
        qkv.stride(0),
        a.stride(0),
        b.stride(0),
        shape.key_dim**-0.5,
        HK=shape.key_heads,
        HV=shape.value_heads,
        DK=shape.key_dim,
        DV=shape.value_dim,
        TAPS=shape.kernel,
        EPS=UNIT_EPS,
        BLOCK_K=block_k,
        BLOCK_V=BLOCK_V,
        num_warps=warps,
    )
    return out


def conv_window(x: Tensor, weight: Tensor, row: Tensor) -> Tensor:
    """Causal depthwise convolution and silu of ``x [T, C]`` (any row stride) for any T: ``[T, C]`` act.

    Rows before the pass are read from the ring of ``row``, which is not changed. Same bits as in ``delta_rows``.
    Raises: ShapeError, UnsupportedError for more than 4 taps.
    """
    T, channels = x.shape
    taps = weight.shape[1]
    _check(x, weight, taps, channels)
    out = torch.empty(T, channels, dtype=x.dtype, device=x.device)
    block_t, block_c = 32, min(256, triton.next_power_of_2(channels))
    launch(
        _conv_window,
        (triton.cdiv(T, block_t), triton.cdiv(channels, block_c)),
        x,
        weight,
        row,
        out,
        T,
        x.stride(0),
        C=channels,
        TAPS=taps,
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        num_warps=4,
    )
    return out


def _check(x: Tensor, weight: Tensor, taps: int, channels: int) -> None:
    if taps > MAX_TAPS:
        raise UnsupportedError(f"the convolution kernels take up to {MAX_TAPS} taps, got {taps}")
    if weight.shape != (channels, taps) or not weight.is_contiguous() or x.shape[1] != channels or x.stride(1) != 1:
        raise ShapeError(f"a convolution of {tuple(x.shape)} by {tuple(weight.shape)} with {taps} taps")


def prepared(
    u: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, shape: DeltaShape
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Inputs of the recurrence: q, k ``[T, Hv, Dk]`` normalised (q scaled), v ``[T, Hv, Dv]``, g, beta ``[T, Hv]``.

    In u's precision.
    """
    T, keys = u.shape[0], shape.key_heads * shape.key_dim
    repeats = shape.value_heads // shape.key_heads

    def heads(x: Tensor) -> Tensor:
        x = x.reshape(T, shape.key_heads, shape.key_dim)
        return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)).repeat_interleave(repeats, 1)

    q, k = heads(u[:, :keys]) * shape.key_dim**-0.5, heads(u[:, keys : 2 * keys])
    v = u[:, 2 * keys :].reshape(T, shape.value_heads, shape.value_dim)
    g = -torch.exp(a_log.to(u.dtype)) * F.softplus(a.to(u.dtype) + dt_bias.to(u.dtype))
    return q, k, v, g, torch.sigmoid(b.to(u.dtype))
