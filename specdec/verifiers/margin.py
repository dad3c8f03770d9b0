"""Near-greedy verification: keeps draft tokens within a given margin of the target's best."""

from __future__ import annotations

import attrs

from specdec.config import between
from specdec.contract import Context, Draft, Guarantee, Logits, Verdict, Verifier, VerifierSpec
from specdec.errors import UnsupportedError
from specdec.hookspecs import hookimpl
from specdec.sampling import Rows
from specdec.verifiers.strict import check_rows


@attrs.frozen(kw_only=True)
class MarginConfig:
    """``margin``: the largest logit gap, in nats; 0 is strict, 0.1 accepts only near ties, 1 is visibly lossy."""

    margin: float = attrs.field(default=0.1, validator=between(0.0, 20.0))


class MarginVerifier(Verifier):
    """Every committed token has a logit gap of at most ``margin`` to the best, so ``P(x) >= exp(-margin) max P``.

    The bound is per token, not per sequence: what follows a tolerated token is conditioned on it. Gaps are measured
    after bias, penalties and bans, before temperature.
    """

    guarantee = Guarantee.BOUNDED

    def __init__(self, config: MarginConfig) -> None:
        self._margin = config.margin
        self.bound = config.margin

    def verify(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        check_rows(draft, logits)
        if context.sampling.temperature > 0:
            raise UnsupportedError(
                f"the margin verifier bounds greedy decoding, temperature {context.sampling.temperature} was asked for",
                try_='temperature = 0, or verifier.name = "strict" or "rejection"',
            )
        rows = Rows(logits, draft.tokens, context)
        tolerated: list[tuple[int, float]] = []
        for position, token in enumerate(draft.tokens):
            best = rows.argmax(position)
            if token == best:
                continue
            values = rows.processed(position)
            gap = float(values[best] - values[token])
            if self._margin == 0 or not gap <= self._margin:
                return Verdict(position, best, tuple(tolerated))
            tolerated.append((position, gap))
        return Verdict(len(draft.tokens), rows.argmax(len(draft.tokens)), tuple(tolerated))


@hookimpl
def specdec_verifiers() -> list[VerifierSpec]:
    return [
        VerifierSpec(
            name="margin",
            factory=MarginVerifier,
            config=MarginConfig,
            help="near-greedy: tokens within a margin (nats) of the best; lossy, bounded per token",
        )
    ]
