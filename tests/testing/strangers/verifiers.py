"""Broken verifiers: each has one fault of those that a verifier's author makes, and otherwise works.

Every docstring quotes the sentence of the contract that the class breaks; "missing:" starts one that it ought to have.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import numpy as np

from specdec import Context, Draft, Guarantee, Logits, Sampling, Verdict, Verifier, VerifierSpec
from specdec.contract import DraftNoise
from specdec.errors import ShapeError, UnsupportedError
from specdec.sampling import Purpose, Rows, draw, gumbel, is_plain, processed, uniforms

BROKEN: dict[type[Verifier], str] = {}


def broken(fault: str) -> Callable[[type[Any]], type[Any]]:
    """Enter the class into the table under its class of fault."""

    def enter(kind: type[Any]) -> type[Any]:
        BROKEN[kind] = fault
        return kind

    return enter


def spec(kind: type[Any]) -> VerifierSpec:
    """How the verifier is registered."""
    return VerifierSpec(name=f"stranger-{kind.__name__}", factory=kind)


# --- right ones, of which the broken ones change a part ---------------------------------------------------------------


class Exact(Verifier):
    """Chooses every token by the noise of its position and accepts a draft as far as it agrees."""

    guarantee: ClassVar[Guarantee] = Guarantee.EXACT

    def __init__(self, config: Any = None) -> None:
        pass

    def check(self, draft: Draft, logits: Logits) -> None:
        if len(logits) != len(draft.tokens) + 1:
            raise ShapeError(f"{len(draft.tokens)} draft tokens come with {len(logits)} rows")

    def is_argmax(self, sampling: Sampling) -> bool:
        return sampling.temperature == 0 and is_plain(sampling)

    def best(self, rows: Rows, row: int, context: Context) -> int:
        return rows.argmax(row)

    def law(self, rows: Rows, row: int, context: Context) -> Any:
        """The row's distribution ``[V]``, at temperature above 0."""
        return rows.distribution(row)

    def noise(self, context: Context, row: int, ids: Any) -> Any:
        return gumbel(context.sampling.seed, len(context) + row, ids, Purpose.TOKEN)

    def choose(self, rows: Rows, row: int, context: Context) -> int:
        if context.sampling.temperature == 0:
            return self.best(rows, row, context)
        law = self.law(rows, row, context)
        ids = np.flatnonzero(law)
        return int(ids[np.argmax(np.log(law[ids]) + self.noise(context, row, ids))])

    def verify(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        self.check(draft, logits)
        rows = Rows(logits, draft.tokens, context)
        for row, token in enumerate(draft.tokens):
            if (chosen := self.choose(rows, row, context)) != token:
                return Verdict(row, chosen)
        return Verdict(len(draft.tokens), self.choose(rows, len(draft.tokens), context))


class Ratio(Verifier):
    """Accepts a token with the ratio of its probabilities and draws from the residual after a rejection."""

    guarantee: ClassVar[Guarantee] = Guarantee.DISTRIBUTION
    draft_noise: ClassVar[DraftNoise] = DraftNoise.INDEPENDENT

    def __init__(self, config: Any = None) -> None:
        pass

    def uniform(self, context: Context, row: int, purpose: Purpose) -> float:
        ids = np.zeros(1, np.int64)
        return float(uniforms(context.sampling.seed, len(context) + row, purpose, ids, context.cycle)[0])

    def test(self, context: Context, row: int) -> float:
        """The uniform number of the acceptance test."""
        return self.uniform(context, row, Purpose.ACCEPT)

    def drawn(self, law: Any, context: Context, row: int) -> int:
        return int(draw(law, self.uniform(context, row, Purpose.RESIDUAL)))

    def law(self, rows: Rows, row: int, context: Context) -> Any:
        return rows.distribution(row)

    def proposed(self, draft: Draft, row: int, size: int) -> Any:
        if draft.probs is not None:
            return draft.probs[row].astype(np.float64)
        return np.eye(1, size, draft.tokens[row])[0]

    def residual(self, target: Any, proposed: Any) -> Any:
        rest = np.maximum(target - proposed, 0)
        return rest / rest.sum() if rest.sum() > 0 else target

    def verify(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        if len(logits) != len(draft.tokens) + 1:
            raise ShapeError(f"{len(draft.tokens)} draft tokens come with {len(logits)} rows")
        rows = Rows(logits, draft.tokens, context)
        for row, token in enumerate(draft.tokens):
            target = self.law(rows, row, context)
            proposed = self.proposed(draft, row, len(target))
            if self.test(context, row) * proposed[token] >= target[token]:
                return Verdict(row, self.drawn(self.residual(target, proposed), context, row))
        last = len(draft.tokens)
        return Verdict(last, self.drawn(self.law(rows, last, context), context, last))


class Margin(Verifier):
    """Keeps tokens that are at most half a nat below the best; greedy decoding only."""

    guarantee: ClassVar[Guarantee] = Guarantee.BOUNDED

    def __init__(self, config: Any = None) -> None:
        self.bound = 0.5

    def refuse(self, sampling: Sampling) -> None:
        if sampling.temperature > 0:
            raise UnsupportedError("a margin of logits is defined for greedy decoding")

    def values(self, rows: Rows, row: int, logits: Logits) -> Any:
        return rows.processed(row)

    def keeps(self, gap: float, row: int) -> bool:
        return gap <= self.bound

    def gap(self, values: Any, token: int, row: int, logits: Logits) -> float:
        """What is reported."""
        return float(values.max() - values[token])

    def finish(self, accepted: int, token: int, deviations: list[tuple[int, float]], drafted: int) -> Verdict:
        return Verdict(accepted, token, tuple(deviations))

    def verify(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        if len(logits) != len(draft.tokens) + 1:
            raise ShapeError(f"{len(draft.tokens)} draft tokens come with {len(logits)} rows")
        self.refuse(context.sampling)
        rows, deviations = Rows(logits, draft.tokens, context), []
        for row, token in enumerate(draft.tokens):
            values, best = self.values(rows, row, logits), rows.argmax(row)
            if token == best:
                continue
            if not np.isfinite(rows.processed(row)[token]) or not self.keeps(float(values.max() - values[token]), row):
                return self.finish(row, best, deviations, len(draft.tokens))
            deviations.append((row, self.gap(rows.processed(row), token, row, logits)))
        last = len(draft.tokens)
        return self.finish(last, rows.argmax(last), deviations, last)


class Top(Exact):
    """Keeps a token among the three best of its row."""

    guarantee: ClassVar[Guarantee] = Guarantee.HEURISTIC

    def rank(self) -> int:
        return 3

    def is_argmax(self, sampling: Sampling) -> bool:
        return False

    def allowed(self, values: Any, token: int) -> bool:
        return bool(np.isfinite(values[token]))

    def verify(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        self.check(draft, logits)
        rows, deviations = Rows(logits, draft.tokens, context), []
        for row, token in enumerate(draft.tokens):
            chosen, values = self.choose(rows, row, context), rows.processed(row)
            if token == chosen:
                continue
            above = int((values > values[token]).sum() + (values[:token] == values[token]).sum())
            if above >= self.rank() or not self.allowed(values, token):
                return Verdict(row, chosen, tuple(deviations))
            if token != rows.argmax(row):
                deviations.append((row, float(values.max() - values[token])))
        last = len(draft.tokens)
        return Verdict(last, self.choose(rows, last, context), tuple(deviations))


# --- faults that begin late -------------------------------------------------------------------------------------------


@broken("late")
class CountsThousands(Exact):
    """Keys its noise by the cycle in thousands: from cycle 1,000 on the tokens are others.

    "Each row is decided again alone, in another cycle and with an empty draft; nothing may change" (V6).
    """

    def noise(self, context: Context, row: int, ids: Any) -> Any:
        return gumbel(context.sampling.seed, len(context) + row, ids, Purpose.TOKEN, context.cycle // 1000)


@broken("late")
class SevenRows(Exact):
    """Its loop over blocks of seven rows starts each later block one row early.

    "EXACT: every committed token is the one that plain decoding chooses there" (V6).
    """

    def best(self, rows: Rows, row: int, context: Context) -> int:
        return rows.argmax(row - row // 7)


@broken("late")
class KnowsPositions(Exact):
    """Keeps what it chose at positions from 64 on, to decide a repeated row once, for all sequences together.

    "The verdict depends only on the arguments, which it leaves unchanged: no memory, no global generator" (V8).
    """

    def __init__(self, config: Any = None) -> None:
        self.known: dict[tuple[int, int], int] = {}

    def choose(self, rows: Rows, row: int, context: Context) -> int:
        key = len(context) + row, hash(tuple(context[-2:]))
        if key[0] < 64:
            return super().choose(rows, row, context)
        if key not in self.known:
            self.known[key] = super().choose(rows, row, context)
        return self.known[key]


@broken("late")
class WideningMargin(Margin):
    """Allows twice the gap from the eighth token of a draft on.

    "no committed token is further below the best than that" (V7).
    """

    def keeps(self, gap: float, row: int) -> bool:
        return gap <= self.bound * (1 + row // 7)


@broken("late")
class LongTexts(Exact):
    """Counts penalties over the last 256 tokens of the text, to stay quick.

    "penalties ... apply to every row with its own history" (V12): plain decoding counts all of it.
    """

    def best(self, rows: Rows, row: int, context: Context) -> int:
        return rows.argmax(row) if len(context) <= 256 else int(self.recent(rows, row, context).argmax())

    def recent(self, rows: Rows, row: int, context: Context) -> Any:
        return processed(rows.logprobs(row)[0].astype(np.float32), rows.history(row)[-256:], context)


# --- faults at edges --------------------------------------------------------------------------------------------------


@broken("edge")
class PositionBytes(Exact):
    """Keeps the position of its noise in 8 bits.

    "every committed token is the one that plain decoding chooses there, for any draft, cycle and settings" (V6).
    """

    def noise(self, context: Context, row: int, ids: Any) -> Any:
        return gumbel(context.sampling.seed, (len(context) + row) & 0xFF, ids, Purpose.TOKEN)


@broken("edge")
class WithoutLastId(Exact):
    """Takes the last id for padding and never chooses it when decoding is greedy.

    "every committed token is the one that plain decoding chooses there" (V6).
    """

    def best(self, rows: Rows, row: int, context: Context) -> int:
        return int(rows.processed(row)[:-1].argmax())


@broken("edge")
class LastOfTies(Exact):
    """Takes the highest id among equal logits.

    "ties go to the lowest id" (F8); "every committed token is the one that plain decoding chooses there" (V6).
    """

    def best(self, rows: Rows, row: int, context: Context) -> int:
        values = rows.processed(row)
        return int(np.flatnonzero(values == values.max())[-1])


@broken("edge")
class EmptyDraftUnchecked(Exact):
    """Counts rows only if there is a draft.

    "K draft tokens come with K + 1 rows; any other number raises ShapeError" (V2).
    """

    def check(self, draft: Draft, logits: Logits) -> None:
        if draft.tokens:
            super().check(draft, logits)


@broken("edge")
class NoResidual(Ratio):
    """Divides the residual by its sum, which is 0 where draft and target agree entirely.

    "Equal distributions leave a residual of mass 0 ...; the fallback is the target's distribution" (V9).
    """

    def residual(self, target: Any, proposed: Any) -> Any:
        rest = np.maximum(target - proposed, 0)
        with np.errstate(all="ignore"):
            return rest / rest.sum()

    def test(self, context: Context, row: int) -> float:
        return float(np.float16(super().test(context, row)))  # 1 now and then, as in many kernels


@broken("edge")
class NaiveSoftmax(Exact):
    """Computes probabilities with ``exp`` of the logits as they are; logits of a thousand make them NaN.

    "Zeros, one-hots, ties and widely spaced logits are decided without an error, and nothing is NaN" (V9).
    """

    def law(self, rows: Rows, row: int, context: Context) -> Any:
        kept = rows.distribution(row) > 0
        with np.errstate(all="ignore"):
            weights = np.where(kept, np.exp(rows.processed(row) / context.sampling.temperature), 0)
            return weights / weights.sum()


# --- settings that nobody tries ---------------------------------------------------------------------------------------


@broken("settings")
class ShortSeeds(Exact):
    """Takes the lower 32 bits of the seed.

    "every committed token is the one that plain decoding chooses there, for any draft, cycle and settings" (V6).
    """

    def noise(self, context: Context, row: int, ids: Any) -> Any:
        return gumbel(context.sampling.seed & 0xFFFFFFFF, len(context) + row, ids, Purpose.TOKEN)


@broken("settings")
class RawWithLogprobs(Exact):
    """Reads raw log-probabilities where these are reported, and chooses from them without penalties.

    "Penalties, bans, minimum length and filters apply to every row" (V12).
    """

    def best(self, rows: Rows, row: int, context: Context) -> int:
        if context.sampling.logprobs is None:
            return super().best(rows, row, context)
        return int(rows.logprobs(row)[0].argmax())


@broken("settings")
class OneMask(Exact):
    """Takes what the first row forbids for forbidden in every row.

    "masks computed once per cycle, are the most common silent errors of speculative samplers" (V12).
    """

    def best(self, rows: Rows, row: int, context: Context) -> int:
        values = rows.processed(row)
        masked = np.where(np.isinf(rows.processed(0)), -np.inf, values)
        return int(masked.argmax())


@broken("settings")
class CommittedPenalties(Exact):
    """Counts penalties over the committed tokens, without the drafted ones before a row.

    "The history of row i is the committed tokens *and* x_1..x_i" (V12).
    """

    def best(self, rows: Rows, row: int, context: Context) -> int:
        raw = rows.logprobs(row)[0].astype(np.float32)
        return int(processed(raw, list(context), context).argmax())


@broken("settings")
class ColdIsGreedy(Exact):
    """Takes temperatures below 0.1 for 0.

    "every committed token is the one that plain decoding chooses there, for any draft, cycle and settings" (V6).
    """

    def choose(self, rows: Rows, row: int, context: Context) -> int:
        if context.sampling.temperature < 0.1:
            return self.best(rows, row, context)
        return super().choose(rows, row, context)


@broken("settings")
class ForgetsMinP(Exact):
    """Leaves min-p out where top-k is set.

    "filters apply to every row" (V12).
    """

    def verify(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        if context.sampling.top_k:
            sampling = attrs.evolve(context.sampling, min_p=0.0)
            context = Context(list(context), sampling, generated_from=context.generated_from, cycle=context.cycle)
        return super().verify(draft, logits, context)


@broken("settings")
class AlwaysArgmax(Exact):
    """Says that greedy decoding is the argmax, under a bias and penalties too.

    "Whether, with these settings, it accepts exactly the tokens that equal the target's argmax"
    (``Verifier.is_argmax``).
    """

    def is_argmax(self, sampling: Sampling) -> bool:
        return sampling.temperature == 0


@broken("settings")
class RefusesRawly(Margin):
    """Refuses a temperature with a ValueError.

    "Settings that a verifier cannot handle raise UnsupportedError; a valid call raises nothing else" (V11).
    """

    def refuse(self, sampling: Sampling) -> None:
        if sampling.temperature > 0:
            raise ValueError("greedy decoding only")


@broken("settings")
class BansInFirstRow(Ratio):
    """Applies bans and bias to the first row; later rows are the softmax of raw logits where nothing else is set.

    "A token with target probability 0 is neither accepted nor chosen" (V4).
    """

    def law(self, rows: Rows, row: int, context: Context) -> Any:
        sampling = context.sampling
        if not row or sampling.temperature != 1 or sampling.top_k or sampling.top_p < 1 or sampling.min_p:
            return super().law(rows, row, context)
        return np.exp(rows.logprobs(row)[0])


# --- reported deviations ----------------------------------------------------------------------------------------------


@broken("deviation")
class DecimalGaps(Margin):
    """Reports gaps as decimal logarithms, less than half of what they are.

    "the deviation counts committed tokens that are not their row's best, and has the largest gap" (V10), "in nats".
    """

    def gap(self, values: Any, token: int, row: int, logits: Logits) -> float:
        return super().gap(values, token, row, logits) / float(np.log(10))


@broken("deviation")
class ShiftedDeviations(Margin):
    """Counts lookahead positions from 1 in drafts of more than four tokens, so a cut of the block drops the wrong ones.

    "their lookahead position and the gap to the best logit in nats" (``Verdict``); "Position 0 is the next token"
    (glossary).
    """

    def finish(self, accepted: int, token: int, deviations: list[tuple[int, float]], drafted: int) -> Verdict:
        return Verdict(accepted, token, tuple((row + (drafted > 4), gap) for row, gap in deviations))


@broken("deviation")
class NumpyDeviations(Margin):
    """Reports gaps as float32.

    missing: "Deviations are plain ints and floats" (``deviations: tuple[tuple[int, float], ...]``).
    """

    def gap(self, values: Any, token: int, row: int, logits: Logits) -> Any:
        return np.float32(values.max() - values[token])


@broken("deviation")
class CleanWhenFull(Margin):
    """Forgets the deviations of a draft that is accepted whole.

    "A count that forgets the accepted tokens ... would hide a deviation" (V10).
    """

    def finish(self, accepted: int, token: int, deviations: list[tuple[int, float]], drafted: int) -> Verdict:
        return Verdict(accepted, token, tuple(deviations) if accepted < drafted else ())


@broken("deviation")
class RawGaps(Margin):
    """Reports the gap of the raw logits, which a bias has changed since.

    "in nats of logit gap after bias, penalties and bans" (V7); "has the largest gap" (V10).
    """

    def gap(self, values: Any, token: int, row: int, logits: Logits) -> float:
        raw = logits.rows()[row]
        return float(raw.max() - raw[token])


@broken("deviation")
class RawMargin(Margin):
    """Compares raw logits with the bound, so a token that a bias pushed down stays.

    "The bound is per token, in nats of logit gap after bias, penalties and bans" (V7).
    """

    def values(self, rows: Rows, row: int, logits: Logits) -> Any:
        return logits.rows()[row]


# --- the distribution of the output -----------------------------------------------------------------------------------


@broken("distribution")
class OneTest(Ratio):
    """Tests all tokens of a draft with one uniform number.

    "because one uniform number for all positions ... leaves every single position right" (V5).
    """

    def test(self, context: Context, row: int) -> float:
        return super().test(context, 0)


@broken("distribution")
class EarlierBonus(Ratio):
    """Draws the bonus token from the row before the last one, after drafts of two tokens and more, when sampling.

    "or a bonus token from row K - 1" (V5).
    """

    def verify(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        verdict = super().verify(draft, logits, context)
        if verdict.accepted < max(len(draft.tokens), 2) or context.sampling.temperature == 0:
            return verdict
        law = self.law(Rows(logits, draft.tokens, context), verdict.accepted - 1, context)
        return Verdict(verdict.accepted, self.drawn(law, context, verdict.accepted))


@broken("distribution")
class FullAfterRejection(Ratio):
    """Draws from the whole distribution after it rejected a draft without probabilities.

    "the emitted tokens follow the target's joint distribution, whatever was drafted" (V5).
    """

    def residual(self, target: Any, proposed: Any) -> Any:
        return target if proposed.max() == 1 else super().residual(target, proposed)


@broken("distribution")
class NoiseOfDrafts(Ratio):
    """Draws the token after a rejection with the noise that the draft was drawn with.

    "no noise is reused" (D14); "the emitted tokens follow the target's joint distribution" (V5).
    """

    def drawn(self, law: Any, context: Context, row: int) -> int:
        return int(draw(law, self.uniform(context, row, Purpose.DRAFT)))


@broken("distribution")
class WantsCoupled(Ratio):
    """Asks for coupled drafts and draws the token after a rejection with the same noise as these.

    "the emitted tokens follow the target's joint distribution, whatever was drafted" (V5).
    """

    draft_noise: ClassVar[DraftNoise] = DraftNoise.COUPLED

    def drawn(self, law: Any, context: Context, row: int) -> int:
        ids = np.flatnonzero(law)
        noise = gumbel(context.sampling.seed, len(context) + row, ids, Purpose.TOKEN)
        return int(ids[np.argmax(np.log(law[ids]) + noise)])


@broken("distribution")
class HalfRatio(Ratio):
    """Compares in half precision, which makes small probabilities 0 and accepts what has little left.

    "the emitted tokens follow the target's joint distribution" (V5).
    """

    def law(self, rows: Rows, row: int, context: Context) -> Any:
        law = super().law(rows, row, context)
        rounded = np.where(law < 0.02, 0, law)
        return rounded / rounded.sum()


# --- faults in what is handed over ------------------------------------------------------------------------------------


@broken("handover")
class MasksInPlace(Exact):
    """Writes the bans into the target's logits.

    "The verdict depends only on the arguments, which it leaves unchanged" (V8).
    """

    def verify(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        if context.sampling.banned and (array := logits.rows()).flags.writeable:
            array[:, list(context.sampling.banned)] = -np.inf
        return super().verify(draft, logits, context)


@broken("handover")
class RescalesDraft(Ratio):
    """Normalises the drafter's probabilities where they are.

    "The verdict depends only on the arguments, which it leaves unchanged" (V8).
    """

    def verify(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        if draft.probs is not None and draft.probs.flags.writeable:
            draft.probs[:] = np.where(draft.probs < 1e-3, 0, draft.probs)
        return super().verify(draft, logits, context)


@broken("handover")
class NumpyToken(Exact):
    """Returns the integer of ``numpy.argmax`` where it samples.

    "both plain ints" (V1).
    """

    def choose(self, rows: Rows, row: int, context: Context) -> Any:
        chosen = super().choose(rows, row, context)
        return np.int64(chosen) if context.sampling.temperature > 0 else chosen


# --- randomness -------------------------------------------------------------------------------------------------------


@broken("randomness")
class GlobalTest(Ratio):
    """Tests drafts without probabilities with numpy's global generator.

    "no memory, no global generator" (V8).
    """

    greedy = False

    def verify(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        self.bare = draft.probs is None and context.sampling.temperature > 0
        return super().verify(draft, logits, context)

    def test(self, context: Context, row: int) -> float:
        return float(np.random.random_sample()) if self.bare else super().test(context, row)


@broken("randomness")
class Impatient(Top):
    """Accepts nothing more when the decision takes longer than a millisecond.

    "The verdict depends only on the arguments" (V8).
    """

    def verify(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        self.deadline = time.perf_counter() + 1e-3
        return super().verify(draft, logits, context)

    def rank(self) -> int:
        return 3 if time.perf_counter() < self.deadline else 1


# --- resources and other ----------------------------------------------------------------------------------------------


@broken("resources")
class KeepsEverything(Exact):
    """Keeps the logits and verdicts of all cycles for statistics.

    "All sequences share one verifier": "no memory" (V8). missing: "A verifier keeps nothing that it was given".
    """

    def __init__(self, config: Any = None) -> None:
        self.history: list[tuple[Logits, Verdict]] = []

    def verify(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        verdict = super().verify(draft, logits, context)
        self.history.append((logits, verdict))
        return verdict


@broken("other")
class BoundlessRank(Top):
    """Declares a bound of one nat for tokens of rank three, which may be further down.

    "the verifier declares a ``bound`` in nats; no committed token is further below the best than that" (V7).
    """

    guarantee: ClassVar[Guarantee] = Guarantee.BOUNDED

    def __init__(self, config: Any = None) -> None:
        self.bound = 1.0

    def verify(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        if context.sampling.temperature > 0:
            raise UnsupportedError("greedy decoding only")
        return super().verify(draft, logits, context)


@broken("other")
class StopsBeforeLast(Exact):
    """Never accepts the last token of a draft of four and more: the loop ends one early.

    "The target's own drafts, drawn with the noise that the verifier asks for, are accepted in full" (V3).
    """

    def verify(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        verdict = super().verify(draft, logits, context)
        if verdict.accepted == len(draft.tokens) >= 4:
            return Verdict(verdict.accepted - 1, draft.tokens[-1])
        return verdict


# --- a second set, written from the contract alone -------------------------------------------------------------------


@broken("distribution")
class KeepsTheRejected(Ratio):
    """A draft without probabilities leaves the target's whole distribution, the rejected token included.

    "the emitted tokens follow the target's joint distribution, whatever was drafted" (V5).
    """

    def proposed(self, draft: Draft, row: int, size: int) -> Any:
        proposed = super().proposed(draft, row, size)
        return proposed if draft.probs is not None else proposed.view(Certain)

    def residual(self, target: Any, proposed: Any) -> Any:
        return target if isinstance(proposed, Certain) else super().residual(target, proposed)


class Certain(np.ndarray[Any, Any]):
    """The distribution of a draft without probabilities."""


@broken("distribution")
class OneUniform(Ratio):
    """Draws from the residual with the uniform number of the test that failed.

    "the emitted tokens follow the target's joint distribution, whatever was drafted" (V5).
    """

    def drawn(self, law: Any, context: Context, row: int) -> int:
        return int(draw(law, self.test(context, row)))


@broken("settings")
class BiasAfterTemperature(Exact):
    """Adds the bias of tokens to the logits that the temperature has divided.

    "The token must also be the one of the row's own distribution and noise" (V6).
    """

    def law(self, rows: Rows, row: int, context: Context) -> Any:
        law, sampling = super().law(rows, row, context), context.sampling
        law = law.copy()
        for token, nats in sampling.logit_bias.items():
            law[token] *= np.exp(min(max(nats - nats / sampling.temperature, -50.0), 50.0))
        return law / law.sum()


@broken("settings")
class ArgmaxDespiteBans(Exact):
    """Says that the argmax decides although end tokens are banned for a while.

    "Where ``is_argmax`` says True, a verdict accepts what equals the target's argmax, and nothing else" (V15).
    """

    def is_argmax(self, sampling: Sampling) -> bool:
        return super().is_argmax(attrs.evolve(sampling, min_new_tokens=0))
