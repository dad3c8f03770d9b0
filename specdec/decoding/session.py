"""One sequence over time: feed text, generate, feed more, go back. Tokens and states stay together."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs

from specdec.config import GenerationConfig
from specdec.contract import Context, CycleRecord, DrafterSnapshot, Snapshot, State, Stats
from specdec.decoding import cycle as engine
from specdec.decoding.loop import Cycles
from specdec.decoding.parts import Parts
from specdec.decoding.result import Result, RunStats
from specdec.decoding.session_file import SavedSession, read_session, write_session
from specdec.decoding.settings import make_sampling, override_generation
from specdec.errors import PromptError, SessionFileError, StateError
from specdec.registry import notify_cycle
from specdec.text import IncrementalDecoder, StopMatcher

PREFILL_CHUNK = 512  # prompt tokens between two looks at the stop flag
PREFILL_TAIL = 8  # the last tokens of a prompt run on their own
"""A recurrent state can return to the ends of prefill chunks only. The next prompt of a conversation often differs from
this one in its last few tokens (the beginning of the answer is written anew), so there is such an end before them."""


class Session:
    """A sequence of tokens with the states that hold all of them but the last.

    Not thread-safe, except for ``Stream.stop``.

    Attributes:
        stats: acceptance counters over all generations of the session; saved and loaded with it.
        extra: what a program wants to keep beside the tokens (plain JSON data); saved, loaded and forked with them.
    """

    def __init__(self, lm: Parts) -> None:
        self._lm = lm
        self._tokens: list[int] = []
        self._running: Stream | None = None
        self._failure = ""  # why the present drafter was switched off
        self._sequence = self._new_sequence()
        self.stats = Stats()
        self.extra: dict[str, Any] = {}

    def _new_sequence(self, state: State | None = None, saved: DrafterSnapshot | None = None) -> engine.Sequence:
        lm = self._lm
        state = state if state is not None else lm.target.new_state(lm.capacity)
        return engine.Sequence(
            target=lm.target,
            state=state,
            drafter=lm.drafter.make(lm.target, state, saved),
            verifier=lm.verifier,
            tokens=self._tokens,
            context=Context(self._tokens, draft_noise=lm.verifier.draft_noise),
        )

    @property
    def tokens(self) -> tuple[int, ...]:
        """All committed tokens, prompt and generated; the last one is pending."""
        return tuple(self._tokens)

    @property
    def text(self) -> str:
        """The committed tokens as text, special tokens left out."""
        return self._lm.tokenizer.decode(self._tokens)

    def feed(self, prompt: str | Sequence[int]) -> int:
        """Append a prompt; it runs through the model when generation starts. Returns the number of tokens added.

        Raises: PromptError for an empty prompt, a token id outside the vocabulary, or more than the model can hold.
        """
        self._must_be_idle()
        if isinstance(prompt, str) and self._tokens:  # what a tokenizer puts around a text stands at its beginning only
            prompt = self._lm.tokenizer.encode(prompt, add_special=False)
        added = self._lm.encode(prompt)
        self._check_fits(len(self._tokens) + len(added))
        self._tokens += added
        return len(added)

    def _check_fits(self, total: int) -> None:
        capacity = self._lm.capacity
        if total >= capacity:
            raise PromptError(
                f"the prompt is too long: {total} tokens, and at least one more must fit",
                limit=f"{capacity} tokens (max_position_embeddings {self._lm.info.max_positions})",
                try_=f"a prompt of at most {capacity - 1} tokens",
            )

    def rewind(self, length: int) -> None:
        """Forget all but the first ``length`` tokens.

        Raises: StateError when ``length`` is negative or above the number of tokens.
        """
        self._must_be_idle()
        if not 0 <= length <= len(self._tokens):
            raise StateError(f"rewind takes 0 to {len(self._tokens)} tokens, got {length}")
        self._repair()
        del self._tokens[length:]
        held = self._sequence.state.length
        if held > max(length - 1, 0):
            reached = self._lm.target.rewind(self._sequence.state, max(length - 1, 0))
            self._guarded("rewind", lambda: self._sequence.drafter.rewind(reached))

    def set_prompt(self, prompt: str | Sequence[int]) -> int:
        """Make ``prompt`` the whole content, keeping what it shares with the session; returns the tokens kept.

        A prompt that extends the session's tokens runs only its new part, through the MTP head too.
        Raises: PromptError as ``feed`` does; the session then stays as it was.
        """
        self._must_be_idle()
        wanted = self._lm.encode(prompt)
        self._check_fits(len(wanted))
        shared = 0
        for ours, theirs in zip(self._tokens, wanted, strict=False):
            if ours != theirs:
                break
            shared += 1
        self.rewind(shared)
        self._tokens += wanted[shared:]
        return shared

    def fork(self) -> Session:
        """An independent session with the same tokens and states."""
        self._must_be_idle()
        other = Session(self._lm)
        state = self._lm.target.restore(attrs.evolve(self._snapshot(), capacity=self._lm.capacity))
        other._adopt(list(self._tokens), state, self._sequence.context.cycle, self._drafter_snapshot())
        other.stats = copy.deepcopy(self.stats)
        other.extra = copy.deepcopy(self.extra)
        return other

    def save(self, path: str | Path) -> None:
        """Write tokens, states and counters to a file (safetensors with a JSON header), replacing it atomically.

        Raises: SessionFileError when it cannot be written; what was there before stays.
        """
        self._must_be_idle()
        snapshot = self._snapshot()
        saved = SavedSession(
            tokens=tuple(self._tokens),
            cycle=self._sequence.context.cycle,
            stats=self.stats,
            snapshot=snapshot,
            drafter=self._lm.drafter.spec.name,
            drafter_snapshot=self._drafter_snapshot(),
            extra=self.extra,
        )
        write_session(Path(path), saved, self._lm.target)

    def load(self, path: str | Path) -> None:
        """Become what ``save`` wrote. Raises: SessionFileError with the reason; this session then stays as it was."""
        self._must_be_idle()
        saved = read_session(Path(path), self._lm.target)
        if len(saved.tokens) > self._lm.capacity:
            raise SessionFileError(
                f"the saved session has {len(saved.tokens)} tokens, this one holds {self._lm.capacity}", file=path
            )
        try:
            state = self._lm.target.restore(attrs.evolve(saved.snapshot, capacity=self._lm.capacity))
        except Exception as error:  # the arrays are not what the header says; each backend fails in its own way
            raise SessionFileError(
                f"the saved state does not fit this model: {type(error).__name__}: {error}", file=path
            ) from error
        ours = saved.drafter == self._lm.drafter.spec.name  # another one builds its own state again
        self._adopt(list(saved.tokens), state, saved.cycle, saved.drafter_snapshot if ours else None)
        self.stats, self.extra = saved.stats, saved.extra

    def _snapshot(self) -> Snapshot:
        self._repair()
        sequence = self._sequence
        if sequence.speculating:
            self._guarded("settle", lambda: sequence.drafter.settle(sequence.context))
        return sequence.target.snapshot(sequence.state)

    def _drafter_snapshot(self) -> DrafterSnapshot | None:
        """The drafter's own state, after ``_snapshot`` has settled it."""
        kept: list[DrafterSnapshot | None] = []
        if self._sequence.speculating:
            self._guarded("snapshot", lambda: kept.append(self._sequence.drafter.snapshot()))
        return kept[0] if kept else None

    def _guarded(self, moment: str, call: Callable[[], None]) -> None:
        """Run a drafter's method between generations; the next one tells the reason of a failure."""
        stats = RunStats()
        engine.guarded(self._sequence, stats, moment, call)
        self._failure = self._failure or stats.inactive_reason

    def _adopt(self, tokens: list[int], state: State, cycle: int, saved: DrafterSnapshot | None = None) -> None:
        """Take over a restored state and the tokens it belongs to; a new drafter starts from that state."""
        previous = self._tokens
        self._tokens = tokens
        try:
            sequence = self._new_sequence(state, saved)
        except BaseException:
            self._tokens = previous
            raise
        sequence.context.cycle = cycle
        self._sequence = sequence
        self._failure = ""

    def stream(self, prompt: str | Sequence[int] | None = None, **settings: Any) -> Stream:
        """Feed ``prompt`` (if any) and generate; iterate over the result for text as it comes.

        Args:
            prompt: text or token ids to append first.
            **settings: fields of ``specdec.config.GenerationConfig`` (max_new_tokens, stop, temperature, seed, top_k,
                ...); the configuration's where not given or None.

        Raises: PromptError for an unusable prompt or setting; the session then stays as it was.
        """
        self._must_be_idle()
        generation = override_generation(self._lm.config.generation, settings)
        before = len(self._tokens)
        if prompt is not None:
            self.feed(prompt)
        if not self._tokens:
            raise PromptError("there is nothing to continue: the prompt is empty", try_="feed a prompt first")
        try:
            self._running = Stream(self, generation)
        except BaseException:
            del self._tokens[before:]  # no state has seen them yet
            raise
        return self._running

    def generate(self, prompt: str | Sequence[int] | None = None, **settings: Any) -> Result:
        """``stream`` to its end. Takes the same arguments."""
        return self.stream(prompt, **settings).result

    # --- the stream's side -----------------------------------------------------------------------------------------

    def _must_be_idle(self) -> None:
        if self._running is not None and not self._running.over():
            raise StateError(
                "a generation of this session is still running", try_="stream.stop(), or read its result first"
            )

    def _repair(self) -> None:
        """After an interruption inside a pass: build the states again from the tokens, which are the truth."""
        if not self._sequence.intact:
            cycle = self._sequence.context.cycle  # noise keys must not come twice
            self._sequence = self._new_sequence()
            self._sequence.context.cycle = cycle
            self._failure = ""

    @property
    def sequence(self) -> engine.Sequence:
        """What the engine works on: for tools that run single cycles themselves."""
        return self._sequence

    def prefill(self, stats: RunStats, stopping: Callable[[], bool] = lambda: False) -> None:
        """Run every token but the last through the target and the drafter, unless ``stopping()`` says to end early."""
        sequence, tokens = self._sequence, self._tokens
        started = perf_counter()
        end = len(tokens) - 1
        while sequence.state.length < end and not stopping():
            at = sequence.state.length
            chunk = tokens[at : min(at + PREFILL_CHUNK, end)]
            if at + len(chunk) == end and len(chunk) > 2 * PREFILL_TAIL:
                del chunk[-PREFILL_TAIL:]
            sequence.intact = False
            output = sequence.target.prefill(sequence.state, chunk)
            seen = Context(tokens[: at + len(chunk)], sequence.context.sampling)
            if sequence.speculating:
                engine.guarded(sequence, stats, "prefill", lambda: sequence.drafter.prefill(seen, output))  # noqa: B023
            sequence.intact = True
            stats.prefilled += len(chunk)
        stats.seconds["prefill"] += perf_counter() - started


