"""Single calls of a verifier, and every position of deep drafts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import attrs
import hypothesis.strategies as st
import numpy as np

from specdec.backends.arrays import HostLogits
from specdec.contract import Context, Draft, DraftNoise, LogitsProcessor, Sampling, Verdict, Verifier
from specdec.drafters.gate import DraftGate, Drawing
from specdec.errors import UnsupportedError
from specdec.sampling import Rows, draw
from specdec.testing.distributions import Places
from specdec.testing.strategies import log_uniform, samplings, seeds

if TYPE_CHECKING:
    from numpy.typing import NDArray

VOCAB = 5


@attrs.frozen
class Alternates(LogitsProcessor):
    """Forbids every third id, which ones by the length of the row's own history; the last id is always allowed."""

    def process(self, logits: NDArray[np.float32], history: Sequence[int]) -> NDArray[np.float32]:
        masked = logits.copy()
        masked[:-1][(np.arange(len(logits) - 1) + len(history)) % 3 == 0] = -np.inf
        return masked


@attrs.frozen
class Case:
    """One call: the rows of a random model after a history and along a draft."""

    rows: NDArray[np.float32]
    history: list[int]
    draft: Draft
    sampling: Sampling
    generated_from: int = 0
    cycle: int = 1

    @property
    def vocab(self) -> int:
        """V."""
        return int(self.rows.shape[1])

    def context(self, noise: DraftNoise = DraftNoise.COUPLED) -> Context:
        """The call's context."""
        where = {"generated_from": self.generated_from, "cycle": self.cycle}
        return Context(list(self.history), self.sampling, draft_noise=noise, **where)

    def history_of(self, row: int) -> list[int]:
        """The tokens before ``row``."""
        return [*self.history, *self.draft.tokens[:row]]

    @property
    def law(self) -> Rows:
        """What plain decoding makes of each row: processed logits, the distribution, the chosen token."""
        return Rows(HostLogits(self.rows), self.draft.tokens, self.context())


_EDGES = (7, 8, 15, 63, 64, 100, 255, 256, 300, 600, 1100)
"""Lengths at which a late fault may begin; other lengths are on a log scale."""
_lengths = st.one_of(log_uniform(1, 8), log_uniform(1, 1200), st.sampled_from(_EDGES))
_depths = st.sampled_from([*range(4), *range(16)])  # up to the rows of a pass
_PALETTES = ("normal", "normal", "grid", "narrow", "flat", "one-hot", "last", "wide")
_TEMPERATURES = (0.0, 0.0, 1.0, 1.7, 1.0, 0.3, 0.05, 30.0, 2e-6)
_DRAFTED = ("any", "right", "right", "right", "wrong at the end", "close")
"""Any tokens; those of plain decoding; those but the last; or one of the three best of each row."""


def _rows(rng: np.random.Generator, palette: str, count: int, vocab: int, bound: float) -> NDArray[np.float32]:
    """Logits of one kind, ``[count, vocab]``."""
    values = rng.standard_normal((count, vocab)) * {"narrow": 0.3, "normal": 2.0, "wide": 700.0}.get(palette, 1.0)
    if palette == "grid":  # ties, forbidden tokens, far ones
        values = rng.choice([-3, -1.5, -0.5, 0, 0, 0.5, 1, 1.5, 3, 80, -80, -np.inf], (count, vocab))
    elif palette == "flat":
        values = np.zeros((count, vocab))
    elif palette == "one-hot":
        values = np.where(rng.integers(0, vocab, (count, 1)) == np.arange(vocab), 0.0, -np.inf)
    elif palette == "last":  # the last id is best, another is close
        values[:, -1] = values.max(axis=1) + 0.2
    elif palette == "near":  # this many nats below the best, or half, or a little more
        gaps = [0, bound / 2, 0.98 * bound, 1.02 * bound + 0.01, 1.9 * bound, 2 * bound + 1, 5 * bound, np.inf]
        values = -rng.choice(gaps, (count, vocab))
        if count > 1 and rng.random() < 0.5:  # all tokens of a draft are within the bound, and the last one is beyond
            values[:-2] = -rng.choice(gaps[:3], (count - 2, vocab))
            values[-2] = -rng.choice(gaps[3:5], vocab)
        values[:, -1] = 0.0
    return values.astype(np.float32)


