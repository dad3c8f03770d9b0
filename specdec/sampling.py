"""Sampling: from logits to a token, with the same code for plain decoding and for every verified row.

Order: logits, bias, penalties (the row's own history), bans, processors, early ends, temperature, top-k, top-p, min-p.

Randomness is counter-based (Philox4x32-10; Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): the key
is the seed, and the counter holds absolute position, purpose, cycle and token id. There is no state to roll back, and
the noise of a position does not depend on how the sequence was generated.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from specdec.contract import Choosing, Context, DraftNoise, Logits, Sampling
from specdec.errors import ConfigError, ContractError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specdec.contract import Float32

    Float64 = NDArray[np.float64]
    Float64Like = NDArray[np.float64] | NDArray[np.float32]
    UInt32 = NDArray[np.uint32]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


class Purpose(enum.IntEnum):
    """The purpose of noise; equal purposes at one position share it."""

    TOKEN = 0  # decides a token: plain decoding, exact verification, coupled drafts
    DRAFT = 1  # independent drafts
    ACCEPT = 2  # ratio tests
    RESIDUAL = 3  # the token after a rejection, and the one after a fully accepted draft


def philox(counters: UInt32, seed: int) -> UInt32:
    """Philox4x32-10 of counters ``[N, 4]`` uint32 under a 64-bit key: ``[N, 4]`` uint32."""
    c0, c1, c2, c3 = (counters[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(_ROUNDS):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (right >> _HALF) ^ c1 ^ np.uint64(k0),
            right & _LOW,
            (left >> _HALF) ^ c3 ^ np.uint64(k1),
            left & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniforms(seed: int, position: int, purpose: Purpose, ids: NDArray[np.int64], cycle: int = 0) -> Float64:
    """Uniform numbers in the open interval (0, 1), one per token id: word ``id % 4`` of block ``id // 4``."""
    blocks, place = np.unique(ids >> 2, return_inverse=True)
    counters = np.empty((len(blocks), 4), dtype=np.uint32)
    counters[:, 0] = blocks
    counters[:, 1] = position
    counters[:, 2] = int(purpose)
    counters[:, 3] = cycle & 0xFFFFFFFF
    words: Float64 = philox(counters, seed)[place, ids & 3].astype(np.float64)
    return (words + 0.5) * 2.0**-32


def gumbel(seed: int, position: int, ids: NDArray[np.int64], purpose: Purpose, cycle: int = 0) -> Float64:
    """Standard Gumbel noise per token id: ``-log(-log(1 - u))`` with the uniforms above.

    ``1 - u`` rather than ``u``: small values of ``-log(1 - u)`` decide the maximum and keep the precision of u.
    """
    noise: Float64 = -np.log(-np.log1p(-uniforms(seed, position, purpose, ids, cycle)))
    return noise


def is_plain(sampling: Sampling) -> bool:
    """Whether a row's distribution is the softmax (or argmax) of its raw logits: no history, bans or filters."""
    s = sampling
    return s.top_k == 0 and s.top_p >= 1.0 and s.min_p <= 0.0 and keeps_logits(s)


def keeps_logits(sampling: Sampling) -> bool:
    """Whether temperature and filters get the raw logits: no history, bias, bans or processors change them."""
    s = sampling
    return (
        s.repetition_penalty == 1.0
        and s.presence_penalty == 0.0
        and s.frequency_penalty == 0.0
        and not s.logit_bias
        and not s.banned
        and s.min_new_tokens == 0
        and not s.processors
    )


