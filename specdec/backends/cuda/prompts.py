"""Passes of more than 16 rows (prompts), with torch's products and attention.

Their bits depend on how a prompt is cut into chunks, as ``parity_reason`` says. Plain and speculative decoding both
continue from the same prompt pass, so this does not affect their parity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own convention)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from specdec.backends.cuda.weights import DenseWeight, ExpertStack, Weight

# torch's own choice among its kernels changes with its version and with what is installed; the second one takes shapes
# that the first refuses
_ATTENTION = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_MASK = 2**26  # entries of the largest attention mask built at once


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return the weight as a matrix in ``dtype``, decoded if packed."""
    return weight.decode().to(dtype)


def linear(x: Tensor, weight: Weight, bias: DenseWeight | None = None) -> Tensor:
    """``x @ w.T (+ bias)``."""
    return F.linear(x, dense(weight, x.dtype), None if bias is None else bias.tensor)


def swiglu(x: Tensor, gate: Weight, up: Weight) -> Tensor:
    """``silu(x @ gate.T) * (x @ up.T)``, the gating in float32."""
    return (F.silu(linear(x, gate).float()) * linear(x, up).float()).to(x.dtype)


def float32_product(x: Tensor, weight: Weight) -> Tensor:
    """``x @ w.T`` not rounded to act."""
    return F.linear(x.float(), weight.decode().float())


def moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: tuple[ExpertStack, ExpertStack, ExpertStack],
    residual: Tensor,
    common: Tensor | None,
) -> Tensor:
    """Add the experts of every row in slot order, reading each expert once; then ``common`` float32."""
    gates, ups, downs = experts
    rows, slots = ids.shape
    chosen = ids.flatten().long()
    order = chosen.argsort(stable=True)  # places t * k + slot, those of one expert together
    gathered = x[order // slots]
    out = torch.empty_like(gathered)
    end = 0
    for expert, count in enumerate(chosen.bincount(minlength=len(gates)).tolist()):
        if count:
            start, end = end, end + count
            part = swiglu(gathered[start:end], gates[expert], ups[expert])
            out[order[start:end]] = linear(part, downs[expert])
    parts = out.view(rows, slots, -1)
    total = weights[:, :1] * parts[:, 0].float()
    for slot in range(1, slots):
        total = total + weights[:, slot : slot + 1] * parts[:, slot].float()
    if common is not None:
        total = total + common
    return (total + residual.float()).to(x.dtype)


def attend(q: Tensor, keys: Tensor, values: Tensor, position: int, scale: float) -> Tensor:
    """Causal attention of ``q [T, nq, D]``, the last T of the S rows ``[S, nkv, ...]``: ``[T, nq, Dv]``.

    The query heads of one key-value head become additional rows, so that keys are not copied.
    """
    rows, heads, dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    step = max(1, _MASK // (group * keys.shape[0]))
    out = []
    for first in range(0, rows, step):
        count = min(step, rows - first)
        end = position + first + count
        part = q[first : first + count].view(count, kv_heads, group, dim).permute(1, 2, 0, 3)
        at = torch.arange(position + first, end, device=q.device)
        seen = torch.arange(end, device=q.device) <= at[:, None]
        with sdpa_kernel(_ATTENTION, set_priority=True):
            mixed = F.scaled_dot_product_attention(
                part.reshape(1, kv_heads, group * count, dim),
                keys[:end].transpose(0, 1)[None],
                values[:end].transpose(0, 1)[None],
                attn_mask=seen.repeat(group, 1),
                scale=scale,
            )
        out.append(mixed.view(kv_heads, group, count, -1).permute(2, 0, 1, 3).reshape(count, heads, -1))
    return out[0] if len(out) == 1 else torch.cat(out)


def in_pieces(function: Callable[[int, int], Sequence[Tensor]], rows: int, most: int) -> list[Tensor]:
    """Call ``function(first, last)`` for every ``most`` rows, and join each of its results along the rows."""
    parts = [function(at, min(at + most, rows)) for at in range(0, rows, most)]
    return [torch.cat(columns) for columns in zip(*parts, strict=True)]
