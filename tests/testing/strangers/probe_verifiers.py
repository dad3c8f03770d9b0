"""For each broken verifier, a few calls that show its fault, and nothing where a right verifier is asked."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np

from specdec import Context, Draft, Guarantee, LogitsProcessor, Sampling, Verdict
from specdec.backends.arrays import HostLogits
from specdec.contract import DraftNoise
from specdec.errors import UnsupportedError
from specdec.sampling import Purpose, draw, gumbel, uniforms
from specdec.verifiers.strict import StrictVerifier

VOCAB = 40


class Alternating(LogitsProcessor):
    """Even ids after odd lengths and odd ids after even ones."""

    def process(self, logits: Any, history: Any) -> Any:
        logits = logits.copy()
        logits[len(history) % 2 :: 2] = -np.inf
        return logits

    def legal(self, draft: Any, history: Any) -> int:
        return len(draft)


def rows_of(count: int, seed: int = 0, scale: float = 2.0, vocab: int = VOCAB) -> Any:
    return (np.random.default_rng(seed).standard_normal((count, vocab)) * scale).astype(np.float32)


def about(
    length: int = 12, cycle: int = 0, generated_from: int = 4, noise: Any = DraftNoise.COUPLED, **settings: Any
) -> Context:
    tokens = [int(token) for token in np.random.default_rng(length).integers(0, VOCAB, length)]
    return Context(tokens, Sampling(**settings), generated_from=generated_from, cycle=cycle, draft_noise=noise)


def unlike_plain(
    kind: Any, array: Any = None, *, drafted: int = 3, seeds: int = 60, verifier: Any = None, **how: Any
) -> bool:
    """Whether it decides otherwise than the built-in exact verifier, for right drafts and half-right ones."""
    strict, verifier = StrictVerifier(), verifier or kind()
    for seed in range(seeds):
        rows = rows_of(drafted + 1, seed) if array is None else array
        context = about(**({"seed": seed} | how))
        tokens: list[int] = []
        for at in range(drafted):
            verdict = strict.verify(Draft(tuple(tokens)), HostLogits(rows[: at + 1]), context)
            tokens.append(verdict.next_token)
        for draft in (Draft(tuple(tokens)), Draft((*tokens[:-1], (tokens[-1] + 1) % VOCAB))):
            logits = HostLogits(rows)
            if verifier.verify(draft, logits, context) != strict.verify(draft, logits, context):
                return True
    return False


def with_memory(kind: Any, calls: int = 1) -> bool:
    """Whether a verdict depends on those before it."""
    used, other = kind(), rows_of(4, 1)
    for number in range(calls):
        context = about(70, cycle=number)
        used.verify(Draft((1, 2, 3)), HostLogits(other), context)
    for seed in range(2, 30):
        rows, context = rows_of(4, seed), about(70)
        draft = Draft(tuple(int(np.argsort(row)[-4]) for row in rows[:3]))
        if used.verify(draft, HostLogits(rows), context) != kind().verify(draft, HostLogits(rows), context):
            return True
    return False


def ranked(rows: Any, rank: int) -> Draft:
    """Every token is the one of this rank, 0 the best."""
    return Draft(tuple(int(np.argsort(-row, kind="stable")[rank]) for row in rows[:-1]))


def spread(count: int, gap: float) -> Any:
    """Rows whose second token is ``gap`` nats below the first."""
    rows = np.full((count, VOCAB), -9, np.float32)
    rows[:, 3], rows[:, 5] = 0, -gap
    return rows


def further_than_bound(kind: Any, rows: Any, draft: Draft, **settings: Any) -> bool:
    verifier, bias = kind(), settings.get("logit_bias", {})
    if verifier.guarantee is not Guarantee.BOUNDED:
        return False
    verdict = verifier.verify(draft, HostLogits(rows), about(**settings))
    shown = rows.copy()
    for token, nats in bias.items():
        shown[:, token] += nats
    gaps = [shown[at].max() - shown[at][token] for at, token in enumerate(draft.tokens[: verdict.accepted])]
    return any(gap > verifier.bound + 1e-5 for gap in gaps)


def misreports(kind: Any, gaps: tuple[float, ...], **settings: Any) -> bool:
    rows = spread(len(gaps) + 1, 0.0)
    for at, gap in enumerate(gaps):
        rows[at, 5] = -gap
    draft = Draft(tuple(5 if gap else 3 for gap in gaps))
    bias = settings.get("logit_bias", {})
    verdict = kind().verify(draft, HostLogits(rows), about(**settings))
    right = tuple((at, float(gap - bias.get(5, 0))) for at, gap in enumerate(gaps) if gap)
    plain = all(type(at) is int and type(gap) is float for at, gap in verdict.deviations)
    return not plain or len(right) != len(verdict.deviations) or not np.allclose(verdict.deviations, right, atol=1e-4)


def three_tokens(kind: Any, seed: int, target: Any, proposed: Any, *, probs: bool) -> tuple[int, ...]:
    """The first three tokens of a run with drafts of two tokens; every position has a distribution of its own."""
    verifier, tokens, cycle = kind(), [0], 0
    sampling = Sampling(temperature=1.0, seed=seed)
    coupled = kind.draft_noise is DraftNoise.COUPLED
    while len(tokens) < 4:
        at, drafted = len(tokens), []
        context = Context(list(tokens), sampling, generated_from=1, cycle=cycle, draft_noise=kind.draft_noise)
        for position in (at, at + 1):
            if coupled:
                noise = gumbel(seed, position, np.arange(4), Purpose.TOKEN)
                drafted.append(int(np.argmax(np.log(proposed[position]) + noise)))
            elif probs:
                u = uniforms(seed, position, Purpose.DRAFT, np.zeros(1, np.int64), cycle)[0]
                drafted.append(int(draw(proposed[position].astype(np.float64), float(u))))
            else:
                drafted.append(int(proposed[position].argmax()))
        draft = Draft(tuple(drafted), proposed[at : at + 2] if probs and not coupled else None)
        logits = HostLogits(np.log(target[at : at + 3]).astype(np.float32))
        verdict = verifier.verify(draft, logits, context)
        tokens += [*draft.tokens[: verdict.accepted], verdict.next_token]
        cycle += 1
    return tuple(tokens[1:4])


@functools.cache
def biased(kind: Any, case: str = "any", *, probs: bool = True) -> bool:
    """Whether the joint distribution of three tokens is not the target's, by the chi-square of its 64 cells."""
    noise = np.random.default_rng(3)
    target, proposed = (noise.dirichlet(np.ones(4) * 2, 8) for _ in range(2))
    if case == "tails":
        target = np.tile([0.015, 0.015, 0.485, 0.485], (8, 1))
    if case == "apart":
        target, proposed = np.tile([0.1, 0.3, 0.3, 0.3], (8, 1)), np.tile([0.7, 0.1, 0.1, 0.1], (8, 1))
    proposed, runs = proposed.astype(np.float32), 1500
    counts = np.zeros((4, 4, 4))
    for seed in range(runs):
        counts[three_tokens(kind, seed, target, proposed, probs=probs)] += 1
    expected = np.einsum("a,b,c->abc", target[1], target[2], target[3]) * runs
    return float(((counts - expected) ** 2 / expected).sum()) > 115


