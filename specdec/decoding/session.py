"""A session: one sequence of tokens and its states. Feed text, generate, feed more, rewind, save.

A language model makes sessions, and generates in a fresh one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, Unpack

import attrs

from specdec.checking import checked
from specdec.config import GenerationSettings
from specdec.contract import Context, DrafterSnapshot, State, Stats
from specdec.decoding.batch import Batch
from specdec.decoding.parts import CallSettings, Parts, Prompt, language_model, override_generation, with_seed
from specdec.decoding.result import Result
from specdec.decoding.sequence import LiveSequence
from specdec.decoding.session_file import (
    SavedSession,
    check_drafter,
    json_copy,
    read_session,
    restore_state,
    write_session,
)
from specdec.decoding.stream import OneThread, Stream
from specdec.drafters.prediction import PredictedText
from specdec.errors import PromptError, SessionFileError, StateError, shown
from specdec.policies.fixed import MAX_DEPTH
from specdec.registry import calling
from specdec.text import common_prefix


class Session:
    """A sequence of tokens, and the states that hold all but the last of them.

    An exception may interrupt any call, KeyboardInterrupt at any step of it. The tokens are then those from before the
    call or from after it (for a generation: with the cycles that it committed). They are the truth: the next call
    builds the states from them again. The next call also ends a stream that was not read to its end.

    Not thread-safe, except for ``Stream.stop``: a second thread gets a StateError.

    As a context manager it ends a running generation when the block is left; the tokens stay.

    Attributes:
        extra: a program's own JSON data; saved, loaded and forked with the tokens.
    """

    def __init__(self, lm: Parts) -> None:
        """Raises: ConfigError if ``lm`` is no language model."""
        self._lm = language_model(lm, "a session")
        self._alone = OneThread()
        self._stream: Stream | None = None  # the last one, until a later call has ended it
        self._sequence = self._new_sequence([])
        self.extra: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def __repr__(self) -> str:
        held = len(self._sequence.tokens)
        return f"<Session: {held} token{'' if held == 1 else 's'} of {self._lm.capacity}>"

    def _new_sequence(
        self,
        tokens: list[int],
        stats: Stats | None = None,
        *,
        state: State | None = None,
        saved: DrafterSnapshot | None = None,
        failure: str = "",
    ) -> LiveSequence:
        """A sequence with a new drafter, and a new state unless one is given."""
        lm = self._lm
        if state is None:
            with calling(("target", lm.info.family), "new_state"):
                state = lm.target.new_state(lm.capacity, lm.drafter.needs)
        return LiveSequence(
            target=lm.target,
            state=state,
            drafter=lm.drafter.make(lm.target, state, saved),
            verifier=lm.verifier,
            tokens=tokens,
            context=Context(tokens, draft_noise=lm.verifier.draft_noise),
            stats=Stats() if stats is None else stats,
            failure=failure,
            drafter_name=lm.drafter.spec.name,
            verifier_name=lm.config.verifier.name,
        )

    @property
    def tokens(self) -> tuple[int, ...]:
        """All committed tokens, prompt and generated; the last one is pending (not in the states yet)."""
        return tuple(self._sequence.tokens)

    @property
    def text(self) -> str:
        """The committed tokens as text, without special tokens."""
        return self._lm.tokenizer.decode(self._sequence.tokens)

    @property
    def stats(self) -> Stats:
        """Acceptance counters over all generations of the session; saved and loaded with it."""
        return self._sequence.stats

    @checked(PromptError)
    def feed(self, prompt: Prompt) -> int:
        """Append a prompt; it runs through the model when generation starts. Returns the number of tokens added.

        Raises: PromptError for an empty prompt, a token id outside the vocabulary, or more tokens than fit.
        """
        with self._in_use() as sequence:
            added = self._encoded(prompt, sequence)
            sequence.tokens.extend(added)
        return len(added)

    def _encoded(self, prompt: str | Sequence[int], sequence: LiveSequence) -> list[int]:
        """The tokens of a prompt that continues ``sequence``; raises as ``feed``."""
        if isinstance(prompt, str) and sequence.tokens:  # a tokenizer's special tokens belong at the beginning only
            prompt = self._lm.tokenizer.encode(prompt, add_special=False)
        added = self._lm.encode(prompt)
        self._lm.check_fits(len(sequence.tokens) + len(added))
        return added

    @checked(StateError)
    def rewind(self, length: int) -> None:
        """Forget all but the first ``length`` tokens.

        Raises: StateError when ``length`` is negative or above the number of tokens.
        """
        with self._in_use() as sequence:
            if not 0 <= length <= len(sequence.tokens):
                raise StateError(f"rewind takes 0 to {len(sequence.tokens)} tokens, got {shown(length)}")
            sequence.replace(length, [])

    @checked(PromptError)
    def set_prompt(self, prompt: Prompt) -> int:
        """Make ``prompt`` the whole content, keeping what it shares with the session; returns the tokens kept.

        A prompt that extends the session's tokens runs only its new part, through the MTP head too.
        Raises: PromptError as ``feed`` does; the session is then unchanged.
        """
        with self._in_use() as sequence:
            wanted = self._lm.encode(prompt)
            self._lm.check_fits(len(wanted))
            shared = common_prefix(sequence.tokens, wanted)
            sequence.replace(shared, wanted[shared:])
        return shared

    def fork(self) -> Session:
        """An independent session with the same tokens and states.

        Raises: SessionFileError when ``extra`` is not JSON data.
        """
        with self._in_use() as sequence:
            snapshot, saved = sequence.snapshot()
            other, extra = Session(self._lm), json_copy(self.extra)
            with sequence.running("restore"):
                snapshot = attrs.evolve(snapshot, capacity=self._lm.capacity)
                state = sequence.target.restore(snapshot, self._lm.drafter.needs)
            other._sequence = self._new_sequence(
                list(sequence.tokens), sequence.stats, state=state, saved=saved, failure=sequence.failure
            )
            other.extra = extra
        return other

    @checked(SessionFileError)
    def save(self, path: str | Path) -> None:
        """Write tokens, states and counters to a file (safetensors with a JSON header), replacing it atomically.

        Raises: SessionFileError when it cannot be written, or ``extra`` is not JSON data; an existing file is
            then unchanged.
        """
        with self._in_use() as sequence:
            snapshot, drafter_snapshot = sequence.snapshot()
            saved = SavedSession(
                tokens=tuple(sequence.tokens),
                stats=self.stats,
                snapshot=snapshot,
                drafter=self._lm.drafter.spec.name,
                drafter_snapshot=drafter_snapshot,
                extra=self.extra,
            )
            write_session(Path(path), saved, self._lm.target)

    @checked(SessionFileError)
    def load(self, path: str | Path) -> None:
        """Replace this session with a saved one. Raises: SessionFileError with the reason; it is then unchanged."""
        path, lm = Path(path), self._lm
        with self._in_use():
            saved = read_session(path, lm.target)
            state = restore_state(saved, lm.target, lm.capacity, lm.drafter.needs, path)
            # another drafter builds its state again
            ours = saved.drafter_snapshot if saved.drafter == lm.drafter.spec.name else None
            sequence = self._new_sequence(list(saved.tokens), saved.stats, state=state, saved=ours)
            if ours is not None:
                check_drafter(ours, sequence.ask("snapshot", sequence.context), saved.drafter, path)
            self.__dict__.update(_sequence=sequence, extra=saved.extra)  # one step: all of it, or nothing

    @checked(PromptError)
    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        prediction: Prompt | None = None,
        depth: int | None = None,
        **settings: Unpack[GenerationSettings],
    ) -> Stream:
        """Feed ``prompt`` (if any) and generate; iterate over the result for text.

        Args:
            prompt: text or token ids to append first; ids are a sequence or a 1-d array of integers.
            prediction: text or token ids that the output is expected to repeat, such as a file that it edits. Where it
                does, they are drafted before the drafter is asked. A wrong prediction costs a little time.
            depth: draft tokens per cycle, at most 15, in place of the depth policy; 0 is plain decoding.
            **settings: fields of ``specdec.config.GenerationConfig`` (max_new_tokens, stop, temperature, seed, top_k,
                ...); the configuration's value if omitted or None. Sampling without a seed draws one, which
                ``Result.generation`` reports.

        Raises: PromptError for an unusable prompt or setting; the session is then unchanged.
        """
        with self._in_use() as sequence:
            generation = with_seed(override_generation(self._lm.config.generation, settings))
            if depth is not None and not 0 <= depth <= MAX_DEPTH:
                raise PromptError(f"argument depth takes 0 to {MAX_DEPTH} draft tokens, got {shown(depth)}")
            added = [] if prompt is None else self._encoded(prompt, sequence)
            begin = [*sequence.tokens, *added]
            if not begin:
                raise PromptError("there is nothing to continue: the prompt is empty", try_="feed a prompt first")
            if isinstance(prediction, str):
                prediction = self._lm.tokenizer.encode(prediction, add_special=False)
            predicted = PredictedText(self._lm.encode(prediction), len(begin)) if prediction else None
            stream = Stream(self._lm, sequence, generation, begin, self._alone, predicted, depth)
            sequence.tokens.extend(added)
            self._stream = stream
        return stream

    def generate(self, prompt: Prompt | None = None, **settings: Unpack[CallSettings]) -> Result:
        """Run ``stream`` to the end and return its result. Takes the same arguments."""
        return self.stream(prompt, **settings).result

    @property
    def sequence(self) -> LiveSequence:
        """The sequence being decoded, for tools that run single cycles themselves."""
        return self._sequence

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[LiveSequence]:
        """What every call begins with: no other thread, no running stream, and states that are those of the tokens.

        Raises: StateError from within a cycle, or when another thread is using the session.
        """
        if self._stream is not None:
            self._stream.check_idle()
        with self._alone:
            if self._stream is not None:
                self._stream.end()
                self._stream = None
            held = self._sequence
            if not held.intact:
                self._sequence = self._new_sequence(list(held.tokens), held.stats, failure=held.failure)
            yield self._sequence


@attrs.frozen(kw_only=True, eq=False)
class LanguageModel(Parts):
    """A target with its drafter, verifier and depth policy, ready to generate. Make one with ``specdec.load``.

    Its parts are the attributes of ``Parts``. A variant over the same weights is made with ``attrs.evolve``.
    """

    def session(self) -> Session:
        """An empty session: feed, generate, feed more, rewind."""
        return Session(self)

    @checked(PromptError)
    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
        **settings: Unpack[CallSettings],
    ) -> Stream:
        """Generate in a fresh session; iterate for text, then read ``result``.

        Args:
            prompt: text or token ids to continue as they are; ids are a sequence or a 1-d array of integers.
            messages: a conversation to answer instead, in the checkpoint's chat template: ``{"role": "user", "content":
                "..."}``, oldest first. ``Conversation`` keeps its state between turns.
            template: variables of the chat template, such as ``{"enable_thinking": False}``.
            **settings: fields of ``specdec.config.GenerationConfig``; the configuration's values if omitted. Also
                ``prediction``, a text that the output is expected to repeat, such as the file that it edits, and
                ``depth``, draft tokens per cycle in place of the depth policy.

        Raises: PromptError for an unusable prompt or setting, and for messages without a chat template or one that
            fails.
        """
        if (prompt is None) == (messages is None):
            raise PromptError("a generation takes a prompt or messages: give one of them")
        if messages is not None:
            prompt = self.tokenizer.encode_messages(messages, template)
        elif template:
            raise PromptError("template has the variables of the chat template, which a prompt does not go through")
        return self.session().stream(prompt, **settings)

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
        **settings: Unpack[CallSettings],
    ) -> Result:
        """Generate a whole continuation or answer, and return its text, tokens and counters.

        Args: as for ``stream``.

        Raises: as ``stream``; PluginError when a plugin fails that decides the output.
        """
        return self.stream(prompt, messages=messages, template=template, **settings).result

    @checked(PromptError)
    def generate_batch(
        self,
        prompts: Sequence[Any],
        *,
        max_batch: int = 8,
        on_result: Callable[[int, Result], object] = lambda number, result: None,
        batch: Batch | None = None,
        **settings: Unpack[CallSettings],
    ) -> list[Result]:
        """Generate for several prompts at once, each in a fresh session; each has the result that it has alone.

        One pass of the target verifies the drafts of all running generations. A target that cannot share a pass
        (``info.batch_rows`` is 0) runs them in turns.

        Args:
            prompts: texts, token ids or conversations, as ``stream`` takes them.
            max_batch: generations that run at once; the others wait.
            on_result: called with the number and result of each one that ends, in the order in which they end.
            batch: runs them; its ``stop`` ends those that run with what they have, and begins no more.
            **settings: as for ``stream``, for all of them.

        Returns the results in the order of the prompts; after ``batch.stop()``, of those that had begun.

        Raises: PromptError for an unusable prompt, by its number, before anything runs. The first error of a
            generation, once the others have ended; a note has the prompt's number.
        """
        if max_batch < 1:
            raise PromptError(f"max_batch is at least 1, got {shown(max_batch)}")
        encoded = [self._numbered(number, prompt) for number, prompt in enumerate(prompts)]
        results: dict[int, Result] = {}
        failures: list[Exception] = []
        begin = [functools.partial(self.stream, tokens, **settings) for tokens in encoded]
        for number, result in (batch or Batch()).run(begin, max_batch):
            if isinstance(result, Exception):
                result.add_note(f"in the generation of prompt number {number}")
                failures.append(result)
            else:
                results[number] = result
                on_result(number, result)
        if failures:
            raise failures[0]
        return [results[number] for number in sorted(results)]

    def _numbered(self, number: int, prompt: Any) -> list[int]:
        """Token ids of a prompt or a conversation that fit into a session. Raises: PromptError with its number."""
        try:
            chat = isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)
            tokens = self.tokenizer.encode_messages(prompt) if chat else self.encode(prompt)
            self.check_fits(len(tokens))
        except PromptError as error:
            raise PromptError(error.message, prompt=f"number {number}", **error.facts) from error
        return tokens

    def __repr__(self) -> str:
        info, drafter = self.info, f"drafter {self.drafter.title}, depth policy {self.depth.spec.name}"
        promise = f"verifier {self.config.verifier.name}, {info.parity.value} parity"
        return f"<LanguageModel {self.config.target.model} ({info.family}, {info.dtype}), {drafter}, {promise}>"
