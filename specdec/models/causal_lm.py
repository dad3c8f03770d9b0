"""A causal language model over Ops: the ForwardPass that every built-in family shares."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from specdec.backends.arrays import ArrayHidden
from specdec.backends.caches import Batched
from specdec.backends.ops import Array, Cache, HeadRows, Ops
from specdec.backends.passes import EagerPass, Pass, Passes
from specdec.contract import (
    IDLE_ROWS,
    NO_NEEDS,
    WAITING_ROWS,
    Choosing,
    DraftHead,
    ForwardOutput,
    ForwardPass,
    Hidden,
    Logits,
    ModelInfo,
    MtpDraft,
    MtpPairs,
    Needs,
    SharedWeights,
    Snapshot,
    State,
    no_mtp_head,
    no_mtp_pairs,
)
from specdec.errors import ContractError, NoMemoryError, ShapeError, StateError
from specdec.models.decoder import Layer, MtpHead, Norm
from specdec.models.mtp_chain import LaterModules
from specdec.sampling import CoupledDraft

CACHE_SHARE = 0.9  # of the free memory, for one session's caches; the rest is for graphs, activations and growth
MORE_STATES = 3  # times the memory of new recurrent states that they may grow to
PREFILL_ROWS = 512  # prompt rows per pass; bounds the memory of a long prompt
SHARED_MTP = 10_000_000  # weights of an MTP layer from which drafts share its passes: smaller ones chain faster alone


@attrs.frozen(kw_only=True)
class DecoderModel:
    """The parts a family builds: weights as ops take them, and the layers."""

    ops: Ops
    embed_tokens: Array  # [V, H]
    embed_scale: float = 1.0  # multiplies embeddings; ``CausalLM`` rounds it to their dtype
    positions: Array | None = None  # [P, H], learned position embeddings; None where attention knows the positions
    layers: tuple[Layer, ...]
    shared: tuple[int, ...] = ()  # the layers whose caches the last layers read, which have none of their own
    layer_inputs: Callable[[Array, Sequence[int]], Sequence[tuple[Array]]] | None = None  # see ``inputs``
    norm: Norm
    lm_head: Array  # [V, H]; embed_tokens itself if tied
    logit_scale: float = 1.0  # multiplies logits
    logit_cap: float = 0.0  # what ``Ops.softcap`` limits them to; 0: nothing
    mtp: tuple[MtpHead, ...] = ()  # the modules of an MTP head, chained in this order
    mtp_residual: bool = False  # the MTP head reads what enters the final norm, not what leaves it

    def embed(self, tokens: Sequence[int], position: int) -> Array:
        """The residual stream that enters the first layer, ``[T, H]``; the first token is at ``position``."""
        x = self.ops.embed(self.embed_tokens, tokens)
        if self.embed_scale != 1.0:
            x = self.ops.scale(x, self.embed_scale)
        return x if self.positions is None else self.ops.add_positions(x, self.positions, position)

    def inputs(self, x: Array, tokens: Sequence[int]) -> Sequence[tuple[Array, ...]]:
        """What each layer takes beside the residual stream and its cache, from the stream that enters the first."""
        return [()] * len(self.layers) if self.layer_inputs is None else self.layer_inputs(x, tokens)

    def logits(self, x: Array) -> Logits:
        """The logits of states after the final norm ``[T, H]``."""
        logits = self.ops.head(x if self.logit_scale == 1.0 else self.ops.scale(x, self.logit_scale), self.lm_head)
        return self.ops.softcap(logits, self.logit_cap) if self.logit_cap else logits


@attrs.define(eq=False, repr=False)
class SequenceState(State):
    """The caches of one sequence: one per layer that has one, and the MTP head's if ``needs`` asks for it."""

    capacity: int
    needs: Needs
    caches: list[Cache]
    mtp: Cache | None  # true pairs; chained entries follow them until the next true pair
    target_pass: Pass
    mtp_pass: Pass | None
    boundaries: tuple[int, ...]  # whose states the target's passes return beside the one after the final norm
    later: LaterModules | None  # None for a head of one module
    prefill_pass: Pass  # ``target_pass``, or one whose output nobody reads
    pairs: MtpPairs | None
    decoded: tuple[Sequence[int], Array] | None = None  # tokens and result of an uncommitted decode

    @property
    def length(self) -> int:
        return self.caches[0].length

    def nbytes(self) -> int:
        heads = [] if self.mtp is None else [self.mtp]
        later = () if self.later is None else self.later.caches
        return sum(cache.nbytes() for cache in (*self.caches, *heads, *later))