def raises(call: Callable[[], Any], allowed: tuple[type[BaseException], ...] = ()) -> bool:
    try:
        with np.errstate(all="ignore"):
            call()
    except allowed:
        return False
    except Exception:  # noqa: BLE001 - whatever it raises is the fault
        return True
    return False


def no_error_for_two_rows(kind: Any) -> bool:
    return not raises(lambda: kind().verify(Draft(), HostLogits(rows_of(2)), about()))


def types(kind: Any, drafted: int, **settings: Any) -> bool:
    rows = rows_of(drafted + 1)
    verdict = kind().verify(ranked(rows, 0), HostLogits(rows), about(**settings))
    return not type(verdict.accepted) is type(verdict.next_token) is int


def equal_distributions(kind: Any) -> bool:
    """A residual of no mass: the test's number reaches 1 for some seed."""
    rows = rows_of(2, vocab=4)
    probs = np.exp(rows[:1].astype(np.float64))
    probs = (probs / probs.sum()).astype(np.float32)
    rows[0] = np.log(probs[0])
    verifier = kind()
    with mock.patch.object(verifier, "test", return_value=1.0), np.errstate(all="ignore"):
        context = about(temperature=1.0, noise=DraftNoise.INDEPENDENT)
        law = verifier.residual(probs[0].astype(np.float64), probs[0].astype(np.float64))
        verifier.verify(Draft((2,), probs), HostLogits(rows), context)
    return not np.isfinite(law).all()


