"""Draft with the checkpoint's own multi-token-prediction (MTP) head.

The target feeds the head true pairs of hidden state and token (``specdec.contract.MtpPairs``); this drafter asks it for
drafts and decides how each token is chosen.

The output head takes most of the time of a draft step. With a draft vocabulary (``specdec vocab``) it covers only the
ids of that file and of the sequence. Drafts are then drawn from the distribution over these ids; the output is the
same.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import attrs

from specdec.contract import Context, Draft, Drafter, DrafterEnv, DrafterSpec, DraftNoise, Needs, PrepareEnv
from specdec.drafters.gate import DraftGate, Drawing
from specdec.drafters.pruned_head import HeadChoice, PreparedVocabulary, PrunedHeadConfig
from specdec.hookspecs import hookimpl
from specdec.sampling import CoupledDraft


@attrs.frozen(kw_only=True)
class MtpConfig(PrunedHeadConfig):
    """A cheaper head, and when to stop a draft early; the defaults do neither."""


class MtpDrafter(Drafter):
    """Asks the target to draft with its MTP head."""

    def __init__(self, config: MtpConfig, env: DrafterEnv) -> None:
        self._target = env.target
        self._state = env.state
        self._gate = DraftGate(config.min_confidence, config.min_margin)
        self._choice: HeadChoice | None = None
        self._dead_ends = 0  # drafts that ended because sampling rules left no token of the vocabulary
        if env.shared is not None:
            self._choice = HeadChoice(env.shared, max_miss=config.max_miss, max_extra=config.max_extra)

    def propose(self, context: Context, depth: int) -> Draft:
        head = None if self._choice is None else self._choice.follow(context)
        drawing = Drawing(self._gate, context, reduced=head is not None)
        draft = functools.partial(self._target.draft_mtp, self._state, context[-1], depth, head=head)
        if drawing.greedy:
            return Draft(draft())
        if self._is_point_mass(context):
            pairs = self._state.pairs
            known = pairs is not None and pairs.waiting > 0
            tokens = draft(choose=CoupledDraft(context))
            self._dead_ends += known and len(tokens) < depth
            return Draft(tokens)
        draft(choose=lambda logits, drafted: drawing.next(logits))
        self._dead_ends += drawing.dead_end
        return drawing.draft()

    def rewind(self, length: int) -> None:
        if self._choice is not None:
            self._choice.forget()

    def report(self) -> Mapping[str, Any]:
        if self._choice is None:
            return self._gate.report()
        return {**self._choice.report(), "dead_ends": self._dead_ends, **self._gate.report()}

    def _is_point_mass(self, context: Context) -> bool:
        """Whether a draft has the token that its own logits and the target's noise give, without a gate."""
        sampling = context.sampling
        coupled = sampling.temperature == 0 or context.draft_noise is DraftNoise.COUPLED
        return coupled and not sampling.processors and not self._gate.enabled


def prepare(config: MtpConfig, env: PrepareEnv) -> PreparedVocabulary | None:
    """Read the draft vocabulary and gather its rows, once for all sequences."""
    return config.prepare(env, env.target.draft_head)


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
