"""The gated delta rule for prompts: matrix products over chunks of 64 rows, and a scan over the chunks.

With ``G_i`` the sum of g over rows 1..i of a chunk and S the state before it, unrolling the recurrence
``S_i = exp(g_i) S_{i-1} + k_i d_i^T``, ``d_i = beta_i (v_i - exp(g_i) S_{i-1}^T k_i)`` gives

    S_i = exp(G_i) S + sum_{j <= i} exp(G_i - G_j) k_j d_j^T
    d_i = beta_i (v_i - exp(G_i) S^T k_i - sum_{j < i} exp(G_i - G_j) (k_i . k_j) d_j)

The second line is a unit lower triangular system for all d of the chunk: with
``A_ij = beta_i exp(G_i - G_j) (k_i . k_j)`` below the diagonal, D = U - W S where

    (I + A) [U | W] = [beta V | beta exp(G) K]

does not depend on S and is solved for all chunks at once. Only the states are sequential (``_scan_chunks``); O is again
a product over all chunks:

    D = U - W S
    O = (exp(G) Q) S + (exp(G_i - G_j) (q_i . k_j), j <= i) D
    S = exp(G_last) S + (exp(G_last - G) K)^T D

Every exponent is at most 0, so nothing overflows for any decay. G is summed and subtracted in float64, because after
one row of very strong decay a float32 sum would lose weak ones. The last chunk is padded with rows whose k, v, beta and
g are 0, which do not change the state.

Source: Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464, section 3.3 (the extended WY form), with a solve instead of
the explicit inverse T. The rounding differs from the recurrence, so verification never uses it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own convention)
import triton
import triton.language as tl
from torch import Tensor

from specdec.backends.cuda.kernels.delta import prepared
from specdec.backends.cuda.kernels.launch import FIRST, SLOT, SLOTS, launch
from specdec.backends.ops import DeltaShape
from specdec.errors import UnsupportedError

CHUNK = 64
BLOCK_V = 16
PIECE = 2048  # rows prepared at once, which takes about 4 KiB of memory per row and value head
MAX_KEY_DIM = 128


@triton.jit(do_not_specialize=["chunks", "from_slot"])
def _scan_chunks(
    solved,
    k_out,
    last,
    starts,
    deltas,
    row,
    chunks,
    from_slot,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """D of every chunk and the state before it, ``BLOCK_V`` columns of one value head.

    Reads state slot SLOT + from_slot and writes slot SLOT + 1. The matrix is held as two halves of ``BLOCK_K`` rows,
    because products over 128 rows need too many registers.
    """
    head = tl.program_id(1)
    states = tl.multiple_of(tl.load(row + FIRST).to(tl.pointer_type(tl.float32)), 16)
    slots, slot = tl.load(row + SLOTS), tl.load(row + SLOT)
    c, i, j = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    columns, upper, lower = j < DV, i < DK, i + BLOCK_K < DK
    size: tl.constexpr = HV * DK * DV
    half: tl.constexpr = BLOCK_K * DV
    in_state = (head * DK + i)[:, None] * DV + j[None, :]
    real_upper, real_lower = upper[:, None] & columns[None, :], lower[:, None] & columns[None, :]
    from_state = states + ((slot + from_slot) % slots) * size + in_state
    state_upper = tl.load(from_state, mask=real_upper, other=0.0)
    state_lower = tl.load(from_state + half, mask=real_lower, other=0.0)

    # a chunk's inputs are stored row by row, one head after another; chunks are HV heads apart
    wide: tl.constexpr = DV + DK
    u_at = solved + (head * CHUNK + c)[:, None] * wide + j[None, :]
    w_at = solved + (head * CHUNK + c)[:, None] * wide + DV + i[None, :]
    k_at = k_out + (head * CHUNK + c)[None, :] * DK + i[:, None]
    delta_at = deltas + (head * CHUNK + c)[:, None] * DV + j[None, :]
    last_at, start_at = last + head, starts + in_state
    for _ in range(chunks):
        tl.store(start_at, state_upper, mask=real_upper)
        tl.store(start_at + half, state_lower, mask=real_lower)
        delta = tl.load(u_at, mask=columns[None, :], other=0.0)
        w = tl.load(w_at, mask=upper[None, :], other=0.0)
        delta -= tl.dot(w, state_upper, input_precision="tf32x3")
        w = tl.load(w_at + BLOCK_K, mask=lower[None, :], other=0.0)
        delta -= tl.dot(w, state_lower, input_precision="tf32x3")
        tl.store(delta_at, delta, mask=columns[None, :])
        kept = tl.load(last_at)
        k = tl.load(k_at, mask=upper[:, None], other=0.0)
        state_upper = tl.dot(k, delta, state_upper * kept, input_precision="tf32x3")
        k = tl.load(k_at + BLOCK_K, mask=lower[:, None], other=0.0)
        state_lower = tl.dot(k, delta, state_lower * kept, input_precision="tf32x3")
        u_at += HV * CHUNK * wide
        w_at += HV * CHUNK * wide
        k_at += HV * CHUNK * DK
        delta_at += HV * CHUNK * DV
        last_at += HV
        start_at += size
    to_state = states + ((slot + 1) % slots) * size + in_state
    tl.store(to_state, state_upper, mask=real_upper)
    tl.store(to_state + half, state_lower, mask=real_lower)


def delta_chunked(
    u: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, row: Tensor, shape: DeltaShape
) -> Tensor:
    """The gated delta rule over a prompt's rows, from state slot SLOT into slot SLOT + 1.

    Args:
        u: ``[T, C]`` act, from ``delta.conv_window``; a and b ``[T, Hv]`` act. T is any number of rows above 0.
        a_log: float32 ``[Hv]``; dt_bias likewise.
        row: the cache's row of the address table, with at least two slots. LENGTH and SLOT do not change; the pass is
            committed whole (``commit.commit_rows(..., whole=True)``).

    Returns: ``[T, Hv, Dv]`` act. Raises: UnsupportedError for keys of more than 128 values.
    """
    T = u.shape[0]
    if shape.key_dim > MAX_KEY_DIM:
        raise UnsupportedError(f"the chunked delta rule takes keys of up to {MAX_KEY_DIM} values, got {shape.key_dim}")
    parts = [
        _piece(u[at : at + PIECE], a[at : at + PIECE], b[at : at + PIECE], a_log, dt_bias, row, shape, int(at > 0))
        for at in range(0, T, PIECE)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _piece(
    u: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, row: Tensor, shape: DeltaShape, from_slot: int
) -> Tensor:
    solved, attention, q_in, k_out, last = chunks_of(*prepared(u.float(), a, b, a_log, dt_bias, shape))
    chunks = solved.shape[0]
    starts = solved.new_empty(chunks, shape.value_heads, shape.key_dim, shape.value_dim)
    deltas = solved.new_empty(chunks, shape.value_heads, CHUNK, shape.value_dim)
    launch(
        _scan_chunks,
        (triton.cdiv(shape.value_dim, BLOCK_V), shape.value_heads),
        solved,
        k_out,
        last,
        starts,
        deltas,
        row,
        chunks,
        from_slot,
        HV=shape.value_heads,
        DK=shape.key_dim,
        DV=shape.value_dim,
        CHUNK=CHUNK,
        BLOCK_K=max(16, triton.next_power_of_2(shape.key_dim) // 2),
        BLOCK_V=BLOCK_V,
        num_warps=4,
        num_stages=2,
    )
    mixed = q_in @ starts + attention @ deltas
    return mixed.transpose(1, 2).flatten(0, 1)[: u.shape[0]].to(u.dtype)


def chunks_of(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """Compute the scan's inputs for all chunks at once, in the inputs' precision.

    Args: the results of ``delta.prepared``.
    Returns: ``[U | W] [n, Hv, 64, Dv + Dk]``, the weights of d in o ``[n, Hv, 64, 64]``, ``exp(G) Q`` and
    ``exp(G_last - G) K`` ``[n, Hv, 64, Dk]``, and ``exp(G_last) [n, Hv]``; all contiguous.
    """

    def chunked(x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, -x.shape[0] % CHUNK))
        return x.view(-1, CHUNK, *x.shape[1:]).transpose(1, 2).contiguous()

    q, k, v, beta = chunked(q), chunked(k), chunked(v), chunked(beta)[..., None]
    total = chunked(g.double()).cumsum(-1)  # G
    decay = (total[..., :, None] - total[..., None, :]).to(q.dtype).exp().tril()
    kept, left = total.to(q.dtype).exp()[..., None], (total[..., -1:] - total).to(q.dtype).exp()[..., None]
    system = (beta * decay * (k @ k.mT)).tril(-1)
    right = torch.cat([beta * v, beta * kept * k], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).contiguous()
    return solved, (q @ k.mT) * decay, kept * q, left * k, kept[..., -1, 0].contiguous()
