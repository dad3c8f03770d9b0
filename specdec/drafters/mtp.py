"""Draft with the checkpoint's own multi-token-prediction head, fed with true hidden states.

The head's cache holds *true pairs* (h_j, x_{j+1}): the target's hidden state of position j with the token after it.
Three moments keep it true:

* prefill: every prompt position passes through the head (``prefill_mtp``), chunk by chunk; the last hidden state of a
  chunk waits for the first token of the next;
* catch-up: after each verification the accepted positions are fed again as true pairs, in one pass whose last row
  gives the first draft token of the next cycle;
* chaining: further draft tokens feed the head's own output in place of h; those entries are provisional and go with
  the next true pair.
"""

from __future__ import annotations

import numpy as np

from specdec.contract import (
    EMPTY_DRAFT,
    Context,
    Draft,
    Drafter,
    DrafterEnv,
    DrafterSpec,
    ForwardOutput,
    Hidden,
    Need,
    NoConfig,
    Verdict,
)
from specdec.errors import StateError
from specdec.hookspecs import hookimpl
from specdec.sampling import draft_token

WAITING_ROWS = 8  # true pairs that may wait for the next draft; in a run of depth 0 they are fed without one


class MtpDrafter(Drafter):
    """Keeps ``state.mtp_length + waiting rows == state.length``: no position is ever skipped."""

    needs = frozenset({Need.HIDDEN, Need.MTP})

    def __init__(self, config: NoConfig, env: DrafterEnv) -> None:
        self._target = env.target
        self._state = env.state
        self._waiting: list[Hidden] = []  # hidden states from position _fed on, not in the head's cache yet
        self._missing = 0  # positions whose hidden states are gone: true pairs that nobody can feed any more
        self._fed = 0  # the head's true pairs as we left them: mtp_length, unless a rewind cut it
        self._adopt_state()

    def prefill(self, context: Context, output: ForwardOutput) -> None:
        self._waiting.append(output.need_hidden())
        self._feed(context, keep=1)

    def propose(self, context: Context, depth: int) -> Draft:
        if self._missing:
            raise StateError(
                f"the MTP cache lacks {self._missing} positions, so it cannot draft",
                reason="the state was built without the drafter 'mtp', or after that had failed",
                try_="a new session with the same tokens",
            )
        if depth < 1 or not self._waiting:
            return EMPTY_DRAFT
        output = self._target.decode_mtp(self._state, *self._take(context, keep=0))
        drafted: list[int] = []
        laws = []
        while True:
            token, law = draft_token(output.need_logits(), drafted, context)
            drafted.append(token)
            laws.append(law)
            if len(drafted) == depth:
                break
            output = self._target.decode_mtp(self._state, [token], output.need_hidden()[-1:], provisional=True)
        return Draft(tuple(drafted), None if laws[0] is None else np.stack([law for law in laws if law is not None]))

    def observe(self, verdict: Verdict, output: ForwardOutput, context: Context) -> None:
        self._waiting.append(output.need_hidden()[: verdict.accepted + 1])
        if sum(map(len, self._waiting)) > WAITING_ROWS:
            self._feed(context, keep=1)

    def rewind(self, length: int) -> None:
        if self._missing or self._state.mtp_length < self._fed:  # the head's cache was cut before what waits
            self._adopt_state()
        else:
            self._waiting = [self._joined()[: length - self._fed]] if length > self._fed and self._waiting else []

    def settle(self, context: Context) -> None:
        self._feed(context, keep=1)

    def _adopt_state(self) -> None:
        """Start from what the state holds: at most the last position waits for its pair."""
        last = self._state.last_hidden
        behind = self._state.length - self._state.mtp_length
        self._waiting = [last] if behind > 0 and last is not None else []
        self._missing = behind - len(self._waiting)
        self._fed = self._state.mtp_length

    def _feed(self, context: Context, *, keep: int) -> None:
        """Append all waiting pairs but the last ``keep`` to the head's cache."""
        if not self._missing and sum(map(len, self._waiting)) > keep:
            self._target.prefill_mtp(self._state, *self._take(context, keep=keep))

    def _take(self, context: Context, *, keep: int) -> tuple[list[int], Hidden]:
        """Remove waiting hidden states, all but the last ``keep``, together with the tokens that follow them."""
        hidden = self._joined()
        rows = len(hidden) - keep
        self._waiting = [hidden[rows:]] if keep else []
        first = self._fed + 1
        self._fed += rows
        return context[first : first + rows], hidden[:rows]

    def _joined(self) -> Hidden:
        return self._waiting[0].join(self._waiting[1:]) if len(self._waiting) > 1 else self._waiting[0]


@hookimpl
def specdec_drafters() -> list[DrafterSpec]:
    return [
        DrafterSpec(
            name="mtp",
            factory=MtpDrafter,
            needs=MtpDrafter.needs,
            help="the checkpoint's own multi-token-prediction head",
        )
    ]
