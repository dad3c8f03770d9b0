"""The sequence of a draft model: follows the committed tokens, drafts on provisional rows, and can be saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from specdec.contract import DrafterSnapshot, ForwardPass, Logits, Snapshot, State
from specdec.text import common_prefix

if TYPE_CHECKING:
    from specdec.contract import Float32

WAITING_ROWS = 8  # committed tokens that a decode may include; more are prefilled first


class Follower:
    """Tracks the tokens in the model's state, and the provisional rows of the last decode.

    Drafting uses provisional rows: step i decodes ``[waiting ..., x_1 .. x_i]`` from the committed prefix. Afterwards
    only the rows of the last decode that match the target's decision are committed, so rollback is free for every
    family, recurrent ones included. The last drafted token has not been decoded; if accepted, it waits for the next
    decode. Tokens also wait while nothing is drafted.

    In every method, ``tokens`` are all committed tokens in this model's ids; the state holds the first ``held``.
    """

    def __init__(self, model: ForwardPass, state: State) -> None:
        self.model = model
        self.state = state
        self._decoded: list[int] = []
        self.passes = 0
        self.prefilled = 0

    @property
    def held(self) -> int:
        """The number of tokens in the state."""
        return self.state.length

    @property
    def waits(self) -> bool:
        """Whether rows of a decode wait for a decision."""
        return bool(self._decoded)

    def settle(self, tokens: Sequence[int], stable: int) -> None:
        """Commit the rows of the last decode that match ``tokens`` before position ``stable``."""
        if self._decoded:
            decided = tokens[self.held : min(stable, self.held + len(self._decoded))]
            self.model.commit(self.state, common_prefix(self._decoded, decided))
            self._decoded = []

    def cut(self, length: int) -> None:
        """Hold at most the first ``length`` tokens."""
        if self._decoded:
            self.model.commit(self.state, 0)
            self._decoded = []
        if self.held > length:
            self.model.rewind(self.state, length)

    def prefill(self, tokens: Sequence[int], end: int) -> None:
        """Hold the first ``end`` tokens."""
        self.settle(tokens, end)
        missing = tokens[self.held : end]
        if missing:
            self.model.prefill(self.state, missing)
            self.prefilled += len(missing)

    def make_room(self, tokens: Sequence[int], stable: int, depth: int) -> int:
        """How many steps a draft of ``depth`` tokens can take; prefills if too many tokens wait.

        The last drafted token is not decoded, so a draft of k tokens takes k - 1 places in the state and k rows. At
        least one committed token is left to decode.
        """
        self.settle(tokens, stable)  # an engine may ask for drafts and verify none
        steps = min(depth, self.state.capacity - len(tokens) + 1, self.model.info.max_rows)
        rows = min(WAITING_ROWS + steps - 1, self.model.info.max_rows)
        for end in (min(stable, len(tokens) - 1), len(tokens) - 1):
            if len(tokens) - self.held + steps - 1 > rows:
                self.prefill(tokens, end)
        return steps

    def step(self, tokens: Sequence[int], drafted: Sequence[int]) -> Logits:
        """The logits after ``tokens`` and ``drafted``, in the last row."""
        self._decoded = [*tokens[self.held :], *drafted]
        self.passes += 1
        return self.model.decode(self.state, self._decoded).need_logits()

    def snapshot(self, tokens: Sequence[int], identity: Mapping[str, str]) -> DrafterSnapshot | None:
        """The state and its tokens; None if ``tokens`` is shorter than the state, or the state is empty."""
        kept = list(tokens[: self.held])
        if not kept or len(kept) != self.held:
            return None
        snapshot = self.model.snapshot(self.state)
        arrays = {f"state.{name}": self.model.to_host(array) for name, array in snapshot.arrays.items()}
        meta: dict[str, int | str] = {f"state.{name}": value for name, value in snapshot.meta.items()}
        return DrafterSnapshot({**arrays, "tokens": np.array(kept, dtype=np.int64)}, {**meta, **identity})


def restored(
    saved: DrafterSnapshot, model: ForwardPass, capacity: int, identity: Mapping[str, str]
) -> tuple[State, list[int]] | str:
    """A saved state and its tokens, or the reason why it is not used (another model, or damaged)."""
    for name, ours in identity.items():
        if saved.meta.get(name) != ours:
            return f"saved with another {name}: {saved.meta.get(name)!r}, this one has {ours!r}"
    try:
        tokens = [int(token) for token in saved.arrays["tokens"].tolist()]
        own = {name[6:]: array for name, array in saved.arrays.items() if name.startswith("state.")}
        arrays = {name: model.from_host(array) for name, array in own.items()}
        meta = {name[6:]: int(value) for name, value in saved.meta.items() if name.startswith("state.")}
        state = model.restore(Snapshot(len(tokens), capacity, arrays, meta))
    except Exception as error:  # noqa: BLE001 - arrays of a damaged file; backends raise different errors
        return f"the saved state cannot be restored: {type(error).__name__}: {error}"
    if state.length != len(tokens):
        return f"the saved state holds {state.length} tokens, and {len(tokens)} belong to it"
    return state, tokens


class DraftRow(Logits):
    """The last row of a draft model's logits, as wide as the target's vocabulary.

    Models with the same tokenizer may pad their vocabularies differently. Ids that only the target has get -inf; ids
    that only the draft model has are dropped.
    """

    def __init__(self, inner: Logits, inner_size: int, vocab_size: int) -> None:
        self._inner, self._inner_size, self._vocab_size = inner, inner_size, vocab_size

    def __len__(self) -> int:
        return 1

    def argmax(self) -> list[int]:
        best = self._inner.argmax()[-1]
        return [best] if best < self._vocab_size else [int(np.argmax(self.rows()[0]))]

    def topk(self, k: int) -> tuple[list[list[int]], list[list[float]]]:
        if self._inner_size <= self._vocab_size:
            ids, values = self._inner.topk(k)
            return ids[-1:], values[-1:]
        row = self.rows()[0]
        best = np.lexsort((np.arange(len(row)), -row))[:k]
        return [best.tolist()], [row[best].tolist()]

    def gather(self, tokens: Sequence[int]) -> list[float]:
        row = self.rows()[0]
        return [float(row[token]) for token in tokens[:1]]

    def logsumexp(self) -> list[float]:
        return self._inner.logsumexp()[-1:] if self._inner_size <= self._vocab_size else super().logsumexp()

    def rows(self) -> Float32:
        last = self._inner.rows()[-1:]
        if self._inner_size >= self._vocab_size:
            return last[:, : self._vocab_size]
        padded = np.full((1, self._vocab_size), -np.inf, dtype=np.float32)
        padded[:, : self._inner_size] = last
        return padded
