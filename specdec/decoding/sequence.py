"""A sequence that is being decoded: its tokens, and the state and the drafter that follow from them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import attrs

from specdec.contract import Context, Drafter, DrafterSnapshot, ForwardPass, Snapshot, State, Stats, Verifier
from specdec.decoding.result import RunStats, TokenLogprobs
from specdec.logs import get_logger
from specdec.registry import Kind, calling, reason

log = get_logger(__name__)

PREFILL_CHUNK = 512  # prompt tokens between two checks of the stop flag
SHARED_CHUNK = 32  # likewise while other generations wait, on targets that promise so many rows the bits of single ones
PREFILL_TAIL = 8  # the last tokens of a prompt run as a separate chunk
"""A recurrent state can only rewind to the end of a prefill chunk. The next prompt of a conversation often differs from
this one in its last few tokens (the template changes the start of the answer), so a chunk ends before them."""


@attrs.define(kw_only=True)
class LiveSequence:
    """One sequence being decoded: its tokens, its state, its drafter and its verifier.

    ``tokens`` are the only truth. State and drafter change within ``changing``; after an interruption there, whatever
    it was, the next use builds both again from the tokens.

    Attributes:
        tokens: all committed tokens, the pending one last. Nothing else holds this list.
        context: a view of ``tokens``.
        logprobs: of the generated tokens, if requested.
        intact: whether state and drafter are those of ``tokens``.
        failure: why the drafter was switched off; empty while it works.
        drafter_name: for messages.
        verifier_name: for messages.
    """

    target: ForwardPass
    state: State
    drafter: Drafter
    verifier: Verifier
    tokens: list[int]
    context: Context
    logprobs: list[TokenLogprobs] = attrs.field(factory=list)
    intact: bool = True
    failure: str = ""
    drafter_name: str = attrs.Factory(lambda self: type(self.drafter).__name__, takes_self=True)
    verifier_name: str = attrs.Factory(lambda self: type(self.verifier).__name__, takes_self=True)
    _stats: Stats = attrs.field(factory=Stats, alias="stats")
    _next: tuple[int, Stats] | None = None  # while a cycle is committed: how many tokens it leaves, and its counters

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Mark the sequence from the first change to the last; the mark stays if anything is raised in between."""
        before, self.intact = self.intact, False
        yield
        self.intact = before  # False within an outer change, and after an interrupted one

    def extend(self, tokens: Sequence[int], *, offered: int, accepted: int) -> None:
        """Append the tokens of a cycle and count it. An interruption leaves both done or neither."""
        before = self.stats
        stats = Stats(
            cycles=before.cycles + 1,
            tokens=before.tokens + len(tokens),
            offered=[*before.offered],
            reached=[*before.reached],
            accepted=[*before.accepted],
        )
        stats.count(offered, accepted)
        self._next = len(self.tokens) + len(tokens), stats
        self.tokens.extend(tokens)  # one step, which decides on which side of the cycle an interruption fell
        self._stats = stats
        self._next = None

    @property
    def stats(self) -> Stats:
        """Acceptance counters for ``tokens``. Noise keys must not repeat, so the number of cycles never falls."""
        return self._next[1] if self._next is not None and self._next[0] == len(self.tokens) else self._stats

    def ask(self, method: str, *arguments: Any, otherwise: Any = None) -> Any:
        """Call the drafter. Its first failure switches it off for this sequence; from then on, ``otherwise``."""
        if self.failure:
            return otherwise
        try:
            return getattr(self.drafter, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - drafting is optional, whatever a plugin raises
            self.switch_off(method, error)
            return otherwise

    def switch_off(self, method: str, error: Exception) -> None:
        """Switch the drafter off. Raises: as ``reason``."""
        self.failure = reason((Kind.DRAFTER, self.drafter_name), method, error)
        log.warning("drafter_switched_off", name=self.drafter_name, reason=self.failure)

    def replace(self, kept: int, rest: Sequence[int]) -> None:
        """Let ``rest`` follow the first ``kept`` tokens."""
        held = max(kept - 1, 0)
        with self.changing():
            self.tokens[kept:] = rest
            if self.state.length > held:
                with self.running("rewind"):
                    reached = self.target.rewind(self.state, held)
                self.ask("rewind", reached)

    def snapshot(self) -> tuple[Snapshot, DrafterSnapshot | None]:
        """The state and the drafter's own. Feeds waiting MTP pairs."""
        with self.changing():
            with self.running("snapshot"):
                snapshot = self.target.snapshot(self.state)
            return snapshot, self.ask("snapshot", self.context)

    def running(self, method: str) -> calling:
        """A block that calls the target."""
        return calling(("target", self.target.info.family), method)


def prefill(sequence: LiveSequence, stats: RunStats) -> None:
    """Run every token but the last through the target and the drafter."""
    for _ in prefill_chunks(sequence, stats):
        pass


def prefill_chunks(
    sequence: LiveSequence, stats: RunStats, shared: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """``prefill`` chunk by chunk: yields after each one. ``shared``: whether others wait for the next one."""
    tokens, end = sequence.tokens, len(sequence.tokens) - 1
    least = SHARED_CHUNK if sequence.target.info.batch_rows >= SHARED_CHUNK else PREFILL_CHUNK
    while sequence.state.length < end:
        started, at = perf_counter(), sequence.state.length
        chunk = tokens[at : min(at + (least if shared() else PREFILL_CHUNK), end)]
        if at + len(chunk) == end and len(chunk) > 2 * PREFILL_TAIL:
            del chunk[-PREFILL_TAIL:]
        with sequence.changing():
            with sequence.running("prefill"):
                output = sequence.target.prefill(sequence.state, chunk)
            seen = Context(tokens[: at + len(chunk)], sequence.context.sampling)
            sequence.ask("prefill", seen, output)
        stats.prefilled += len(chunk)
        stats.seconds["prefill"] += perf_counter() - started
        yield
