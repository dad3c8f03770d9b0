"""Generations with a record of every cycle, and what all measurements share: runs in series, stoppable on request."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from specdec.checking import checked
from specdec.config import Choice
from specdec.contract import CycleRecord, Guarantee, Parity, Stats
from specdec.decoding.parts import override_generation, with_seed
from specdec.errors import UnsupportedError
from specdec.measuring.environment import Environment
from specdec.measuring.prompts import Prompt
from specdec.pipeline import LanguageModel
from specdec.registry.parts import DepthPart, DrafterPart

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specdec.decoding.stream import Stream

FACTS = ("family", "fingerprint", "backend", "device", "dtype", "kernels")  # of the target, in a report


def cycle_seconds(cycle: CycleRecord) -> float:
    """Seconds of all phases of a cycle."""
    return cycle.draft_seconds + cycle.verify_seconds + cycle.commit_seconds


@attrs.frozen(kw_only=True)
class Run:
    """One generation, cycle by cycle."""

    prompt: Prompt | None = None  # None if it continued a context
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]  # generated
    cycles: tuple[CycleRecord, ...]
    seconds: float = 0.0  # of decoding, timed around each cycle
    prefill_seconds: float = 0.0
    inactive_reason: str = ""  # why speculation ended off
    complete: bool = True  # False if interrupted

    @property
    def rate(self) -> float:
        """Generated tokens per second of decoding."""
        return len(self.tokens) / self.seconds

    def counts(self, depth: int) -> NDArray[np.int64]:
        """``[4, depth]``: by lookahead position, cycles asked for a token there, offered, reached, accepted."""
        stats = Stats(offered=[0] * depth, reached=[0] * depth, accepted=[0] * depth)
        for cycle in self.cycles:
            stats.count(cycle.offered, cycle.accepted)
        requested = [sum(cycle.depth > position for cycle in self.cycles) for position in range(depth)]
        return np.array([requested, stats.offered, stats.reached, stats.accepted], dtype=np.int64)


def at_depth(lm: LanguageModel, depth: int) -> LanguageModel:
    """The same pipeline with a fixed depth."""
    return attrs.evolve(lm, depth=DepthPart.of(Choice("fixed", {"depth": depth})))


def plain(lm: LanguageModel) -> LanguageModel:
    """The same target, verifier and settings without a drafter."""
    return attrs.evolve(at_depth(lm, 0), drafter=DrafterPart.of(Choice("none")))


def generate(
    lm: LanguageModel,
    prompt: Prompt | list[int] | None = None,
    *,
    on_stream: Callable[[Stream], None] = lambda stream: None,
    **settings: Any,
) -> Run:
    """Generate and record every cycle.

    Args:
        prompt: to continue.
        on_stream: called with the stream before it starts.
        **settings: as for ``Session.stream``.

    Raises: PromptError, naming the prompt.
    """
    named = prompt if isinstance(prompt, Prompt) else None
    with contextlib.nullcontext() if named is None else named.named():
        ids = prompt.encode(lm.tokenizer) if isinstance(prompt, Prompt) else prompt
        stream = lm.session().stream(ids, **settings)
    cycles: list[CycleRecord] = []
    stream.on_cycle = cycles.append
    on_stream(stream)
    result = stream.result
    return Run(
        prompt=named,
        prompt_tokens=tuple(result.prompt),
        tokens=tuple(result.tokens),
        cycles=tuple(cycle for cycle in cycles if cycle.emitted),  # a device may run cycles past the end
        seconds=result.stats.decode_seconds,
        prefill_seconds=result.stats.seconds["prefill"],
        inactive_reason=result.stats.inactive_reason,
        complete=result.finish_reason != "interrupted",
    )


@attrs.frozen(kw_only=True)
class Report:
    """Fields that every measurement reports besides its figures."""

    environment: Environment
    drafter: str
    verifier: str
    guarantee: str
    max_new_tokens: int
    temperature: float
    seed: int | None  # None if nothing was sampled
    partial: bool  # interrupted: the figures cover the finished prompts
    notices: tuple[str, ...] = ()

    @property
    def promised(self) -> bool:
        """Whether verifier and backend promise the tokens of plain decoding."""
        return self.guarantee == Guarantee.EXACT.value and self.environment.parity == Parity.BITWISE.value


class Generations:
    """A series of generations that ``stop`` ends: the current one after its cycle, and no other starts."""

    stopping = False
    _stream: Stream | None = None

    def stop(self) -> None:
        """End early. Safe to call from a signal handler."""
        self.stopping = True
        if self._stream is not None:
            self._stream.stop()

    def started(self, stream: Stream) -> None:
        """The stream of the next generation, before it runs."""
        self._stream = stream
        if self.stopping:  # the signal came before the stream existed
            stream.stop()


class Measurement(Generations):
    """A series of generations, of which complete ones count.

    Args:
        lm: the pipeline to measure.
        progress: called with finished and planned generations.
        model: its name, for the record.
        **settings: fields of ``specdec.config.GenerationConfig``; the configuration's by default.

    Raises: UnsupportedError for a drafter that drafts nothing, ConfigError or PromptError for settings.
    """

    @checked()
    def __init__(
        self, lm: LanguageModel, *, progress: Callable[[int, int], None] | None = None, model: str = "", **settings: Any
    ) -> None:
        drafts = lm.drafter.spec.name != "none"
        if not drafts or getattr(lm.depth.config, "depth", None) == 0:
            idle = "depth 0" if drafts else "the drafter 'none'"
            raise UnsupportedError(
                f"{idle} drafts nothing, so there is nothing to measure",
                try_="depth = auto" if drafts else "drafter.name = mtp or ngram (specdec plugins lists them)",
            )
        self._lm = lm
        self._generation = with_seed(override_generation(lm.config.generation, settings))
        self._settings = {**settings, "seed": self._generation.seed}
        facts = {name: getattr(lm.info, name) for name in FACTS}
        # before the measurement adds its own load
        self._environment = Environment(model=model, parity=lm.info.parity.value, **facts)
        self._progress = progress or (lambda done, planned: None)
        self._planned = self._done = 0

    def _facts(self) -> dict[str, Any]:
        """The fields of ``Report``, without notices."""
        lm, generation = self._lm, self._generation
        return {
            "environment": self._environment,
            "drafter": lm.drafter.title,
            "verifier": lm.config.verifier.name,
            "guarantee": lm.verifier.guarantee.value,
            "max_new_tokens": generation.max_new_tokens,
            "temperature": generation.temperature,
            "seed": generation.seed,
            "partial": self.stopping,
        }

    def _common_notices(self, disturbed: str) -> Iterator[str]:
        """The pipeline's notices, and what a busy machine ``disturbed``."""
        yield from self._lm.notices
        if self._environment.busy:
            yield f"the machine was busy (load {self._environment.load_1min:.2f} in the minute before): {disturbed}"

    def _plan(self, generations: int) -> None:
        """Count generations towards the progress from here on."""
        self._planned = generations
        self._progress(0, generations)

    def _generate(self, lm: LanguageModel, prompt: Prompt) -> Run | None:
        """Run one generation; None if the measurement was stopped: an interrupted generation does not count."""
        if self.stopping:
            return None
        run = generate(lm, prompt, on_stream=self.started, **self._settings)
        if not run.complete:
            return None
        if self._planned:
            self._done += 1
            self._progress(self._done, self._planned)
        return run
