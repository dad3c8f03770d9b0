"""Draft with the checkpoint's own multi-token-prediction head, fed with true hidden states.

The head's cache holds *true pairs* (h_j, x_{j+1}): the target's hidden state of position j with the token after it.
Three moments keep it true:

* prefill: every prompt position passes through the head (``prefill_mtp``), chunk by chunk; the last hidden state of a
  chunk waits for the first token of the next;
* catch-up: after each verification the accepted positions are fed again as true pairs, in one pass whose last row
  gives the first draft token of the next cycle;
* chaining: further draft tokens feed the head's own output in place of h; those entries are provisional and go with
  the next true pair.

Most of a draft step is the output head. With a draft vocabulary (``specdec vocab``) it runs over the ids of that file
and those of the sequence itself; drafts are then drawn from the law over these ids, and the output stays what it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from specdec.config import between
from specdec.contract import (
    EMPTY_DRAFT,
    Context,
    Draft,
    Drafter,
    DrafterEnv,
    DrafterSpec,
    ForwardOutput,
    GreedyStart,
    Hidden,
    Need,
    PrepareEnv,
    Verdict,
)
from specdec.drafters.draft_vocabulary import DraftVocabulary
from specdec.drafters.gate import DraftGate
from specdec.drafters.pruned_head import HeadChoice, PreparedVocabulary
from specdec.errors import ConfigError, StateError
from specdec.hookspecs import hookimpl
from specdec.sampling import draft_token, is_plain

WAITING_ROWS = 8  # true pairs that the pass of a first draft token takes in; more of them are fed before it
IDLE_CYCLES = 256  # in a run of depth 0 pairs wait so long: a row of a long pass costs a tenth of a pass of its own


@attrs.frozen(kw_only=True)
class MtpConfig:
    """A cheaper head, and when to stop a draft early; the defaults do neither."""

    vocabulary: str | None = None  # a file of specdec vocab: the ids that drafts are made of
    max_miss: float = attrs.field(default=0.1, validator=between(0.0, 1.0))  # share of tokens outside; above: full head
    max_extra: int = attrs.field(default=2048, validator=between(0, 65536))  # ids of a sequence added to the vocabulary
    min_confidence: float = attrs.field(default=0.0, validator=between(0.0, 1.0))  # least probability of the best token
    min_margin: float = attrs.field(default=0.0, validator=between(0.0, 1000.0))  # nats from the best to the second

    def __attrs_post_init__(self) -> None:
        """Raises: ConfigError for settings of a draft vocabulary where there is none."""
        fields = attrs.fields_dict(MtpConfig)
        idle = [name for name in ("max_miss", "max_extra") if getattr(self, name) != fields[name].default]
        if self.vocabulary is None and idle:
            raise ConfigError(
                f"drafter.{idle[0]} belongs to a draft vocabulary, and drafter.vocabulary names none",
                try_="specdec vocab MODEL makes one; or leave the setting out",
            )


class MtpDrafter(Drafter):
    """Keeps ``state.mtp_length + waiting rows == state.length``: no position is ever skipped."""

    needs = frozenset({Need.HIDDEN, Need.MTP})

    def __init__(self, config: MtpConfig, env: DrafterEnv) -> None:
        self._target = env.target
        self._state = env.state
        self._gate = DraftGate(config.min_confidence, config.min_margin)
        self._choice: HeadChoice | None = None
        self._dead_ends = 0  # drafts that ended because the rules of sampling left no token of the vocabulary
        if config.vocabulary is not None:
            if not isinstance(env.shared, PreparedVocabulary):
                raise StateError("the drafter 'mtp' has a draft vocabulary, and its prepare was not run")
            self._choice = HeadChoice(env.shared, max_miss=config.max_miss, max_extra=config.max_extra)
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
        if sum(map(len, self._waiting)) > WAITING_ROWS:
            self._feed(context, keep=1)
        # a pass that makes no pruned heads need not know the argument
        head = None if self._choice is None else self._choice.follow(context)
        options: dict[str, Any] = {} if head is None else {"head": head}
        pairs = self._take(context, keep=0)
        sampling = context.sampling
        if head is None and sampling.temperature == 0 and not self._gate.enabled and is_plain(sampling):
            chained = self._target.draft_greedy(self._state, *pairs, depth)
            if chained is not None:
                return Draft(chained)
        output = self._target.decode_mtp(self._state, *pairs, **options)
        drafted: list[int] = []
        laws = []
        while True:
            logits = output.need_logits()
            try:
                if self._gate.stops(logits, context, drafted):
                    break
                token, law = draft_token(logits, drafted, context)
            except ConfigError:  # no token of the head is allowed here
                if head is None:
                    raise
                self._dead_ends += 1  # the target may choose among more ids: this is no fault of the settings
                break
            drafted.append(token)
            laws.append(law)
            if len(drafted) == depth:
                break
            output = self._target.decode_mtp(
                self._state, [token], output.need_hidden()[-1:], provisional=True, **options
            )
        if not drafted:
            return EMPTY_DRAFT
        return Draft(tuple(drafted), None if laws[0] is None else np.stack([law for law in laws if law is not None]))

    def observe(self, verdict: Verdict, output: ForwardOutput, context: Context) -> None:
        hidden, kept = output.need_hidden(), verdict.accepted + 1
        self._waiting.append(hidden if kept == len(hidden) else hidden[:kept])
        if len(self._waiting) > IDLE_CYCLES:
            self._feed(context, keep=1)

    def hand_over(self, context: Context) -> GreedyStart | None:
        sampling = context.sampling
        greedy = sampling.temperature == 0 and is_plain(sampling) and not self._gate.enabled
        if not greedy or self._missing or not self._waiting:
            return None
        if sum(map(len, self._waiting)) > WAITING_ROWS:
            self._feed(context, keep=1)
        head = None if self._choice is None else self._choice.follow(context)
        tokens, hidden = self._take(context, keep=0)
        return GreedyStart(tuple(tokens), hidden, head)

    def take_back(self, hidden: Hidden) -> None:
        self._waiting = [hidden]
        self._fed = self._state.mtp_length

    def rewind(self, length: int) -> None:
        if self._choice is not None:
            self._choice.forget()
        if self._missing or self._state.mtp_length < self._fed:  # the head's cache was cut before what waits
            self._adopt_state()
        else:
            self._waiting = [self._joined()[: length - self._fed]] if length > self._fed and self._waiting else []

    def settle(self, context: Context) -> None:
        self._feed(context, keep=1)

    def report(self) -> Mapping[str, Any]:
        if self._choice is None:
            return self._gate.report()
        return {**self._choice.report(), "dead_ends": self._dead_ends, **self._gate.report()}

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
        return context[first : first + rows], hidden[:rows] if keep else hidden

    def _joined(self) -> Hidden:
        return self._waiting[0].join(self._waiting[1:]) if len(self._waiting) > 1 else self._waiting[0]


def prepare(config: MtpConfig, env: PrepareEnv) -> PreparedVocabulary | None:
    """Read the draft vocabulary and gather its rows, once for all sequences."""
    if config.vocabulary is None:
        return None
    vocabulary = DraftVocabulary.read(config.vocabulary)
    vocabulary.check(env.target.info, env.tokenizer, config.vocabulary)
    return PreparedVocabulary.of(env.target.draft_head(vocabulary.tokens), env.target.info.vocab_size)


@hookimpl
def specdec_drafters() -> list[DrafterSpec]:
    return [
        DrafterSpec(
            name="mtp",
            factory=MtpDrafter,
            config=MtpConfig,
            needs=MtpDrafter.needs,
            prepare=prepare,
            help="the checkpoint's own multi-token-prediction head",
        )
    ]
