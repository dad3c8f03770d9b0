"""Run prompts at one fixed depth, and keep every draft beside what became output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from specdec.contract import (
    EMPTY_DRAFT,
    Context,
    CycleRecord,
    DepthPolicy,
    DepthPolicySpec,
    Draft,
    Drafter,
    DrafterEnv,
    DrafterSnapshot,
    ForwardOutput,
    Stats,
    Verdict,
)
from specdec.decoding.parts import DepthPart
from specdec.errors import PromptError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specdec.decoding.result import Result
    from specdec.decoding.stream import Stream
    from specdec.measuring.prompts import Prompt
    from specdec.pipeline import LanguageModel

    Int64 = NDArray[np.int64]


@attrs.frozen
class DraftedCycle:
    """One cycle: what was drafted, and how much of it was accepted."""

    position: int  # committed tokens before the cycle
    asked: int  # tokens asked for; less than the depth where the generation was about to end
    drafted: tuple[int, ...]  # as verified
    accepted: int
    seconds: tuple[float, float, float]  # of drafting, verifying and committing, by the clock


@attrs.frozen(kw_only=True)
class PromptRun:
    """One prompt's generation."""

    prompt: Prompt
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]  # generated
    cycles: tuple[DraftedCycle, ...]
    inactive_reason: str  # why the drafter was switched off, or ""

    def counts(self, depth: int) -> Int64:
        """``[4, depth]``: by lookahead position, cycles asked for a token there, offered, reached, accepted."""
        stats = Stats(offered=[0] * depth, reached=[0] * depth, accepted=[0] * depth)
        asked = [0] * depth
        for cycle in self.cycles:
            stats.count(len(cycle.drafted), cycle.accepted)
            for position in range(cycle.asked):
                asked[position] += 1
        return np.array([asked, stats.offered, stats.reached, stats.accepted], dtype=np.int64)


class Recorder(DepthPolicy):
    """The same depth in every cycle; keeps each cycle together with its draft."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self.proposed = EMPTY_DRAFT
        self.cycles: list[DraftedCycle] = []

    def next_depth(self, stats: Stats) -> int:
        self.proposed = EMPTY_DRAFT
        return self._depth

    def record(self, cycle: CycleRecord) -> None:
        drafted = self.proposed.tokens[: cycle.offered]  # the engine cuts what cannot be verified
        seconds = (cycle.draft_seconds, cycle.verify_seconds, cycle.commit_seconds)
        self.cycles.append(DraftedCycle(cycle.position, cycle.depth, tuple(map(int, drafted)), cycle.accepted, seconds))


class RecordingDrafter(Drafter):
    """Another drafter, whose proposals a ``Recorder`` sees."""

    def __init__(self, inner: Drafter, recorder: Recorder) -> None:
        self._inner = inner
        self._recorder = recorder

    def prefill(self, context: Context, output: ForwardOutput) -> None:
        self._inner.prefill(context, output)

    def propose(self, context: Context, depth: int) -> Draft:
        draft = self._inner.propose(context, depth)
        self._recorder.proposed = draft
        return draft

    def observe(self, verdict: Verdict, output: ForwardOutput, context: Context) -> None:
        self._inner.observe(verdict, output, context)

    def rewind(self, length: int) -> None:
        self._inner.rewind(length)

    def snapshot(self, context: Context) -> DrafterSnapshot | None:
        return self._inner.snapshot(context)

    def report(self) -> Mapping[str, Any]:
        return self._inner.report()


class Recording:
    """One prompt's generation under way."""

    def __init__(self, lm: LanguageModel, prompt: Prompt, depth: int, **settings: Any) -> None:
        """``settings`` are fields of ``specdec.config.GenerationConfig``. Raises: PromptError as ``Session.feed``."""
        self._prompt = prompt
        self._recorder = recorder = Recorder(depth)
        make = lm.drafter.spec.factory

        def factory(config: Any, env: DrafterEnv) -> Drafter:
            return RecordingDrafter(make(config, env), recorder)

        watched = attrs.evolve(
            lm,
            drafter=attrs.evolve(lm.drafter, spec=attrs.evolve(lm.drafter.spec, factory=factory)),
            depth=DepthPart(spec=DepthPolicySpec(name="fixed", factory=lambda config: recorder)),
        )
        tokens = prompt.encode(lm.tokenizer)
        try:
            self.stream: Stream = watched.session().stream(tokens, **settings)
        except PromptError as error:
            raise PromptError(error.message, prompt=prompt.name, **error.facts) from error

    def run(self) -> PromptRun | None:
        """Generate to the end; None when ``stream.stop`` ended it early, for its counters would be of a part."""
        result: Result = self.stream.result
        if result.finish_reason == "interrupted":
            return None
        return PromptRun(
            prompt=self._prompt,
            prompt_tokens=tuple(result.prompt),
            tokens=tuple(result.tokens),
            cycles=tuple(self._recorder.cycles),
            inactive_reason=result.stats.inactive_reason,
        )