def wide_logits(kind: Any) -> bool:
    rows = np.zeros((2, VOCAB), np.float32)
    rows[:, 7], rows[:, 3] = 900, 800
    context = about(temperature=1.0)
    with np.errstate(all="ignore"):
        made = (
            None
            if raises(lambda: kind().verify(Draft((7,)), HostLogits(rows), context))
            else kind().verify(Draft((7,)), HostLogits(rows), context)
        )
    return made != Verdict(1, 7)


def bans_later(kind: Any) -> bool:
    rows = spread(3, 0.1)
    for seed in range(30):
        context = about(temperature=1.0, banned=(5,), seed=seed, noise=DraftNoise.INDEPENDENT)
        verdict = kind().verify(Draft((3,)), HostLogits(rows[:2]), context)
        if verdict.next_token == 5:
            return True
    return False


def says_argmax(kind: Any) -> bool:
    return kind().is_argmax(Sampling(logit_bias={1: 3.0})) or kind().is_argmax(Sampling(repetition_penalty=1.2))


def refuses_otherwise(kind: Any) -> bool:
    context = about(temperature=0.7)
    return raises(lambda: kind().verify(Draft(), HostLogits(rows_of(1)), context), (UnsupportedError,))


def writes_logits(kind: Any) -> bool:
    rows = rows_of(3)
    before = rows.copy()
    kind().verify(Draft((1, 2)), HostLogits(rows), about(banned=(4,)))
    return not np.array_equal(rows, before)


def writes_probs(kind: Any) -> bool:
    probs = np.full((1, VOCAB), (1 - 0.01) / (VOCAB - 20), np.float32)
    probs[0, :20] = 0.0005
    before, context = probs.copy(), about(temperature=1.0, noise=DraftNoise.INDEPENDENT)
    kind().verify(Draft((30,), probs), HostLogits(rows_of(2)), context)
    return not np.array_equal(probs, before)


def moves_numpy(kind: Any) -> bool:
    np.random.seed(77)
    for seed in range(5):
        context = about(temperature=1.0, seed=seed, noise=DraftNoise.INDEPENDENT)
        kind().verify(Draft((1,)), HostLogits(rows_of(2)), context)
    return bool(np.random.random_sample() != np.random.RandomState(77).random_sample())


def by_clock(kind: Any) -> bool:
    rows = rows_of(3)
    with mock.patch("time.perf_counter", side_effect=itertools.count().__next__):
        slow = kind().verify(ranked(rows, 1), HostLogits(rows), about())
    with mock.patch("time.perf_counter", side_effect=itertools.repeat(1.0).__next__):
        return bool(slow != kind().verify(ranked(rows, 1), HostLogits(rows), about()))


def keeps_logits(kind: Any) -> bool:
    verifier, logits = kind(), HostLogits(rows_of(2))
    alive = weakref.ref(logits)
    verifier.verify(Draft((1,)), logits, about())
    del logits
    gc.collect()
    return alive() is not None