def processed(row: Float32, history: Sequence[int], context: Context) -> Float64:
    """Logits ``[V]`` after bias, penalties, bans and processors; before temperature. ``history`` is the row's own."""
    s = context.sampling
    logits = row.astype(np.float64)
    for token, bias in s.logit_bias.items():
        logits[token] += bias
    if s.repetition_penalty != 1.0:
        seen = np.unique(np.asarray(history, dtype=np.int64))
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
    if s.presence_penalty or s.frequency_penalty:
        generated = np.asarray(history[context.generated_from :], dtype=np.int64)
        if len(generated):
            tokens, counts = np.unique(generated, return_counts=True)
            logits[tokens] -= s.presence_penalty + s.frequency_penalty * counts
    if s.banned:
        logits[list(s.banned)] = -np.inf
    if s.processors:
        narrow = logits.astype(np.float32)
        for processor in s.processors:
            narrow = processor.process(narrow, history)
        logits = narrow.astype(np.float64)
    if s.end_tokens and len(history) - context.generated_from < s.min_new_tokens:
        longer = logits.copy()
        longer[list(s.end_tokens)] = -np.inf
        if longer.max() > -np.inf or not s.processors:  # a grammar that is complete ends the text earlier
            logits = longer
    return logits


def survivors(logits: Float64, sampling: Sampling) -> tuple[NDArray[np.int64], Float64]:
    """Token ids (ascending) that sampling at temperature > 0 may choose, and their probabilities, which sum to 1.

    Ties are ordered by ascending id, so that the set is a function of the logits alone.
    Raises: ConfigError when every token is forbidden; ContractError when the logits are not finite.
    """
    _best(logits)
    ids = np.flatnonzero(logits > -np.inf)
    scaled = logits[ids] / sampling.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    if sampling.top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0:
        order = np.lexsort((ids, -probs))
        if sampling.top_k:
            order = order[: sampling.top_k]
        if sampling.top_p < 1.0:
            mass = probs[order] / probs[order].sum()
            before = np.cumsum(mass) - mass  # probability of all better tokens: the token that crosses top_p stays
            order = order[before < sampling.top_p]
        if sampling.min_p > 0.0:
            order = order[probs[order] >= sampling.min_p * probs[order[0]]]
        keep = np.sort(order)
        ids, probs = ids[keep], probs[keep]
        probs = probs / probs.sum()
    return ids, probs


class Rows:
    """The rows of one pass, each with its own history: the context and the drafted tokens before it.

    ``first`` is the lookahead position of the first row of ``logits`` (a draft step has one row, at its own position).
    """

    def __init__(self, logits: Logits, drafted: Sequence[int], context: Context, *, first: int = 0) -> None:
        self._logits = logits
        self._first = first
        self._drafted = drafted
        self._context = context
        self._plain = is_plain(context.sampling)
        self._greedy: list[int] | None = None
        self._chosen: Sequence[int | None] | None = None

    def history(self, row: int) -> list[int]:
        """The tokens before the one that ``row`` decides."""
        return [*self._context, *self._drafted[:row]]

    def processed(self, row: int) -> Float64:
        """The row's logits ``[V]`` float64 after every step before temperature."""
        raw = self._logits.rows()[row - self._first]
        return raw.astype(np.float64) if self._plain else processed(raw, self.history(row), self._context)

    def distribution(self, row: int) -> Float64:
        """The row's full distribution ``[V]`` float64; one-hot at temperature 0."""
        logits = self.processed(row)
        distribution = np.zeros(len(logits))
        if self._context.sampling.temperature == 0:
            distribution[_best(logits)] = 1.0
        else:
            ids, probs = survivors(logits, self._context.sampling)
            distribution[ids] = probs
        return distribution

    def argmax(self, row: int) -> int:
        """The best token of the row after processing, the lowest id among equals."""
        if self._plain:
            if self._greedy is None:
                self._greedy = self._logits.argmax()
            return self._greedy[row - self._first]
        token = self._decided(row) if self._context.sampling.temperature == 0 else None
        return _best(self.processed(row)) if token is None else token

    def choose(self, row: int) -> int:
        """The token that plain decoding chooses: argmax at temperature 0, else by the position's noise.

        ``argmax_v(log P(v) + G(seed, position, v))`` is distributed as P (Gumbel 1954; Maddison et al. 2014,
        arXiv:1411.0030), and is a function of target, history and seed alone.
        """
        sampling = self._context.sampling
        if sampling.temperature == 0:
            return self.argmax(row)
        token = self._decided(row)
        if token is not None:
            return token
        ids, probs = survivors(self.processed(row), sampling)
        noise = gumbel(sampling.seed, len(self._context) + row, ids, Purpose.TOKEN)
        with np.errstate(divide="ignore"):  # a probability that underflowed to 0 never wins
            return int(ids[np.argmax(np.log(probs) + noise)])

    def _decided(self, row: int) -> int | None:
        """The token of a row, if the backend chooses it."""
        if self._chosen is None:
            context = self._context
            alone = context.sampling.processors or not 0 <= context.generated_from <= len(context)
            self._chosen = () if alone else self._logits.choose(Choosing(self._drafted, context, self._first))
        return self._chosen[row - self._first] if self._chosen else None

    def reported(self, tokens: Sequence[int]) -> list[tuple[float, list[tuple[int, float]]]]:
        """The raw log-probabilities of ``tokens`` (temperature 1, nothing processed), one for each of the first rows.

        With each come the best tokens of its row and theirs.
        """
        logits, count = self._logits, self._context.sampling.logprobs or 0
        ids, values = logits.topk(max(count, 1))
        entries = []
        for row, (token, raw) in enumerate(zip(tokens, logits.rows(), strict=False)):
            total = _log_sum(raw.astype(np.float64))
            top = [(token, value - total) for token, value in zip(ids[row][:count], values[row], strict=False)]
            entries.append((float(raw[token]) - total, top))
        return entries


