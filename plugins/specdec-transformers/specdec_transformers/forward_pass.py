"""The ForwardPass over a transformers model, with transformers' own MTP layer if the checkpoint has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from specdec.contract import (
    IDLE_ROWS,
    NO_NEEDS,
    DraftHead,
    ForwardOutput,
    ForwardPass,
    Hidden,
    Logits,
    ModelInfo,
    MtpPairs,
    Needs,
    SharedWeights,
    Snapshot,
    State,
    no_mtp_head,
    no_mtp_pairs,
)
from specdec.errors import ContractError, ShapeError, StateError
from torch import Tensor
from transformers.cache_utils import Cache

from specdec_transformers import caches
from specdec_transformers.arrays import TorchHidden, TorchLogits, own_hidden
from specdec_transformers.model import Model, Rollback, Text
from specdec_transformers.mtp import MtpHead

PREFILL_ROWS = 512  # rows of a prompt in one pass; bounds the memory of a long prompt
MAX_ROWS = 16  # rows of a verification pass
MARKS = 4  # rewind points of a state that cannot be cut; each costs a copy of its windows and states


@attrs.frozen
class Mark:
    """A rewind point: the end of a prefill."""

    length: int
    cache: Cache


class TransformersState(State):
    """One sequence: the text's cache and the MTP layer's."""

    def __init__(self, text: Text, capacity: int, needs: Needs) -> None:
        self.text = text
        self.needs = needs
        self.pairs = MtpPairs() if needs.mtp else None
        self.mtp: Any = None  # true pairs only
        self.chained: Any = None  # true pairs, then provisional ones
        self.chained_pairs = 0
        self.decoded: tuple[Sequence[int], Tensor | None] | None = None  # tokens and hidden states of a pass
        self.marks: list[Mark] = []
        self._capacity = capacity

    @property
    def length(self) -> int:
        return self.text.length

    @property
    def capacity(self) -> int:
        return self._capacity

    def nbytes(self) -> int:
        kept = sum(caches.nbytes(mark.cache) for mark in self.marks)
        return self.text.nbytes() + kept + (0 if self.mtp is None else caches.nbytes(self.mtp))


class TransformersPass(ForwardPass):
    """A model run by transformers. All states share the weights.

    Attributes:
        notices: notices about the load, one sentence each.
    """

    def __init__(
        self, info: ModelInfo, model: Model, template: Any, mtp: MtpHead | None, notices: Sequence[str]
    ) -> None:
        self.info = info
        self.model = model
        self.mtp = mtp
        self.notices = tuple(notices)
        self._template = template  # a used cache: the layout of saved ones

    # --- states ----------------------------------------------------------------------------------------------------

    def new_state(self, capacity: int, needs: Needs = NO_NEEDS) -> TransformersState:
        self.check_new_state(capacity, needs)
        return TransformersState(Text(self.model, needs.boundaries), capacity, needs)

    # --- target passes ---------------------------------------------------------------------------------------------

    def prefill(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        state = _own(state)
        self.check_pass(state, tokens, decode=False)
        state.decoded = None
        whole = self.model.rollback is Rollback.RECOMPUTE
        rows = len(tokens) if whole else PREFILL_ROWS  # RECOMPUTE computes the whole text anyway
        parts = []
        for at in range(0, len(tokens), rows):
            chunk, before = tokens[at : at + rows], state.length
            hidden = state.text.run(chunk, logits=False, keep=True).hidden
            self._add_pairs(state, chunk, hidden, before)
            self.feed_mtp(state)
            if hidden is not None and state.needs.hidden:
                parts.append(hidden)
        self._mark(state)
        return _output(state, len(tokens), torch.cat(parts) if parts else None)

    def _add_pairs(self, state: TransformersState, tokens: Sequence[int], hidden: Tensor | None, before: int) -> None:
        if state.pairs is not None and hidden is not None:
            state.pairs.add(tokens, TorchHidden(hidden[:, : self.info.hidden_size]), before)

    def _mark(self, state: TransformersState) -> None:
        cache = state.text.cache
        if cache is not None and caches.can_lose(cache):
            kept = [mark for mark in state.marks if mark.length < state.length]
            state.marks = [*kept[1 - MARKS :], Mark(state.length, caches.mark(cache))]
            if state.pairs is not None:
                state.pairs.mark(mark.length for mark in state.marks)

    def decode(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        state = _own(state)
        self.check_pass(state, tokens, decode=True)
        made = state.text.run(tokens, logits=True, keep=False)
        state.decoded = tuple(tokens), made.hidden  # the list is the caller's
        assert made.logits is not None
        return _output(state, len(tokens), made.hidden, TorchLogits(made.logits[:, : self.info.vocab_size]))

    def commit(self, state: State, rows: int) -> None:
        state = _own(state)
        pending = state.text.pending
        if pending is None or state.decoded is None:
            raise StateError("commit without a decode before it")
        if not 0 <= rows <= pending:
            raise StateError(f"commit takes 0 to {pending} rows of the last decode, got {rows}")
        before = state.length
        state.text.commit(rows)
        tokens, hidden = state.decoded
        if rows:
            self._add_pairs(state, tokens[:rows], None if hidden is None else hidden[:rows], before)
        if state.pairs is not None and state.pairs.waiting > IDLE_ROWS:
            self.feed_mtp(state)
        state.decoded = None

    # --- MTP passes ------------------------------------------------------------------------------------------------

    def prefill_mtp(self, state: State, tokens: Sequence[int], hidden: Hidden) -> None:
        if self.mtp is None:
            return
        for at in range(0, len(tokens), PREFILL_ROWS):
            rows = slice(at, at + PREFILL_ROWS)
            self._run_mtp(self.mtp, _own(state), tokens[rows], hidden[rows], provisional=False)

    def decode_mtp(
        self,
        state: State,
        tokens: Sequence[int],
        hidden: Hidden,
        *,
        provisional: bool = False,
        head: DraftHead | None = None,
    ) -> ForwardOutput:
        if self.mtp is None:
            raise no_mtp_head(self.info)
        if head is not None:  # this class offers no draft_head, so none can be ours
            raise ContractError("a draft head made by another object", got=type(head).__name__)
        after = self._run_mtp(self.mtp, _own(state), tokens, hidden, provisional=provisional)
        logits = self.mtp.logits(after[-1:])[:, : self.info.vocab_size]
        return ForwardOutput(rows=len(tokens), logits=TorchLogits(logits), hidden=TorchHidden(after))

    def _run_mtp(
        self, mtp: MtpHead, state: TransformersState, tokens: Sequence[int], hidden: Hidden, *, provisional: bool
    ) -> Tensor:
        pairs = state.pairs
        if pairs is None:
            raise no_mtp_pairs(self.info)
        self.check_tokens(tokens)
        if len(tokens) != len(hidden):
            raise ShapeError(f"an MTP pass pairs each token with a hidden state: {len(tokens)} and {len(hidden)}")
        chaining = provisional and state.chained is not None
        held = state.chained_pairs if chaining else pairs.fed
        source = state.chained if chaining else state.mtp
        cache = mtp.new_cache() if source is None else caches.copied(source)
        after = mtp.run(cache, tokens, own_hidden(hidden), held)
        if provisional:
            state.chained, state.chained_pairs = cache, held + len(tokens)
        else:
            state.mtp, pairs.fed = cache, held + len(tokens)
            state.chained = None
        return after

    def shared_weights(self) -> SharedWeights:
        """Both matrices in host memory; what the model multiplies embeddings by is found by embedding one token.

        Raises: UnsupportedError for a model without either matrix.
        """
        network = self.model.network
        table = getattr(network.get_input_embeddings(), "weight", None)
        head = getattr(network.get_output_embeddings(), "weight", None)
        if table is None or head is None:
            return super().shared_weights()
        token = torch.zeros(1, dtype=torch.int64, device=self.model.device)
        with torch.no_grad():
            embedded = network.get_input_embeddings()(token)[0].float()
        row = table[0].detach().float()
        size = self.info.vocab_size
        return SharedWeights(
            embed_tokens=table[:size].detach().cpu(),
            lm_head=head[:size].detach().cpu(),
            embed_scale=float(embedded.norm() / row.norm()) if bool(row.any()) else 1.0,
        )

    # --- going back ------------------------------------------------------------------------------------------------

    def rewind(self, state: State, length: int) -> int:
        state = _own(state)
        self.check_rewind(state, length)
        text = state.text
        text.drop()
        state.decoded = state.chained = None
        if length == state.length:
            return length
        pairs, knows = state.pairs, None if state.pairs is None else state.pairs.knows
        if text.cache is not None and not caches.holds_all(text.cache):
            marks = [mark for mark in state.marks if mark.length <= length and (knows is None or knows(mark.length))]
            mark = marks[-1] if marks else None
            reached = 0 if mark is None else mark.length
            cache = None if mark is None else caches.back_at(mark.cache, text.cache, reached)
        else:  # one token less, so that the last kept token runs again and its hidden state is known
            known = (knows is None or knows(length)) and not (state.needs.hidden and length)
            reached = length if known else length - 1
            cache = None if text.cache is None or reached == 0 else caches.cut_to(text.cache, reached)
        if pairs is not None:
            held = pairs.fed
            pairs.cut(reached)
            if pairs.fed < held and state.mtp is not None:
                if pairs.fed and not caches.holds_all(state.mtp):  # its window has lost needed tokens: start over
                    reached, cache = 0, None
                    pairs.cut(0)
                state.mtp = caches.cut_to(state.mtp, pairs.fed) if pairs.fed else None
        text.cache, text.length = cache, reached
        del text.tokens[reached:]
        state.marks = [mark for mark in state.marks if mark.length <= reached]
        return reached

    def snapshot(self, state: State) -> Snapshot:
        state = _own(state)
        arrays: dict[str, Any] = {}
        meta: dict[str, int] = {}
        if state.pairs is not None:
            self.feed_mtp(state)
            meta["mtp_length"] = state.pairs.fed
            if state.pairs.last is not None:
                arrays["last_hidden"] = own_hidden(state.pairs.last).clone()
        for name, cache in (("cache", state.text.cache), ("mtp", state.mtp)):
            if cache is not None:
                tensors, numbers = caches.saved(cache)
                arrays |= {f"{name}.{path}": array for path, array in tensors.items()}
                meta |= {f"{name}.{path}": number for path, number in numbers.items()}
        if self.model.rollback is Rollback.RECOMPUTE:
            arrays["tokens"] = torch.tensor(state.text.tokens, dtype=torch.int64)
        return Snapshot(state.length, state.capacity, arrays, meta)

    def restore(self, snapshot: Snapshot, needs: Needs = NO_NEEDS) -> TransformersState:
        state = self.new_state(snapshot.capacity, needs)
        if self.model.rollback is Rollback.RECOMPUTE:
            state.text.tokens = [int(token) for token in snapshot.arrays["tokens"]]
        elif snapshot.length:
            state.text.cache = caches.loaded(self._template, *_under(snapshot, "cache."))
        state.text.length = snapshot.length
        if state.pairs is not None and self.mtp is not None and "mtp_length" in snapshot.meta:
            state.pairs.fed = snapshot.meta["mtp_length"]
            if state.pairs.fed:
                state.mtp = caches.loaded(self.mtp.template, *_under(snapshot, "mtp."))
            if "last_hidden" in snapshot.arrays:
                last = torch.as_tensor(snapshot.arrays["last_hidden"]).to(self.model.device, copy=True)
                state.pairs.resume(state.pairs.fed, [], TorchHidden(last))
        self._mark(state)
        return state


def _output(state: TransformersState, rows: int, hidden: Tensor | None, logits: Logits | None = None) -> ForwardOutput:
    """The output of a pass; hidden states only if requested."""
    if hidden is None or not state.needs.hidden:
        return ForwardOutput(rows=rows, logits=logits)
    final, *others = (TorchHidden(part) for part in hidden.chunk(1 + len(state.needs.boundaries), dim=-1))
    return ForwardOutput(
        rows=rows,
        logits=logits,
        hidden=final if state.needs.final_hidden else None,
        boundaries=dict(zip(state.needs.boundaries, others, strict=True)),
    )


def _own(state: State) -> TransformersState:
    if not isinstance(state, TransformersState):
        raise StateError(f"a state of another model: {type(state).__name__}")
    return state


def _under(snapshot: Snapshot, prefix: str) -> tuple[dict[str, Any], dict[str, int]]:
    def cut(entries: Any) -> dict[str, Any]:
        return {name.removeprefix(prefix): value for name, value in entries.items() if name.startswith(prefix)}

    return cut(snapshot.arrays), cut(snapshot.meta)