@st.composite
def cases(draw: st.DrawFn, *, bound: float | None = None) -> Case:
    """Calls in which every row leaves a token allowed: the last one, which is never banned or impossible.

    Texts, drafts and vocabularies are short and long, and all settings are tried. ``bound``: half of the calls have
    tokens about this many nats below the best.
    """
    depth, length, vocab = draw(_depths), draw(_lengths), draw(st.sampled_from([VOCAB, VOCAB, VOCAB, 40, 2]))
    near = bound is not None and draw(st.booleans())
    palette = "near" if near else draw(st.sampled_from(_PALETTES))
    cycle = draw(st.one_of(st.integers(1, 99), st.sampled_from([999, 1000, 1001, 70_000])))
    # hypothesis repeats parts of a case in others: with all of these in the seed, none has the same numbers
    rng = np.random.default_rng([draw(seeds), depth, length, vocab, near, cycle])
    rows, last = _rows(rng, palette, depth + 1, vocab, bound or 0.0), vocab - 1
    rows[np.isneginf(rows[:, last]), last] = -1.0
    sampling = draw(samplings(vocab))
    if near and draw(st.booleans()):  # the settings drawn above move most tokens further away
        scale = max(bound or 0.0, 1e-3)
        biases = draw(st.dictionaries(st.integers(0, last), st.sampled_from([-0.3, -0.1, 0.1, 0.3, 2.0])))
        sampling = Sampling(seed=sampling.seed, logit_bias={token: bias * scale for token, bias in biases.items()})
    sampling = attrs.evolve(
        sampling,
        temperature=draw(st.sampled_from((0.0, 0.0, 1.0) if near else _TEMPERATURES)),
        banned=tuple(token for token in sampling.banned if token != last),
        end_tokens=tuple(token for token in sampling.end_tokens if token != last),
        logprobs=draw(st.sampled_from([None, None, 0, 2])),
        processors=draw(st.sampled_from([(), (), (), (Alternates(),)])),
    )
    history = rng.integers(0, vocab, length).tolist()
    case = Case(rows, history, Draft(), sampling, draw(st.one_of(st.just(0), st.integers(0, length))), cycle)
    return _drafted(case, "close" if near else draw(st.sampled_from(_DRAFTED)), rng, draw(st.booleans()))


def _drafted(case: Case, kind: str, rng: np.random.Generator, with_probs: bool) -> Case:
    """The case with a draft of one kind; with ``probs``, in which every token has a positive probability."""
    depth, vocab = len(case.rows) - 1, case.vocab
    for row in range(depth):
        token = int(rng.integers(vocab))
        if kind == "close":
            ranked = np.argsort(-case.rows[row], kind="stable")[:3]
            token = int(ranked[rng.integers(len(ranked))])
        elif kind == "right" or (kind == "wrong at the end" and row < depth - 1):
            token = case.law.choose(row)
        case = attrs.evolve(case, draft=Draft((*case.draft.tokens, token)))
    if not with_probs or not depth:
        return case
    weights = rng.integers(0, 9, (depth, vocab)) + np.where(rng.random((depth, 1)) < 0.3, 0.0, 0.004)
    weights[np.arange(depth), list(case.draft.tokens)] += 1  # the token itself must be possible
    probs = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    return attrs.evolve(case, draft=Draft(case.draft.tokens, probs))


def decide(verifier: Verifier, case: Case) -> Verdict | None:
    """The verdict, or None if the verifier refuses the settings."""
    try:
        return verifier.verify(case.draft, HostLogits(case.rows.copy()), case.context(verifier.draft_noise))
    except UnsupportedError:
        return None


def emitted(case: Case, verdict: Verdict) -> list[int]:
    """The tokens that a verdict commits."""
    return [*case.draft.tokens[: verdict.accepted], verdict.next_token]


# --- every position of drafts of every depth -------------------------------------------------------------------------