def _log_sum(row: Float64) -> float:
    """The logarithm of the sum of exp over one row ``[V]``; of that row alone, so that a plain pass gives its bits."""
    best = row.max()
    return float(best + np.log(np.exp(row - best).sum()))


@attrs.frozen(eq=False)
class CoupledDraft:
    """Chooses draft tokens by ``draft_token`` where those are point masses: what a target may do on its device.

    Called with the logits of a step and the tokens drafted before it, as ``ForwardPass.draft_mtp`` does. The draft ends
    where no token is allowed; if that is the settings' fault, the target's own row says so.
    """

    context: Context

    def __call__(self, logits: Logits, drafted: Sequence[int]) -> int | None:
        try:
            return draft_token(logits, drafted, self.context)[0]
        except ConfigError:
            return None


def draft_token(logits: Logits, drafted: Sequence[int], context: Context) -> tuple[int, Float32 | None]:
    """The token that a model-based drafter drafts after ``drafted``, from the single row of its ``logits``.

    COUPLED noise (and temperature 0) gives a point mass: the token chosen by the noise that the target will use.
    INDEPENDENT noise gives a draw from the drafter's distribution, and that distribution ``[V]`` float32, rounded
    before the draw so that the token is drawn from exactly what is returned.
    """
    rows = Rows(logits, drafted, context, first=len(drafted))
    sampling, row = context.sampling, len(drafted)
    if sampling.temperature == 0 or context.draft_noise is DraftNoise.COUPLED:
        return rows.choose(row), None
    distribution = rows.distribution(row).astype(np.float32)
    position = len(context) + row
    u = uniforms(sampling.seed, position, Purpose.DRAFT, np.zeros(1, np.int64), context.cycle)[0]
    return draw(distribution.astype(np.float64), float(u)), distribution


def draw(distribution: Float64, u: float) -> int:
    """The token at quantile ``u`` in (0, 1) of a distribution ``[V]``; never a token of probability 0."""
    cumulative = np.cumsum(distribution)
    token = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    while token >= len(distribution) or distribution[token] == 0.0:  # rounding at the last step
        token -= 1
    return token


def _best(logits: Float64) -> int:
    """The best token. Raises: as ``survivors``."""
    token = int(np.argmax(logits))  # NaN wins
    if logits[token] == -np.inf:
        raise ConfigError(
            "no token is allowed here: bans, min_new_tokens (no end yet) and processors together forbid the whole "
            "vocabulary",
            try_="fewer bans, or a grammar that can end",
        )
    if not np.isfinite(logits[token]):
        raise ContractError(f"the target's logits are not finite (token {token}: {logits[token]})")
    return token
