"""Choose the tokens of rows of logits on the device, as ``specdec.sampling.Rows`` does on the host.

Bias, penalties and bans are computed by the reference itself, on the few logits that they change. The filters keep a
prefix of the tokens in the order (probability descending, id ascending), so a row is sorted, its probabilities are
added up in float64, and every filter becomes a count or a bound. Sums are rounded in another order than on the host;
where that could decide, a token is neither surely kept nor surely dropped. Then the noise is added in float32, and only
the tokens that could win leave the device: the host computes their scores with the reference's own noise, in float64.

A token that is returned is the reference's. A row that rounding could decide has None (one in many thousands).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch
from torch import Tensor

from specdec.backends.cuda.kernels import head
from specdec.backends.cuda.kernels.launch import MAX_ROWS
from specdec.contract import Choosing, Context, Sampling
from specdec.sampling import Purpose, gumbel, keeps_logits, processed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specdec.contract import Float32

_EPSILON = 2.0**-52
_TIE = 1e-14  # probabilities whose logarithms are closer than this may change places, or be equal, by rounding
_SHARE = 1e-12  # relative error of a probability
_NOISE = 1e-4  # of a score in float32; the noise itself is within 1e-5
_SCORE = 1e-9  # of a score in float64


def choose(logits: Tensor, choosing: Choosing, ids: NDArray[np.int32] | None = None) -> list[int | None]:
    """The token of every row of ``logits [T, n]`` float32; None for a row that is not finite or not certain.

    ``ids`` ``[n]`` are the token ids of the columns, ascending; without them, 0 to n - 1. All other tokens count as
    forbidden.
    """
    chosen: list[int | None] = []
    for at in range(0, len(logits), MAX_ROWS):
        part = Choosing(choosing.drafted, choosing.context, choosing.first + at)
        chosen += _choose(logits[at : at + MAX_ROWS], part, ids)
    return chosen


def _choose(logits: Tensor, choosing: Choosing, ids: NDArray[np.int32] | None) -> list[int | None]:
    sampling = choosing.sampling
    x = _edited(logits, choosing, ids)
    top = x.amax(1, keepdim=True)
    if sampling.temperature == 0:
        columns = torch.arange(x.shape[1], device=x.device)
        best = torch.where(x == top, columns, x.shape[1]).amin(1)
        found = torch.stack([best.double(), top[:, 0]], 1).tolist()
        return [_id(int(column), ids) if np.isfinite(value) else None for column, value in found]
    # the reference's operations, so that equal values are equal there; only what follows exp is rounded otherwise
    scaled = x / sampling.temperature
    below = scaled - scaled.amax(1, keepdim=True)  # nats below the best token
    sure = x > -torch.inf
    maybe = sure
    if sampling.top_k or sampling.top_p < 1.0:
        first, last = _prefix(below, sampling)
        sure, maybe = sure & first, maybe & last
    if sampling.min_p > 0.0:
        share = below.exp()
        sure = sure & ((share >= sampling.min_p * (1 + _SHARE)) | (below == 0.0))
        maybe = maybe & (share >= sampling.min_p * (1 - _SHARE))
    position = len(choosing.context) + choosing.first
    noise = head.Noise.of(sampling.seed, position, 1.0, x.device)
    on_device = None if ids is None else torch.from_numpy(ids).to(x.device)
    score = head.perturbed(below.float(), noise, ids=on_device)
    floor = torch.where(sure, score, -torch.inf).amax(1, keepdim=True)
    contends = maybe & (score >= floor - _NOISE) & torch.isfinite(top)
    rows, columns = contends.nonzero(as_tuple=True)
    facts = torch.stack([rows.double(), columns.double(), below[rows, columns], sure[rows, columns].double()])
    return _winners(len(x), facts.cpu().numpy(), sampling.seed, position, ids)


def _id(column: int, ids: NDArray[np.int32] | None) -> int:
    return column if ids is None else int(ids[column])


def _winners(
    rows: int, facts: NDArray[np.float64], seed: int, position: int, ids: NDArray[np.int32] | None
) -> list[int | None]:
    """The best of the contenders of every row, if it surely is the best and surely kept."""
    chosen: list[int | None] = []
    for row in range(rows):
        _, columns, below, sure = facts[:, facts[0] == row]
        tokens = columns.astype(np.int64) if ids is None else ids[columns.astype(np.int64)].astype(np.int64)
        if not len(tokens):
            chosen.append(None)
            continue
        scores = below + gumbel(seed, position + row, tokens, Purpose.TOKEN)
        best = int(np.argmax(scores))
        close = np.sort(scores)[-2:]
        certain = sure[best] and (len(close) == 1 or close[1] - close[0] > _SCORE)
        chosen.append(int(tokens[best]) if certain else None)
    return chosen


def _prefix(below: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The tokens that top-k and top-p surely keep, and those that they may keep: two masks like ``below [T, n]``."""
    size = below.shape[1]
    ordered, order = below.sort(dim=1, descending=True, stable=True)  # columns are ascending ids
    kept = min(sampling.top_k or size, size)
    few = torch.full((len(below), 1), kept, device=below.device)
    most = few
    if sampling.top_p < 1.0:
        mass = ordered[:, :kept].exp()
        before = (mass.cumsum(1) - mass) / mass.sum(1, keepdim=True)
        bound = 4 * _EPSILON * (size + 8)
        few = (before < sampling.top_p - bound).sum(1, keepdim=True).clamp(min=1)  # the best token always stays
        most = (before < sampling.top_p + bound).sum(1, keepdim=True).clamp(min=1)
    place = torch.arange(size, device=below.device)
    sure, maybe = place < few, place < most
    for count in (few, most):
        inside = ordered.gather(1, count - 1)
        outside = ordered.gather(1, count.clamp(max=size - 1))
        ends = count >= size  # nothing is outside
        near = _near(ordered, inside) | (_near(ordered, outside) & ~ends)
        moving = near.any(1, keepdim=True) & ((ordered - inside).abs() <= _TIE)
        moving |= near.any(1, keepdim=True) & ((ordered - outside).abs() <= _TIE) & ~ends
        sure, maybe = sure & ~moving, maybe | moving
    return torch.empty_like(sure).scatter_(1, order, sure), torch.empty_like(maybe).scatter_(1, order, maybe)


