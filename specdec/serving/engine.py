"""Generates for one request after another, in a thread of its own."""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from time import perf_counter
from typing import Self

import attrs

from specdec.contract import CycleRecord
from specdec.decoding.parts import Parts
from specdec.decoding.result import Result, TokenLogprobs
from specdec.decoding.stream import Stream
from specdec.errors import SpecdecError, UnsupportedError
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
    """A request's place in the queue, and what its generation produces. Created and read on the event loop.

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
        self.future: Future[None] | None = None  # of its generation
        self.gone = False  # the client no longer wants it
        self.ended_by_server = False
        self.started = perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Give the place back: a waiting request is dropped, a running one ends after its current cycle."""
        self.gone = True
        self.stop()
        if self.future is None or self.future.cancel():
            self._engine.forget(self)
        self._events.put_nowait(None)

    def stop(self) -> None:
        """End the generation after its current cycle; safe from any thread."""
        if self._stream is not None:
            self._stream.stop()

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
    """The thread that generates, and the queue of requests before it.

    Requests are served one at a time in the order of their arrival: a pass of one sequence uses the whole machine.

    Args:
        lm: the model.
        most_waiting: requests that may wait beside the one that runs.
        kept_bytes: for the states of earlier requests.
    """

    def __init__(self, lm: Parts, metrics: Metrics, *, most_waiting: int, kept_bytes: int) -> None:
        self._metrics = metrics
        self._places = most_waiting + 1
        self._sessions = Sessions(lm, kept_bytes)
        self._turns: set[Turn] = set()  # that hold a place
        self._running: Turn | None = None
        self._closing = False
        self._seconds = 1.0  # of a request, a moving mean
        self._jobs: queue.SimpleQueue[tuple[Turn, Prepared]] = queue.SimpleQueue()
        # a daemon: a pass that does not return must not hold the end of the process
        threading.Thread(target=self._work, name="specdec-engine", daemon=True).start()
        metrics.waiting.set_function(lambda: max(len(self._turns) - (self._running is not None), 0))

    # --- called on the event loop ------------------------------------------------------------------------------------

    def turn(self, *, streamed: bool, cycles: bool = False) -> Turn:
        """A place in the queue. Raises: Refusal with status 429 when all are taken, 503 during a shutdown."""
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
        return turn

    def start(self, turn: Turn, prepared: Prepared) -> None:
        """Put a turn at the end of the queue, unless its client has gone. Raises: Refusal during a shutdown."""
        self._check_open()
        if not turn.gone:
            turn.future = Future()
            self._jobs.put((turn, prepared))

    def _check_open(self) -> None:
        if self._closing:
            raise Refusal(503, "the server is shutting down", headers={"retry-after": "1"})

    def forget(self, turn: Turn) -> None:
        """Free a turn's place."""
        self._turns.discard(turn)

    def close(self) -> None:
        """Take no more requests, and refuse those that wait; the running one may go on."""
        self._closing = True
        for turn in list(self._turns):
            if turn.future is not None and turn.future.cancel():
                turn.send(Refusal(503, "the server is shutting down; this request has not begun"))

    @property
    def busy(self) -> bool:
        """Whether a generation runs."""
        return self._running is not None

    def stop(self) -> None:
        """End the running generation after its current cycle; its client is told."""
        turn = self._running
        if turn is not None:
            turn.ended_by_server = True
            turn.stop()

    # --- the engine's thread -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            turn, prepared = self._jobs.get()
            if turn.future is not None and turn.future.set_running_or_notify_cancel():
                self._run(turn, prepared)

    def _run(self, turn: Turn, prepared: Prepared) -> None:
        self._running = turn
        try:
            self._generate(turn, prepared)
        except SpecdecError as error:
            log.warning("generation_failed", error=type(error).__name__, message=error.message)
            asked = isinstance(error, UnsupportedError)  # what the request asks for cannot be done, such as a grammar
            turn.send(
                Refusal.of(error) if asked else Refusal(500, f"the generation failed with a {type(error).__name__}")
            )
        except BaseException:  # a bug, or a plugin's, an exit included; the server goes on
            log.exception("generation_failed")
            turn.send(Refusal(500, "the generation failed"))
        finally:
            self.forget(turn)
            self._running = None

    def _generate(self, turn: Turn, prepared: Prepared) -> None:
        began = perf_counter()
        session = self._sessions.take(prepared.prompt)
        session.set_prompt(prepared.prompt)
        stream = session.stream(prediction=prepared.prediction or None, depth=prepared.depth, **prepared.settings)
        cycles: list[CycleRecord] = []
        if turn.cycles:
            stream.on_cycle = cycles.append
        turn.runs(stream)
        first = None
        texts: list[str] = []
        sent, reported = 0.0, 0

        def send_piece() -> None:
            """What is new since the last piece."""
            nonlocal reported
            piece = Piece("".join(texts), tuple(session.sequence.logprobs[reported:]), tuple(cycles))
            reported += len(piece.logprobs)
            texts.clear()
            cycles.clear()
            turn.send(piece)

        for text in stream:
            now = perf_counter()
            first = first or now
            texts.append(text)
            if turn.streamed and now - sent >= PIECE_SECONDS and not turn.gone:
                send_piece()
                sent = now
        result = stream.result
        send_piece()
        ended = perf_counter()
        self._seconds += 0.2 * (ended - began - self._seconds)
        self._sessions.keep(session, len(prepared.prompt))
        queued, took = began - turn.started, ended - turn.started
        self._metrics.generated(result, queued=queued, first=(first or ended) - turn.started, took=took)
        self._metrics.kept(len(self._sessions), self._sessions.size)
        log.info(
            "served",
            tokens=len(result.tokens),
            prompt_tokens=result.prompt_tokens,
            prefilled=result.stats.prefilled,
            finish_reason=result.finish_reason,
            queued_s=round(queued, 6),
            elapsed_s=round(ended - began, 6),
        )
        if turn.ended_by_server:
            turn.send(Refusal(503, f"the server shut down after {len(result.tokens)} tokens of the answer"))
        else:
            turn.send(result)
