"""Typical acceptance: a heuristic that keeps draft tokens not too improbable for the row's entropy."""

from __future__ import annotations

import attrs
import numpy as np

from specdec.config import between
from specdec.contract import Context, Draft, Guarantee, Logits, Verdict, Verifier, VerifierSpec
from specdec.hookspecs import hookimpl
from specdec.sampling import Rows
from specdec.verifiers.strict import check_rows


@attrs.frozen(kw_only=True)
class TypicalConfig:
    """Thresholds of the rule; ``epsilon = 1`` and a huge ``delta`` accept only the tokens of plain decoding."""

    epsilon: float = attrs.field(default=0.09, validator=between(0.0, 1.0))  # hard floor of the probability
    delta: float = attrs.field(default=0.3, validator=between(0.0, 1e9))  # factor of exp(-entropy)


class TypicalVerifier(Verifier):
    """Keep x if ``P(x) > min(epsilon, delta * exp(-H(P)))``, with P at temperature 1 for greedy decoding.

    Source: Cai et al. 2024 (Medusa), arXiv:2401.10774, section 2.3.1. The output's distribution is not bounded.
    """

    guarantee = Guarantee.HEURISTIC

    def __init__(self, config: TypicalConfig) -> None:
        self._epsilon, self._delta = config.epsilon, config.delta

    def verify(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        check_rows(draft, logits)
        rows = Rows(logits, draft.tokens, context)
        deviating: list[tuple[int, float]] = []
        for position, token in enumerate(draft.tokens):
            chosen = rows.choose(position)
            if token == chosen:
                continue
            values = rows.processed(position)
            if not self._typical(values, token, context.sampling.temperature or 1.0):
                return Verdict(position, chosen, tuple(deviating))
            deviating.append((position, float(values.max() - values[token])))
        return Verdict(len(draft.tokens), rows.choose(len(draft.tokens)), tuple(deviating))

    def _typical(self, logits: np.ndarray, token: int, temperature: float) -> bool:
        scaled = (logits - logits.max()) / temperature
        probs = np.exp(scaled)
        probs /= probs.sum()
        positive = probs[probs > 0]
        entropy = float(-(positive * np.log(positive)).sum())
        return bool(probs[token] > min(self._epsilon, self._delta * np.exp(-entropy)))


@hookimpl
def specdec_verifiers() -> list[VerifierSpec]:
    return [
        VerifierSpec(
            name="typical",
            factory=TypicalVerifier,
            config=TypicalConfig,
            help="tokens that are typical for the row's entropy; lossy, a heuristic",
        )
    ]
