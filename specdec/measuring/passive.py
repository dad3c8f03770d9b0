"""Measure a drafter without using it: it drafts at every plain step, and nothing is verified.

The target runs one row per pass, so the output is that of plain decoding even where a pass of several rows has other
bits. Each draft is compared with the tokens that were then generated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from specdec.contract import EMPTY_DRAFT, Context, Draft, Drafter, Guarantee, Passes
from specdec.errors import UnsupportedError
from specdec.text.tokenizer import common_prefix

if TYPE_CHECKING:
    from specdec.measuring.runs import Run
    from specdec.pipeline import LanguageModel


def passive(lm: LanguageModel) -> tuple[LanguageModel, Callable[[Run], Run]]:
    """The pipeline with its drafter watched, and a function that adds the drafts to a run of it.

    Raises: UnsupportedError unless the verifier is exact: only then is an accepted token one that equals the output.
    """
    if lm.verifier.guarantee is not Guarantee.EXACT:
        raise UnsupportedError(
            f"a passive measurement counts drafts that equal the output, and the verifier {lm.config.verifier.name!r} "
            "accepts others too",
            try_='verifier.name = "strict", or an active measurement',
        )
    spec = lm.drafter.spec
    drafts: dict[int, tuple[int, ...]] = {}  # of the last session: committed tokens before the draft -> draft

    def factory(config: Any, env: Any) -> Drafter:
        drafter = spec.factory(config, env)
        drafting = drafter.drafting
        drafts.clear()

        def keep(context: Context, depth: int) -> Passes[Draft]:
            draft = yield from drafting(context, depth)
            drafts[len(context)] = tuple(draft.tokens[:depth])
            return EMPTY_DRAFT

        drafter.drafting = keep  # type: ignore[method-assign]
        return drafter

    def with_drafts(run: Run) -> Run:
        tokens = (*run.prompt_tokens, *run.tokens)
        cycles = []
        for cycle in run.cycles:
            following = tokens[cycle.position :]
            drafted = drafts.get(cycle.position, ())[: len(following)]
            accepted = common_prefix(drafted, following)
            cycles.append(attrs.evolve(cycle, drafted=drafted, offered=len(drafted), accepted=accepted))
        return attrs.evolve(run, cycles=tuple(cycles))

    part = attrs.evolve(lm.drafter, spec=attrs.evolve(spec, factory=factory))
    return attrs.evolve(lm, drafter=part), with_drafts
