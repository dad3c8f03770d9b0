"""``StrictForwardPass``: a wrapper that accepts only what the contract promises, however lenient the target is."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from specdec.contract import DraftHead, ForwardOutput, ForwardPass, Hidden, Logits, Snapshot, State, no_mtp_head
from specdec.errors import ContractError

if TYPE_CHECKING:
    from specdec.contract import Float32


class StrictLogits(Logits):
    """Logits until the next pass of their kind: no longer life is promised, and a device reuses the buffer."""

    def __init__(self, inner: Logits, state: StrictState, rows: int, *, mtp: bool = False) -> None:
        if len(inner) != rows:
            raise ContractError(f"a pass with {rows} rows of logits to give has {len(inner)}")
        self._inner, self._state, self._mtp = inner, state, mtp
        self._pass = self._passes()

    def _passes(self) -> int:
        return self._state.mtp_passes if self._mtp else self._state.passes

    def _alive(self) -> Logits:
        if self._passes() != self._pass:
            raise ContractError("logits were read after the next pass over their state")
        return self._inner

    def __len__(self) -> int:
        return len(self._inner)

    def argmax(self) -> list[int]:
        return self._alive().argmax()

    def topk(self, k: int) -> tuple[list[list[int]], list[list[float]]]:
        return self._alive().topk(k)

    def gather(self, tokens: Sequence[int]) -> list[float]:
        if len(tokens) > len(self._inner):
            raise ContractError(f"gather takes at most {len(self._inner)} tokens, one per row, got {len(tokens)}")
        return self._alive().gather(tokens)

    def logsumexp(self) -> list[float]:
        return self._alive().logsumexp()

    def noisy_argmax(self, row: int, scale: float, seed: int, position: int) -> int | None:
        return self._alive().noisy_argmax(row, scale, seed, position)

    def rows(self) -> Float32:
        rows = self._alive().rows()
        rows.flags.writeable = False  # a reader that writes would change what others read
        return rows


_Row = tuple[int, int]  # position, serial number: two rows at one position differ


class StrictHidden(Hidden):
    """Hidden states with their origin: which pass, which position, target or MTP head."""

    def __init__(self, inner: Hidden, owner: StrictForwardPass, rows: Sequence[_Row], *, chained: bool) -> None:
        self.inner, self.owner, self.rows_of, self.chained = inner, owner, tuple(rows), chained

    def __len__(self) -> int:
        return len(self.rows_of)

    def __getitem__(self, rows: slice) -> StrictHidden:
        rows_: object = rows  # what callers really hand over
        if not isinstance(rows_, slice) or rows_.step not in (None, 1):
            raise ContractError(f"hidden states are cut by slices of step 1, got {rows!r}")
        return StrictHidden(self.inner[rows], self.owner, self.rows_of[rows], chained=self.chained)

    def join(self, others: Sequence[Hidden]) -> StrictHidden:
        parts = []
        rows = list(self.rows_of)
        for other in others:
            if not isinstance(other, StrictHidden) or other.owner is not self.owner or other.chained != self.chained:
                raise ContractError("only hidden states of one model and one kind can be joined")
            parts.append(other.inner)
            rows += other.rows_of
        return StrictHidden(self.inner.join(parts), self.owner, rows, chained=self.chained)


class StrictHead(DraftHead):
    """A draft head with its origin."""

    def __init__(self, inner: DraftHead, owner: StrictForwardPass) -> None:
        self.inner, self.owner = inner, owner

    @property
    def tokens(self) -> Sequence[int]:
        return self.inner.tokens

    def extended(self, tokens: Sequence[int]) -> StrictHead:
        if tokens:
            self.owner._check_tokens(tokens, "extended")
        return StrictHead(self.inner.extended(tokens), self.owner)


class StrictState(State):
    """The wrapped state, and what its owner may do with it next."""

    def __init__(self, inner: State, owner: StrictForwardPass) -> None:
        self.inner = inner
        self.owner = weakref.ref(owner)
        self.passes = self.mtp_passes = 0  # logits of an earlier number are stale
        self.tokens: list[int] = []  # committed
        self.rows: list[_Row] = []  # of the committed tokens
        self.decoded: tuple[list[int], list[_Row]] | None = None
        self.mtp_tokens: list[int] = []  # token of every true pair
        self.chaining = False  # provisional entries may follow

    @property
    def length(self) -> int:
        return self.inner.length

    @property
    def capacity(self) -> int:
        return self.inner.capacity

    @property
    def mtp_length(self) -> int:
        return self.inner.mtp_length

    @property
    def last_hidden(self) -> StrictHidden | None:
        inner, owner = self.inner.last_hidden, self.owner()
        if inner is None or owner is None or not self.rows:
            return None
        return StrictHidden(inner, owner, self.rows[-1:], chained=False)

    def nbytes(self) -> int:
        return self.inner.nbytes()


class StrictForwardPass(ForwardPass):
    """Accepts what the contract promises and raises ContractError for anything else, however lenient ``inner`` is.

    Run an engine or a drafter over it to find what leans on one backend's leniency: token types, row counts, the order
    of decode and commit, hidden states of another pass, gaps and untrue pairs in the MTP cache, stale logits.
    """

    def __init__(self, inner: ForwardPass) -> None:
        self.inner = inner
        self.info = inner.info
        self._serial = 0

    def _number(self, first: int, count: int) -> list[_Row]:
        self._serial += count
        return [(first + i, self._serial - count + i) for i in range(count)]

    def _own(self, state: State) -> StrictState:
        if not isinstance(state, StrictState) or state.owner() is not self:
            raise ContractError(f"a state of another model: {type(state).__name__}")
        return state

    def _settled(self, state: State, what: str) -> StrictState:
        state = self._own(state)
        if state.decoded is not None:
            raise ContractError(f"{what} after a decode that was not committed (commit(state, 0) drops its rows)")
        return state

    def _check_tokens(self, tokens: Sequence[int], what: str) -> list[int]:
        if isinstance(tokens, str | bytes) or not isinstance(tokens, Sequence):
            raise ContractError(f"{what} takes a sequence of tokens, got {type(tokens).__name__}")
        for token in tokens:
            if type(token) is not int:
                raise ContractError(f"{what} takes plain ints, got {token!r} of type {type(token).__name__}")
            if not 0 <= token < self.info.vocab_size:
                raise ContractError(f"{what} got token {token}, outside 0 to {self.info.vocab_size - 1}")
        if not tokens:
            raise ContractError(f"{what} takes at least one token")
        return list(tokens)

    def _check_room(self, state: StrictState, rows: int, what: str) -> None:
        if state.length + rows > state.capacity:
            raise ContractError(f"{what} of {rows} rows: {state.length} of {state.capacity} tokens are held")

    def new_state(self, capacity: int) -> StrictState:
        if type(capacity) is not int or not 1 <= capacity <= self.info.max_positions:
            raise ContractError(f"a state holds 1 to {self.info.max_positions} tokens, asked for {capacity!r}")
        return StrictState(self.inner.new_state(capacity), self)

    def prefill(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        state, tokens = self._settled(state, "prefill"), self._check_tokens(tokens, "prefill")
        self._check_room(state, len(tokens), "prefill")
        rows = self._number(state.length, len(tokens))
        output = self.inner.prefill(state.inner, tokens)
        state.passes += 1
        state.tokens += tokens
        state.rows += rows
        self._same_length(state)
        return ForwardOutput(None, self._hidden(output.hidden, rows, chained=False))

    def decode(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        state, tokens = self._own(state), self._check_tokens(tokens, "decode")
        if len(tokens) > self.info.max_rows:
            raise ContractError(f"decode takes 1 to {self.info.max_rows} rows, got {len(tokens)}")
        self._check_room(state, len(tokens), "decode")
        rows = self._number(state.length, len(tokens))
        output = self.inner.decode(state.inner, tokens)
        state.passes += 1
        state.decoded = tokens, rows
        logits = StrictLogits(output.need_logits(), state, len(tokens))
        return ForwardOutput(logits, self._hidden(output.hidden, rows, chained=False))

    def commit(self, state: State, rows: int) -> None:
        state = self._own(state)
        if state.decoded is None:
            raise ContractError("commit without a decode before it")
        tokens, numbers = state.decoded
        if type(rows) is not int or not 0 <= rows <= len(tokens):
            raise ContractError(f"commit takes 0 to {len(tokens)} rows of the last decode, got {rows!r}")
        self.inner.commit(state.inner, rows)
        state.decoded = None
        state.tokens += tokens[:rows]
        state.rows += numbers[:rows]
        self._same_length(state)

    def _same_length(self, state: StrictState) -> None:
        if state.inner.length != len(state.tokens):
            raise ContractError(f"{len(state.tokens)} tokens were committed, the state says {state.inner.length}")

    def _hidden(self, hidden: Hidden | None, rows: Sequence[_Row], *, chained: bool) -> StrictHidden | None:
        if hidden is None:
            return None
        if len(hidden) != len(rows):
            raise ContractError(f"a pass of {len(rows)} rows gave hidden states of {len(hidden)}")
        return StrictHidden(hidden, self, rows, chained=chained)

    # --- the MTP head ----------------------------------------------------------------------------------------------

    def _check_pairs(
        self, state: State, tokens: Sequence[int], hidden: Hidden, *, provisional: bool
    ) -> tuple[StrictState, list[int], StrictHidden]:
        state = self._settled(state, "an MTP pass")
        tokens = self._check_tokens(tokens, "an MTP pass")
        if not isinstance(hidden, StrictHidden) or hidden.owner is not self:
            raise ContractError("an MTP pass was given hidden states of another model")
        if len(hidden) != len(tokens):
            raise ContractError(f"an MTP pass pairs tokens with hidden states: {len(tokens)} and {len(hidden)}")
        if provisional:
            if not hidden.chained or not state.chaining:
                raise ContractError("a provisional MTP pass feeds the output of the MTP pass before it")
            return state, tokens, hidden
        if hidden.chained:
            raise ContractError("a true pair has a hidden state of the target, not of the MTP head")
        known = state.tokens[1 : state.mtp_length + 1]
        if state.mtp_tokens[: len(known)] != known:
            raise ContractError("the MTP cache holds a pair whose token was not the one committed")
        for i, row in enumerate(hidden.rows_of):
            position = state.mtp_length + i
            if row[0] != position:
                raise ContractError(
                    f"MTP pairs skip no position: pair {position} was due, it came with the hidden state of {row[0]}"
                )
            if position >= state.length or state.rows[position] != row:
                raise ContractError(f"the hidden state of position {position} is of a row that was not committed")
            if position + 1 < state.length and tokens[i] != state.tokens[position + 1]:
                raise ContractError(
                    f"pair {position} takes the next token, {state.tokens[position + 1]}, and got {tokens[i]}"
                )
        return state, tokens, hidden

    def prefill_mtp(self, state: State, tokens: Sequence[int], hidden: Hidden) -> None:
        state, tokens, hidden = self._check_pairs(state, tokens, hidden, provisional=False)
        self.inner.prefill_mtp(state.inner, tokens, hidden.inner)
        self._paired(state, tokens)
        state.chaining = False

    def draft_head(self, tokens: Sequence[int]) -> StrictHead:
        return StrictHead(self.inner.draft_head(self._check_tokens(tokens, "draft_head")), self)

    def decode_mtp(
        self,
        state: State,
        tokens: Sequence[int],
        hidden: Hidden,
        *,
        provisional: bool = False,
        head: DraftHead | None = None,
    ) -> ForwardOutput:
        if not self.info.mtp_layers:
            raise no_mtp_head(self.info)
        state, tokens, hidden = self._check_pairs(state, tokens, hidden, provisional=provisional)
        if head is None:  # a pass that makes no heads may know nothing of them
            output = self.inner.decode_mtp(state.inner, tokens, hidden.inner, provisional=provisional)
        elif isinstance(head, StrictHead) and head.owner is self:
            output = self.inner.decode_mtp(state.inner, tokens, hidden.inner, provisional=provisional, head=head.inner)
        else:
            raise ContractError("an MTP pass was given a draft head that this object's draft_head did not make")
        if provisional:
            state.mtp_passes += 1
        else:
            self._paired(state, tokens)
        state.chaining = True
        rows = self._number(state.length, len(tokens))
        return ForwardOutput(
            StrictLogits(output.need_logits(), state, 1, mtp=True), self._hidden(output.hidden, rows, chained=True)
        )

    def _paired(self, state: StrictState, tokens: list[int]) -> None:
        state.mtp_passes += 1
        if self.info.mtp_layers:
            state.mtp_tokens += tokens
            if state.inner.mtp_length != len(state.mtp_tokens):
                raise ContractError(f"{len(state.mtp_tokens)} pairs were fed, the state says {state.inner.mtp_length}")

    # --- going back ------------------------------------------------------------------------------------------------

    def rewind(self, state: State, length: int) -> int:
        state = self._settled(state, "rewind")
        if type(length) is not int or not 0 <= length <= state.length:
            raise ContractError(f"rewind takes 0 to {state.length} tokens, got {length!r}")
        reached = self.inner.rewind(state.inner, length)
        if not 0 <= reached <= length or state.inner.length != reached:
            raise ContractError(f"rewind to {length} says {reached}, and the state holds {state.inner.length}")
        state.passes += 1
        state.chaining = False
        del state.tokens[reached:], state.rows[reached:], state.mtp_tokens[state.inner.mtp_length :]
        return reached

    def snapshot(self, state: State) -> Snapshot:
        state = self._settled(state, "snapshot")
        taken = self.inner.snapshot(state.inner)
        if taken.length != state.length:
            raise ContractError(f"a snapshot of {state.length} tokens says {taken.length}")
        state.chaining = False
        remembered: dict[str, Any] = {
            "strict.tokens": np.array(state.tokens, np.int64),
            "strict.mtp_tokens": np.array(state.mtp_tokens[: state.mtp_length], np.int64),
        }
        return attrs.evolve(taken, arrays={**taken.arrays, **remembered})

    def restore(self, snapshot: Snapshot) -> StrictState:
        arrays = {name: array for name, array in snapshot.arrays.items() if not name.startswith("strict.")}
        state = StrictState(self.inner.restore(attrs.evolve(snapshot, arrays=arrays)), self)
        state.tokens = [int(token) for token in snapshot.arrays["strict.tokens"]]
        state.mtp_tokens = [int(token) for token in snapshot.arrays["strict.mtp_tokens"]]
        state.rows = self._number(0, len(state.tokens))
        self._same_length(state)
        return state
