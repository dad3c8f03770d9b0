"""A running generation: drives the decoding loop and yields text."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import operator
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from time import perf_counter
from typing import Self

import attrs

from specdec.config import GenerationConfig
from specdec.contract import CycleRecord, DepthPolicy, ForwardOutput, ForwardPass, PassRequest, same_depth
from specdec.decoding.cycle import cycle
from specdec.decoding.parts import Parts, language_model, make_sampling, unused_filters
from specdec.decoding.result import Result, RunStats
from specdec.decoding.sequence import LiveSequence, prefill_chunks
from specdec.drafters.prediction import PredictedText
from specdec.errors import SpecdecError, StateError
from specdec.logs import get_logger
from specdec.registry import calling, notify_cycle
from specdec.text import IncrementalDecoder, StopMatcher

log = get_logger(__name__)


class OneThread:
    """A context that one thread at a time can enter; another thread gets an error at once instead of waiting.

    The thread that holds it may enter again: an interruption that falls into ``__exit__`` must not lock it for ever.
    """

    def __init__(self) -> None:
        self._holder: dict[str, int] = {}

    def __enter__(self) -> None:
        """Raises: StateError when another thread is inside."""
        here = threading.get_ident()
        if self._holder.setdefault("thread", here) != here:  # one step, so only one of two threads comes in
            raise StateError(
                "another thread is using this session",
                try_="a session for each thread; Stream.stop may be called from any thread",
            )

    def __exit__(self, *_: object) -> None:
        self._holder.pop("thread", None)


class Stream:
    """A running generation: iterate for text, with ``for`` or ``async for``, then read ``result``.

    Reading ``result`` generates whatever is left.

    As a context manager it ends the generation when the block is left. So does the next call of its session.

    Attributes:
        settings: the generation settings in force.
        on_cycle: called with the record of every cycle; assign it before reading the first text.
        prediction: what is drafted from before the drafter is asked; likewise.
        shared: whether other generations wait for a chunk of its prompt.
        stopping: whether ``stop`` was called.
        failed: whether an error ended it; an interruption is none.
    """

    def __init__(
        self,
        lm: Parts,
        sequence: LiveSequence,
        settings: GenerationConfig,
        prompt: list[int],
        alone: OneThread,
        prediction: PredictedText | None = None,
        depth: int | None = None,
    ) -> None:
        """Args: ``prompt``: the tokens that the sequence has when the generation begins."""
        self._lm = language_model(lm, "a stream")
        self._sequence = sequence
        self.settings = settings
        self._prompt = prompt
        self._alone = alone
        self.prediction = prediction
        self._depth = depth  # in place of the policy's
        self._stats = RunStats(drafter=lm.drafter.title)
        self._decoder = IncrementalDecoder(lm.tokenizer)
        self._matcher = StopMatcher(settings.stop)
        self._stop_ids = frozenset() if settings.ignore_eos else frozenset(lm.tokenizer.eos_ids)
        self._sampling = make_sampling(lm, settings, generated_from=len(self._prompt))
        self._notices = unused_filters(settings)  # of this generation
        self._text = ""
        self._piece = ""
        self._reason: str | None = None
        self._result: Result | None = None
        self.on_cycle: Callable[[CycleRecord], object] = lambda record: None
        self.shared = self.stopping = self.failed = False
        self._steps = self._run()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.check_idle()
        with self._alone:
            while not (text := self._go_on()):
                pass
            return text

    def _go_on(self) -> str:
        """Run passes up to the next text, which is empty where a chunk of the prompt has run."""
        step = self.step()
        while isinstance(step, PassRequest):
            step = self.step(step.run())
        return step

    def step(self, output: ForwardOutput | BaseException | None = None) -> str | PassRequest:
        """Go on to the next text or the next pass; for a driver, which no other thread may share.

        The text is empty where a chunk of the prompt has run.

        Args:
            output: of the pass that the last call returned, or what it raised. Without one it is returned again, also
                after an interruption of the caller.

        Raises: StopIteration when the generation is over.
        """
        return self._steps.send(output)

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        """The next text, from a thread, so that an event loop goes on meanwhile."""
        try:
            piece = await asyncio.to_thread(next, self, None)
        except asyncio.CancelledError:
            self.stop()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stop(self) -> None:
        """Ask the generation to end after the current cycle; safe from a signal handler or another thread."""
        self.stopping = True

    def close(self) -> None:
        """End the generation, if it has not ended. The session keeps its tokens, and ``result`` has them."""
        self.check_idle()
        with self._alone:
            self.end()

    def end(self) -> None:
        """``close`` for the session, which is used by this thread already."""
        self.stopping = True
        with contextlib.suppress(StopIteration):
            while True:
                self._go_on()

    def check_idle(self) -> None:
        """Raises: StateError inside a cycle, where ``on_cycle`` or another thread called."""
        if inspect.getgeneratorstate(self._steps) == inspect.GEN_RUNNING:
            raise StateError("a generation of this session is running", try_="Stream.stop, then wait for its end")

    @property
    def prompt(self) -> list[int]:
        """All tokens that the generation continues."""
        return list(self._prompt)

    @property
    def target(self) -> ForwardPass:
        """The model that it generates with."""
        return self._sequence.target

    @property
    def waiting(self) -> int:
        """Tokens of the prompt that have yet to run."""
        return max(len(self._sequence.tokens) - 1 - self._sequence.state.length, 0)

    @property
    def finished(self) -> bool:
        """Whether the generation is over (also after an error, which leaves the session usable)."""
        return inspect.getgeneratorstate(self._steps) == inspect.GEN_CLOSED

    @property
    def result(self) -> Result:
        """The result; generates what is left first."""
        for _ in self:
            pass
        if self._result is None:
            raise StateError("this generation ended with an error and has no result", tokens="they are in the session")
        return self._result

    def _run(self) -> Generator[str | PassRequest, ForwardOutput | BaseException | None, None]:
        try:
            yield from self._decode()
        except Exception as error:
            self.failed = True
            if isinstance(error, SpecdecError):
                error.tokens = tuple(self._sequence.tokens[len(self._prompt) :])
            raise

    def _decode(self) -> Generator[str | PassRequest, ForwardOutput | BaseException | None, None]:
        lm, sequence, stats = self._lm, self._sequence, self._stats
        sequence.context.sampling = self._sampling
        sequence.context.generated_from = len(self._prompt)
        sequence.logprobs = []
        policy = lm.depth.make()
        sequence.context.depth_of = policy.depth_of if self._depth is None else same_depth
        started = perf_counter()
        for _ in () if self.stopping else prefill_chunks(sequence, stats, lambda: self.shared):
            yield ""
            if self.stopping:
                break
        log.info("prefilled", tokens=len(self._prompt), elapsed_s=round(perf_counter() - started, 6))
        every_cycle = log.isEnabledFor(logging.DEBUG)
        deepest: int | None = None  # depth that the policy chose
        while self._reason is None:
            produced = len(sequence.tokens) - len(self._prompt)
            room = min(self.settings.max_new_tokens - produced, lm.capacity - len(sequence.tokens))
            if self.stopping:
                self._reason = "interrupted"
            elif room <= 0:
                self._reason = "context"
            else:
                started = perf_counter()
                most = min(room, lm.info.max_rows) - 1
                depth = most if self._depth is None else min(self._depth, most)
                predicted = () if self.prediction is None else self.prediction.draft(sequence.tokens, depth)
                if predicted:
                    depth = len(predicted)
                elif self._depth is None:
                    with calling(lm.depth.spec, "next_depth"):
                        depth = max(0, min(operator.index(policy.next_depth(stats)), most))
                    deepest = max(deepest or 0, depth)
                record = yield from cycle(sequence, depth, self._cut, stats, predicted)
                if predicted:
                    stats.prediction_offered += record.offered
                    stats.prediction_accepted += record.accepted
                elif self._depth is None:
                    with calling(lm.depth.spec, "record"):
                        policy.record(record)
                self._notices += notify_cycle(record)
                if every_cycle:
                    log.debug("cycle", **attrs.asdict(record))
                self.on_cycle(record)
                stats.decode_seconds += perf_counter() - started
            if self._piece:
                piece, self._piece = self._piece, ""
                yield piece
        tail = self._decoder.flush()
        if self._reason != "stop_string":
            emitted, matched = self._matcher.push(tail)
            tail = emitted + ("" if matched else self._matcher.flush())
            self._text += tail
            if tail:
                yield tail
        self._result = self._finish(deepest, policy)
        log.info(
            "generated",
            tokens=len(self._result.tokens),
            finish_reason=self._result.finish_reason,
            cycles=stats.cycles,
            speculation=stats.inactive_reason or "on",
            elapsed_s=round(stats.decode_seconds, 6),
        )

    def _cut(self, emitted: tuple[int, ...]) -> int:
        """Take tokens until one of them ends the generation; returns how many were taken.

        A cycle never emits more tokens than there is room for.
        """
        produced = len(self._sequence.tokens) - len(self._prompt)
        end = next((place for place, token in enumerate(emitted) if token in self._stop_ids), None)
        taken, shown = len(emitted) if end is None else end + 1, emitted[:end]
        if end is not None:
            self._reason = "stop"
        elif produced + taken >= self.settings.max_new_tokens:
            self._reason = "length"
        if self.settings.stop:
            text = ""
            for count, token in enumerate(shown, start=1):
                piece, matched = self._matcher.push(self._decoder.push([token]))
                text += piece
                if matched is not None:
                    self._reason, taken = "stop_string", count
                    break
        else:
            text = self._decoder.push(shown)
        self._piece += text
        self._text += text
        return taken

    def _finish(self, deepest: int | None, policy: DepthPolicy) -> Result:
        lm, sequence, stats = self._lm, self._sequence, self._stats
        reason = "depth 0 was requested" if self._depth == 0 else ""
        if deepest is not None:
            with calling(lm.depth.spec, "reason"):
                reason = policy.reason
        stats.draft.update(sequence.ask("report") or {})
        stats.inactive_reason = sequence.failure
        if not stats.offered and not stats.inactive_reason and stats.cycles:
            if lm.drafter.spec.name == "none":
                stats.inactive_reason = "drafter 'none' was chosen"
            elif deepest == 0 and not reason:
                reason = f"the depth policy {lm.depth.spec.name!r} chose depth 0 in every cycle"
        if reason and not stats.inactive_reason:  # it may have run for a while, then gone off for this reason
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
            notices=[*lm.notices, *self._notices],
            generation=self.settings,
            fingerprint=lm.info.fingerprint,
            device=lm.info.device,
            weights=lm.info.weights,
            logprobs=None if self._sampling.logprobs is None else list(sequence.logprobs),
        )
