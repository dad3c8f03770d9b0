"""Replay recorded traffic: a target that chooses the recorded tokens, so that specdec's own engine runs over them.

The engine's cycles are the reference of what a drafter does. Over a ``RecordedTarget`` they verify drafts against a
text instead of a model: what a host drafted can be compared with what the engine drafts, and any drafter can be judged
on the traffic of any host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from specdec.contract import (
    NO_NEEDS,
    Context,
    CycleRecord,
    ForwardOutput,
    ForwardPass,
    Logits,
    ModelInfo,
    Needs,
    Parity,
    Snapshot,
    State,
)
from specdec.decoding.cycle import LiveSequence
from specdec.decoding.loop import run_cycle
from specdec.decoding.parts import DrafterPart
from specdec.decoding.prefill import prefill
from specdec.decoding.statistics import RunStats
from specdec.errors import ShapeError, StateError, UnsupportedError
from specdec.hosting.drafting import hosted_part
from specdec.hosting.engines import host_info
from specdec.verifiers.strict import StrictVerifier

if TYPE_CHECKING:
    from specdec.contract import Float32
    from specdec.hosting.traces import TracedRequest

MAX_ROWS = 257


class RecordedLogits(Logits):
    """1 for the recorded token of a row, 0 for all others."""

    def __init__(self, tokens: Sequence[int], vocab_size: int) -> None:
        self._tokens, self._vocab_size = list(tokens), vocab_size

    def __len__(self) -> int:
        return len(self._tokens)

    def argmax(self) -> list[int]:
        return list(self._tokens)

    def topk(self, k: int) -> tuple[list[list[int]], list[list[float]]]:
        count = min(k, self._vocab_size)
        ids = []
        for token in self._tokens:
            others = [other for other in range(min(count + 1, self._vocab_size)) if other != token]
            ids.append([token, *others][:count])
        return ids, [[float(at == 0) for at in range(count)] for _ in self._tokens]

    def gather(self, tokens: Sequence[int]) -> list[float]:
        return [float(one == token) for one, token in zip(self._tokens, tokens, strict=False)]

    def rows(self) -> Float32:
        rows = np.zeros((len(self._tokens), self._vocab_size), np.float32)
        rows[np.arange(len(self._tokens)), self._tokens] = 1.0
        return rows


class RecordedState(State):
    """How many tokens of the recorded text are committed."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self.held, self.rows = capacity, 0, 0

    @property
    def length(self) -> int:
        return self.held

    @property
    def capacity(self) -> int:
        return self._capacity

    def nbytes(self) -> int:
        return 0


class RecordedTarget(ForwardPass):
    """A target that has nothing but one text: after its first n tokens it chooses token n, past the end 0."""

    def __init__(self, tokens: Sequence[int], vocab_size: int) -> None:
        self._tokens = list(tokens)
        info = host_info("recorded traffic", vocab_size, len(self._tokens) + MAX_ROWS, max_rows=MAX_ROWS)
        self.info: ModelInfo = attrs.evolve(info, parity=Parity.BITWISE, parity_reason="the text is recorded")

    def new_state(self, capacity: int, needs: Needs = NO_NEEDS) -> RecordedState:
        unmet = needs.unmet(self.info)
        if unmet is not None:
            raise UnsupportedError(f"a state is asked for {unmet}")
        return RecordedState(capacity)

    def prefill(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        _own(state).held += len(tokens)
        return ForwardOutput(rows=len(tokens))

    def decode(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        own = _own(state)
        if not 1 <= len(tokens) <= self.info.max_rows:
            raise ShapeError(f"decode takes 1 to {self.info.max_rows} rows, got {len(tokens)}")
        own.rows = len(tokens)
        after = self._tokens[own.held + 1 : own.held + 1 + own.rows]
        logits = RecordedLogits([*after, *[0] * (own.rows - len(after))], self.info.vocab_size)
        return ForwardOutput(rows=own.rows, logits=logits)

    def commit(self, state: State, rows: int) -> None:
        own = _own(state)
        if not 0 <= rows <= own.rows:
            raise StateError(f"commit takes 0 to {own.rows} rows, got {rows}")
        own.held, own.rows = own.held + rows, 0

    def rewind(self, state: State, length: int) -> int:
        _own(state).held = length
        return length

    def snapshot(self, state: State) -> Snapshot:
        return Snapshot(state.length, state.capacity, {}, {})

    def restore(self, snapshot: Snapshot, needs: Needs = NO_NEEDS) -> RecordedState:
        state = self.new_state(snapshot.capacity, needs)
        state.held = snapshot.length
        return state


def _own(state: State) -> RecordedState:
    if not isinstance(state, RecordedState):
        raise StateError(f"a state of another target: {type(state).__name__}")
    return state


class RecordedRun:
    """specdec's engine over one recorded text.

    Args:
        part: the drafter, prepared for a target with these tokens (``recorded_part``).
        prompt, tokens: the text; the engine generates ``tokens``.
    """

    def __init__(self, part: DrafterPart, prompt: Sequence[int], tokens: Sequence[int], vocab_size: int) -> None:
        target = RecordedTarget([*prompt, *tokens], vocab_size)
        state = target.new_state(target.info.max_positions)
        held = list(prompt)
        self.left = len(tokens)
        self.stats = RunStats(drafter=part.spec.name)
        self._sequence = LiveSequence(
            target=target,
            state=state,
            drafter=part.make(target, state),
            verifier=StrictVerifier(),
            tokens=held,
            context=Context(held, generated_from=len(held)),
        )
        prefill(self._sequence, self.stats)

    @property
    def failure(self) -> str:
        """Why the drafter was switched off."""
        return self._sequence.failure

    def cycle(self, depth: int, most: int | None = None) -> CycleRecord:
        """One cycle; it keeps at most ``most`` tokens, as many as possible if None."""
        room = self.left if most is None else min(most, self.left)
        record = run_cycle(
            self._sequence, max(min(depth, MAX_ROWS - 1), 0), lambda emitted: min(len(emitted), room), self.stats
        )
        self.left -= len(record.emitted)
        return record


@attrs.frozen
class Difference:
    """A recorded draft that is not the engine's."""

    position: int  # committed tokens before
    recorded: tuple[int, ...]
    drafted: tuple[int, ...]  # by the engine


def recorded_part(request: TracedRequest, tokenizer: object = None) -> DrafterPart:
    """The drafter that a request names, prepared for recorded traffic.

    Raises: UnsupportedError if it needs more than tokens, or the trace names none.
    """
    if request.drafter is None:
        raise UnsupportedError("the trace names no drafter")
    return hosted_part(request.drafter, RecordedTarget([], request.vocab_size), tokenizer)


def replay(request: TracedRequest, part: DrafterPart | None = None) -> list[Difference]:
    """Where specdec's engine drafts something else than was recorded; empty if all drafts are the same.

    Rounds are replayed as recorded: the same depth, and as many tokens committed. A round in which the host committed
    more than its draft and one token, because it skipped calls, is continued in cycles without drafts.
    """
    part = recorded_part(request) if part is None else part
    if not request.prompt:
        return []
    run = RecordedRun(part, request.prompt, request.tokens, request.vocab_size)
    differing: list[Difference] = []
    for one in request.rounds:
        left = len(one.committed)
        if not left:  # the request ended, or was asked again
            continue
        depth = one.depth
        while left:
            record = run.cycle(depth, left)
            if depth and record.drafted != one.drafted:
                differing.append(Difference(one.position, one.drafted, record.drafted))
            left -= len(record.emitted)
            depth = 0
    return differing
