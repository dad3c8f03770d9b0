"""A causal language model over Ops: the ForwardPass that every built-in family shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from specdec.backends.ops import Array, Cache, HeadRows, Ops
from specdec.backends.passes import ChainsGreedily, CycleSetup, Pass, PassCycles, RunsGreedyCycles
from specdec.contract import (
    DraftHead,
    ForwardOutput,
    ForwardPass,
    GreedyCycle,
    GreedyCycles,
    GreedyStart,
    Hidden,
    ModelInfo,
    Snapshot,
    State,
    no_mtp_head,
)
from specdec.errors import ContractError, PromptError, ShapeError, StateError
from specdec.models.decoder import DecoderLayer, MtpHead

PREFILL_ROWS = 512  # rows of a prompt that go through the layers together; bounds the memory of a long prompt


@attrs.frozen(kw_only=True)
class DecoderModel:
    """What a family builds: weights as ops take them, and the layers over them."""

    ops: Ops
    eps: float
    embed_tokens: Array  # [V, H]
    layers: tuple[DecoderLayer, ...]
    norm: Array  # [H]
    lm_head: Array  # [V, H]; embed_tokens itself where the weights are tied
    mtp: MtpHead | None
    mtp_lm_head: Array | None  # the main head unless the checkpoint brings one
    mtp_embed_tokens: Array | None = None  # the main embedding unless the checkpoint brings one


class SequenceState(State):
    """The caches of one sequence: one per layer, and the MTP head's own."""

    def __init__(
        self, capacity: int, caches: list[Cache], mtp: Cache | None, target_pass: Pass, mtp_pass: Pass | None
    ) -> None:
        self.caches = caches
        self.mtp = mtp
        self.target_pass = target_pass  # over these caches
        self.mtp_pass = mtp_pass
        self.mtp_chain = mtp_pass if isinstance(mtp_pass, ChainsGreedily) else None
        self.mtp_true = 0  # true pairs; chained entries stand behind them until the next true pair
        self.decoded: Hidden | None = None  # hidden states of the last decode, until it is committed
        self.last: Hidden | None = None  # hidden state of the last committed token
        self.marked: dict[int, Hidden] = {}  # the same at the points that recurrent caches can return to
        self._capacity = capacity

    @property
    def length(self) -> int:
        return self.caches[0].length

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def mtp_length(self) -> int:
        return self.mtp_true

    @property
    def last_hidden(self) -> Hidden | None:
        return self.last

    def nbytes(self) -> int:
        caches = self.caches if self.mtp is None else [*self.caches, self.mtp]
        return sum(cache.nbytes() for cache in caches)


