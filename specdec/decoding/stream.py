"""A running generation: drives the decoding loop and yields text."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator
from time import perf_counter

from specdec.config import GenerationConfig
from specdec.contract import CycleRecord, Stats
from specdec.decoding.cycle import LiveSequence
from specdec.decoding.loop import DecodingLoop
from specdec.decoding.parts import Parts
from specdec.decoding.prefill import prefill
from specdec.decoding.result import Result
from specdec.decoding.settings import make_sampling
from specdec.decoding.statistics import RunStats
from specdec.errors import StateError
from specdec.registry import notify_cycle
from specdec.text import IncrementalDecoder, StopMatcher


class Stream:
    """A running generation: iterate for text, then read ``result`` (which generates whatever is left).

    Attributes:
        on_cycle: called with the record of every cycle; assign it before reading the first text.
    """

    def __init__(self, lm: Parts, sequence: LiveSequence, settings: GenerationConfig, totals: Stats) -> None:
        """Args: ``totals``: the session's counters, updated with every cycle."""
        self._lm = lm
        self._sequence = sequence
        self._settings = settings
        self._totals = totals
        self._prompt = list(sequence.tokens)
        self._stats = RunStats(drafter=lm.drafter.spec.name)
        self._decoder = IncrementalDecoder(lm.tokenizer)
        self._matcher = StopMatcher(settings.stop)
        self._stop_ids = frozenset() if settings.ignore_eos else frozenset(lm.tokenizer.eos_ids)
        self._sampling = make_sampling(lm, settings, generated_from=len(self._prompt))
        self._text = ""
        self._piece = ""
        self._reason: str | None = None
        self._result: Result | None = None
        self.on_cycle: Callable[[CycleRecord], object] = lambda record: None
        self.stopping = False
        self._over = False
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except BaseException:  # the end, an error or an interruption: the generator cannot continue
            self._over = True
            raise

    def stop(self) -> None:
        """Ask the generation to end after the current cycle; safe from a signal handler or another thread."""
        self.stopping = True

    def over(self) -> bool:
        """Whether the session may be used again; ends a generation that was stopped and is not inside a cycle."""
        if not self.finished and self.stopping and inspect.getgeneratorstate(self._pieces) != inspect.GEN_RUNNING:
            for _ in self:
                pass
        return self.finished

    @property
    def finished(self) -> bool:
        """Whether the generation is over (also after an error, which leaves the session usable)."""
        return self._over

    @property
    def result(self) -> Result:
        """The result; generates what is left first."""
        for _ in self:
            pass
        if self._result is None:
            raise StateError("this generation ended with an error and has no result")
        return self._result

    def _run(self) -> Generator[str, None, None]:
        lm, sequence, stats = self._lm, self._sequence, self._stats
        sequence.context.sampling = self._sampling
        sequence.context.generated_from = len(self._prompt)
        sequence.logprobs = []
        policy = lm.depth.make()
        prefill(sequence, stats, lambda: self.stopping)
        stop_ids = sorted(self._stop_ids)
        loop = DecodingLoop(sequence, self._cut, stats, stop_tokens=stop_ids, ahead=not self._settings.stop)
        deepest = 0  # depth asked for
        try:
            while self._reason is None:
                produced = len(sequence.tokens) - len(self._prompt)
                room = min(self._settings.max_new_tokens - produced, lm.capacity - len(sequence.tokens))
                if self.stopping and not loop.in_flight:
                    self._reason = "interrupted"
                elif room <= 0:
                    self._reason = "context"
                else:
                    started = perf_counter()
                    depth = max(0, min(policy.next_depth(stats), lm.info.max_rows - 1, room - 1))
                    deepest = max(deepest, depth)
                    record = loop.step(None if self.stopping else depth, room)
                    policy.record(record)
                    notify_cycle(record)
                    self.on_cycle(record)
                    self._totals.cycles += 1
                    self._totals.tokens += len(record.emitted)
                    self._totals.count(record.offered, record.accepted)
                    stats.decode_seconds += perf_counter() - started
                if self._piece:
                    piece, self._piece = self._piece, ""
                    yield piece
        except GeneratorExit:
            loop.close()
            raise
        loop.close()
        tail = self._decoder.flush()
        if self._reason != "stop_string":
            emitted, matched = self._matcher.push(tail)
            tail = emitted + ("" if matched else self._matcher.flush())
            self._text += tail
            if tail:
                yield tail
        self._result = self._finish(deepest, policy.reason)

    def _cut(self, emitted: tuple[int, ...]) -> int:
        """Take the tokens one by one until one of them ends the generation; returns how many were taken."""
        produced = len(self._sequence.tokens) - len(self._prompt)
        if not self._settings.stop:
            return self._cut_at_ids(emitted, produced)
        for taken, token in enumerate(emitted, start=1):
            if token in self._stop_ids:
                self._reason = "stop"
                return taken
            text, matched = self._matcher.push(self._decoder.push([token]))
            self._piece += text
            self._text += text
            if matched is not None:
                self._reason = "stop_string"
                return taken
            if produced + taken >= self._settings.max_new_tokens:
                self._reason = "length"
                return taken
        return len(emitted)

    def _cut_at_ids(self, emitted: tuple[int, ...], produced: int) -> int:
        """``_cut`` without stop strings, so that all tokens are decoded at once.

        A cycle never emits more tokens than there is room for.
        """
        taken, shown = len(emitted), emitted
        if not self._stop_ids.isdisjoint(emitted):
            taken = next(i for i, token in enumerate(emitted, start=1) if token in self._stop_ids)
            shown = emitted[: taken - 1]
            self._reason = "stop"
        elif produced + taken >= self._settings.max_new_tokens:
            self._reason = "length"
        text = self._decoder.push(shown)
        self._piece += text
        self._text += text
        return taken

    def _finish(self, deepest: int, reason: str) -> Result:
        lm, sequence, stats = self._lm, self._sequence, self._stats
        if sequence.speculating:
            sequence.guard("report", lambda: stats.draft.update(sequence.drafter.report()))
        stats.inactive_reason = sequence.failure
        if not stats.offered and not stats.inactive_reason and stats.cycles:
            if lm.drafter.spec.name == "none":
                stats.inactive_reason = "drafter 'none' was chosen"
            elif deepest == 0:
                why = reason or f"the depth policy {lm.depth.spec.name!r} chose depth 0 in every cycle"
                stats.inactive_reason = why
        if reason and not stats.inactive_reason:  # speculation ran for a while, then went off for this reason
            stats.inactive_reason = reason
        return Result(
            prompt=self._prompt,
            tokens=sequence.tokens[len(self._prompt) :],
            text=self._text,
            finish_reason=self._reason or "interrupted",
            prompt_tokens=len(self._prompt),
            guarantee=lm.verifier.guarantee.value,
            parity=lm.info.parity.value,
            deviation=stats.deviation,
            stats=stats,
            notices=list(lm.notices),
            generation=self._settings,
            fingerprint=lm.info.fingerprint,
            logprobs=None if self._sampling.logprobs is None else list(sequence.logprobs),
        )
