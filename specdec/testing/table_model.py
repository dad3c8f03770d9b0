"""``TableModel``: a target without weights, a Markov chain whose distribution is known.

It needs only numpy. Its state comes in two kinds that differ in rollback: attention can be cut anywhere, a recurrent
one can only go back to saved points.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
import numpy as np

from specdec.backends.arrays import ArrayHidden, HostLogits
from specdec.contract import (
    NO_NEEDS,
    DraftHead,
    ForwardOutput,
    ForwardPass,
    Hidden,
    Logits,
    ModelInfo,
    MtpPairs,
    Needs,
    Parity,
    SharedWeights,
    Snapshot,
    State,
    no_mtp_head,
    no_mtp_pairs,
)
from specdec.errors import ContractError, ShapeError, StateError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specdec.exchange import Float32, Float64

MARKS = 4  # points that a recurrent state can go back to
MAX_ROWS = 16
MTP_TILT = 0.5  # ``tilt`` of the MTP head, by the pairs in its cache

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Memory(enum.Enum):
    """The memory of a state."""

    ATTENTION = "attention"
    """Goes back to any token."""
    RECURRENT = "recurrent"
    """Goes back to the ends of the last prompt chunks only."""


@attrs.frozen
class TableHead(DraftHead):
    """Token ids; a table has nothing to gather."""

    tokens: tuple[int, ...]
    owner: TableModel = attrs.field(repr=False)

    def extended(self, tokens: Sequence[int]) -> TableHead:
        return self.owner.draft_head([*self.tokens, *tokens])


class _Point(NamedTuple):
    """A row's past: the last tokens, and an accumulator over all of them."""

    tail: tuple[int, ...]
    accumulator: int


class TableHidden(ArrayHidden):
    """The last tokens of each row, and 23 bits of its accumulator, which differ at each layer boundary."""

    @staticmethod
    def concatenate(arrays: list[Any]) -> Any:
        return np.concatenate(arrays)

    def rows(self) -> Float32:
        rows: Float32 = self.array.astype(np.float32)
        return rows


@attrs.define(eq=False)
class TableState(State):
    """A sequence's past: a point for each committed token."""

    model: TableModel
    capacity: int
    needs: Needs
    pairs: MtpPairs | None = attrs.Factory(lambda self: MtpPairs() if self.needs.mtp else None, takes_self=True)
    points: list[_Point] = attrs.field(factory=list)
    marks: list[int] = attrs.field(factory=list)  # lengths that a recurrent state can go back to
    provisional: list[_Point] | None = None
    fed: tuple[int, ...] = ()  # tokens of the uncommitted pass
    mtp: list[int] = attrs.field(factory=list)  # accumulators after each pair; provisional ones last

    @property
    def length(self) -> int:
        return len(self.points)

    @property
    def last(self) -> _Point:
        """What came before the next token."""
        return self.points[-1] if self.points else self.model.start

    def nbytes(self) -> int:
        return 8 * (len(self.model.start.tail) + 1) * (1 + len(self.points)) + 8 * len(self.mtp)


