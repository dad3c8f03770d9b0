"""A target and its reference: the same target in plain decoding, with a fresh state and one row per pass.

``Play`` takes a fixed text in by drawn steps; whichever way that is, the logits at every position must be those of
plain decoding.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.contract import NO_NEEDS, DraftHead, ForwardOutput, Logits, MtpPairs, Needs, Parity, Snapshot, State, Stats
from specdec.decoding.session_file import SavedSession, read_session, restore_state, write_session
from specdec.testing.checks import Broken, expect, expect_equal
from specdec.testing.subjects import ForwardPassSubject

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float32 = NDArray[np.float32]

CAPACITY = 96  # tokens of a short sequence
LONGEST = 700  # tokens of a text
SLACK = 0.02  # NUMERIC parity: allowed difference of rows, as a share of the logits' spread
_HOST = 64_000_000  # logits of the reference that are kept on the host


class TargetUnderTest:
    """The target of a subject, with tokens to feed it and comparisons as strict as its parity."""

    def __init__(self, subject: ForwardPassSubject) -> None:
        self.model = subject.make()
        self.info = self.model.info
        self.exact = self.info.parity is Parity.BITWISE
        self.room = min(max(CAPACITY, self.info.max_rows + 16), self.info.max_positions)
        self.chunks_differ = not self.exact or "chunk" in self.info.parity_reason
        self.length = max(min(LONGEST, self.info.max_positions - 1, _HOST // self.info.vocab_size), 2)
        self.text, self.junk = self._drawn(self.length + 1), self._drawn(4 * self.length)
        self._known: dict[tuple[int, ...], Float32] = {}
        self._plain: list[Float32] = []
        self._reference: State | None = None

    def _drawn(self, count: int) -> list[int]:
        """Three in four tokens come from a small set, the rest from the whole vocabulary."""
        rng, vocab = np.random.default_rng(count), self.info.vocab_size
        common = np.unique([0, vocab - 1, *self.tokens(range(20))])
        rare = np.unique(np.linspace(0, vocab - 1, min(vocab, 100)).astype(np.int64))
        drawn: list[int] = np.where(
            rng.integers(0, 4, count) > 0, rng.choice(common, count), rng.choice(rare, count)
        ).tolist()
        return drawn

    def plain(self, position: int) -> Float32:
        """The logits ``[V]`` after the token of the text at ``position``, by plain decoding."""
        if self._reference is None:
            self._reference = self.state(min(LONGEST + 64, self.info.max_positions))
        while len(self._plain) <= position:
            output = self.model.decode(self._reference, [self.text[len(self._plain)]])
            self._plain.append(output.need_logits().rows()[0].copy())
            self.model.commit(self._reference, 1)
        return self._plain[position]

    def offered(self, *boundaries: int) -> Needs:
        """The final hidden states and these boundaries, as far as this target gives them."""
        known = tuple(k for k in boundaries if self.info.layers and k <= self.info.layers)
        return Needs(final_hidden=self.info.gives_hidden, boundaries=known)

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

    def expect_close(self, got: Float32, truth: Float32, what: str, *, exact: bool = True, **case: object) -> None:
        """Raises: Broken unless the logits are equal: bit for bit with BITWISE parity, if ``exact``."""
        if exact and self.exact:
            same = np.array_equal(got, truth)
        else:
            finite = np.isfinite(truth)
            limit = SLACK * float(np.ptp(truth[finite])) + 1e-5 if finite.any() else 0.0
            same = bool((np.isfinite(got) == finite).all()) and bool((abs(got - truth)[finite] <= limit).all())
        if not same:
            with np.errstate(invalid="ignore"):
                off = float(np.nanmax(np.abs(got.astype(np.float64) - truth)))
            raise Broken(what, got=got[:6], expected=truth[:6], largest_difference=f"{off:.3g}", **case)


_BACK = (1, 4, 1, 30, 2, 300)
"""Tokens that a state goes back before it goes on with another text."""


class Play:
    """One way through the text of a target.

    Kinds of steps: ``prefill`` one chunk; ``decode`` one pass, of which some rows are committed; ``twice`` after
    another pass that is not committed; ``rewind``; ``restore``: the copy of the state goes on; ``file``: likewise, by
    way of a session's file; ``beside``: like decode, and another sequence has a pass before the logits are read.

    With ``hostile``, the caller writes into everything that it was handed, and into its own lists after a call.
    """

    def __init__(self, target: TargetUnderTest, what: str, *, needs: Needs = NO_NEEDS, hostile: bool = False) -> None:
        self.target, self.model, self.what, self.needs, self.hostile = target, target.model, what, needs, hostile
        self.capacity = min(LONGEST + 64, target.info.max_positions)
        self.state = target.state(self.capacity, needs)
        self.other: State | None = None
        self.at = self.turns = 0
        self.taken: list[str] = []

    def run(self, kinds: Sequence[str], seed: int, steps: int) -> None:
        """Take up to ``steps`` drawn steps, as far as the text reaches. Raises: Broken with the steps taken."""
        rng, target = np.random.default_rng(seed), self.target
        chunk = target.info.max_rows if target.chunks_differ else 300
        try:
            for number in range(steps):
                kind, room = kinds[int(rng.integers(len(kinds)))], target.length - self.at
                if not room and kind not in ("rewind", "restore", "file"):
                    if "rewind" not in kinds:
                        return
                    kind = "rewind"
                if kind == "prefill":
                    self._take(kind, min(_size(rng, chunk), room))
                elif kind == "rewind":
                    self._take(kind, min(_size(rng, target.length), self.at) if rng.integers(8) else 0)
                elif kind in ("restore", "file"):
                    self._take(kind)
                else:
                    most = target.info.max_rows
                    rows = min(_size(rng, most) if rng.integers(3) else most, self.capacity - self.at)
                    count = min(int(rng.integers(0, rows + 1)) if number % 2 else rows, room)
                    self._take(kind, count, rows - count)
        except Exception as error:
            raise Broken.by(error, {"steps": self.taken[-12:], "at": self.at}) from error

    def take(self, *steps: tuple[str, int]) -> None:
        """Take these steps. Raises: Broken."""
        for kind, count in steps:
            self._take(kind, count)

    def _take(self, kind: str, count: int = 0, more: int = 0) -> None:
        self.taken.append(f"{kind}({count}{f' of {count + more} rows' if more else ''})")
        if kind == "prefill":
            self._prefill(count)
        elif kind == "rewind":
            self._rewind(count)
        else:
            self._pass(kind, count, more)
        expect(self.state.length == self.at, "the state has the wrong length", got=self.state.length, expected=self.at)

    def _given(self, call: Callable[[State, list[int]], ForwardOutput], tokens: list[int]) -> ForwardOutput:
        """Call with a list of its own, which belongs to the caller again afterwards."""
        given = list(tokens)
        output = call(self.state, given)
        expect_equal(given, tokens, "the list of tokens was changed")
        if self.hostile:
            given[:] = [0] * len(given)
        return output

    def _prefill(self, count: int) -> None:
        for_file = self.target.text[self.at : self.at + count]
        output = self._given(self.model.prefill, for_file)
        self.at += count
        self._spoil(output)

    def _pass(self, kind: str, count: int, more: int) -> None:
        if kind in ("restore", "file"):
            self._restore() if kind == "restore" else self._file()
            self._next()
            return
        junk = self.target.junk
        if not count + more:
            return
        if kind == "twice":
            self.model.decode(self.state, junk[-count - more :])
        output = self._given(
            self.model.decode, self.target.text[self.at : self.at + count] + junk[self.at : self.at + more]
        )
        if kind == "beside":
            if self.other is None or self.other.length + count + more > self.other.capacity:
                self.other = self.target.state(self.capacity, self.needs)
            self.model.decode(self.other, junk[-count - more :])
            self.model.commit(self.other, (count + more + 1) // 2)
        self._compare(output.need_logits(), count)
        self._spoil(output)
        self.model.commit(self.state, count)
        self.at += count

    def _rewind(self, count: int) -> None:
        length = self.at - count
        reached = self.model.rewind(self.state, length)
        expect(0 <= reached <= length, "rewind reached an invalid length", got=reached, expected=f"0 to {length}")
        expect_equal(self.state.length, reached, "the state's length is not what rewind returned")
        self.at = length
        most = self.target.info.max_rows if self.target.chunks_differ else length or 1
        for at in range(reached, length, most):
            self.model.prefill(self.state, self.target.text[at : min(at + most, length)])
        self._next()

    def _restore(self) -> None:
        if self.state.length + 1 < self.state.capacity:  # these rows are never committed
            self.model.decode(self.state, self.target.junk[:1])
        taken = self.model.snapshot(self.state)
        expect_plain_snapshot(taken, self.state)
        self._go_elsewhere(self.state)
        copy, self.state = (self.model.restore(taken, self.needs) for _ in range(2))
        for state in (copy, self.state):
            expect_equal(state.capacity, self.capacity, "the restored state has the wrong capacity")
            expect_equal(state.needs, self.needs, "the restored state is made for other needs")
        self._go_elsewhere(copy)
        for array in taken.arrays.values() if self.hostile else ():
            spoil(array)

    def _go_elsewhere(self, state: State) -> None:
        """Rewind, continue with other text; copies must not change."""
        self.turns += 1
        self.model.rewind(state, max(state.length - _BACK[self.turns % len(_BACK)], 0))
        rows = self.target.junk[: min(3, self.target.info.max_rows, state.capacity - state.length)]
        if rows:
            self.model.decode(state, rows)
            self.model.commit(state, len(rows))

    def _file(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path, model = Path(folder) / "session", self.model
            taken, tokens = model.snapshot(self.state), tuple(self.target.text[: self.at + 1])
            expect_plain_snapshot(taken, self.state)
            write_session(path, SavedSession(tokens=tokens, cycle=0, stats=Stats(), snapshot=taken), model)
            self.state = restore_state(read_session(path, model), model, self.capacity, self.needs, path)

    def _next(self) -> None:
        """The next row, which is dropped again."""
        if self.state.length < self.state.capacity:
            output = self.model.decode(self.state, self.target.text[self.at : self.at + 1])
            self._compare(output.need_logits(), 1)
            given = output.hidden is not None, tuple(output.boundaries)
            wanted = self.needs.final_hidden, self.needs.boundaries
            expect_equal(given, wanted, "a state gives other hidden states than it was made for")
            self.model.commit(self.state, 0)

    def _compare(self, logits: Logits, count: int) -> None:
        rows = logits.rows()
        for row in range(count):
            self.target.expect_close(rows[row], self.target.plain(self.at + row), self.what, row=row)

    def _spoil(self, output: ForwardOutput) -> None:
        for part in (output.logits, output.hidden, *output.boundaries.values()):
            if part is not None and self.hostile:
                spoil(part.rows())


def _size(rng: np.random.Generator, most: int) -> int:
    """1 to ``most``, on a log scale."""
    return min(int(np.exp(rng.uniform(0, np.log(most + 1)))), most)


def spoil(array: Any) -> None:
    """Overwrite an array of numpy or torch in host memory; others are left alone."""
    with contextlib.suppress(ValueError, RuntimeError, TypeError):
        if isinstance(array, np.ndarray):
            array[...] = 77
        elif hasattr(array, "fill_") and str(getattr(array, "device", "")) == "cpu":
            array.fill_(77)


def expect_plain_snapshot(taken: Snapshot, state: State) -> None:
    """Raises: Broken unless the metadata can be written to a file, and the lengths are those of the state."""
    for name, value in taken.meta.items():
        plain = type(name) is str and type(value) is int
        expect(plain, "a snapshot's metadata is not a plain int under a name", got={name: value})
    expect_equal(
        (taken.length, taken.capacity),
        (state.length, state.capacity),
        "a snapshot has another length or capacity than its state",
    )