def ties() -> Any:
    rows = np.zeros((4, VOCAB), np.float32)
    rows[:, [4, 9]] = 2
    return rows


def last_id() -> Any:
    rows = rows_of(4)
    rows[:, -1] = 30
    return rows


PROBES: dict[str, Callable[[Any], bool]] = {
    "CountsThousands": lambda kind: unlike_plain(kind, temperature=1.0, cycle=1000),
    "SevenRows": lambda kind: unlike_plain(kind, drafted=8),
    "KnowsPositions": with_memory,
    "WideningMargin": lambda kind: further_than_bound(kind, spread(10, 0.8), Draft((3,) * 7 + (5, 5))),
    "LongTexts": lambda kind: unlike_plain(kind, length=400, frequency_penalty=0.7),
    "PositionBytes": lambda kind: unlike_plain(kind, length=255, temperature=1.0),
    "WithoutLastId": lambda kind: unlike_plain(kind, last_id()),
    "LastOfTies": lambda kind: unlike_plain(kind, ties()),
    "EmptyDraftUnchecked": no_error_for_two_rows,
    "NoResidual": equal_distributions,
    "NaiveSoftmax": wide_logits,
    "ShortSeeds": lambda kind: unlike_plain(kind, temperature=1.0, seed=2**32 + 9),
    "RawWithLogprobs": lambda kind: unlike_plain(kind, logprobs=2, repetition_penalty=1.7),
    "OneMask": lambda kind: unlike_plain(kind, processors=(Alternating(),)),
    "CommittedPenalties": lambda kind: unlike_plain(kind, spread(4, 0.5), frequency_penalty=2.0),
    "ColdIsGreedy": lambda kind: unlike_plain(kind, spread(4, 0.02), temperature=0.05),
    "ForgetsMinP": lambda kind: unlike_plain(kind, temperature=1.5, top_k=20, min_p=0.4),
    "AlwaysArgmax": says_argmax,
    "RefusesRawly": refuses_otherwise,
    "BansInFirstRow": bans_later,
    "DecimalGaps": lambda kind: misreports(kind, (0.4,)),
    "ShiftedDeviations": lambda kind: misreports(kind, (0.4, 0.0, 0.0, 0.3, 0.0)),
    "NumpyDeviations": lambda kind: misreports(kind, (0.4,)),
    "CleanWhenFull": lambda kind: misreports(kind, (0.4, 0.3)),
    "RawGaps": lambda kind: misreports(kind, (0.4,), logit_bias={5: 0.2}),
    "RawMargin": lambda kind: further_than_bound(kind, spread(2, 0.4), Draft((5,)), logit_bias={5: -2.0}),
    "OneTest": biased,
    "EarlierBonus": biased,
    "FullAfterRejection": lambda kind: biased(kind, probs=False),
    "NoiseOfDrafts": lambda kind: biased(kind, "apart"),
    "WantsCoupled": biased,
    "HalfRatio": lambda kind: biased(kind, "tails"),
    "MasksInPlace": writes_logits,
    "RescalesDraft": writes_probs,
    "NumpyToken": lambda kind: types(kind, 2, temperature=1.0),
    "GlobalTest": moves_numpy,
    "Impatient": by_clock,
    "KeepsEverything": keeps_logits,
    "BoundlessRank": lambda kind: further_than_bound(kind, spread(2, 3.0), Draft((5,))),
    "StopsBeforeLast": lambda kind: unlike_plain(kind, drafted=4),
    "KeepsTheRejected": lambda kind: biased(kind, probs=False),
    "OneUniform": lambda kind: biased(kind, "apart"),
    "BiasAfterTemperature": lambda kind: unlike_plain(kind, temperature=2.0, logit_bias={3: 2.0, 5: 1.5, 9: -2.0}),
    "ArgmaxDespiteBans": lambda kind: kind().is_argmax(Sampling(min_new_tokens=3, end_tokens=(2,))),
}