class CausalLM(ForwardPass):
    """A decoder-only model on a backend. Weights are shared by all states."""

    def __init__(self, info: ModelInfo, model: DecoderModel) -> None:
        # a config may leave open whether there is a head (Qwen3-Next); the weights decide
        self.info = info if model.mtp is not None else attrs.evolve(info, mtp_layers=0)
        self.model = model
        self.ops = model.ops
        caches, mtp = self._new_caches(1)
        self._target_passes = self.ops.record_passes(self._run_layers, caches)
        eager_reason = self._target_passes.eager_reason
        if mtp is not None:
            self._mtp_passes = self.ops.record_passes(self._run_mtp, [mtp], info.hidden_size)
            eager_reason = eager_reason or self._mtp_passes.eager_reason
        if eager_reason:
            self.info = attrs.evolve(self.info, kernels=f"{self.info.kernels}; passes run eagerly: {eager_reason}")

    # --- states ----------------------------------------------------------------------------------------------------

    def new_state(self, capacity: int) -> SequenceState:
        if not 1 <= capacity <= self.info.max_positions:
            raise PromptError(f"a state holds 1 to {self.info.max_positions} tokens, asked for {capacity}")
        caches, mtp = self._new_caches(capacity)
        return SequenceState(
            capacity,
            caches,
            mtp,
            self._target_passes.bind(caches),
            None if mtp is None else self._mtp_passes.bind([mtp]),
        )

    def _new_caches(self, capacity: int) -> tuple[list[Cache], Cache | None]:
        caches = [layer.mixer.new_cache(capacity) for layer in self.model.layers]
        # chained draft steps stand behind the true pairs, so the head's cache is a little longer
        mtp = self.model.mtp.layer.mixer.new_cache(capacity + self.info.max_rows) if self.model.mtp else None
        return caches, mtp

    def _check_room(self, state: SequenceState, rows: int) -> None:
        if state.length + rows > state.capacity:
            raise StateError(f"the state holds {state.length} of {state.capacity} tokens; {rows} more do not fit")

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if len(tokens) == 0:
            raise ShapeError("a pass takes at least one token, got none")
        if min(tokens) < 0 or max(tokens) >= self.info.vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < self.info.vocab_size)
            raise PromptError(f"token id {wrong} is outside the vocabulary (0 to {self.info.vocab_size - 1})")

    # --- target passes ---------------------------------------------------------------------------------------------

    def _run_layers(self, caches: Sequence[Any], tokens: Sequence[int], _: Array | None) -> Array:
        x = self.ops.embed(self.model.embed_tokens, tokens)
        for layer, cache in zip(self.model.layers, caches, strict=True):
            x = layer(x, cache)
        return self.ops.rms_norm(x, self.model.norm, self.model.eps)

    def prefill(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        state = _own(state)
        self._check_tokens(tokens)
        self._check_room(state, len(tokens))
        state.decoded = None
        parts: list[Hidden] = []
        for at in range(0, len(tokens), PREFILL_ROWS):
            chunk = tokens[at : at + PREFILL_ROWS]
            parts.append(self.ops.hidden(state.target_pass.run(chunk)))
            state.target_pass.commit(len(chunk))
        state.last = parts[-1][-1:]
        self._mark(state)
        return ForwardOutput(None, parts[0].join(parts[1:]) if len(parts) > 1 else parts[0])

    def _mark(self, state: SequenceState) -> None:
        """Let recurrent caches keep the present point, so that a rewind need not start from nothing."""
        kept: set[int] = set()
        for cache in state.caches:
            cache.mark()
            kept.update(cache.marks() or ())
        if kept and state.last is not None:
            state.marked[state.length] = state.last
            state.marked = {length: hidden for length, hidden in state.marked.items() if length in kept}

    def decode(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        state = _own(state)
        self._check_tokens(tokens)
        if len(tokens) > self.info.max_rows:
            raise ShapeError(f"decode takes 1 to {self.info.max_rows} rows, got {len(tokens)}")
        self._check_room(state, len(tokens))
        x = state.target_pass.run(tokens)
        state.decoded = self.ops.hidden(x)
        return ForwardOutput(self.ops.head(x, self.model.lm_head), state.decoded)

    def commit(self, state: State, rows: int) -> None:
        state = _own(state)
        if state.decoded is None:
            raise StateError("commit without a decode before it")
        if not 0 <= rows <= len(state.decoded):
            raise StateError(f"commit takes 0 to {len(state.decoded)} rows of the last decode, got {rows}")
        state.target_pass.commit(rows)
        if rows:
            state.last = state.decoded[rows - 1 : rows]
        state.decoded = None

    # --- MTP passes ------------------------------------------------------------------------------------------------

    def _run_mtp(self, caches: Sequence[Any], tokens: Sequence[int], hidden: Array | None) -> Array:
        head = self.model.mtp
        assert head is not None
        table = self.model.embed_tokens if self.model.mtp_embed_tokens is None else self.model.mtp_embed_tokens
        return head(self.ops.embed(table, tokens), hidden, caches[0])

    def _forward_mtp(self, state: SequenceState, tokens: Sequence[int], hidden: Hidden, *, provisional: bool) -> Array:
        cache, mtp_pass = state.mtp, state.mtp_pass
        if cache is None or mtp_pass is None:
            raise no_mtp_head(self.info)
        self._check_pairs(tokens, hidden)
        if not provisional:
            cache.truncate(state.mtp_true)
        x = mtp_pass.run(tokens, self.ops.array(hidden))
        mtp_pass.commit(len(tokens))
        if not provisional:
            state.mtp_true = cache.length
        return x

    def _check_pairs(self, tokens: Sequence[int], hidden: Hidden) -> None:
        self._check_tokens(tokens)
        if len(tokens) != len(hidden):
            raise ShapeError(f"an MTP pass pairs each token with a hidden state: {len(tokens)} and {len(hidden)}")

    def prefill_mtp(self, state: State, tokens: Sequence[int], hidden: Hidden) -> None:
        if self.model.mtp is None:
            return
        for at in range(0, len(tokens), PREFILL_ROWS):
            rows = slice(at, at + PREFILL_ROWS)
            self._forward_mtp(_own(state), tokens[rows], hidden[rows], provisional=False)

    def decode_mtp(
        self,
        state: State,
        tokens: Sequence[int],
        hidden: Hidden,
        *,
        provisional: bool = False,
        head: DraftHead | None = None,
    ) -> ForwardOutput:
        if head is not None and not (isinstance(head, PrunedHead) and head.target is self):
            raise ContractError("a draft head that another object made", takes="what this target's draft_head returned")
        x = self._forward_mtp(_own(state), tokens, hidden, provisional=provisional)
        if head is None:
            return ForwardOutput(self.ops.head(x[-1:], self._mtp_lm_head), self.ops.hidden(x))
        return ForwardOutput(self.ops.pruned_head(x[-1:], head.rows), self.ops.hidden(x))

    def draft_greedy(self, state: State, tokens: Sequence[int], hidden: Hidden, depth: int) -> tuple[int, ...] | None:
        state = _own(state)
        cache, chain, true, rows = state.mtp, state.mtp_chain, state.mtp_true, len(tokens)
        if cache is None or chain is None or depth < 1:
            return None
        self._check_pairs(tokens, hidden)
        cache.truncate(true)
        try:
            return chain.chain(tokens, self.ops.array(hidden), depth, self._mtp_lm_head)
        finally:
            if cache.length > true:  # also where a later step failed
                state.mtp_true = true + rows

    @property
    def runs_greedy_cycles(self) -> bool:  # type: ignore[override]  # it depends on the backend
        """Whether the backend runs whole cycles, and there is a head to draft with."""
        return self.model.mtp is not None and isinstance(self.ops, RunsGreedyCycles)

    def greedy_cycles(
        self, state: State, start: GreedyStart, *, stop_tokens: Sequence[int], limit: int
    ) -> GreedyCycles | None:
        state = _own(state)
        if not isinstance(self.ops, RunsGreedyCycles) or state.mtp is None or state.mtp_pass is None:
            return None
        head = start.head
        if head is not None and not (isinstance(head, PrunedHead) and head.target is self):
            raise ContractError("a draft head that another object made", takes="what this target's draft_head returned")
        self._check_pairs(start.tokens, start.hidden)
        state.mtp.truncate(state.mtp_true)
        setup = CycleSetup(
            tokens=start.tokens,
            hidden=self.ops.array(start.hidden),
            lm_head=self.model.lm_head,
            draft_head=self._mtp_lm_head if head is None else head.rows,
            pruned=head is not None,
            stop_tokens=tuple(stop_tokens),
            limit=limit,
        )
        state.decoded = None
        cycles = self.ops.greedy_cycles(state.target_pass, state.mtp_pass, setup)
        return None if cycles is None else _StateCycles(self.ops, state, cycles)

    @property
    def _mtp_lm_head(self) -> Array:
        return self.model.lm_head if self.model.mtp_lm_head is None else self.model.mtp_lm_head

    def draft_head(self, tokens: Sequence[int]) -> PrunedHead:
        if self.model.mtp is None:
            raise no_mtp_head(self.info)
        self._check_tokens(tokens)
        return PrunedHead(self, self.ops.head_rows(self._mtp_lm_head, tokens))

    # --- going back ------------------------------------------------------------------------------------------------

    def to_host(self, array: Array) -> Any:
        return self.ops.to_host(array)

    def from_host(self, tensor: Any) -> Array:
        return self.ops.from_host(tensor)

    def rewind(self, state: State, length: int) -> int:
        state = _own(state)
        if not 0 <= length <= state.length:
            raise StateError(f"rewind takes 0 to {state.length} tokens, got {length}")
        state.decoded = None
        if length == state.length:
            return length
        points = next((marks for cache in state.caches if (marks := cache.marks()) is not None), None)
        if points is not None:
            reached = max(point for point in points if point <= length)
            state.last = state.marked.get(reached)
        else:
            # one token less, so that the last kept token runs again and its hidden state is known
            reached = max(length - 1, 0)
            state.last = None
        for cache in state.caches:
            if not cache.truncate(reached):
                raise AssertionError("caches disagree about the points they can return to")
        if state.mtp is not None:
            # the pair (h_j, x_{j+1}) stays valid only if token j+1 is kept: pairs 0..length-2
            state.mtp_true = min(state.mtp_true, reached if state.last is None else reached - 1)
            state.mtp.truncate(state.mtp_true)
        return reached

    def snapshot(self, state: State) -> Snapshot:
        state = _own(state)
        if state.mtp is not None:
            state.mtp.truncate(state.mtp_true)
        arrays = {f"layers.{i}.{name}": a for i, c in enumerate(state.caches) for name, a in c.save().items()}
        if state.mtp is not None:
            arrays |= {f"mtp.{name}": array for name, array in state.mtp.save().items()}
        if state.last is not None:
            arrays["last_hidden"] = self.ops.array(state.last)
        return Snapshot(state.length, state.capacity, arrays, {"mtp_length": state.mtp_true})

    def restore(self, snapshot: Snapshot) -> SequenceState:
        state = self.new_state(snapshot.capacity)
        for i, cache in enumerate(state.caches):
            cache.load(_under(snapshot, f"layers.{i}."), snapshot.length)
        if state.mtp is not None:
            state.mtp_true = snapshot.meta["mtp_length"]
            state.mtp.load(_under(snapshot, "mtp."), state.mtp_true)
        if "last_hidden" in snapshot.arrays:
            state.last = self.ops.hidden(snapshot.arrays["last_hidden"])
        return state


class _StateCycles(GreedyCycles):
    """Cycles over the passes of one state, which is brought up to date when they end."""

    def __init__(self, ops: Ops, state: SequenceState, cycles: PassCycles) -> None:
        self._ops = ops
        self._state = state
        self._cycles = cycles

    def submit(self, depth: int) -> None:
        self._cycles.submit(depth)

    def collect(self) -> GreedyCycle:
        return self._cycles.collect()

    def keep(self, tokens: int) -> None:
        self._cycles.keep(tokens)

    def close(self) -> Hidden:
        state = self._state
        hidden = self._ops.hidden(self._cycles.close())
        assert state.mtp is not None
        state.mtp_true = state.mtp.length
        state.last = hidden[-1:]
        return hidden


class PrunedHead(DraftHead):
    """Rows of the head that MTP passes draft with."""

    def __init__(self, target: CausalLM, rows: HeadRows) -> None:
        self.target = target
        self.rows = rows

    @property
    def tokens(self) -> Sequence[int]:
        return self.rows.tokens

    def extended(self, tokens: Sequence[int]) -> PrunedHead:
        if not tokens:
            return self
        self.target._check_tokens(tokens)
        return PrunedHead(self.target, self.target.ops.head_rows(self.target._mtp_lm_head, tokens, self.rows))


def _own(state: State) -> SequenceState:
    if not isinstance(state, SequenceState):
        raise StateError(f"a state of another model: {type(state).__name__}")
    return state


def _under(snapshot: Snapshot, prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): array for name, array in snapshot.arrays.items() if name.startswith(prefix)}
