"""A target and its reference: the same target in plain decoding, with a fresh state and one row per pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specdec.contract import NO_NEEDS, DraftHead, Logits, MtpPairs, Needs, Parity, State
from specdec.testing.checks import Broken, expect, expect_equal
from specdec.testing.subjects import ForwardPassSubject

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float32 = NDArray[np.float32]

CAPACITY = 96  # tokens per sequence
SLACK = 0.02  # NUMERIC parity: allowed difference of rows, as a share of the logits' spread


class TargetUnderTest:
    """The target of a subject, with tokens to feed it and comparisons as strict as its parity."""

    def __init__(self, subject: ForwardPassSubject) -> None:
        self.model = subject.make()
        self.info = self.model.info
        self.exact = self.info.parity is Parity.BITWISE
        self.room = min(max(CAPACITY, self.info.max_rows + 16), self.info.max_positions)
        self.chunks_differ = not self.exact or "chunk" in self.info.parity_reason
        self._known: dict[tuple[int, ...], Float32] = {}

    def most_rows(self, held: int, most: int | None = None) -> int:
        """The rows of a pass, at most ``most``, that fit after ``held`` tokens and leave place for one more."""
        return max(min(self.info.max_rows if most is None else most, self.info.max_rows, self.room - held - 1), 1)

    def state(self, capacity: int | None = None, needs: Needs = NO_NEEDS) -> State:
        """An empty state."""
        return self.model.new_state(capacity or self.room, needs)

    def prefilled(self, tokens: Sequence[int], capacity: int | None = None, needs: Needs = NO_NEEDS) -> State:
        """A state after ``tokens``, in chunks whose bits are those of plain decoding."""
        state, most = self.state(capacity, needs), self.info.max_rows if self.chunks_differ else len(tokens)
        for at in range(0, len(tokens), most or 1):
            self.model.prefill(state, tokens[at : at + most])
        return state

    def pairs(self, state: State) -> MtpPairs:
        """The ledger of a state made for MTP drafts. Raises: Broken unless it accounts for all positions."""
        pairs = state.pairs
        if pairs is None:
            raise Broken("a state made with Needs.mtp has no ledger of pairs", expected="MtpPairs")
        expect_equal(pairs.fed + pairs.waiting, state.length, "fed and waiting pairs are not all committed positions")
        return pairs

    def draft(
        self, state: State, pending: int, depth: int, *, head: DraftHead | None = None, forced: Sequence[int] = ()
    ) -> tuple[tuple[int, ...], list[Float32]]:
        """Draft in single steps, greedily or with tokens ``forced``; returns draft and logits ``[V]`` of each step."""
        seen: list[Float32] = []

        def choose(logits: Logits, drafted: Sequence[int]) -> int:
            seen.append(logits.rows()[0].copy())
            return forced[len(drafted)] if forced else logits.argmax()[0]

        return self.model.draft_mtp(state, pending, depth, head=head, choose=choose), seen

    def token(self, number: int) -> int:
        """Map any int to a token id, spread over the vocabulary."""
        return (number * 2654435761 + 1) % self.info.vocab_size

    def tokens(self, numbers: Sequence[int]) -> list[int]:
        """Map ints to token ids."""
        return [self.token(number) for number in numbers]

    def append(self, state: State, tokens: Sequence[int]) -> None:
        """Decode given tokens plainly: one row per pass."""
        for token in tokens:
            self.model.decode(state, [token])
            self.model.commit(state, 1)

    def logits_after(self, tokens: Sequence[int]) -> Float32:
        """The logits ``[V]`` after ``tokens``, by plain decoding in a fresh state."""
        key = tuple(tokens)
        if key not in self._known:
            state = self.state()
            for i, token in enumerate(tokens):
                self._known[key[: i + 1]] = self.model.decode(state, [token]).need_logits().rows()[0].copy()
                self.model.commit(state, 1)
        return self._known[key]

    def next_logits(self, state: State, token: int) -> Float32:
        """The logits ``[V]`` after one more token, which is rolled back."""
        logits: Float32 = self.model.decode(state, [token]).need_logits().rows()[0].copy()
        self.model.commit(state, 0)
        return logits

    def expect_plain(self, state: State, tokens: Sequence[int], what: str) -> None:
        """Raises: Broken unless ``state`` continues like a plainly decoded one that holds ``tokens``."""
        token = self.token(len(tokens))
        self.expect_close(self.next_logits(state, token), self.logits_after([*tokens, token]), what, tokens=[*tokens])
        expect(state.length == len(tokens), "the state has the wrong length", got=state.length, expected=len(tokens))

    def expect_close(self, got: Float32, wanted: Float32, what: str, *, exact: bool = True, **case: object) -> None:
        """Raises: Broken unless the logits are equal: bit for bit with BITWISE parity, if ``exact``."""
        if exact and self.exact:
            same = np.array_equal(got, wanted)
        else:
            finite = np.isfinite(wanted)
            limit = SLACK * float(np.ptp(wanted[finite])) + 1e-5 if finite.any() else 0.0
            same = bool((np.isfinite(got) == finite).all()) and bool((abs(got - wanted)[finite] <= limit).all())
        if not same:
            with np.errstate(invalid="ignore"):
                off = float(np.nanmax(np.abs(got.astype(np.float64) - wanted)))
            raise Broken(what, got=got[:6], expected=wanted[:6], largest_difference=f"{off:.3g}", **case)
