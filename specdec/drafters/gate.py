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
from typing import TYPE_CHECKING

import numpy as np

from specdec.contract import Choosing, Context, Draft, DraftNoise, Logits
from specdec.drafters.logits import Row
from specdec.errors import ConfigError
from specdec.sampling import Rows, draft_token, is_plain

if TYPE_CHECKING:
    from specdec.contract import Float32


class DraftGate:
    """Stops a draft below a confidence or a margin; 0 switches either off. One object per sequence.

    Confidence: the largest probability of the distribution that the next token would be drawn from; after temperature
    and filters for independent drafts, of the plain softmax for point masses.

    Margin: the best raw logit minus the second best, in nats; infinite if only one token can be drafted.

    Attributes:
        enabled: whether either threshold is set.
        steps: decisions taken.
        stopped: how many of them ended a draft.
    """

    __slots__ = ("enabled", "min_confidence", "min_margin", "steps", "stopped")

    def __init__(self, min_confidence: float = 0.0, min_margin: float = 0.0) -> None:
        self.min_confidence = min_confidence
        self.min_margin = min_margin
        self.enabled = min_confidence > 0 or min_margin > 0
        self.steps = 0
        self.stopped = 0

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


class Drawing:
    """Draws the tokens of one draft, one by one, behind a gate.

    Args:
        reduced: whether the logits cover a part of the target's vocabulary only. The rules of sampling may then forbid
            all of it: the settings are not at fault, since the target has more ids to choose from, and the draft ends.

    Attributes:
        tokens: those drawn so far.
        greedy: whether each token is the best one of its raw logits.
        dead_end: whether the draft has ended because no token of the reduced vocabulary is allowed.
    """

    def __init__(self, gate: DraftGate, context: Context, *, reduced: bool) -> None:
        self._gate, self._context, self._reduced = gate, context, reduced
        self._distributions: list[Float32] = []
        self.tokens: list[int] = []
        self.greedy = context.sampling.temperature == 0 and is_plain(context.sampling) and not gate.enabled
        self.dead_end = False

    def next(self, logits: Logits) -> int | None:
        """Draw the token of one row of logits; None ends the draft before it."""
        if self.greedy:
            self.tokens += logits.argmax()
            return self.tokens[-1]
        try:
            if self._gate.stops(logits, self._context, self.tokens):
                return None
            token, distribution = draft_token(logits, self.tokens, self._context)
        except ConfigError:
            if not self._reduced:
                raise
            self.dead_end = True
            return None
        self.tokens.append(token)
        if distribution is not None:
            self._distributions.append(distribution)
        return token

    def rows(self, logits: Logits) -> None:
        """Draw a token from each row of logits that depend on no drawn token, in one call where the backend can."""
        if self.greedy:
            self.tokens += logits.argmax()
            return
        chosen: Sequence[int | None] = ()
        context, sampling = self._context, self._context.sampling
        penalties = sampling.repetition_penalty - 1, sampling.presence_penalty, sampling.frequency_penalty
        apart = sampling.processors or self._gate.enabled or any(penalties)  # these ask row by row
        if sampling.temperature > 0 and context.draft_noise is DraftNoise.COUPLED and not apart:
            chosen = logits.choose(Choosing([0] * len(logits), context))
        for row in range(len(logits)):
            token = chosen[row] if chosen else None
            if token is not None:
                self.tokens.append(token)
            elif self.next(Row(logits, row)) is None:
                return

    def draft(self) -> Draft:
        """What was drawn, with the distributions that the tokens were drawn from."""
        return Draft(tuple(self.tokens), np.stack(self._distributions) if self._distributions else None)
