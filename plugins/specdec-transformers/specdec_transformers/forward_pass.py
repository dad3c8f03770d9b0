"""The ForwardPass over a transformers model, with transformers' own MTP layer where the checkpoint has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from specdec.contract import DraftHead, ForwardOutput, ForwardPass, Hidden, ModelInfo, Snapshot, State, no_mtp_head
from specdec.errors import ContractError, PromptError, ShapeError, StateError
from torch import Tensor
from transformers.cache_utils import Cache

from specdec_transformers import caches
from specdec_transformers.arrays import TorchHidden, TorchLogits, own_hidden
from specdec_transformers.model import Model, Rollback, Text
from specdec_transformers.mtp import MtpHead

PREFILL_ROWS = 512  # rows of a prompt in one pass; bounds the memory of a long prompt
MAX_ROWS = 16  # rows of a verification pass
MARKS = 4  # points that a state which cannot be cut may go back to; each costs a copy of its windows and states


@attrs.frozen
class Mark:
    """A point to go back to: the end of a prefill."""

    length: int
    cache: Cache
    last: Tensor | None  # hidden state [1, H] of the last token before it


class TransformersState(State):
    """One sequence: the text's cache, and the MTP layer's own."""

    def __init__(self, text: Text, capacity: int) -> None:
        self.text = text
        self.mtp: Any = None  # true pairs only
        self.chained: Any = None  # true pairs, and provisional ones behind them
        self.mtp_true = 0
        self.chained_pairs = 0
        self.decoded: Tensor | None = None  # hidden states of the pass that waits for commit
        self.last: Tensor | None = None  # hidden state [1, H] of the last committed token
        self.marks: list[Mark] = []
        self._capacity = capacity

    @property
    def length(self) -> int:
        return self.text.length

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def mtp_length(self) -> int:
        return self.mtp_true

    @property
    def last_hidden(self) -> Hidden | None:
        return None if self.last is None else TorchHidden(self.last)

    def nbytes(self) -> int:
        kept = sum(caches.nbytes(mark.cache) for mark in self.marks)
        return self.text.nbytes() + kept + (0 if self.mtp is None else caches.nbytes(self.mtp))


class TransformersPass(ForwardPass):
    """A model that transformers runs. Weights are shared by all states.

    Attributes:
        notices: what a user should know about the load, one sentence each.
    """

    def __init__(
        self, info: ModelInfo, model: Model, template: Any, mtp: MtpHead | None, notices: Sequence[str]
    ) -> None:
        self.info = info
        self.model = model
        self.mtp = mtp
        self.notices = tuple(notices)
        self._template = template  # a used cache: what saved ones are laid out like

    # --- states ----------------------------------------------------------------------------------------------------

    def new_state(self, capacity: int) -> TransformersState:
        if not 1 <= capacity <= self.info.max_positions:
            raise PromptError(f"a state holds 1 to {self.info.max_positions} tokens, asked for {capacity}")
        return TransformersState(Text(self.model), capacity)

    def _check(self, state: TransformersState, tokens: Sequence[int]) -> None:
        self._check_tokens(tokens)
        if state.length + len(tokens) > state.capacity:
            raise StateError(
                f"the state holds {state.length} of {state.capacity} tokens; {len(tokens)} more do not fit"
            )

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if len(tokens) == 0:
            raise ShapeError("a pass takes at least one token, got none")
        wrong = [token for token in tokens if not 0 <= token < self.info.vocab_size]
        if wrong:
            raise PromptError(f"token id {wrong[0]} is outside the vocabulary (0 to {self.info.vocab_size - 1})")

    # --- target passes ---------------------------------------------------------------------------------------------

    def prefill(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        state = _own(state)
        self._check(state, tokens)
        state.decoded = None
        whole = self.model.rollback is Rollback.RECOMPUTE
        rows = len(tokens) if whole else PREFILL_ROWS  # a text that is computed again anyway is not computed in parts
        parts = []
        for at in range(0, len(tokens), rows):
            parts.append(state.text.run(tokens[at : at + rows], logits=False, keep=True).hidden)
        found = [part for part in parts if part is not None]
        state.last = found[-1][-1:] if found else None
        self._mark(state)
        return ForwardOutput(None, TorchHidden(torch.cat(found)) if found else None)

    def _mark(self, state: TransformersState) -> None:
        cache = state.text.cache
        if cache is not None and caches.can_lose(cache):
            kept = [mark for mark in state.marks if mark.length < state.length]
            state.marks = [*kept[1 - MARKS :], Mark(state.length, caches.mark(cache), state.last)]

    def decode(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        state = _own(state)
        if len(tokens) > self.info.max_rows:
            raise ShapeError(f"decode takes 1 to {self.info.max_rows} rows, got {len(tokens)}")
        self._check(state, tokens)
        made = state.text.run(tokens, logits=True, keep=False)
        state.decoded = made.hidden
        assert made.logits is not None
        hidden = None if made.hidden is None else TorchHidden(made.hidden)
        return ForwardOutput(TorchLogits(made.logits[:, : self.info.vocab_size]), hidden)

    def commit(self, state: State, rows: int) -> None:
        state = _own(state)
        pending = state.text.pending
        if pending is None:
            raise StateError("commit without a decode before it")
        if not 0 <= rows <= pending:
            raise StateError(f"commit takes 0 to {pending} rows of the last decode, got {rows}")
        state.text.commit(rows)
        if rows and state.decoded is not None:
            state.last = state.decoded[rows - 1 : rows]
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
        if head is not None:  # draft_head is not offered, so none can be ours
            raise ContractError("a draft head that another object made", got=type(head).__name__)
        after = self._run_mtp(self.mtp, _own(state), tokens, hidden, provisional=provisional)
        logits = self.mtp.logits(after[-1:])[:, : self.info.vocab_size]
        return ForwardOutput(TorchLogits(logits), TorchHidden(after))

    def _run_mtp(
        self, mtp: MtpHead, state: TransformersState, tokens: Sequence[int], hidden: Hidden, *, provisional: bool
    ) -> Tensor:
        self._check_tokens(tokens)
        if len(tokens) != len(hidden):
            raise ShapeError(f"an MTP pass pairs each token with a hidden state: {len(tokens)} and {len(hidden)}")
        chaining = provisional and state.chained is not None
        held = state.chained_pairs if chaining else state.mtp_true
        source = state.chained if chaining else state.mtp
        cache = mtp.new_cache() if source is None else caches.copied(source)
        after = mtp.run(cache, tokens, own_hidden(hidden), held)
        if provisional:
            state.chained, state.chained_pairs = cache, held + len(tokens)
        else:
            state.mtp, state.mtp_true = cache, held + len(tokens)
            state.chained = None
        return after

    # --- going back ------------------------------------------------------------------------------------------------

    def rewind(self, state: State, length: int) -> int:
        state = _own(state)
        if not 0 <= length <= state.length:
            raise StateError(f"rewind takes 0 to {state.length} tokens, got {length}")
        text = state.text
        text.drop()
        state.decoded = state.chained = None
        if length == state.length:
            return length
        # one token less, so that the last kept token runs again and its hidden state is known
        reached, last = max(length - 1, 0), None
        if text.cache is not None and not caches.holds_all(text.cache):
            mark = next((mark for mark in reversed(state.marks) if mark.length <= length), None)
            reached, last = (0, None) if mark is None else (mark.length, mark.last)
            cache = None if mark is None else caches.back_at(mark.cache, text.cache, reached)
        else:
            cache = None if text.cache is None or reached == 0 else caches.cut_to(text.cache, reached)
        # the pair (h_j, x_{j+1}) stays true only if token j+1 is kept
        pairs = min(state.mtp_true, max(reached if last is None else reached - 1, 0))
        if pairs < state.mtp_true and state.mtp is not None:
            if pairs and not caches.holds_all(state.mtp):  # its window has lost what it would need: start over
                reached, last, cache, pairs = 0, None, None, 0
            state.mtp = caches.cut_to(state.mtp, pairs) if pairs else None
        state.mtp_true = pairs
        text.cache, text.length = cache, reached
        del text.tokens[reached:]
        state.last = last
        state.marks = [mark for mark in state.marks if mark.length <= reached]
        return reached

    def snapshot(self, state: State) -> Snapshot:
        state = _own(state)
        arrays: dict[str, Any] = {}
        meta = {"mtp_length": state.mtp_true}
        for name, cache in (("cache", state.text.cache), ("mtp", state.mtp)):
            if cache is not None:
                tensors, numbers = caches.saved(cache)
                arrays |= {f"{name}.{path}": array for path, array in tensors.items()}
                meta |= {f"{name}.{path}": number for path, number in numbers.items()}
        if self.model.rollback is Rollback.RECOMPUTE:
            arrays["tokens"] = torch.tensor(state.text.tokens, dtype=torch.int64)
        if state.last is not None:
            arrays["last_hidden"] = state.last.clone()
        return Snapshot(state.length, state.capacity, arrays, meta)

    def restore(self, snapshot: Snapshot) -> TransformersState:
        state = self.new_state(snapshot.capacity)
        if self.model.rollback is Rollback.RECOMPUTE:
            state.text.tokens = [int(token) for token in snapshot.arrays["tokens"]]
        elif snapshot.length:
            state.text.cache = caches.loaded(self._template, *_under(snapshot, "cache."))
        state.text.length = snapshot.length
        state.mtp_true = snapshot.meta["mtp_length"]
        if state.mtp_true:
            if self.mtp is None:
                raise no_mtp_head(self.info)
            state.mtp = caches.loaded(self.mtp.template, *_under(snapshot, "mtp."))
        if "last_hidden" in snapshot.arrays:
            state.last = torch.as_tensor(snapshot.arrays["last_hidden"]).to(self.model.device, copy=True)
        self._mark(state)
        return state


def _own(state: State) -> TransformersState:
    if not isinstance(state, TransformersState):
        raise StateError(f"a state of another model: {type(state).__name__}")
    return state


def _under(snapshot: Snapshot, prefix: str) -> tuple[dict[str, Any], dict[str, int]]:
    def cut(entries: Any) -> dict[str, Any]:
        return {name.removeprefix(prefix): value for name, value in entries.items() if name.startswith(prefix)}

    return cut(snapshot.arrays), cut(snapshot.meta)
