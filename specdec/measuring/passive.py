"""Measure a drafter without using it: it drafts at every plain step, and nothing is verified.

The target runs one row per pass, so the output is that of plain decoding even where a pass of several rows has other
bits. Each draft is compared with the tokens that were then generated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from specdec.contract import Context, Draft, Drafter, DrafterSnapshot, ForwardOutput, Guarantee, Verdict
from specdec.errors import UnsupportedError

if TYPE_CHECKING:
    from specdec.measuring.runs import Run
    from specdec.pipeline import LanguageModel

_NOTHING = Draft(())


class PassiveDrafter(Drafter):
    """Asks another drafter for drafts, keeps them, and proposes none."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.drafts: dict[int, tuple[int, ...]] = {}  # committed tokens before the draft -> draft

    def propose(self, context: Context, depth: int) -> Draft:
        self.drafts[len(context)] = tuple(self._inner.propose(context, depth).tokens[:depth])
        return _NOTHING

    def prefill(self, context: Context, output: ForwardOutput) -> None:
        self._inner.prefill(context, output)

    def observe(self, verdict: Verdict, output: ForwardOutput, context: Context) -> None:
        self._inner.observe(verdict, output, context)

    def rewind(self, length: int) -> None:
        self._inner.rewind(length)

    def snapshot(self, context: Context) -> DrafterSnapshot | None:
        return self._inner.snapshot(context)

    def report(self) -> Mapping[str, Any]:
        return self._inner.report()


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
    watched: list[PassiveDrafter] = []

    def factory(config: Any, env: Any) -> Drafter:
        watched.append(PassiveDrafter(spec.factory(config, env)))
        return watched[-1]

    def with_drafts(run: Run) -> Run:
        drafts = watched[-1].drafts
        tokens = (*run.prompt_tokens, *run.tokens)
        cycles = []
        for cycle in run.cycles:
            following = tokens[cycle.position :]
            drafted = drafts.get(cycle.position, ())[: len(following)]
            pairs = enumerate(zip(drafted, following, strict=False))
            accepted = next((i for i, (ours, theirs) in pairs if ours != theirs), len(drafted))
            cycles.append(attrs.evolve(cycle, drafted=drafted, offered=len(drafted), accepted=accepted))
        watched.clear()
        return attrs.evolve(run, cycles=tuple(cycles))

    part = attrs.evolve(lm.drafter, spec=attrs.evolve(spec, factory=factory))
    return attrs.evolve(lm, drafter=part), with_drafts
