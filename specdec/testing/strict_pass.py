"""``StrictForwardPass``: a wrapper that enforces the contract, however lenient the target is."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from specdec.contract import (
    NO_NEEDS,
    Choosing,
    DraftHead,
    ForwardOutput,
    ForwardPass,
    Hidden,
    Logits,
    Needs,
    SharedWeights,
    Snapshot,
    State,
)
from specdec.errors import ContractError

if TYPE_CHECKING:
    from specdec.contract import Float32


class StrictLogits(Logits):
    """Logits, valid until the next pass of their kind, as the contract promises: a device reuses the buffer."""

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

    def choose(self, choosing: Choosing) -> Sequence[int | None]:
        return self._alive().choose(choosing)

    def exponential_sum(self, row: int, best: float) -> int | None:
        return self._alive().exponential_sum(row, best)

    def rows(self) -> Float32:
        rows = self._alive().rows()
        if self._pass % 2:  # writes affect other readers; most backends do not stop them either
            rows.flags.writeable = False
        return rows


class StrictHidden(Hidden):
    """Hidden states with their origin."""

    def __init__(self, inner: Hidden, owner: StrictForwardPass) -> None:
        self.inner, self.owner = inner, owner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, rows: slice) -> StrictHidden:
        given: object = rows  # callers may pass anything
        if not isinstance(given, slice) or given.step not in (None, 1):
            raise ContractError(f"hidden states are sliced with step 1, got {rows!r}")
        return StrictHidden(self.inner[rows], self.owner)

    def join(self, others: Sequence[Hidden]) -> StrictHidden:
        parts = [other.inner for other in others if isinstance(other, StrictHidden) and other.owner is self.owner]
        if len(parts) < len(others):
            raise ContractError("only hidden states of one model can be joined")
        return StrictHidden(self.inner.join(parts), self.owner)

    def rows(self) -> Float32:
        return self.inner.rows()


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
    """The wrapped state, and the calls allowed next."""

    def __init__(self, inner: State, owner: StrictForwardPass) -> None:
        self.inner = inner
        self.needs, self.pairs = inner.needs, inner.pairs
        self.owner = weakref.ref(owner)
        self.passes = self.mtp_passes = 0  # logits with an earlier number are stale
        self.committed = inner.length
        self.unpaired = inner.length - (0 if inner.pairs is None else inner.pairs.length)  # lost before a restore
        self.decoded: int | None = None  # rows of an uncommitted pass
        self.pending: int | None = None  # the token a draft was made from, to be committed next

    @property
    def length(self) -> int:
        return self.inner.length

    @property
    def capacity(self) -> int:
        return self.inner.capacity

    def nbytes(self) -> int:
        return self.inner.nbytes()


class StrictForwardPass(ForwardPass):
    """Accepts what the contract promises and raises ContractError for anything else, however lenient ``inner`` is.

    Run an engine or a drafter over it to find reliance on one backend's leniency: token types, row counts, the order of
    decode and commit, drafts from a token that is not committed next, foreign hidden states and heads, stale logits.
    """

    def __init__(self, inner: ForwardPass) -> None:
        self.inner = inner
        self.info = inner.info

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

    def _check_rows(self, state: StrictState, tokens: Sequence[int], what: str) -> list[int]:
        tokens = self._check_tokens(tokens, what)
        if state.length + len(tokens) > state.capacity:
            raise ContractError(f"{what} of {len(tokens)} rows: {state.length} of {state.capacity} tokens are held")
        if state.pending not in (None, tokens[0]):
            raise ContractError(f"{what} begins with token {tokens[0]}, and a draft was made from {state.pending}")
        return tokens

    def _expect_length(self, state: StrictState, committed: int) -> None:
        state.committed = committed
        if state.length != committed:
            raise ContractError(f"{committed} tokens were committed, but the state's length is {state.length}")
        if state.pairs is not None and state.pairs.length != committed - state.unpaired:
            raise ContractError(f"the ledger of MTP pairs has {state.pairs.length} of {committed} positions")

    # --- passes ----------------------------------------------------------------------------------------------------

    def new_state(self, capacity: int, needs: Needs = NO_NEEDS) -> StrictState:
        if type(capacity) is not int or not 1 <= capacity <= self.info.max_positions:
            raise ContractError(f"a state holds 1 to {self.info.max_positions} tokens, asked for {capacity!r}")
        return StrictState(self.inner.new_state(capacity, needs), self)

    def prefill(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        state = self._settled(state, "prefill")
        tokens = self._check_rows(state, tokens, "prefill")
        output = self.inner.prefill(state.inner, tokens)
        state.passes += 1
        state.pending = None
        self._expect_length(state, state.committed + len(tokens))
        return self._output(state, output, len(tokens), None)

    def decode(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        state = self._own(state)
        tokens = self._check_rows(state, tokens, "decode")
        if len(tokens) > self.info.max_rows:
            raise ContractError(f"decode takes 1 to {self.info.max_rows} rows, got {len(tokens)}")
        output = self.inner.decode(state.inner, tokens)
        state.passes += 1
        state.decoded = len(tokens)
        return self._output(state, output, len(tokens), StrictLogits(output.need_logits(), state, len(tokens)))

    def _output(self, state: StrictState, output: ForwardOutput, rows: int, logits: Logits | None) -> ForwardOutput:
        """The output of a pass, checked to be exactly what its state was made for."""
        needs = state.needs
        if output.rows != rows or tuple(output.boundaries) != needs.boundaries:
            raise ContractError(f"a pass of {rows} rows gave {output.rows}, with boundaries {list(output.boundaries)}")
        if (output.hidden is None) == needs.final_hidden:
            raise ContractError("a pass gives hidden states where they are asked for, and only there")
        wanted = 1 if logits is None and needs.prompt_rows == "last" else rows
        for hidden in (*output.boundaries.values(), *([] if output.hidden is None else [output.hidden])):
            if len(hidden) != wanted:
                raise ContractError(f"a pass of {rows} rows gave hidden states of {len(hidden)}")
        return ForwardOutput(
            rows=rows,
            logits=logits,
            hidden=None if output.hidden is None else StrictHidden(output.hidden, self),
            boundaries={k: StrictHidden(hidden, self) for k, hidden in output.boundaries.items()},
        )

    def commit(self, state: State, rows: int) -> None:
        state = self._own(state)
        if state.decoded is None:
            raise ContractError("commit without a decode before it")
        if type(rows) is not int or not 0 <= rows <= state.decoded:
            raise ContractError(f"commit takes 0 to {state.decoded} rows of the last decode, got {rows!r}")
        self.inner.commit(state.inner, rows)
        state.decoded = None
        state.pending = None if rows else state.pending
        self._expect_length(state, state.committed + rows)

    # --- the MTP head ----------------------------------------------------------------------------------------------

    def prefill_mtp(self, state: State, tokens: Sequence[int], hidden: Hidden) -> None:
        raise ContractError("prefill_mtp belongs to the target, which feeds its head itself; call draft_mtp")

    def decode_mtp(
        self,
        state: State,
        tokens: Sequence[int],
        hidden: Hidden,
        *,
        provisional: bool = False,
        head: DraftHead | None = None,
    ) -> ForwardOutput:
        raise ContractError("decode_mtp belongs to the target, which feeds its head itself; call draft_mtp")

    def draft_mtp(
        self,
        state: State,
        pending: int,
        depth: int,
        *,
        head: DraftHead | None = None,
        choose: Callable[[Logits, Sequence[int]], int | None] | None = None,
    ) -> tuple[int, ...]:
        state = self._settled(state, "draft_mtp")
        self._check_tokens([pending], "draft_mtp")
        if state.pending not in (None, pending):
            raise ContractError(f"one token is pending, and drafts were made from {state.pending} and {pending}")
        if type(depth) is not int or depth < 0:
            raise ContractError(f"draft_mtp takes a depth of at least 0, got {depth!r}")
        inner_head = None
        if head is not None:
            if not isinstance(head, StrictHead) or head.owner is not self:
                raise ContractError("draft_mtp was given a draft head that this object's draft_head did not make")
            inner_head = head.inner

        def watched(logits: Logits, drafted: Sequence[int]) -> int | None:
            assert choose is not None
            state.mtp_passes += 1
            return choose(StrictLogits(logits, state, 1, mtp=True), drafted)

        chosen = None if choose is None else watched
        drafted = self.inner.draft_mtp(state.inner, pending, depth, head=inner_head, choose=chosen)
        state.pending = pending if depth else state.pending
        self._expect_length(state, state.committed)
        return drafted

    def draft_head(self, tokens: Sequence[int]) -> StrictHead:
        return StrictHead(self.inner.draft_head(self._check_tokens(tokens, "draft_head")), self)

    def shared_weights(self) -> SharedWeights:
        return self.inner.shared_weights()

    # --- going back ------------------------------------------------------------------------------------------------

    def rewind(self, state: State, length: int) -> int:
        state = self._settled(state, "rewind")
        if type(length) is not int or not 0 <= length <= state.length:
            raise ContractError(f"rewind takes 0 to {state.length} tokens, got {length!r}")
        reached = self.inner.rewind(state.inner, length)
        if not 0 <= reached <= length:
            raise ContractError(f"rewind to {length} returned {reached}")
        state.passes += 1
        if reached < state.committed:
            state.pending = None
        if state.pairs is not None:
            state.unpaired = min(state.unpaired, max(reached - state.pairs.length, 0))
        self._expect_length(state, reached)
        return reached

    def snapshot(self, state: State) -> Snapshot:
        state = self._settled(state, "snapshot")
        taken = self.inner.snapshot(state.inner)
        if taken.length != state.length:
            raise ContractError(f"a snapshot of {state.length} tokens has length {taken.length}")
        return taken

    def restore(self, snapshot: Snapshot, needs: Needs = NO_NEEDS) -> StrictState:
        state = StrictState(self.inner.restore(snapshot, needs), self)
        self._expect_length(state, snapshot.length)
        return state
