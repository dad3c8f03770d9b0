"""Several generations at once: each draws its own drafts, and one pass of the target verifies all of them.

A tick takes every generation to its next pass, runs the passes as one and lets each go on: its verifier decides, its
state commits, its drafter drafts, whose own model's passes are shared too. One sequence is the case of one
(``Stream.__next__``).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import attrs

from specdec.contract import ModelInfo, Parity, PassRequest
from specdec.decoding.result import Result
from specdec.decoding.stream import Stream
from specdec.errors import NoMemoryError

SMOOTHING = 0.1  # weight of the newest pass in an average
VARIED = 0.5  # variance of the rows below which they say nothing about the price of one


class Batch:
    """Generations over one target. They join and leave between ticks, and each has the tokens that it has alone.

    Prompts run in chunks, one chunk of one generation per tick, so that a long prompt delays no other generation by
    more than a chunk. The shortest prompt and the oldest take turns. A generation that fails leaves the others alone.

    Attributes:
        running: generations that have not ended, in the order in which they joined.
        failures: what ended a generation with an error.
        rows: of the last tick's pass.
    """

    def __init__(self) -> None:
        self.running: list[Stream] = []
        self.failures: dict[Stream, Exception] = {}
        self.rows = 0
        self._prompts: list[Stream] = []  # whose prompts have yet to run, in the order in which they joined
        self._oldest = False  # whether the last chunk was of the oldest one
        self._outputs: dict[Stream, Any] = {}  # or what was raised
        self._prices = _Prices()
        self._stopping = False

    def add(self, stream: Stream) -> None:
        """Let a generation join."""
        self.running.append(stream)
        self._prompts.append(stream)
        if self._stopping:
            stream.stop()

    def tick(self) -> list[tuple[Stream, str]]:
        """Run one pass of the target for all; returns the texts that came, with their generations. Ended ones leave."""
        texts: list[tuple[Stream, str]] = []
        requests: dict[Stream, PassRequest] = {}
        if self._prompts:
            self._oldest = not self._oldest
        chosen = next(iter(self._prompts if self._oldest else sorted(self._prompts, key=lambda one: one.waiting)), None)
        if chosen is not None:
            chosen.shared = len(self.running) > 1
        going = [s for s in self.running if s not in self._prompts or s is chosen or s.stopping]
        while going:
            drafts: dict[Stream, PassRequest] = {}
            for stream in going:
                request = self._go_on(stream, texts)
                if request is not None:
                    verifies = type(request) is PassRequest and request.model is stream.target
                    (requests if verifies else drafts)[stream] = request
            kinds = {stream: (request.model, type(request)) for stream, request in drafts.items()}
            for kind in dict.fromkeys(kinds.values()):
                self._run({stream: request for stream, request in drafts.items() if kinds[stream] == kind})
            going = list(drafts)
        self.rows = sum(len(request.tokens) for request in requests.values())
        self._run(requests, self._prices)
        return texts

    def _go_on(self, stream: Stream, texts: list[tuple[Stream, str]]) -> PassRequest | None:
        """Take a generation to its next pass, if there is one, with the output of its last."""
        try:
            step = stream.step(self._outputs.pop(stream, None))
            while step and not isinstance(step, PassRequest):
                texts.append((stream, step))
                step = stream.step()
        except StopIteration:
            self._leave(stream)
            return None
        except Exception as error:  # noqa: BLE001 - it ends this generation, not the others
            self._leave(stream)
            self.failures[stream] = error
            return None
        if stream in self._prompts and not stream.waiting:
            self._prompts.remove(stream)
        return step if isinstance(step, PassRequest) else None

    def run(self, begin: Iterable[Callable[[], Stream]], most: int) -> Iterator[tuple[int, Result | Exception]]:
        """Run generations, at most ``most`` at once; yields the number and result of each one that ends.

        Where there is no memory for one more, it waits, and fewer run at once from then on.

        Args:
            begin: starts each generation; called when there is a place for it.
        """
        waiting = enumerate(begin)
        numbers: dict[Stream, int] = {}
        following = next(waiting, None)
        while (following and not self._stopping) or self.running:
            while following and not self._stopping and len(self.running) < most:
                number, start = following
                try:
                    stream = _begun(start)
                except Exception as error:  # noqa: BLE001 - it ends this generation, not the others
                    if isinstance(error, NoMemoryError) and self.running:
                        most = len(self.running)
                        break
                    yield number, error
                else:
                    numbers[stream] = number
                    self.add(stream)
                following = next(waiting, None)
            self.tick()
            for stream in [stream for stream in numbers if stream not in self.running]:
                failure = self.failures.pop(stream, None)
                yield numbers.pop(stream), failure or stream.result
                del stream  # its state makes room for the next one's

    def stop(self) -> None:
        """End the running generations after their current cycle, and begin no more; safe from a signal handler."""
        self._stopping = True
        for stream in list(self.running):
            stream.stop()

    def _leave(self, stream: Stream) -> None:
        self.running.remove(stream)
        if stream in self._prompts:
            self._prompts.remove(stream)

    def _run(self, requests: Mapping[Stream, PassRequest], prices: _Prices | None = None) -> None:
        """Run passes of one model as one, if that changes no bits, and keep their outputs.

        Each is told its share of the seconds: by ``prices``, or by the number of its steps.
        """
        passes = list(requests.values())
        if len(passes) < 2 or not _batches(passes[0].model.info):
            outputs: Sequence[Any] = [request.run() for request in passes]
        else:
            started = perf_counter()
            outputs = _run_together(passes)
            seconds, steps = perf_counter() - started, sum(request.steps for request in passes)
            if prices is not None:
                prices.add(self.rows, seconds)
            for request in passes:
                if prices is not None:
                    request.seconds = prices.share(seconds, len(passes), len(request.tokens) - 1)
                elif not request.seconds:  # else the model has run it alone
                    request.seconds = seconds * request.steps / steps
        self._outputs |= zip(requests, outputs, strict=True)


def _begun(start: Callable[[], Stream]) -> Stream:
    """A generation; where memory is short, the states of those that ended are collected first."""
    try:
        return start()
    except NoMemoryError:
        gc.collect()
        return start()


def _batches(info: ModelInfo) -> bool:
    return info.batch_rows > 0 and info.parity is Parity.BITWISE


@attrs.define
class _Prices:
    """What a row adds to a shared pass: the slope of seconds over rows in recent passes."""

    _rows: float = 0.0  # means
    _seconds: float = 0.0
    _variance: float = 0.0  # of the rows
    _covariance: float = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """Learn from a pass."""
        weight = SMOOTHING if self._rows else 1.0
        off, late = rows - self._rows, seconds - self._seconds
        self._rows += weight * off
        self._seconds += weight * late
        if weight < 1.0:
            self._variance = (1 - weight) * (self._variance + weight * off * off)
            self._covariance = (1 - weight) * (self._covariance + weight * off * late)

    def share(self, seconds: float, sequences: int, drafted: int) -> float:
        """A sequence's share of a pass: a drafted row costs it what the row adds to everybody's wait.

        The pass is shared equally. Of what its own ``drafted`` rows add, the others bear all but one part, so that part
        is added: a depth then pays for a sequence exactly where it raises the tokens per second of all.
        """
        mean = self._seconds / self._rows
        slope = min(max(self._covariance / self._variance, 0.0), mean) if self._variance > VARIED else mean
        return seconds / sequences + (1 - 1 / sequences) * slope * drafted


def _run_together(requests: Sequence[PassRequest]) -> Sequence[Any]:
    """One pass for all requests. If it fails, each has its own, so that only those fail that cause it."""
    try:
        return type(requests[0]).run_batch(requests)
    except Exception:  # noqa: BLE001 - found again below
        return [request.run() for request in requests]
