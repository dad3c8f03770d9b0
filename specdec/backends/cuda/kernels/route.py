"""The choice of experts: scores, groups, top k and weights, one program per row.

Source: ``specdec.backends.ops.Routing``, which cites the papers. Ties go to the lower id.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.backends.cuda.kernels.launch import launch
from specdec.backends.ops import Routing


@triton.jit
def _take(values, open_, at, count):
    """Index and value of the best open entry; a NaN is never the best, and the index is below ``count``."""
    best = tl.max(tl.where(open_, values, float("-inf")), 0)
    place = tl.min(tl.where(open_ & (values == best), at, count - 1), 0)
    return place, best


@triton.jit
def _choose(
    logits,
    bias,
    ids,
    weights,
    experts,
    top_k,
    scale,
    groups,
    kept_groups,
    per_group,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    BIASED: tl.constexpr,
    GROUPED: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    t = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    there = e < experts
    x = tl.load(logits + t * experts + e, there, other=float("-inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    else:
        powers = tl.exp(x - tl.max(x, 0))
        scores = powers / tl.sum(powers, 0)
    choice = scores
    if BIASED:
        choice = scores + tl.load(bias + e, there, other=0.0)
    open_ = there
    if GROUPED:
        group = e // per_group
        g = tl.arange(0, GROUPS)
        worth = tl.full([GROUPS], float("-inf"), tl.float32)
        for i in range(groups):
            inside = there & (group == i)
            place, first = _take(choice, inside, e, experts)
            _, second = _take(choice, inside & (e != place), e, experts)
            worth = tl.where(g == i, first + second, worth)
        left = g < groups
        kept = e < 0
        for _ in range(kept_groups):
            place, _value = _take(worth, left, g, groups)
            left = left & (g != place)
            kept = kept | (group == place)
        open_ = there & kept
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros([SLOTS], tl.int32)
    shares = tl.zeros([SLOTS], tl.float32)
    total = 0.0
    for s in range(top_k):
        place, _value = _take(choice, open_, e, experts)
        open_ = open_ & (e != place)
        share = tl.sum(tl.where(e == place, scores, 0.0), 0)
        total += share  # from left to right, as the reference does
        chosen = tl.where(slot == s, place, chosen)
        shares = tl.where(slot == s, share, shares)
    if NORMALISED:
        shares = shares / (total + 1e-20)
    tl.store(ids + t * top_k + slot, chosen, slot < top_k)
    tl.store(weights + t * top_k + slot, shares * scale, slot < top_k)


def choose(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Ids ``[T, k]`` int32 and weights ``[T, k]`` float32, best first, from the router's logits ``[T, E]`` float32."""
    rows, experts = logits.shape
    top_k = routing.top_k
    ids = torch.empty(rows, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    launch(
        _choose,
        (rows,),
        logits,
        logits if bias is None else bias,
        ids,
        weights,
        experts,
        top_k,
        routing.scale,
        routing.groups,
        routing.kept_groups,
        experts // routing.groups,
        SIGMOID=routing.scores == "sigmoid",
        NORMALISED=routing.normalised,
        BIASED=bias is not None,
        GROUPED=routing.groups > 1,
        EXPERTS=triton.next_power_of_2(experts),
        SLOTS=triton.next_power_of_2(top_k),
        GROUPS=triton.next_power_of_2(routing.groups),
    )
    return ids, weights