class Stream:
    """A running generation: iterate for text; ``result`` is there afterwards (and runs what is left when asked).

    Attributes:
        on_cycle: called with the record of every cycle; assign it before the first text is read.
    """

    def __init__(self, session: Session, settings: GenerationConfig) -> None:
        self._session = session
        self._settings = settings
        self._lm = session._lm
        self._prompt = list(session._tokens)
        self._prompt_tokens = len(self._prompt)
        self._stats = RunStats(drafter=self._lm.drafter.spec.name)
        self._decoder = IncrementalDecoder(self._lm.tokenizer)
        self._matcher = StopMatcher(settings.stop)
        self._stop_ids = frozenset() if settings.ignore_eos else frozenset(self._lm.tokenizer.eos_ids)
        self._sampling = make_sampling(self._lm, settings, generated_from=self._prompt_tokens)
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
        except BaseException:  # the end, an error, an interruption: the generator cannot go on after any of them
            self._over = True
            raise

    def stop(self) -> None:
        """Ask the generation to end after the present cycle; safe from a signal handler or another thread."""
        self.stopping = True

    def over(self) -> bool:
        """Whether the session may be used again; ends a generation that was asked to stop and is not inside a cycle."""
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
        session, lm, stats = self._session, self._lm, self._stats
        session._repair()
        sequence = session._sequence
        stats.inactive_reason = session._failure
        sequence.context.sampling = self._sampling
        sequence.context.generated_from = self._prompt_tokens
        sequence.logprobs = []
        policy = lm.depth.make()
        session.prefill(stats, lambda: self.stopping)
        cycles = Cycles(
            sequence, self._cut, stats, stop_tokens=sorted(self._stop_ids), host_cuts=bool(self._settings.stop)
        )
        asked = 0
        try:
            while self._reason is None:
                produced = len(session._tokens) - self._prompt_tokens
                room = min(self._settings.max_new_tokens - produced, lm.capacity - len(session._tokens))
                if self.stopping and not cycles.flying:
                    self._reason = "interrupted"
                elif room <= 0:
                    self._reason = "context"
                else:
                    started = perf_counter()
                    depth = max(0, min(policy.next_depth(stats), lm.info.max_rows - 1, room - 1))
                    asked = max(asked, depth)
                    record = cycles.run(0 if self.stopping else depth, room)
                    policy.record(record)
                    notify_cycle(record)
                    self.on_cycle(record)
                    session.stats.cycles += 1
                    session.stats.tokens += len(record.emitted)
                    session.stats.count(record.offered, record.accepted)
                    stats.decode_seconds += perf_counter() - started
                if self._piece:
                    piece, self._piece = self._piece, ""
                    yield piece
            cycles.close()
        except GeneratorExit:
            cycles.close()
            raise
        except BaseException:
            cycles.abandon()
            raise
        tail = self._decoder.flush()
        if self._reason != "stop_string":
            emitted, matched = self._matcher.push(tail)
            tail = emitted + ("" if matched else self._matcher.flush())
            self._text += tail
            if tail:
                yield tail
        self._result = self._finish(asked, policy.reason)

    def _cut(self, emitted: tuple[int, ...]) -> int:
        """Take the tokens one by one until one of them ends the generation; returns how many were taken."""
        produced = len(self._session._tokens) - self._prompt_tokens
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
        """The same where no string ends the generation, so that the text of all tokens can be had at once.

        A cycle emits no more than the room that there was for it.
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
        lm, stats = self._lm, self._stats
        sequence = self._session._sequence
        if sequence.speculating:
            engine.guarded(sequence, stats, "report", lambda: stats.draft.update(sequence.drafter.report()))
        if not sequence.speculating:
            self._session._failure = stats.inactive_reason
        if not stats.offered and not stats.inactive_reason and stats.cycles:
            if lm.drafter.spec.name == "none":
                stats.inactive_reason = "drafter 'none' was chosen"
            elif deepest == 0:
                why = reason or f"the depth policy {lm.depth.spec.name!r} chose depth 0 in every cycle"
                stats.inactive_reason = why
        if reason and not stats.inactive_reason:  # it was on for a while, and went off for this
            stats.inactive_reason = reason
        return Result(
            prompt=self._prompt,
            tokens=self._session._tokens[self._prompt_tokens :],
            text=self._text,
            finish_reason=self._reason or "interrupted",
            prompt_tokens=self._prompt_tokens,
            guarantee=lm.verifier.guarantee.value,
            parity=lm.info.parity.value,
            deviation=stats.deviation,
            stats=stats,
            notices=list(lm.notices),
            generation=self._settings,
            fingerprint=lm.info.fingerprint,
            logprobs=None if self._sampling.logprobs is None else list(self._session._sequence.logprobs),
        )
