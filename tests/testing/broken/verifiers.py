"""Wrong verifiers."""

from __future__ import annotations

import attrs
import numpy as np

from specdec.backends.arrays import HostLogits
from specdec.contract import Context, Guarantee, Verdict
from specdec.sampling import Purpose, Rows
from specdec.verifiers import rejection
from specdec.verifiers.margin import MarginConfig, MarginVerifier
from specdec.verifiers.rejection import RejectionConfig, RejectionVerifier
from specdec.verifiers.strict import StrictVerifier, check_rows


class Ratio(RejectionVerifier):
    def __init__(self) -> None:
        super().__init__(RejectionConfig())


class NumpyTokens(Ratio):
    def verify(self, draft, logits, context):
        verdict = super().verify(draft, logits, context)
        return attrs.evolve(verdict, next_token=np.int64(verdict.next_token))


class TakesAnyRows(StrictVerifier):
    def verify(self, draft, logits, context):
        if len(logits) != len(draft.tokens) + 1:
            return Verdict(0, 0)
        return super().verify(draft, logits, context)


class AcceptsOneAtMost(StrictVerifier):
    """Exact, and useless for longer drafts."""

    def verify(self, draft, logits, context):
        verdict = super().verify(draft, logits, context)
        return Verdict(1, draft.tokens[1]) if verdict.accepted > 1 else verdict


class AcceptsTheImpossible(StrictVerifier):
    """Takes a token of probability 0 in the first row when the row's other tokens tie."""

    guarantee = Guarantee.HEURISTIC

    def verify(self, draft, logits, context):
        verdict = super().verify(draft, logits, context)
        if verdict.accepted == 0 and draft.tokens and logits.rows()[0][draft.tokens[0]] == -np.inf:
            rest = super().verify(type(draft)(), HostLogits(logits.rows()[1:2]), _with(context, draft.tokens[:1]))
            return Verdict(1, rest.next_token)
        return verdict


def _with(context, tokens=(), **settings):
    """The context, with more tokens or with other settings of sampling."""
    where = {"generated_from": context.generated_from, "cycle": context.cycle, "draft_noise": context.draft_noise}
    return Context([*context, *tokens], attrs.evolve(context.sampling, **settings), **where)


class ResamplesFromTheTarget(Ratio):
    """After a rejection the target's distribution instead of the residual."""

    def verify(self, draft, logits, context):
        verdict = super().verify(draft, logits, context)
        if context.sampling.temperature == 0 or verdict.accepted == len(draft.tokens):
            return verdict
        rows = Rows(logits, draft.tokens, context)
        u = rejection.uniforms(context.sampling.seed, 99, Purpose.RESIDUAL, np.zeros(1, np.int64), context.cycle)[0]
        return Verdict(verdict.accepted, rejection.draw(rows.distribution(verdict.accepted), float(u)))


class OwnGenerator(Ratio):
    """Draws with a generator that is seeded once."""

    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng(0)

    def verify(self, draft, logits, context):
        return super().verify(draft, logits, _with(context, seed=int(self.random.integers(2**62))))


class WrongAtElevenTokens(StrictVerifier):
    def verify(self, draft, logits, context):
        verdict = super().verify(draft, logits, context)
        wrong = len(draft.tokens) == 11 and verdict.accepted > 0
        return Verdict(verdict.accepted - 1, verdict.next_token) if wrong else verdict


class StatesTooSmallABound(MarginVerifier):
    def __init__(self) -> None:
        super().__init__(MarginConfig(margin=0.6))
        self.bound = 0.5


class GivesUpOnLargeLogits(StrictVerifier):
    def verify(self, draft, logits, context):
        if np.max(logits.rows()) > 1000:
            raise FloatingPointError("overflow")
        return super().verify(draft, logits, context)


class HidesItsDeviation(MarginVerifier):
    def __init__(self) -> None:
        super().__init__(MarginConfig(margin=0.6))

    def verify(self, draft, logits, context):
        return attrs.evolve(super().verify(draft, logits, context), deviations=())


class RaisesValueError(StrictVerifier):
    """Refuses a setting, with an error that no one expects."""

    def verify(self, draft, logits, context):
        if context.sampling.top_k == 1:
            raise ValueError("top_k = 1 is greedy")
        return super().verify(draft, logits, context)


class StaleHistory(Ratio):
    """Penalties of the committed tokens only, for every row."""

    def verify(self, draft, logits, context):
        history = Rows.history
        Rows.history = lambda self, row: list(self._context)
        try:
            return super().verify(draft, logits, context)
        finally:
            Rows.history = history


class GreedyInLongTexts(StrictVerifier):
    """Exact until a text is longer than single calls ever are."""

    def verify(self, draft, logits, context):
        if len(context) > 12 and len(draft.tokens) > 0:
            check_rows(draft, logits)
            return Verdict(0, int(Rows(logits, draft.tokens, context).processed(0).argmax()))
        return super().verify(draft, logits, context)


class HalfTheSeed(StrictVerifier):
    """Right for seeds below 2^32."""

    def verify(self, draft, logits, context):
        return super().verify(draft, logits, _with(context, seed=context.sampling.seed % 2**32))


BROKEN = {
    NumpyTokens: "V1",
    TakesAnyRows: "V2",
    AcceptsOneAtMost: "V3",
    AcceptsTheImpossible: "V4",
    ResamplesFromTheTarget: "V5",
    WrongAtElevenTokens: "V6",
    StatesTooSmallABound: "V7",
    OwnGenerator: "V8",
    GivesUpOnLargeLogits: "V9",
    HidesItsDeviation: "V10",
    RaisesValueError: "V11",
    StaleHistory: "V12",
    GreedyInLongTexts: "V13",
    HalfTheSeed: "V14",
}