def _near(values: Tensor, at: Tensor) -> Tensor:
    """Where a value is so close to ``at`` that rounding may make them equal or change their places."""
    return (values != at) & ((values - at).abs() <= _TIE)


# --- bias, penalties and bans -----------------------------------------------------------------------------------------


def _edited(logits: Tensor, choosing: Choosing, ids: NDArray[np.int32] | None) -> Tensor:
    """Float64 logits ``[T, n]`` after ``specdec.sampling.processed``, which runs on the host for what it may change."""
    x = logits.double()
    if keeps_logits(choosing.sampling):
        return x
    tokens, penalised = _changeable(choosing)
    if ids is None:
        there, columns = tokens < x.shape[1], tokens[tokens < x.shape[1]]
    else:
        there = np.isin(tokens, ids)
        columns = np.searchsorted(ids, tokens[there])
    at = torch.from_numpy(columns).to(x.device)
    raw: Float32 = np.full((len(x), len(tokens)), -np.inf, dtype=np.float32)
    raw[:, there] = logits[:, at].cpu().numpy()
    length = len(choosing.context) + choosing.first
    history: Sequence[int] = range(length + len(x))  # without penalties only its length counts
    if penalised:
        history = np.searchsorted(tokens, [*choosing.context, *choosing.drafted]).tolist()
    context = _renumbered(choosing, tokens)
    edited = np.stack([processed(one, history[: length + row], context) for row, one in enumerate(raw)])
    x[:, at] = torch.from_numpy(edited[:, there]).to(x.device)
    return x


def _changeable(choosing: Choosing) -> tuple[NDArray[np.int64], bool]:
    """The ids of all tokens whose logits may change, ascending, and whether those of the history are among them."""
    s = choosing.sampling
    penalised = s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0
    tokens = [*s.logit_bias, *s.banned, *s.end_tokens]
    if penalised:
        tokens += [*choosing.context.seen().ids, *choosing.drafted]
    return np.unique(np.array(tokens, dtype=np.int64)), penalised


def _renumbered(choosing: Choosing, tokens: NDArray[np.int64]) -> Context:
    """A context whose sampling names tokens by their places among ``tokens``."""
    place = {int(token): at for at, token in enumerate(tokens)}
    s = choosing.sampling
    sampling = attrs.evolve(
        s,
        logit_bias={place[token]: bias for token, bias in s.logit_bias.items()},
        banned=tuple(place[token] for token in s.banned),
        end_tokens=tuple(place[token] for token in s.end_tokens),
    )
    return Context([], sampling, generated_from=choosing.context.generated_from)