class Boundaries(Mapping[int, Hidden]):
    """The states at layer boundaries, as a pass gives them: side by side.

    Args:
        whole: ``[T, (n + 1) * H]``, the states at ``places`` and then those after the final norm.
        places: n boundaries, ascending.
        asked: those of them that the mapping has.
    """

    __slots__ = ("_asked", "_places", "_whole")

    def __init__(self, whole: ArrayHidden, places: tuple[int, ...], asked: tuple[int, ...]) -> None:
        self._whole, self._places, self._asked = whole, places, asked

    def __getitem__(self, boundary: int) -> Hidden:
        if boundary not in self._asked:
            raise KeyError(boundary)
        first = self._places.index(boundary)
        return self._columns(self._whole, first, first + 1)

    def __iter__(self) -> Iterator[int]:
        return iter(self._asked)

    def __len__(self) -> int:
        return len(self._asked)

    def side_by_side(self, needs: Needs, later: Sequence[Boundaries] = ()) -> ArrayHidden | None:
        """What ``needs`` requests as one row per token, the states after the final norm last; None if not adjacent.

        It has a boundary: a pass that is asked for none gives no ``Boundaries``. The rows of ``later`` passes over the
        same state follow.
        """
        wanted, places = needs.boundaries, self._places
        first = places.index(wanted[0])
        end = first + len(wanted)
        if places[first:end] != wanted or (needs.final_hidden and end < len(places)):
            return None
        whole = self._whole.join([one._whole for one in later]) if later else self._whole
        return self._columns(whole, first, end + needs.final_hidden)

    def _columns(self, whole: ArrayHidden, first: int, end: int) -> ArrayHidden:
        size = whole.array.shape[1] // (len(self._places) + 1)
        return type(whole)(whole.array[:, first * size : end * size])


