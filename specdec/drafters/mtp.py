"""Draft with the checkpoint's own multi-token-prediction (MTP) head.

The target feeds the head true pairs of hidden state and token (``specdec.contract.MtpPairs``); this drafter asks it for
drafts and decides how each token is chosen.

The output head takes most of the time of a draft step, so it is pruned to a draft vocabulary and the ids of the
sequence (``specdec.drafters.pruned_head``). Drafts are then drawn from the distribution over these ids; the output is
the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.contract import (
    Context,
    Draft,
    Drafter,
    DrafterEnv,
    DrafterSpec,
    DraftNoise,
    MtpDraft,
    Needs,
    Passes,
    PrepareEnv,
    run_passes,
)
from specdec.drafters.gate import DraftGate, Drawing
from specdec.drafters.pruned_head import HeadChoice, PreparedVocabulary, PrunedHeadConfig
from specdec.hookspecs import hookimpl
from specdec.sampling import CoupledDraft, is_plain


class MtpDrafter(Drafter):
    """Asks the target to draft with its MTP head."""

    def __init__(self, config: PrunedHeadConfig, env: DrafterEnv) -> None:
        self._target = env.target
        self._state = env.state
        gated = config.min_confidence > 0 or config.min_margin > 0
        self._gate = DraftGate(config.min_confidence, config.min_margin) if gated else None
        self._choice: HeadChoice | None = None
        self._dead_ends = 0  # drafts that ended because sampling rules left no token of the vocabulary
        if env.shared is not None:
            self._choice = HeadChoice(env.shared, config)

    def propose(self, context: Context, depth: int) -> Draft:
        return run_passes(self.drafting(context, depth))

    def drafting(self, context: Context, depth: int) -> Passes[Draft]:
        head = None if self._choice is None else self._choice.follow(context)
        sampling, pairs = context.sampling, self._state.pairs
        draft = MtpDraft(self._target, self._state, [context[-1]], depth=depth, head=head)
        coupled = sampling.temperature == 0 or context.draft_noise is DraftNoise.COUPLED
        if self._gate is None and coupled and not sampling.processors:  # the target can choose the tokens on its device
            known = pairs is not None and pairs.waiting > 0
            if sampling.temperature > 0 or not is_plain(sampling):
                draft.choose = CoupledDraft(context)
            tokens = yield from draft
            self._dead_ends += known and len(tokens) < depth
            return Draft(tokens)
        drawing = Drawing(self._gate or DraftGate(), context, reduced=head is not None)
        draft.choose = lambda logits, drafted: drawing.next(logits)
        yield from draft
        self._dead_ends += drawing.dead_end
        return drawing.draft()

    def rewind(self, length: int) -> None:
        if self._choice is not None:
            self._choice.forget()

    def report(self) -> Mapping[str, Any]:
        gate = {} if self._gate is None else self._gate.report()
        return gate if self._choice is None else {**self._choice.report(), "dead_ends": self._dead_ends, **gate}


def prepare(config: PrunedHeadConfig, env: PrepareEnv) -> PreparedVocabulary | None:
    """Read the draft vocabulary and gather its rows, once for all sequences."""
    info = env.target.info
    return config.prepare(env, env.target.draft_head, info.mtp_weights, info.hidden_size)


@hookimpl
def specdec_drafters() -> list[DrafterSpec]:
    return [
        DrafterSpec(
            name="mtp",
            factory=MtpDrafter,
            config=PrunedHeadConfig,
            needs=Needs(mtp=True),
            prepare=prepare,
            help="the checkpoint's own multi-token-prediction head",
        )
    ]
