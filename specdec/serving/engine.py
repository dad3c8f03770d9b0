"""Generates for several requests at once, in a thread of its own."""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from time import perf_counter

import attrs

from specdec.contract import CycleRecord
from specdec.decoding.batch import Batch
from specdec.decoding.parts import Parts
from specdec.decoding.result import Result, TokenLogprobs
from specdec.decoding.session import Session
from specdec.decoding.stream import Stream
from specdec.drafters.prediction import Answers, RepeatedAnswer
from specdec.errors import ConfigError, NoMemoryError, SpecdecError, UnsupportedError
from specdec.logs import get_logger
from specdec.records.machine import memory
from specdec.serving.metrics import Metrics
from specdec.serving.refusal import Refusal
from specdec.serving.requests import Prepared
from specdec.serving.sessions import Sessions, keeps_texts

log = get_logger(__name__)

PIECE_SECONDS = 0.01
"""Text waits for more that is likely to come within this time after the last piece: waking the event loop for every
cycle of a small model would cost more than the cycle."""
RETRY_SECONDS = 60  # the longest advice of Retry-After
MEMORY_SHARE = 0.9  # of the available memory, for what the running states still grow by


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
    """A request's place in the queue, and what its generation produces. Created and read on the event loop."""

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

    def close(self) -> None:
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
        """The next piece, and at last the result. Raises: Refusal if it failed; CancelledError if closed."""
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


class _Generation:
    """A turn's generation. For the engine's thread."""

    def __init__(self, turn: Turn, prepared: Prepared, session: Session, answers: Answers | None) -> None:
        self.turn = turn
        self.prompt = len(prepared.prompt)
        self.session = session
        self.began = perf_counter()
        session.set_prompt(prepared.prompt)
        self.stream = session.stream(**prepared.settings)
        if answers is not None and self.stream.prediction is None:
            self.stream.prediction = RepeatedAnswer(answers, self.prompt)
        self.first: float | None = None  # when its first text came
        self._cycles: list[CycleRecord] = []
        self._texts: list[str] = []
        self._sent = self._came = 0.0  # the last piece and the last text
        self._reported = 0  # tokens whose log-probabilities are sent
        if turn.cycles:
            self.stream.on_cycle = self._cycles.append
        turn.runs(self.stream)

    @property
    def growth(self) -> float:
        """Bytes that the state may still take, by the tokens that are to come."""
        state = self.session.sequence.state
        tokens = min(self.prompt + self.stream.settings.max_new_tokens, state.capacity)
        return state.nbytes() / state.capacity * (tokens - state.length)

    def add(self, text: str) -> None:
        """Take a text, and send what there is if it is time."""
        now = perf_counter()
        self.first = self.first or now
        self._texts.append(text)
        expected, self._came = 2 * now - self._came, now  # the next text
        if self.turn.streamed and expected - self._sent >= PIECE_SECONDS and not self.turn.gone:
            self.send_piece()
            self._sent = now

    def send_piece(self) -> None:
        """Send what is new since the last piece."""
        logprobs = tuple(self.session.sequence.logprobs[self._reported :])
        self._reported += len(logprobs)
        self.turn.send(Piece("".join(self._texts), logprobs, tuple(self._cycles)))
        self._texts.clear()
        self._cycles.clear()


