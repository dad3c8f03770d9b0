"""The choice of tokens on the device: the best one, or one sampled by temperature, top-k, top-p and min-p.

The sampler computes in float32 and is the same for a plain and for a verified row. Its noise is keyed by seed, position
and token id. A row's token depends on that row alone: sorting is exact, and probabilities are added as integers, whose
sum has no order. The host's sampler (``specdec.sampling``) draws from the same distribution, not the same tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.backends.cuda.kernels import noise
from specdec.contract import Sampling

_LAST = 2**31 - 1  # greater than every token id


def best(logits: Tensor, ids: Tensor | None = None) -> Tensor:
    """The best token of every row ``[T]`` int32, the lowest id among equals; -1 if the best logit is not finite.

    ``ids`` int32 ``[n]`` are the token ids of the columns, in any order; without them, 0 to n - 1.
    """
    top = logits.amax(1, keepdim=True)  # NaN wins
    if ids is None:
        ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    token = torch.where(logits == top, ids, _LAST).amin(1)
    return torch.where(top[:, 0].abs() < torch.inf, token, -1)


def sample(logits: Tensor, sampling: Sampling, position: int, ids: Tensor | None = None) -> Tensor:
    """A token of every row of ``logits [T, n]`` float32, as in ``best``; row t decides ``position + t``.

    Args:
        sampling: of which temperature (above 0), filters and seed count.
        ids: as in ``best``, but ascending.
    """
    top = logits.amax(1, keepdim=True)
    below = (logits - top) / sampling.temperature
    key = torch.tensor([sampling.seed, position], dtype=torch.int64, device=logits.device)
    scores, shares = noise.perturb(below, key, ids)
    if sampling.top_k or sampling.top_p < 1.0:
        scores = scores.masked_fill(~_prefix(below, shares, sampling), -torch.inf)
    if sampling.min_p > 0.0:
        scores = scores.masked_fill(shares < sampling.min_p * noise.UNIT, -torch.inf)
    return torch.where(top[:, 0].abs() < torch.inf, best(scores, ids), -1)


def _prefix(below: Tensor, shares: Tensor, sampling: Sampling) -> Tensor:
    """Which tokens top-k and top-p keep: a mask like ``below [T, n]``."""
    order = below.sort(dim=1, descending=True, stable=True).indices  # columns are in the order of their ids
    keep = (torch.arange(below.shape[1], device=below.device) < (sampling.top_k or below.shape[1])).expand_as(below)
    if sampling.top_p < 1.0:
        mass = shares.gather(1, order) * keep
        before = mass.cumsum(1) - mass  # of all better tokens: the token that crosses top_p stays
        keep = keep & (before.double() < sampling.top_p * mass.sum(1, keepdim=True).double())
    return torch.empty_like(keep).scatter_(1, order, keep)