class TableModel(ForwardPass):
    """A Markov chain over a small vocabulary: ``logits = log(table[last n tokens])``, optionally tilted by the past.

    Args:
        table: ``[V, ..., V]`` with n + 1 axes: probabilities of the next token, by the last n tokens, oldest first.
            Zeros are allowed and become ``-inf``. A sequence starts as if preceded by n tokens 0.
        memory: the kind of state.
        tilt: nats by which a pseudo-random function of *all* earlier tokens moves each logit, so that a lost or doubled
            token shows.
        mtp_table: the same for an MTP head, by the last tokens including the pair's; None: no head.
        layers: how many it says it has; it gives hidden states at boundaries 0 to this, and none if this is 0.
    """

    def __init__(
        self,
        table: Float64,
        *,
        memory: Memory = Memory.ATTENTION,
        tilt: float = 0.0,
        mtp_table: Float64 | None = None,
        layers: int = 1,
        max_positions: int = 4096,
        max_rows: int = MAX_ROWS,
    ) -> None:
        self.order, self.vocab = table.ndim - 1, table.shape[-1]
        if self.order < 1 or set(table.shape) != {self.vocab} or not np.allclose(table.sum(-1), 1.0):
            raise ShapeError(f"a table is [V, ..., V] with rows that sum to 1, got {table.shape}")
        with np.errstate(divide="ignore"):
            self._logits = np.log(table)
            self._mtp_logits = None if mtp_table is None else np.log(mtp_table)
        self.memory, self.tilt = memory, tilt
        self.start = _Point((0,) * self.order, 0)
        self._ids = np.arange(1, self.vocab + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        self.info = ModelInfo(
            family="table",
            vocab_size=self.vocab,
            hidden_size=self.order + 1,
            max_positions=max_positions,
            mtp_layers=0 if mtp_table is None else 1,
            layers=layers,
            max_rows=max_rows,
            parity=Parity.BITWISE,
            parity_reason="a table is read, nothing is summed",
            backend="table",
            device="host",
            dtype="float32",
        )

    @classmethod
    def random(
        cls,
        vocab: int = 6,
        *,
        order: int = 2,
        seed: int = 0,
        memory: Memory = Memory.ATTENTION,
        peak: float = 0.5,
        tilt: float = 0.0,
        mtp: bool = False,
        **options: int,
    ) -> TableModel:
        """A random chain; further ``options`` are those of the class.

        Args:
            peak: Dirichlet concentration; small values give peaked distributions.
            mtp: add an MTP head that is right more often than chance.
        """
        rng = np.random.default_rng(seed)
        shape = (vocab,) * order
        table = rng.dirichlet(np.full(vocab, peak), shape)
        head = 0.8 * table + 0.2 * rng.dirichlet(np.full(vocab, 0.5), shape) if mtp else None
        return cls(table, memory=memory, tilt=tilt, mtp_table=head, **options)

    # --- the distribution ------------------------------------------------------------------------------------------

    def logits(self, history: Sequence[int]) -> Float32:
        """Logits ``[V]`` after ``history``, computed from the tokens alone: the reference for every pass."""
        point = self.start
        for token in history:
            point = self._step(point, token)
        row: Float32 = self._rows([point])[0]
        return row

    def distribution(self, history: Sequence[int]) -> Float64:
        """The distribution ``[V]`` of the token after ``history`` at temperature 1."""
        logits = self.logits(history).astype(np.float64)
        weights: Float64 = np.exp(logits - logits.max())
        probs: Float64 = weights / weights.sum()
        return probs

    @staticmethod
    def _step(point: _Point, token: int) -> _Point:
        return _Point((*point.tail[1:], token), _fold(point.accumulator, token))

    def _rows(self, points: Sequence[_Point]) -> Float32:
        """The logits ``[T, V]`` after each point."""
        rows = self._logits[tuple(np.array([point.tail for point in points]).T)]
        if self.tilt:
            rows = rows + self.tilt * self._noise([point.accumulator for point in points])
        return np.asarray(rows, np.float32)

    def _noise(self, accumulators: Sequence[int]) -> Float64:
        """Numbers in [-1, 1): ``[T, V]``."""
        words = self._ids ^ np.array(accumulators, np.uint64)[:, None]
        return _mixed(words).astype(np.float64) * 2.0**-63 - 1.0

    # --- passes ----------------------------------------------------------------------------------------------------

    def new_state(self, capacity: int, needs: Needs = NO_NEEDS) -> TableState:
        self.check_new_state(capacity, needs)
        return TableState(self, capacity, needs)

    def _run(self, state: State, tokens: Sequence[int], *, decode: bool) -> tuple[TableState, list[_Point]]:
        state = self._own(state)
        self.check_pass(state, tokens, decode=decode)
        point, points = state.last, []
        for token in tokens:
            point = self._step(point, int(token))
            points.append(point)
        return state, points

    def prefill(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        state, points = self._run(state, tokens, decode=False)
        self._keep(state, tokens, points)
        self.feed_mtp(state)
        if state.length not in state.marks:
            state.marks = [*state.marks[-MARKS + 1 :], state.length]
            if state.pairs is not None and self.memory is Memory.RECURRENT:
                state.pairs.mark(state.marks)
        return self._output(state, points, len(tokens))

    def _output(
        self, state: TableState, points: Sequence[_Point], rows: int, logits: Logits | None = None
    ) -> ForwardOutput:
        return ForwardOutput(
            rows=rows,
            logits=logits,
            hidden=self._hidden(points) if state.needs.final_hidden else None,
            boundaries={k: self._hidden(points, k + 1) for k in state.needs.boundaries},
        )

    def _hidden(self, points: Sequence[_Point], place: int = 0) -> TableHidden:
        """Hidden states ``[T, n + 1]`` after the final norm, or at a layer boundary."""
        values = [[*point.tail, (point.accumulator ^ place) % 2**23] for point in points]
        return TableHidden(np.array(values, np.int64).reshape(-1, self.order + 1))

    def decode(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        state, points = self._run(state, tokens, decode=True)
        state.provisional, state.fed = points, tuple(tokens)
        return self._output(state, points, len(tokens), HostLogits(self._rows(points)))

    def commit(self, state: State, rows: int) -> None:
        state = self._own(state)
        if state.provisional is None:
            raise StateError("commit without a decode before it")
        if not 0 <= rows <= len(state.provisional):
            raise StateError(f"commit takes 0 to {len(state.provisional)} rows of the last decode, got {rows}")
        self._keep(state, state.fed[:rows], state.provisional[:rows])

    def _keep(self, state: TableState, tokens: Sequence[int], points: Sequence[_Point]) -> None:
        state.provisional = None
        if points:
            if state.pairs is not None:
                state.pairs.add(tokens, self._hidden(points), state.length)
            state.points += points

    # --- the MTP head ----------------------------------------------------------------------------------------------

    def prefill_mtp(self, state: State, tokens: Sequence[int], hidden: Hidden) -> None:
        if self.info.mtp_layers:
            self._mtp(state, tokens, hidden, provisional=False)

    def decode_mtp(
        self,
        state: State,
        tokens: Sequence[int],
        hidden: Hidden,
        *,
        provisional: bool = False,
        head: DraftHead | None = None,
    ) -> ForwardOutput:
        if self._mtp_logits is None:
            raise no_mtp_head(self.info)
        state, points = self._mtp(state, tokens, hidden, provisional=provisional)
        logits = self._mtp_logits[points[-1].tail] + MTP_TILT * self._noise(state.mtp[-1:])[0]
        if head is not None:
            left_out = np.ones(self.vocab, dtype=bool)
            left_out[list(head.tokens)] = False
            logits = np.where(left_out, -np.inf, logits)
        return ForwardOutput(
            rows=len(tokens), logits=HostLogits(np.asarray(logits[None], np.float32)), hidden=self._hidden(points)
        )

    def draft_head(self, tokens: Sequence[int]) -> TableHead:
        if self._mtp_logits is None:
            raise no_mtp_head(self.info)
        self.check_tokens(tokens)
        return TableHead(tuple(sorted(set(tokens))), self)

    def shared_weights(self) -> SharedWeights:
        """Pseudo-random matrices: for a table they mean nothing, to a head they are what it drafts with."""
        rng = np.random.default_rng(self.vocab)
        table, head = (rng.standard_normal((self.vocab, self.info.hidden_size), np.float32) for _ in range(2))
        return SharedWeights(embed_tokens=table, lm_head=head)

    def _mtp(
        self, state: State, tokens: Sequence[int], hidden: Hidden, *, provisional: bool
    ) -> tuple[TableState, list[_Point]]:
        state = self._own(state)
        if state.pairs is None:
            raise no_mtp_pairs(self.info)
        if not isinstance(hidden, TableHidden):
            raise ContractError("hidden states of another model")
        if len(tokens) != len(hidden) or not len(tokens):
            raise ShapeError(f"an MTP pass pairs each token with a hidden state: {len(tokens)} and {len(hidden)}")
        if not provisional:
            del state.mtp[state.pairs.fed :]
        self.check_tokens(tokens)
        points = []
        for token, (*tail, _) in zip(tokens, hidden.array.tolist(), strict=True):
            accumulator = state.mtp[-1] if state.mtp else 1
            for word in (*tail, token):
                accumulator = _fold(accumulator, word)
            state.mtp.append(accumulator)
            points.append(_Point((*tail[1:], int(token)), accumulator))
        if not provisional:
            state.pairs.fed = len(state.mtp)
        return state, points

    # --- going back ------------------------------------------------------------------------------------------------

    def rewind(self, state: State, length: int) -> int:
        state = self._own(state)
        self.check_rewind(state, length)
        state.provisional = None
        if length == state.length:
            return length
        if self.memory is Memory.RECURRENT:
            length = max((mark for mark in state.marks if mark <= length), default=0)
        elif length and (state.needs.hidden or not (state.pairs is None or state.pairs.knows(length))):
            length -= 1  # the last kept token runs again, to restore its hidden state
        del state.points[length:]
        state.marks = [mark for mark in state.marks if mark <= length]
        if state.pairs is not None:
            state.pairs.cut(length)
            del state.mtp[state.pairs.fed :]
        return length

    def snapshot(self, state: State) -> Snapshot:
        state = self._own(state)
        self.feed_mtp(state)
        points = [[*point.tail, point.accumulator] for point in state.points]
        arrays = {"points": np.array(points, np.uint64).reshape(-1, self.order + 1)}
        if state.pairs is not None:
            arrays["mtp"] = np.array(state.mtp[: state.pairs.fed], np.uint64)
        return Snapshot(state.length, state.capacity, arrays, {})

    def restore(self, snapshot: Snapshot, needs: Needs = NO_NEEDS) -> TableState:
        state = self.new_state(snapshot.capacity, needs)
        state.points = [_Point(tuple(tail), last) for *tail, last in np.asarray(snapshot.arrays["points"]).tolist()]
        if state.pairs is not None and "mtp" in snapshot.arrays:
            state.mtp = np.asarray(snapshot.arrays["mtp"]).tolist()
            state.pairs.fed = len(state.mtp)
            if state.pairs.fed < state.length:
                state.pairs.resume(state.pairs.fed, [], self._hidden([state.last]))
        return state

    def _own(self, state: State) -> TableState:
        if not isinstance(state, TableState) or state.model is not self:
            raise StateError(f"a state of another model: {type(state).__name__}")
        return state


def second_model(vocab: int) -> TableModel:
    """A draft model that is often right about a ``TableModel``, whose state goes back to few points."""
    return TableModel.random(vocab, seed=3, tilt=0.5, memory=Memory.RECURRENT, peak=0.4)


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): every bit of the result depends on every bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _fold(accumulator: int, token: int) -> int:
    """Mix in one token; depends on the order and cannot be undone."""
    word = ((accumulator ^ (accumulator >> 29)) * 0xBF58476D1CE4E5B9 + (token + 1) * _GOLDEN) & _MASK
    return word ^ (word >> 32)