class CausalLM(ForwardPass):
    """A decoder-only model on a backend. All states share the weights."""

    def __init__(self, info: ModelInfo, model: DecoderModel) -> None:
        # a config may not say whether there is a head (Qwen3-Next); the weights decide
        self.info = attrs.evolve(
            info,
            mtp_layers=len(model.mtp),
            layers=len(model.layers),
            pass_weights=weights_of((model.layers, model.layer_inputs, model.lm_head)),
            mtp_weights=weights_of(model.mtp[:1]),
        )
        if model.embed_scale != 1.0:
            dtype = model.ops.to_host(model.ops.embed(model.embed_tokens, [0])).dtype
            model = attrs.evolve(model, embed_scale=torch.tensor(model.embed_scale, dtype=dtype).item())
        self.model = model
        self.ops = model.ops
        self._target_passes: dict[tuple[int, ...], Passes] = {}  # by the layer boundaries that they return
        self._mtp_passes = [  # of each module of the head
            self.ops.record_passes(functools.partial(_run_mtp, model, number), [cache], self.info.hidden_size)
            for number, cache in enumerate(self._new_mtp_caches(1))
        ]
        reasons = [passes.eager_reason for passes in (self._passes_with(()), *self._mtp_passes[:1])]
        if eager_reason := next(filter(None, reasons), ""):
            self.info = attrs.evolve(self.info, kernels=f"{self.info.kernels}; passes run eagerly: {eager_reason}")

    # --- states ----------------------------------------------------------------------------------------------------

    def new_state(self, capacity: int, needs: Needs = NO_NEEDS) -> SequenceState:
        self.check_new_state(capacity, needs)
        try:
            caches = self._new_caches(capacity)
            heads = self._new_mtp_caches(capacity) if needs.mtp else []
        except (RuntimeError, MemoryError) as error:  # torch and MLX report a refused allocation as a RuntimeError
            raise NoMemoryError(
                f"there is no memory for a state of {capacity} tokens",
                reason=error,
                try_=f"-s target.capacity={min(capacity // 2, 8192) or 1}, or more, below {capacity}; or fewer "
                "sequences at once",
            ) from error
        boundaries = needs.boundaries
        if needs.mtp and self.model.mtp_residual:
            boundaries = tuple(sorted({*boundaries, self.info.layers}))
        target = self._passes_with(boundaries).bind(caches)
        passes = [passes.bind([cache]) for passes, cache in zip(self._mtp_passes, heads, strict=False)]
        mtp, head = (heads[0], passes[0]) if heads else (None, None)
        later = LaterModules(passes[1:], heads[1:]) if heads[1:] else None
        prefill: Pass = target
        if self.model.shared and not (needs.hidden or needs.mtp):  # nobody reads what layers without a cache put out
            filling = attrs.evolve(self.model, layers=self.model.layers[: len(caches)], shared=())
            prefill = EagerPass(functools.partial(_run_layers, filling, ()), caches)
        pairs = MtpPairs() if heads else None
        return SequenceState(capacity, needs, caches, mtp, target, head, boundaries, later, prefill, pairs)

    def most_tokens(self, needs: Needs = NO_NEEDS) -> int | None:
        free = self.ops.free_bytes()
        if free is None:
            return None
        one, two = (self._cache_bytes(capacity, needs) for capacity in (1, 2))
        each = two - one
        fixed = max(0, one - each)  # states of a recurrent layer, of which a longer draft takes more
        left = int(CACHE_SHARE * free) - MORE_STATES * fixed
        return self.info.max_positions if each <= 0 else max(0, min(left // each, self.info.max_positions))

    def _cache_bytes(self, capacity: int, needs: Needs) -> int:
        """Bytes of the caches of a new state."""
        caches = self._new_caches(capacity)
        if needs.mtp:
            caches += self._new_mtp_caches(capacity)
        return sum(cache.nbytes() for cache in caches)

    def _new_caches(self, capacity: int) -> list[Cache]:
        own = len(self.model.layers) - len(self.model.shared)
        return [layer.new_cache(capacity) for layer in self.model.layers[:own]]

    def _new_mtp_caches(self, capacity: int) -> list[Any]:
        """Empty caches of the MTP modules. Chained draft steps follow the true pairs, so they are slightly longer."""
        return [head.layer.new_cache(capacity + self.info.max_rows) for head in self.model.mtp]

    def _passes_with(self, boundaries: tuple[int, ...]) -> Passes:
        """Passes whose rows hold the states at ``boundaries`` and the one after the final norm, side by side."""
        if boundaries not in self._target_passes:
            run_layers = functools.partial(_run_layers, self.model, boundaries)
            self._target_passes[boundaries] = self.ops.record_passes(run_layers, self._new_caches(1))
        return self._target_passes[boundaries]

    # --- target passes ---------------------------------------------------------------------------------------------

    def prefill(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        state = _own(state)
        self.check_pass(state, tokens, decode=False)
        state.decoded = None
        parts: list[Array] = []  # outputs of passes, row after row; empty if no hidden states are requested
        for at in range(0, len(tokens), PREFILL_ROWS):
            chunk = tokens[at : at + PREFILL_ROWS]
            before = state.length
            x = state.prefill_pass.run(chunk)
            state.prefill_pass.commit(len(chunk))
            self._add_pairs(state, chunk, x, before)
            self.feed_mtp(state)
            if state.needs.hidden:
                parts.append(x)
        self._mark(state)
        if not parts:
            return ForwardOutput(rows=len(tokens))
        x = parts[0] if len(parts) == 1 else self._joined(parts)
        return self._output(state, tokens, x)

    def _to_decode(self, state: State, tokens: Sequence[int]) -> SequenceState:
        """The state of a pass, once its tokens are checked."""
        state = _own(state)
        self.check_pass(state, tokens, decode=True)
        return state

    def decode(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        state = self._to_decode(state, tokens)
        x = state.target_pass.run(tokens)
        state.decoded = tuple(tokens), x  # the list of tokens is the caller's
        return self._output(state, tokens, x, self.model.logits(self._final(state, x)))

    def decode_batch(self, batch: Sequence[tuple[State, Sequence[int]]]) -> list[ForwardOutput]:
        """As in ``ForwardPass``: passes of up to ``info.batch_rows`` rows, each over states with equal boundaries."""
        if len(batch) < 2 or not self.info.batch_rows:
            return super().decode_batch(batch)
        outputs: dict[int, ForwardOutput] = {}
        groups: dict[tuple[int, ...], list[int]] = {}  # numbers of the states that share a pass
        for number, (state, tokens) in enumerate(batch):
            groups.setdefault(self._to_decode(state, tokens).boundaries, []).append(number)
        for group in groups.values():
            while group:
                shared, rows = [], 0
                while group and rows + len(batch[group[0]][1]) <= self.info.batch_rows:
                    rows += len(batch[group[0]][1])
                    shared.append(group.pop(0))
                if len(shared) == 1:  # a recorded pass is faster
                    outputs[shared[0]] = self.decode(*batch[shared[0]])
                else:
                    outputs |= zip(shared, self._decode_shared([batch[number] for number in shared]), strict=True)
        return [outputs[number] for number in range(len(batch))]

    def _decode_shared(self, batch: Sequence[tuple[State, Sequence[int]]]) -> Iterable[ForwardOutput]:
        """One pass over several states, which give the same boundaries."""
        states = [_own(state) for state, _ in batch]
        first, *others = (state.target_pass for state in states)
        x = first.run_batch(others, [tokens for _, tokens in batch])
        logits: Any = self.model.logits(self._final(states[0], x))
        end = 0
        for state, (_, tokens) in zip(states, batch, strict=True):
            own = slice(end, end := end + len(tokens))
            state.decoded = tuple(tokens), x[own]
            yield self._output(state, *state.decoded, logits[own])

    def commit(self, state: State, rows: int) -> None:
        state = _own(state)
        if state.decoded is None:
            raise StateError("commit without a decode before it")
        tokens, x = state.decoded
        if not 0 <= rows <= len(tokens):
            raise StateError(f"commit takes 0 to {len(tokens)} rows of the last decode, got {rows}")
        before = state.length
        state.target_pass.commit(rows)
        if rows:
            self._add_pairs(state, tokens[:rows], x if rows == len(tokens) else x[:rows], before)
            if state.pairs is not None and state.pairs.waiting > IDLE_ROWS:
                self.feed_mtp(state)
        state.decoded = None

    def _final(self, state: SequenceState, x: Array) -> Array:
        """The state after the final norm, from the output of a pass."""
        return x[:, -self.info.hidden_size :] if state.boundaries else x

    def _output(
        self, state: SequenceState, tokens: Sequence[int], x: Array, logits: Logits | None = None
    ) -> ForwardOutput:
        """``x``: the output of a pass."""
        needs = state.needs
        return ForwardOutput(
            rows=len(tokens),
            logits=logits,
            hidden=self.ops.hidden(self._final(state, x)) if needs.final_hidden else None,
            boundaries=self._boundaries(state, x, needs.boundaries) if needs.boundaries else {},
        )

    def _boundaries(self, state: SequenceState, x: Array, asked: tuple[int, ...]) -> Boundaries:
        return Boundaries(self.ops.hidden_type(x), state.boundaries, asked)

    # --- MTP pairs -------------------------------------------------------------------------------------------------

    def _add_pairs(self, state: SequenceState, tokens: Sequence[int], x: Array, before: int) -> None:
        if state.pairs is not None:
            if self.model.mtp_residual:
                hidden = self._boundaries(state, x, state.boundaries)[self.info.layers]
            else:
                hidden = self.ops.hidden(self._final(state, x))
            state.pairs.add(tokens, hidden, before)

    def _mark(self, state: SequenceState) -> None:
        """Save a restore point in the recurrent caches, so that a rewind need not start over."""
        points: set[int] = set()
        for cache in state.caches:
            cache.mark()
            points.update(cache.marks() or ())
        if state.pairs is not None and points:
            state.pairs.mark(points)

    # --- MTP passes ------------------------------------------------------------------------------------------------

    def _forward_mtp(self, state: SequenceState, tokens: Sequence[int], hidden: Hidden, *, provisional: bool) -> Array:
        cache, mtp_pass, pairs, later = state.mtp, state.mtp_pass, state.pairs, state.later
        if cache is None or mtp_pass is None or pairs is None:
            raise no_mtp_pairs(self.info)
        self._check_pairs(tokens, hidden)
        rows = len(tokens)
        if provisional and later is not None:
            if rows != 1 or not later.drafting:
                raise StateError("a chained step of several MTP modules takes one token, after true pairs")
            return later.step(tokens[0])[-1:]
        if later is not None:
            tokens, hidden = later.joined(tokens, hidden)
        if not provisional:
            cache.truncate(pairs.fed if later is None else later.start)
        x = mtp_pass.run(tokens, self.ops.array(hidden))
        mtp_pass.commit(len(tokens))
        if not provisional:
            pairs.fed = cache.length
        if later is not None:
            later.begin(list(tokens), hidden, x)
        return x if later is None else x[-rows:]

    def _check_pairs(self, tokens: Sequence[int], hidden: Hidden) -> None:
        self.check_tokens(tokens)
        if len(tokens) != len(hidden):
            raise ShapeError(f"an MTP pass pairs each token with a hidden state: {len(tokens)} and {len(hidden)}")

    def prefill_mtp(self, state: State, tokens: Sequence[int], hidden: Hidden) -> None:
        if not self.model.mtp:
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
        most = self.ops.capabilities.max_rows
        own = None if head is None else self._own_head(head)
        state = _own(state)
        forward = functools.partial(self._forward_mtp, state, provisional=provisional)
        if len(tokens) <= most:
            parts = [forward(tokens, hidden)]
        else:
            self._check_pairs(tokens, hidden)
            parts = [forward(tokens[at : at + most], hidden[at : at + most]) for at in range(0, len(tokens), most)]
        x = parts[-1][-1:]
        module = 0 if state.later is None else state.later.module
        logits = (
            self.ops.head(x, self._lm_head_of(module)) if own is None else self.ops.pruned_head(x, own.rows[module])
        )
        first, *others = map(self.ops.hidden, parts)
        return ForwardOutput(rows=len(tokens), logits=logits, hidden=first.join(others) if others else first)

    def draft_mtp(
        self,
        state: State,
        pending: int,
        depth: int,
        *,
        head: DraftHead | None = None,
        choose: Callable[[Logits, Sequence[int]], int | None] | None = None,
    ) -> tuple[int, ...]:
        """As in ``ForwardPass``; greedy and coupled drafts run in one call if the backend can chain passes."""
        state = _own(state)
        if (
            (choose is None or isinstance(choose, CoupledDraft))
            and depth > 0
            and state.mtp_pass
            and state.later is None
        ):
            rows = self._lm_head_of(0) if head is None else self._own_head(head).rows[0]
            choosing = None if choose is None else Choosing((), choose.context)
            drafted = self._chain(state, state.mtp_pass, pending, depth, rows, choosing)
            if drafted is not None:
                return drafted
        return super().draft_mtp(state, pending, depth, head=head, choose=choose)

    def draft_mtp_batch(self, drafts: Sequence[MtpDraft]) -> list[tuple[int, ...] | BaseException]:
        """As in ``ForwardPass``; each step of a head of one module is a pass over all drafts that go on."""
        most = self.info.batch_rows // WAITING_ROWS
        if len(drafts) > most > 1:
            parts = [self.draft_mtp_batch(drafts[at : at + most]) for at in range(0, len(drafts), most)]
            return [result for part in parts for result in part]
        if most < 2 or len(drafts) < 2 or len(self.model.mtp) > 1 or self.info.mtp_weights < SHARED_MTP:
            return super().draft_mtp_batch(drafts)
        work = [self._mtp_steps(draft.state, draft.tokens[0], draft.depth, draft.choose) for draft in drafts]
        results: dict[int, Any] = {}
        outputs: dict[int, ForwardOutput | None] = dict.fromkeys(range(len(drafts)))
        while outputs:
            steps: dict[int, tuple[Any, ...]] = {}
            for number, output in outputs.items():
                head = drafts[number].head
                try:
                    tokens, hidden, provisional = work[number].send(output)
                    self._check_pairs(tokens, hidden)
                    rows = None if head is None else self._own_head(head).rows[0]
                    steps[number] = _own(drafts[number].state), tokens, hidden, provisional, rows
                except StopIteration as end:
                    results[number] = end.value
                except Exception as error:  # noqa: BLE001 - it ends this draft, not the others
                    results[number] = error
            outputs = {}
            if not steps:
                continue
            try:
                outputs |= zip(steps, self._decode_mtp_shared(list(steps.values())), strict=True)
            except Exception as error:  # noqa: BLE001 - it ends those that were to share the pass
                results |= dict.fromkeys(steps, error)
        return [results[number] for number in range(len(drafts))]

    def _decode_mtp_shared(self, steps: Sequence[tuple[Any, ...]]) -> list[ForwardOutput]:
        """``decode_mtp`` for several states, as one pass; gives the last hidden state only.

        A step has the state, its tokens and hidden states, whether it is provisional, and the rows of a pruned head.
        """
        states, tokens, (hidden, *others), provisional, heads = zip(*steps, strict=True)
        true = [state for state, chained in zip(states, provisional, strict=True) if not chained]
        for state in true:
            state.mtp.truncate(state.pairs.fed)
        first, *further = (state.mtp_pass for state in states)
        joined = self.ops.array(hidden.join(others) if others else hidden)
        x = first.run_batch(further, tokens, joined) if further else first.run(tokens[0], joined)
        ends = list(itertools.accumulate(map(len, tokens)))
        for state, own in zip(states, tokens, strict=True):
            state.mtp_pass.commit(len(own))
        for state in true:
            state.pairs.fed = state.mtp.length
        rows = [x[end - 1 : end] for end in ends]
        return [
            ForwardOutput(rows=len(own), logits=logits, hidden=self.ops.hidden(row))
            for own, row, logits in zip(tokens, rows, self._mtp_logits(rows, heads), strict=True)
        ]

    def _mtp_logits(self, rows: Sequence[Array], heads: Iterable[HeadRows | None]) -> Sequence[Logits]:
        """The logits of each of ``rows`` ``[1, H]``, by the full head or by rows of it."""
        pruned = {number: head for number, head in enumerate(heads) if head is not None}
        full = [number for number in range(len(rows)) if number not in pruned]
        found: dict[int, Logits] = {}
        if full:
            logits: Any = self.ops.head(self._joined(rows[number] for number in full), self._lm_head_of(0))
            found |= {number: logits[at : at + 1] for at, number in enumerate(full)}
        if pruned:
            x = self._joined(rows[number] for number in pruned)
            found |= zip(pruned, self.ops.pruned_heads(x, list(pruned.values())), strict=True)
        return [found[number] for number in range(len(rows))]

    def _joined(self, rows: Iterable[Array]) -> Array:
        return self.ops.hidden_type.concatenate(list(rows))

    def _chain(
        self,
        state: SequenceState,
        mtp_pass: Pass,
        pending: int,
        depth: int,
        head: Array | HeadRows,
        choosing: Choosing | None,
    ) -> tuple[int, ...] | None:
        pairs, cache = self._pairs_to_draft_from(state), state.mtp
        assert cache is not None
        if not pairs.waiting:
            return ()
        if pairs.waiting > WAITING_ROWS:
            self.feed_mtp(state)
        tokens, hidden = pairs.take(pending)
        self._check_pairs(tokens, hidden)
        fed = pairs.fed
        cache.truncate(fed)
        try:
            drafted = mtp_pass.chain(tokens, self.ops.array(hidden), depth, head, choosing)
        finally:
            if cache.length > fed:  # even if a later step failed
                pairs.fed = fed + len(tokens)
        if drafted is None:
            pairs.resume(fed, tokens[:-1], hidden)
        return drafted

    def _own_head(self, head: DraftHead) -> PrunedHead:
        if not (isinstance(head, PrunedHead) and head.owner is self):
            raise ContractError("a draft head that another object made", takes="what this target's draft_head returned")
        return head

    def _lm_head_of(self, module: int) -> Array:
        """The output head of an MTP module."""
        own = self.model.mtp[module].lm_head
        return self.model.lm_head if own is None else own

    def draft_head(self, tokens: Sequence[int]) -> PrunedHead:
        if not self.model.mtp:
            raise no_mtp_head(self.info)
        return self._pruned(tokens)

    def _pruned(self, tokens: Sequence[int], rows: Sequence[HeadRows] = ()) -> PrunedHead:
        self.check_tokens(tokens)
        weights = [self._lm_head_of(module) for module in range(self.info.mtp_layers)]
        gathered: dict[int, HeadRows] = {}  # modules mostly share one output head
        for module, weight in enumerate(weights):
            if id(weight) not in gathered:
                gathered[id(weight)] = self.ops.head_rows(weight, tokens, rows[module] if rows else None)
        return PrunedHead(self, [gathered[id(weight)] for weight in weights], self._pruned)

    def shared_weights(self) -> SharedWeights:
        return SharedWeights(ops=self.ops, embed_tokens=self.model.embed_tokens, lm_head=self.model.lm_head)

    # --- going back ------------------------------------------------------------------------------------------------

    def to_host(self, array: Array) -> Any:
        return self.ops.to_host(array)

    def from_host(self, tensor: Any) -> Array:
        return self.ops.from_host(tensor)

    def rewind(self, state: State, length: int) -> int:
        state = _own(state)
        self.check_rewind(state, length)
        state.decoded = None
        if length == state.length:
            return length
        points = next((marks for cache in state.caches if (marks := cache.marks()) is not None), None)
        knows = state.pairs.knows if state.pairs is not None and state.pairs.length == state.length else _always
        if points is not None:
            reached = max(point for point in points if point <= length and (point == 0 or knows(point)))
        elif knows(length) and not (state.needs.hidden and length):
            reached = length
        else:  # a token less per MTP module: running them again yields the hidden states that are lost
            reached = max(0, length - max(1, self.info.mtp_layers if state.pairs is not None else 0))
        for cache in state.caches:
            if not cache.truncate(reached):
                raise AssertionError("caches disagree about the points they can return to")
        if state.pairs is not None:
            assert state.mtp is not None
            state.pairs.cut(reached)
            state.mtp.truncate(min(state.mtp.length, state.pairs.fed))
            if state.later is not None:
                state.later.cut(state.pairs.fed)
        return reached

    def snapshot(self, state: State) -> Snapshot:
        state = _own(state)
        arrays = {f"layers.{i}.{name}": a for i, c in enumerate(state.caches) for name, a in c.save().items()}
        meta: dict[str, int] = {}
        if state.pairs is not None and state.mtp is not None:
            self.feed_mtp(state)
            state.mtp.truncate(state.pairs.fed)
            arrays |= {f"mtp.{name}": array for name, array in state.mtp.save().items()}
            if state.pairs.last is not None:
                arrays["last_hidden"] = self.ops.array(state.pairs.last)
            meta["mtp_length"] = state.pairs.fed
            if state.later is not None:
                later = state.later
                later.cut(state.pairs.fed)
                arrays |= {f"mtp{i}.{name}": a for i, c in enumerate(later.caches) for name, a in c.save().items()}
                meta |= {f"mtp_token{i}": token for i, token in enumerate(later.tokens)}
                if later.hidden is not None:
                    arrays["mtp_hidden"] = self.ops.array(later.hidden)
        return Snapshot(state.length, state.capacity, arrays, meta)

    def restore(self, snapshot: Snapshot, needs: Needs = NO_NEEDS) -> SequenceState:
        state = self.new_state(snapshot.capacity, needs)
        for i, cache in enumerate(state.caches):
            cache.load(_under(snapshot, f"layers.{i}."), snapshot.length)
        if state.pairs is not None and state.mtp is not None and "mtp_length" in snapshot.meta:
            fed = snapshot.meta["mtp_length"]
            if not 0 <= fed <= snapshot.length:
                raise StateError(f"a head's cache of {fed} pairs in a state of {snapshot.length} tokens")
            state.mtp.load(_under(snapshot, "mtp."), fed)
            state.pairs.fed = fed
            if (last := snapshot.arrays.get("last_hidden")) is not None:
                state.pairs.resume(fed, [], self._saved_hidden(last, 1))
            if state.later is not None:
                self._restore_later(state.later, snapshot, fed)
        self._mark(state)
        return state

    def _restore_later(self, later: LaterModules, snapshot: Snapshot, fed: int) -> None:
        tokens = [snapshot.meta[name] for i in range(fed) if (name := f"mtp_token{i}") in snapshot.meta]
        hidden = None
        if tokens:
            self.check_tokens(tokens)
            hidden = self._saved_hidden(snapshot.arrays["mtp_hidden"], len(tokens))
        later.restart(fed - len(tokens), tokens, hidden)
        for i, cache in enumerate(later.caches):
            cache.load(_under(snapshot, f"mtp{i}."), later.start)

    def _saved_hidden(self, array: Array, rows: int) -> Hidden:
        like = self.ops.embed(self.model.embed_tokens, [0] * rows)
        if (tuple(array.shape), array.dtype) != (tuple(like.shape), like.dtype):
            got, takes = (f"{list(one.shape)} {one.dtype}" for one in (array, like))
            raise ShapeError("the last hidden state does not fit", got=got, takes=takes)
        return self.ops.hidden(array)


def _always(length: int) -> bool:
    return True


def weights_of(part: Any) -> int:
    """How many weights the matrices of a layer, a network or a tuple of these have, apart from a head of its own."""
    found: dict[int, int] = {}

    def visit(value: Any) -> None:
        shape = getattr(value, "shape", None)
        if isinstance(shape, tuple):
            found[id(value)] = math.prod(shape) if len(shape) > 1 else 0
        elif isinstance(value, tuple | list):
            for item in value:
                visit(item)
        elif attrs.has(type(value)):
            for field in attrs.fields(type(value)):
                if field.name not in ("ops", "lm_head", "embed_tokens"):
                    visit(getattr(value, field.name))

    visit(part)
    return sum(found.values())


class PrunedHead(DraftHead):
    """Rows of the output heads that ``owner`` drafts with, one per MTP module; ``gather`` adds rows to them."""

    def __init__(self, owner: object, rows: Sequence[HeadRows], gather: Callable[..., PrunedHead]) -> None:
        self.owner, self.rows, self._gather = owner, rows, gather

    @property
    def tokens(self) -> Sequence[int]:
        return self.rows[0].tokens

    def extended(self, tokens: Sequence[int]) -> PrunedHead:
        return self._gather(tokens, self.rows) if tokens else self


def _own(state: State) -> SequenceState:
    if not isinstance(state, SequenceState):
        raise StateError(f"a state of another model: {type(state).__name__}")
    return state


def _under(snapshot: Snapshot, prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): array for name, array in snapshot.arrays.items() if name.startswith(prefix)}


# --- bodies of passes: functions of the model, as a CausalLM that its passes refer to would not be freed at once ------


def _run_layers(
    model: DecoderModel, boundaries: tuple[int, ...], caches: Sequence[Any], tokens: Sequence[int], _: Array | None
) -> Array:
    x = model.embed(tokens, caches[0].length)
    taken = [x] if 0 in boundaries else []
    read = [*caches, *(caches[number] for number in model.shared)]
    for k, (layer, cache, own) in enumerate(zip(model.layers, read, model.inputs(x, tokens), strict=False), start=1):
        x = layer(x, cache, *own)
        if k in boundaries:
            taken.append(x)
    return functools.reduce(model.ops.concat, [*taken, model.norm(x)])


def _run_mtp(
    model: DecoderModel, number: int, caches: Sequence[Any], tokens: Sequence[int], hidden: Array | None
) -> Array:
    head = model.mtp[number]
    table = model.embed_tokens if head.embed_tokens is None else head.embed_tokens
    # nobody reads what a prompt's rows put out, except a later module; drafts of several sequences may be as many rows
    long = len(tokens) > model.ops.capabilities.max_rows
    prompt = long and len(model.mtp) == 1 and not isinstance(caches[0], Batched)
    run = head.fill if prompt else head
    return run(model.ops.embed(table, tokens), hidden, caches[0])
