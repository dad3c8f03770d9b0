"""Draft with the checkpoint's own multi-token-prediction (MTP) head.

The target feeds the head true pairs of hidden state and token (``specdec.contract.MtpPairs``); this drafter asks it for
drafts and decides how each token is chosen.

The output head takes most of the time of a draft step. With a draft vocabulary (``specdec vocab``) it covers only the
ids of that file and of the sequence. Drafts are then drawn from the distribution over these ids; the output is the
same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from specdec.config import between
from specdec.contract import (
    Context,
    Draft,
    Drafter,
    DrafterEnv,
    DrafterSpec,
    DraftHead,
    DraftNoise,
    Logits,
    Needs,
    PrepareEnv,
)
from specdec.drafters.draft_vocabulary import DraftVocabulary
from specdec.drafters.gate import DraftGate
from specdec.drafters.pruned_head import HeadChoice, PreparedVocabulary
from specdec.errors import ConfigError, StateError
from specdec.hookspecs import hookimpl
from specdec.sampling import CoupledDraft, draft_token, is_plain


@attrs.frozen(kw_only=True)
class MtpConfig:
    """A cheaper head, and when to stop a draft early; the defaults do neither."""

    vocabulary: str | None = None  # a file made by specdec vocab: the ids to draft from
    max_miss: float = attrs.field(default=0.1, validator=between(0.0, 1.0))  # share of tokens outside; above: full head
    max_extra: int = attrs.field(default=2048, validator=between(0, 65536))  # ids of a sequence added to the vocabulary
    min_confidence: float = attrs.field(default=0.0, validator=between(0.0, 1.0))  # least probability of the best token
    min_margin: float = attrs.field(default=0.0, validator=between(0.0, 1000.0))  # nats from the best to the second

    def __attrs_post_init__(self) -> None:
        """Raises: ConfigError for draft-vocabulary settings without a draft vocabulary."""
        fields = attrs.fields_dict(MtpConfig)
        idle = [name for name in ("max_miss", "max_extra") if getattr(self, name) != fields[name].default]
        if self.vocabulary is None and idle:
            raise ConfigError(
                f"drafter.{idle[0]} belongs to a draft vocabulary, and drafter.vocabulary names none",
                try_="specdec vocab MODEL makes one; or leave the setting out",
            )


class MtpDrafter(Drafter):
    """Asks the target to draft with its MTP head."""

    def __init__(self, config: MtpConfig, env: DrafterEnv) -> None:
        self._target = env.target
        self._state = env.state
        self._gate = DraftGate(config.min_confidence, config.min_margin)
        self._choice: HeadChoice | None = None
        self._dead_ends = 0  # drafts that ended because sampling rules left no token of the vocabulary
        if config.vocabulary is not None:
            if not isinstance(env.shared, PreparedVocabulary):
                raise StateError("the drafter 'mtp' has a draft vocabulary, and its prepare was not run")
            self._choice = HeadChoice(env.shared, max_miss=config.max_miss, max_extra=config.max_extra)

    def propose(self, context: Context, depth: int) -> Draft:
        head = self._head(context)
        if self._choice is not None:
            self._choice.count()
        if self._is_greedy(context):
            return Draft(self._target.draft_mtp(self._state, context[-1], depth, head=head))
        if self._is_point_mass(context):
            coupled, pairs = CoupledDraft(context), self._state.pairs
            known = pairs is not None and pairs.waiting > 0
            tokens = self._target.draft_mtp(self._state, context[-1], depth, head=head, choose=coupled)
            self._dead_ends += known and len(tokens) < depth
            return Draft(tokens)
        distributions: list[Any] = []

        def choose(logits: Logits, drafted: Sequence[int]) -> int | None:
            try:
                if self._gate.stops(logits, context, drafted):
                    return None
                token, distribution = draft_token(logits, drafted, context)
            except ConfigError:  # no token of the head is allowed here
                if head is None:
                    raise
                self._dead_ends += 1  # the target has more ids to choose from, so the settings are not at fault
                return None
            distributions.append(distribution)
            return token

        drafted = self._target.draft_mtp(self._state, context[-1], depth, head=head, choose=choose)
        point_masses = not drafted or distributions[0] is None
        return Draft(drafted, None if point_masses else np.stack(distributions))

    def rewind(self, length: int) -> None:
        if self._choice is not None:
            self._choice.forget()

    def report(self) -> Mapping[str, Any]:
        if self._choice is None:
            return self._gate.report()
        return {**self._choice.report(), "dead_ends": self._dead_ends, **self._gate.report()}

    def _head(self, context: Context) -> DraftHead | None:
        return None if self._choice is None else self._choice.follow(context)

    def _is_point_mass(self, context: Context) -> bool:
        """Whether a draft has the token that its own logits and the target's noise give, without a gate."""
        sampling = context.sampling
        coupled = sampling.temperature == 0 or context.draft_noise is DraftNoise.COUPLED
        return coupled and not sampling.processors and not self._gate.enabled

    def _is_greedy(self, context: Context) -> bool:
        sampling = context.sampling
        return sampling.temperature == 0 and is_plain(sampling) and not self._gate.enabled


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
            needs=Needs(mtp=True),
            prepare=prepare,
            help="the checkpoint's own multi-token-prediction head",
        )
    ]
