"""A session: one sequence of tokens and its states. Feed text, generate, feed more, rewind, save."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from specdec.contract import Context, DrafterSnapshot, Snapshot, State, Stats
from specdec.decoding.cycle import LiveSequence
from specdec.decoding.parts import Parts
from specdec.decoding.result import Result
from specdec.decoding.session_file import SavedSession, read_session, write_session
from specdec.decoding.settings import override_generation
from specdec.decoding.stream import Stream
from specdec.errors import PromptError, SessionFileError, StateError
from specdec.text import common_prefix


class Session:
    """A sequence of tokens, and the states that hold all but the last of them.

    Not thread-safe, except for ``Stream.stop``.

    Attributes:
        stats: acceptance counters over all generations of the session; saved and loaded with it.
        extra: a program's own JSON data; saved, loaded and forked with the tokens.
    """

    def __init__(self, lm: Parts) -> None:
        self._lm = lm
        self._running: weakref.ref[Stream] | None = None  # an abandoned stream ends itself
        self._sequence = self._new_sequence([])
        self.stats = Stats()
        self.extra: dict[str, Any] = {}

    def _new_sequence(
        self, tokens: list[int], state: State | None = None, saved: DrafterSnapshot | None = None
    ) -> LiveSequence:
        lm = self._lm
        state = state if state is not None else lm.target.new_state(lm.capacity, lm.drafter.needs)
        return LiveSequence(
            target=lm.target,
            state=state,
            drafter=lm.drafter.make(lm.target, state, saved),
            verifier=lm.verifier,
            tokens=tokens,
            context=Context(tokens, draft_noise=lm.verifier.draft_noise),
        )

    @property
    def tokens(self) -> tuple[int, ...]:
        """All committed tokens, prompt and generated; the last one is pending (not in the states yet)."""
        return tuple(self._sequence.tokens)

    @property
    def text(self) -> str:
        """The committed tokens as text, without special tokens."""
        return self._lm.tokenizer.decode(self._sequence.tokens)

    def feed(self, prompt: str | Sequence[int]) -> int:
        """Append a prompt; it runs through the model when generation starts. Returns the number of tokens added.

        Raises: PromptError for an empty prompt, a token id outside the vocabulary, or more tokens than fit.
        """
        self._must_be_idle()
        if (
            isinstance(prompt, str) and self._sequence.tokens
        ):  # a tokenizer's special tokens belong at the beginning only
            prompt = self._lm.tokenizer.encode(prompt, add_special=False)
        added = self._lm.encode(prompt)
        self._check_fits(len(self._sequence.tokens) + len(added))
        self._sequence.tokens.extend(added)
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
        if not 0 <= length <= len(self._sequence.tokens):
            raise StateError(f"rewind takes 0 to {len(self._sequence.tokens)} tokens, got {length}")
        self._repair()
        sequence, held = self._sequence, max(length - 1, 0)
        sequence.intact = False
        del sequence.tokens[length:]
        if sequence.state.length > held:
            reached = sequence.target.rewind(sequence.state, held)
            sequence.guard("rewind", lambda: sequence.drafter.rewind(reached))
        sequence.intact = True

    def set_prompt(self, prompt: str | Sequence[int]) -> int:
        """Make ``prompt`` the whole content, keeping what it shares with the session; returns the tokens kept.

        A prompt that extends the session's tokens runs only its new part, through the MTP head too.
        Raises: PromptError as ``feed`` does; the session is then unchanged.
        """
        self._must_be_idle()
        wanted = self._lm.encode(prompt)
        self._check_fits(len(wanted))
        shared = common_prefix(self._sequence.tokens, wanted)
        self.rewind(shared)
        self._sequence.tokens.extend(wanted[shared:])
        return shared

    def fork(self) -> Session:
        """An independent session with the same tokens and states."""
        self._must_be_idle()
        other = Session(self._lm)
        state = self._restored(self._snapshot())
        other._adopt(list(self._sequence.tokens), state, self._sequence.context.cycle, self._drafter_snapshot())
        other.stats = copy.deepcopy(self.stats)
        other.extra = copy.deepcopy(self.extra)
        return other

    def save(self, path: str | Path) -> None:
        """Write tokens, states and counters to a file (safetensors with a JSON header), replacing it atomically.

        Raises: SessionFileError when it cannot be written; an existing file is then unchanged.
        """
        self._must_be_idle()
        snapshot = self._snapshot()
        saved = SavedSession(
            tokens=tuple(self._sequence.tokens),
            cycle=self._sequence.context.cycle,
            stats=self.stats,
            snapshot=snapshot,
            drafter=self._lm.drafter.spec.name,
            drafter_snapshot=self._drafter_snapshot(),
            extra=self.extra,
        )
        write_session(Path(path), saved, self._lm.target)

    def load(self, path: str | Path) -> None:
        """Replace this session with a saved one. Raises: SessionFileError with the reason; it is then unchanged."""
        self._must_be_idle()
        saved = read_session(Path(path), self._lm.target)
        if len(saved.tokens) > self._lm.capacity:
            raise SessionFileError(
                f"the saved session has {len(saved.tokens)} tokens, this one holds {self._lm.capacity}", file=path
            )
        try:
            state = self._restored(saved.snapshot)
        except Exception as error:  # the arrays do not match the header; backends raise different errors
            raise SessionFileError(
                f"the saved state does not fit this model: {type(error).__name__}: {error}", file=path
            ) from error
        ours = saved.drafter == self._lm.drafter.spec.name  # another drafter builds its state again
        self._adopt(list(saved.tokens), state, saved.cycle, saved.drafter_snapshot if ours else None)
        self.stats, self.extra = saved.stats, saved.extra

    def _restored(self, snapshot: Snapshot) -> State:
        lm = self._lm
        return lm.target.restore(attrs.evolve(snapshot, capacity=lm.capacity), lm.drafter.needs)

    def _snapshot(self) -> Snapshot:
        self._repair()
        return self._sequence.target.snapshot(self._sequence.state)

    def _drafter_snapshot(self) -> DrafterSnapshot | None:
        """The drafter's own state, if it works and has one."""
        sequence, kept = self._sequence, list[DrafterSnapshot | None]()
        if sequence.speculating:
            sequence.guard("snapshot", lambda: kept.append(sequence.drafter.snapshot(sequence.context)))
        return kept[0] if kept else None

    def _adopt(self, tokens: list[int], state: State, cycle: int, saved: DrafterSnapshot | None = None) -> None:
        """Adopt a restored state and its tokens; a new drafter starts from that state."""
        sequence = self._new_sequence(tokens, state, saved)
        sequence.context.cycle = cycle
        self._sequence = sequence

    def stream(self, prompt: str | Sequence[int] | None = None, **settings: Any) -> Stream:
        """Feed ``prompt`` (if any) and generate; iterate over the result for text.

        Args:
            prompt: text or token ids to append first.
            **settings: fields of ``specdec.config.GenerationConfig`` (max_new_tokens, stop, temperature, seed, top_k,
                ...); the configuration's value if omitted or None.

        Raises: PromptError for an unusable prompt or setting; the session is then unchanged.
        """
        self._must_be_idle()
        generation = override_generation(self._lm.config.generation, settings)
        before = len(self._sequence.tokens)
        if prompt is not None:
            self.feed(prompt)
        if not self._sequence.tokens:
            raise PromptError("there is nothing to continue: the prompt is empty", try_="feed a prompt first")
        try:
            self._repair()
            stream = Stream(self._lm, self._sequence, generation, self.stats)
        except BaseException:
            del self._sequence.tokens[before:]  # no state has seen them yet
            raise
        self._running = weakref.ref(stream)
        return stream

    def generate(self, prompt: str | Sequence[int] | None = None, **settings: Any) -> Result:
        """Run ``stream`` to the end and return its result. Takes the same arguments."""
        return self.stream(prompt, **settings).result

    # --- internals -------------------------------------------------------------------------------------------------

    def _must_be_idle(self) -> None:
        if self._is_running():
            gc.collect()  # an abandoned stream and its generator refer to each other
        if self._is_running():
            raise StateError(
                "a generation of this session is still running", try_="stream.stop(), or read its result first"
            )

    def _repair(self) -> None:
        """Rebuild the state from the tokens if a step was interrupted."""
        if not self._sequence.intact:
            cycle = self._sequence.context.cycle  # noise keys must not repeat
            self._adopt(
                self._sequence.tokens, self._lm.target.new_state(self._lm.capacity, self._lm.drafter.needs), cycle
            )

    @property
    def sequence(self) -> LiveSequence:
        """The sequence being decoded, for tools that run single cycles themselves."""
        return self._sequence

    def _is_running(self) -> bool:
        stream = None if self._running is None else self._running()
        return stream is not None and not stream.over()