_EVEN = np.array([np.roll([0.34, 0.26, 0.22, 0.18], shift) for shift in range(4)])
_SURE = np.array([np.roll([0.97, 0.01, 0.01, 0.01], shift) for shift in range(4)])
_RARE = np.tile([0.4, 0.4, *[0.02] * 5, *[0.01] * 10], (17, 1))
_PAIRS = {"even": (_EVEN, _SURE), "rare tokens": (_RARE, np.full((17, 17), 1 / 17))}
"""Target and draft, the next token by the last one: the draft is sure of one token, or knows nothing of rare ones."""
_SETTINGS = {
    "plain": Sampling(temperature=1.0),
    "penalties": Sampling(temperature=0.8, presence_penalty=1.5, repetition_penalty=1.3, logit_bias={0: 0.5}),
    "filters": Sampling(temperature=1.0, top_k=3, min_p=0.45),
}
_CHOSEN = ("plain", "plain", "plain", "plain", "penalties", "filters")
_DRAFTS = ("drawn", "drawn", "drawn", "drawn from a part of the vocabulary", "best tokens without probs")


@cache
def _law(name: str, settings: str, last: int, before: frozenset[int]) -> NDArray[np.float64]:
    """The target's distribution after ``last``, where these tokens came ``before``; the prompt is a 0."""
    logits = HostLogits(np.log(_PAIRS[name][0][[last]]).astype(np.float32))
    return Rows(logits, (), Context([0, *before], _SETTINGS[settings], generated_from=1)).distribution(0)


def every_position(verifier: Verifier, draws: Iterable[int], seed: int) -> Places | None:
    """Drafts of 1 to 15 tokens that follow the target but at one position; None if the verifier refuses all settings.

    In a third of them there is no such position, so the bonus token is reached; in the others it is rather late. A
    quarter does not follow the target anywhere.
    """
    rng, places, taken = np.random.default_rng(seed), Places(seed), False
    for number in draws:
        name = "rare tokens" if number % 8 == 7 else "even"
        target, draft = _PAIRS[name]
        settings, kind = (options[int(rng.integers(len(options)))] for options in (_CHOSEN, _DRAFTS))
        depth = 1 + number % 15
        other = depth if rng.random() < 1 / 3 else int(rng.integers(depth, size=2).max())
        nowhere, some = rng.random() < 1 / 4, int(rng.integers(depth + 1))
        sampling = attrs.evolve(_SETTINGS[settings], seed=(seed + (number + 1) * 0x5851F42D4C957F2D) % 2**63)
        context = Context([0], sampling, generated_from=1, cycle=number + 1, draft_noise=verifier.draft_noise)
        drawing = Drawing(DraftGate(), context, reduced=False)
        for row in range(depth):
            last = drawing.tokens[-1] if row else 0
            logits = np.log((draft if nowhere or row == other else target)[last]).astype(np.float32)
            if kind == "best tokens without probs":
                drawing.tokens.append(int(logits.argmax()))
                continue
            if row == other and kind != "drawn":
                logits[-1] = -np.inf
            drawing.next(HostLogits(logits[None]))
        drafted, tokens = drawing.draft(), [0, *drawing.tokens]
        try:
            verdict = verifier.verify(drafted, HostLogits(np.log(target[tokens]).astype(np.float32)), context)
        except UnsupportedError:
            continue
        taken = True
        tokens = [*tokens[: verdict.accepted + 1], int(verdict.next_token)]
        while len(tokens) < depth + 2:  # the rest comes from the target
            tokens.append(draw(_law(name, settings, tokens[-1], frozenset(tokens[1:])), rng.random()))
        for row in {other, depth, 0, some}:
            before, token = tokens[: row + 1], tokens[row + 1]
            expected = _law(name, settings, before[-1], frozenset(before[1:]))
            excess = np.log(np.maximum(draft[before[-1]], 1e-3) / np.maximum(expected, 1e-3))
            groups = [f"{name}, every position", f"{name}, position {row}", f"{kind}, {settings}", f"{nowhere = }"]
            if row == other:
                place = "bonus tokens" if row == depth else "other positions"
                groups += [f"{name}, {place}", f"{place} of {depth} drafted tokens"]
                groups += [f"{place} from {least} on" for least in (1, 5, 8) if row >= least]
            places.add(groups, token, expected, excess)
    return places if taken else None