class Engine:
    """The thread that generates, and the queue of requests before it.

    Requests begin in the order of their arrival, up to ``parallel`` at once; each verification pass serves all of them.

    Args:
        lm: the model.
        most_waiting: requests that may wait beside those that run.
        parallel: requests that run at once.
        kept_bytes: for the states of earlier requests.
        answer_tokens: of finished answers, from which others are drafted; 0 for none.

    Raises: ConfigError for ``answer_tokens`` where a draft could change a text.
    """

    def __init__(
        self, lm: Parts, metrics: Metrics, *, most_waiting: int, parallel: int, kept_bytes: int, answer_tokens: int = 0
    ) -> None:
        if answer_tokens and not keeps_texts(lm):
            raise ConfigError(
                "drafts from finished answers need an exact verifier and bitwise parity: a text would depend on others",
                try_="--answers 0",
            )
        self._answers = Answers(answer_tokens) if answer_tokens else None
        self._metrics = metrics
        self._most_waiting, self._parallel = most_waiting, parallel
        self._sessions = Sessions(lm, kept_bytes)
        self._in_main_memory = lm.room is None  # states, whose memory is then taken as tokens come
        self._turns: set[Turn] = set()  # that hold a place
        self._running: dict[Stream, _Generation] = {}
        self._batch = Batch()
        self._closing = False
        self._seconds = 1.0  # of a request, a moving mean
        self._jobs: queue.SimpleQueue[tuple[Turn, Prepared]] = queue.SimpleQueue()
        # a daemon: a pass that does not return must not hold the end of the process
        threading.Thread(target=self._work, name="specdec-engine", daemon=True).start()
        metrics.waiting.set_function(lambda: max(len(self._turns) - self._parallel, 0))

    # --- called on the event loop ------------------------------------------------------------------------------------

    def turn(self, *, streamed: bool, cycles: bool = False) -> Turn:
        """A place in the queue. Raises: Refusal with status 429 when all are taken, 503 during a shutdown."""
        self._check_open()
        if len(self._turns) >= self._most_waiting + self._parallel:
            self._metrics.refused.inc()
            raise self._overloaded(f"the queue is full, with {self._most_waiting} waiting", "queue_full")
        turn = Turn(self, streamed=streamed, cycles=cycles)
        self._turns.add(turn)
        return turn

    def _overloaded(self, why: str, code: str) -> Refusal:
        seconds = min(RETRY_SECONDS, max(1, math.ceil(self._seconds)))
        return Refusal(429, why, code=code, headers={"retry-after": str(seconds)})

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
        """Take no more requests, and refuse those that wait; the running ones may go on."""
        self._closing = True
        for turn in list(self._turns):
            if turn.future is not None and turn.future.cancel():
                turn.send(Refusal(503, "the server is shutting down; this request has not begun"))

    @property
    def busy(self) -> bool:
        """Whether a generation runs."""
        return bool(self._running)

    def stop(self) -> None:
        """End the running generations after their current cycle; their clients are told."""
        for generation in list(self._running.values()):
            generation.turn.ended_by_server = True
            generation.turn.stop()

    # --- the engine's thread -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            self._admit()
            try:
                texts = self._batch.tick()
            except BaseException as error:  # noqa: BLE001 - a bug; the server goes on
                self._batch = Batch()
                for stream in list(self._running):
                    self._failed(self._running.pop(stream).turn, error)
                continue
            for stream, text in texts:
                self._running[stream].add(text)
            for stream in [stream for stream in self._running if stream not in self._batch.running]:
                self._ended(self._running[stream])
                del self._running[stream]
            self._metrics.ran(len(self._batch.running), self._batch.rows)

    def _admit(self) -> None:
        """Begin requests that wait while there are places; wait for one if none runs."""
        while len(self._running) < self._parallel:
            try:
                turn, prepared = self._jobs.get(block=not self._running)
            except queue.Empty:
                return
            if turn.future is None or not turn.future.set_running_or_notify_cancel():
                continue
            try:
                generation = _Generation(turn, prepared, self._sessions.take(prepared.prompt), self._answers)
                growth = sum(running.growth for running in (*self._running.values(), generation))
                if self._in_main_memory and growth > MEMORY_SHARE * memory()[1]:
                    raise NoMemoryError("there is no memory for the tokens of another request")
            except BaseException as error:  # noqa: BLE001 - a bug; the server goes on
                self._failed(turn, error)
            else:
                self._running[generation.stream] = generation
                self._batch.add(generation.stream)

    def _ended(self, generation: _Generation) -> None:
        failure = self._batch.failures.pop(generation.stream, None)
        try:
            if failure is not None:
                raise failure
            self._finish(generation)
            self.forget(generation.turn)
        except BaseException as error:  # noqa: BLE001 - likewise
            self._failed(generation.turn, error)

    def _failed(self, turn: Turn, error: BaseException) -> None:
        self.forget(turn)
        if isinstance(error, ConfigError | UnsupportedError):  # what the request asks for cannot be done
            turn.send(Refusal.of(error))
        elif isinstance(error, NoMemoryError):
            turn.send(self._overloaded("there is no memory for another request", "no_memory"))
        elif isinstance(error, SpecdecError):
            turn.send(Refusal(500, f"the generation failed with a {type(error).__name__}"))
        else:
            turn.send(Refusal(500, "the generation failed"))
        facts = {"message": error.message} if isinstance(error, SpecdecError) else {"exc_info": error}
        log.warning("generation_failed", error=type(error).__name__, **facts)

    def _finish(self, generation: _Generation) -> None:
        turn, began, result = generation.turn, generation.began, generation.stream.result
        generation.send_piece()
        ended = perf_counter()
        self._seconds += 0.2 * (ended - began - self._seconds)
        self._sessions.keep(generation.session, generation.prompt)
        if self._answers is not None:
            self._answers.add(result.tokens)
        queued, took = began - turn.started, ended - turn.started
        self._metrics.generated(result, queued=queued, first=(generation.first or ended) - turn.started, took=took)
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
            turn.send(Refusal(503, f"the server shut down after token {len(result.tokens)} of the answer"))
        else:
            turn.send(result)
