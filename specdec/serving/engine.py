"""Generates for one request after another, in a thread of its own."""

from __future__ import annotations

import asyncio
import collections
import math
import threading
from collections.abc import Sequence
from time import perf_counter
from typing import Self

import attrs

from specdec.contract import CycleRecord
from specdec.decoding.parts import Parts
from specdec.decoding.result import Result, TokenLogprobs
from specdec.decoding.stream import Stream
from specdec.errors import SpecdecError
from specdec.logs import get_logger
from specdec.serving.metrics import Metrics
from specdec.serving.refusal import Refusal
from specdec.serving.requests import Prepared
from specdec.serving.sessions import Sessions

log = get_logger(__name__)

PIECE_SECONDS = 0.04
"""Text waits this long for more, at most, before it is sent: waking the event loop for every cycle of a small model
would cost more than the cycle. A cycle that takes longer sends its text at once."""
RETRY_SECONDS = 60  # the longest advice of Retry-After


@attrs.frozen
class Piece:
    """What a generation has produced since the last piece.

    Attributes:
        text: final text.
        logprobs: of the new tokens, if requested.
        cycles: that produced them, if requested.
    """

    text: str
    logprobs: Sequence[TokenLogprobs] = ()
    cycles: Sequence[CycleRecord] = ()


class Turn:
    """A request's place in the queue, and what its generation produces. Made and read on the event loop.

    As a context manager it gives the place back, and ends the generation after its current cycle.
    """

    def __init__(self, engine: Engine, *, streamed: bool, cycles: bool) -> None:
        """Args: ``streamed``: whether pieces come while it runs; ``cycles``: whether they report their cycles."""
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Piece | Result | Refusal | None] = asyncio.Queue()
        self._stream: Stream | None = None
        self.streamed = streamed
        self.cycles = cycles
        self.gone = False  # the client no longer wants it
        self.ended_by_server = False
        self.asked = perf_counter()
        self.begun: float | None = None
        self.prepared = Prepared([], {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Give the place back: a waiting request is dropped, a running one ends after its current cycle."""
        self.gone = True
        self.stop()
        self._engine.forget(self)
        self._events.put_nowait(None)

    def stop(self) -> None:
        """End the generation after its current cycle; safe from any thread."""
        stream = self._stream
        if stream is not None:
            stream.stop()

    def start(self, prepared: Prepared) -> None:
        """Join the line. Raises: Refusal when the server is shutting down."""
        self.prepared = prepared
        self._engine.line_up(self)

    async def next(self) -> Piece | Result:
        """The next piece, and at last the result. Raises: Refusal if the generation failed; CancelledError if left."""
        event = await self._events.get()
        if event is None:
            raise asyncio.CancelledError
        if isinstance(event, Refusal):
            raise event
        return event

    # --- called by the engine's thread -----------------------------------------------------------------------------

    def runs(self, stream: Stream) -> None:
        """Its turn has come."""
        self._stream = stream
        if self.gone or self.ended_by_server:
            stream.stop()

    def send(self, event: Piece | Result | Refusal) -> None:
        """Hand an event to the event loop."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop has ended
            self.gone = True


class Engine:
    """The thread that generates, and the line of requests before it.

    Requests are served one at a time in the order of their arrival: a pass of one sequence uses the whole machine.

    Args:
        lm: the model.
        most_waiting: requests that may wait beside the one that runs.
        kept_bytes: for the states of earlier requests.
    """

    def __init__(self, lm: Parts, metrics: Metrics, *, most_waiting: int, kept_bytes: int) -> None:
        self._lm = lm
        self._metrics = metrics
        self._places = most_waiting + 1
        self._sessions = Sessions(lm, kept_bytes)
        self._condition = threading.Condition()
        self._turns: set[Turn] = set()  # that hold a place
        self._line: collections.deque[Turn] = collections.deque()
        self._running: Turn | None = None
        self._closing = False
        self._seconds = 1.0  # of a request, a moving mean
        self._thread = threading.Thread(target=self._run, name="specdec-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests in the queue, the running one excluded."""
        return len(self._turns) - (self._running is not None)

    def turn(self, *, streamed: bool, cycles: bool = False) -> Turn:
        """A place in the queue. Raises: Refusal with status 429 when all are taken, 503 during a shutdown."""
        with self._condition:
            self._check_open()
            if len(self._turns) >= self._places:
                self._metrics.refused.inc()
                seconds = min(RETRY_SECONDS, max(1, math.ceil(self._seconds)))
                raise Refusal(
                    429,
                    f"the queue is full: {self._places - 1} requests wait",
                    code="queue_full",
                    headers={"retry-after": str(seconds)},
                )
            turn = Turn(self, streamed=streamed, cycles=cycles)
            self._turns.add(turn)
        self._metrics.waiting.set(self.waiting)
        return turn

    def _check_open(self) -> None:
        if self._closing:
            raise Refusal(503, "the server is shutting down", headers={"retry-after": "1"})

    def line_up(self, turn: Turn) -> None:
        """Put a turn at the end of the line. Raises: Refusal during a shutdown."""
        with self._condition:
            self._check_open()
            if turn in self._turns:
                self._line.append(turn)
                self._condition.notify()

    def forget(self, turn: Turn) -> None:
        """Free a turn's place, unless it is running: then its place is free when it has ended."""
        with self._condition:
            if turn in self._line:
                self._line.remove(turn)
            if turn is not self._running:
                self._turns.discard(turn)
        self._metrics.waiting.set(self.waiting)

    def close(self) -> None:
        """Take no more requests, and refuse those that wait; the running one may go on."""
        with self._condition:
            self._closing = True
            waiting, self._line = self._line, collections.deque()
            self._condition.notify()
        for turn in waiting:
            turn.send(Refusal(503, "the server is shutting down; this request has not begun"))

    def stop(self) -> None:
        """End the running generation after its current cycle; its client is told."""
        turn = self._running
        if turn is not None:
            turn.ended_by_server = True
            turn.stop()

    def join(self, seconds: float) -> None:
        """Wait for the thread."""
        self._thread.join(seconds)

    # --- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._condition:
                self._running = None
                while not self._line:
                    if self._closing:
                        return
                    self._condition.wait()
                turn = self._running = self._line.popleft()
            self._metrics.waiting.set(self.waiting)
            try:
                self._serve(turn)
            except SpecdecError as error:
                log.warning("generation_failed", error=type(error).__name__, message=error.message)
                turn.send(Refusal(500, f"the generation failed with a {type(error).__name__}"))
            except Exception:  # a bug, or a plugin's; the server goes on
                log.exception("generation_failed")
                turn.send(Refusal(500, "the generation failed"))
            finally:
                with self._condition:
                    self._running = None
                    self._turns.discard(turn)

    def _serve(self, turn: Turn) -> None:
        turn.begun = began = perf_counter()
        prompt = turn.prepared.prompt
        session = self._sessions.take(prompt)
        session.set_prompt(prompt)
        stream = session.stream(**turn.prepared.settings)
        cycles: list[CycleRecord] = []
        if turn.cycles:
            stream.on_cycle = cycles.append
        turn.runs(stream)
        first = None
        waits: list[str] = []
        sent, reported = 0.0, 0

        def piece(reported: int) -> Piece:
            """What is new after ``reported`` log-probabilities."""
            made = Piece("".join(waits), tuple(session.sequence.logprobs[reported:]), tuple(cycles))
            waits.clear()
            cycles.clear()
            return made

        for text in stream:
            now = perf_counter()
            first = first or now
            waits.append(text)
            if turn.streamed and now - sent >= PIECE_SECONDS and not turn.gone:
                made = piece(reported)
                reported += len(made.logprobs)
                sent = now
                turn.send(made)
        result = stream.result
        turn.send(piece(reported))
        ended = perf_counter()
        self._seconds += 0.2 * (ended - began - self._seconds)
        self._sessions.keep(session, len(prompt))
        self._metrics.generated(
            result, queued=began - turn.asked, first=(first or ended) - turn.asked, took=ended - turn.asked
        )
        self._metrics.kept(len(self._sessions), self._sessions.size)
        log.info(
            "served",
            tokens=len(result.tokens),
            prompt_tokens=result.prompt_tokens,
            prefilled=result.stats.prefilled,
            finish_reason=result.finish_reason,
            queued_s=round(began - turn.asked, 6),
            elapsed_s=round(ended - began, 6),
        )
        if turn.ended_by_server:
            turn.send(Refusal(503, f"the server shut down after {len(result.tokens)} tokens of the answer"))
        else:
            turn.send(result)
