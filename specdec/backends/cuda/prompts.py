"""Experts and attention of passes of more than 16 rows (prompts), by torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own convention)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from specdec.backends.cuda import products
from specdec.backends.cuda.weights import ExpertStack

# torch's own choice among its kernels changes with its version and with what is installed; the second one takes shapes
# that the first refuses
_ATTENTION = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_MASK = 2**26  # entries of the largest attention mask built at once


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
            part = products.swiglu(gathered[start:end], gates[expert], ups[expert])
            out[order[start:end]] = products.linear(part, downs[expert])
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
