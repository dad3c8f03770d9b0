"""Stop a draft when the drafter is not confident; used by every drafter that runs a model.

A gate decides **before** a token is drawn, from the logits of the step. This keeps ratio tests exact: the draft
distribution is a function of the prefix, so a stop that depends on it only chooses the depth. A stop that depends on
the drawn token would change the distribution of the output, because a decision to stop must not depend on the token
whose verification it prevents. Point masses (greedy and coupled drafts) are safe under any rule.

A stop ends the draft before the token in question. At position 0 the draft is empty and the cycle is plain decoding,
but the drafter's step has still cost its time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdec.contract import Context, DraftNoise, Logits
from specdec.sampling import Rows


class DraftGate:
    """Stops a draft below a confidence or a margin; 0 switches either off. One object per sequence.

    Confidence: the largest probability of the distribution that the next token would be drawn from; after temperature
    and filters for independent drafts, of the plain softmax for point masses.

    Margin: the best raw logit minus the second best, in nats; infinite if only one token can be drafted.

    Attributes:
        steps: decisions taken.
        stopped: how many of them ended a draft.
    """

    __slots__ = ("min_confidence", "min_margin", "steps", "stopped")

    def __init__(self, min_confidence: float = 0.0, min_margin: float = 0.0) -> None:
        self.min_confidence = min_confidence
        self.min_margin = min_margin
        self.steps = 0
        self.stopped = 0

    @property
    def enabled(self) -> bool:
        """Whether either threshold is set."""
        return self.min_confidence > 0 or self.min_margin > 0

    def stops(self, logits: Logits, context: Context, drafted: Sequence[int] = ()) -> bool:
        """Whether the draft ends before the token that ``logits`` would give.

        Args:
            logits: one row, from the drafter.
            context: the committed tokens and the sampling settings.
            drafted: the tokens drafted so far; used by penalties and processors of an independent draft.
        """
        if not self.enabled:
            return False
        self.steps += 1
        stop = self._unsure(logits, context, drafted)
        self.stopped += stop
        return stop

    def _unsure(self, logits: Logits, context: Context, drafted: Sequence[int]) -> bool:
        values = logits.topk(2)[1][0]
        if self.min_margin > 0 and len(values) > 1 and values[0] - values[1] < self.min_margin:
            return True
        if self.min_confidence <= 0:
            return False
        if context.sampling.temperature > 0 and context.draft_noise is DraftNoise.INDEPENDENT:
            row = len(drafted)
            confidence = float(Rows(logits, drafted, context, first=row).distribution(row).max())
        else:
            confidence = math.exp(values[0] - logits.logsumexp()[0])
        return confidence < self.min_confidence

    def report(self) -> dict[str, int]:
        """For ``Drafter.report``: decisions and stops so far; empty when the gate is off."""
        return {"gate_steps": self.steps, "gate_stops": self.stopped} if self.enabled else {}
