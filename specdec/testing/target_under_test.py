"""A target and its reference: the same target in plain decoding, with a fresh state and one row per pass.

``Play`` takes a fixed text in by drawn steps. Whichever way that is, the logits and the hidden states at every position
must be those of plain decoding, and MTP drafts those of a fresh state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch

from specdec.contract import (
    NO_NEEDS,
    DraftHead,
    ForwardOutput,
    ForwardPass,
    Hidden,
    Logits,
    MtpPairs,
    Needs,
    Parity,
    State,
)
from specdec.testing.checks import Broken, expect, expect_equal
from specdec.testing.subjects import PluginSubject

if TYPE_CHECKING:
    from specdec.exchange import Float32

LONGEST = 700  # tokens of a text
SLACK = 0.02  # NUMERIC parity: allowed difference of rows, as a share of the logits' spread
MTP = Needs(mtp=True)
_HOST = 64_000_000  # logits of the reference that are kept on the host


class TargetUnderTest:
    """The target of a subject, texts to feed it, and comparisons as strict as its parity."""

    def __init__(self, subject: PluginSubject) -> None:
        self.model: ForwardPass = subject.make()
        self.info = self.model.info
        self.exact = self.info.parity is Parity.BITWISE
        self.chunks_differ = not self.exact or "chunk" in self.info.parity_reason
        self.chunk = self.info.max_rows if self.chunks_differ else 300  # tokens of a chunk with the bits of single rows
        self.length = max(min(LONGEST, self.info.max_positions - 1, _HOST // self.info.vocab_size), 2)
        self.capacity = min(LONGEST + 64, self.info.max_positions)
        self.text, self.junk = self._drawn(self.length + 1), self._drawn(4 * self.length)
        layers = self.info.layers
        boundaries = tuple(sorted({0, (layers + 1) // 2, layers})) if layers else ()
        self.hidden = Needs(final_hidden=self.info.gives_hidden, boundaries=boundaries)
        self._plain: dict[str, Float32] = {}
        self._known = 0  # rows of each
        self._reference: State | None = None

    def _drawn(self, count: int) -> list[int]:
        """Three in four tokens come from a small set, the rest from the whole vocabulary."""
        rng, vocab = np.random.default_rng(count), self.info.vocab_size
        common = np.unique([0, vocab - 1, *((number * 2654435761 + 1) % vocab for number in range(20))])
        rare = np.unique(np.linspace(0, vocab - 1, min(vocab, 100)).astype(np.int64))
        often = rng.integers(0, 4, count) > 0
        drawn: list[int] = np.where(often, rng.choice(common, count), rng.choice(rare, count)).tolist()
        return drawn

    def needs(self) -> list[Needs]:
        """What states can be made for: nothing, all or some hidden states, MTP drafts."""
        single = [Needs(boundaries=(k,)) for k in self.hidden.boundaries[::-1]]
        hidden = [self.hidden, *single[:2]] if self.hidden.hidden else []
        return [NO_NEEDS, *hidden, *([MTP] if self.info.mtp_layers else [])]

    def plain(self, first: int, count: int = 1, name: str = "logits") -> Float32:
        """The logits ``[T, V]`` after the tokens of the text from ``first`` on, or hidden states, by plain decoding."""
        while self._known < first + count:
            if self._reference is None:
                self._reference = self.state(needs=self.hidden)
            output = self.model.decode(self._reference, self.text[self._known : self._known + 1])
            parts: dict[str, Logits | Hidden] = {"logits": output.need_logits(), **hidden_by_name(output)}
            for key, part in parts.items():
                row = part.rows()
                self._plain.setdefault(key, np.empty((self.length + 1, row.shape[1]), np.float32))[self._known] = row
            self.model.commit(self._reference, 1)
            self._known += 1
        return self._plain[name][first : first + count]

    def expect_plain(
        self, got: Float32, first: int, what: str, *, name: str = "logits", exact: bool = True, **case: object
    ) -> None:
        """Raises: Broken unless these rows are those of plain decoding from position ``first`` on."""
        truth = self.plain(first, len(got), name)
        if not np.array_equal(got, truth):
            for row, (values, expected) in enumerate(zip(got, truth, strict=True)):
                self.expect_close(values, expected, what, exact=exact, position=first + row, **case)

    def state(self, capacity: int | None = None, needs: Needs = NO_NEEDS) -> State:
        """An empty state."""
        return self.model.new_state(capacity or self.capacity, needs)

    def prefilled(self, length: int, capacity: int | None = None, needs: Needs = NO_NEEDS) -> State:
        """A state after so many tokens of the text, in chunks whose bits are those of plain decoding."""
        state = self.state(capacity, needs)
        self.prefill(state, length)
        return state

    def prefill(self, state: State, length: int) -> None:
        """Take the text in up to ``length``."""
        for at in range(state.length, length, self.chunk):
            self.model.prefill(state, self.text[at : min(at + self.chunk, length)])

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

    def expect_next(self, state: State, what: str) -> None:
        """Raises: Broken unless the next row of the text, which is dropped again, is that of plain decoding."""
        at = state.length
        if at < state.capacity:
            logits = self.model.decode(state, self.text[at : at + 1]).need_logits().rows()
            self.expect_plain(logits, at, what)
            self.model.commit(state, 0)

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


def under_test(subject: PluginSubject) -> TargetUnderTest:
    """The target of a subject, the same for all checks: plain decoding of the text is computed once."""
    known: TargetUnderTest = subject.known.get("target") or TargetUnderTest(subject)
    subject.known["target"] = known
    return known


def hidden_by_name(output: ForwardOutput) -> dict[str, Hidden]:
    """The hidden states of a pass, by name."""
    final = {} if output.hidden is None else {"final": output.hidden}
    return {**final, **{f"boundary {k}": hidden for k, hidden in output.boundaries.items()}}


_BACK = (1, 4, 1, 30, 2, 300)
"""Tokens that a state goes back before it goes on with another text."""
DEPTHS = (1, 2, 3, 5, 8, 13)
DIFFERS = "a row differs from plain decoding"


class Play:
    """One way through the text of a target. Raises: Broken with the steps taken.

    Kinds of steps: ``prefill`` one chunk; ``decode`` one pass, of which some rows are committed; ``twice`` after
    another pass that is not committed; ``rewind``; ``restore``: the copy of the state goes on, whose arrays are by
    turns those that a session's file gives; ``beside``: like decode, and another sequence has a pass before the logits
    are read; ``draft`` by the MTP head, if the state is made for that, in one call and in single steps by turns.

    Args:
        exact: with the bits of plain decoding, if parity is BITWISE.
    """

    def __init__(
        self, target: TargetUnderTest, *, needs: Needs = NO_NEEDS, exact: bool = True, capacity: int | None = None
    ) -> None:
        self.target, self.model, self.needs, self.exact = target, target.model, needs, exact
        self.capacity = capacity or target.capacity
        self.state = target.state(self.capacity, needs)
        self.other: State | None = None
        self.at = self.turns = self.drafted = 0  # drafted: where the last draft began
        self.taken: list[str] = []
        self.held: list[tuple[ForwardOutput, int, int]] = []  # passes with hidden states, positions, committed rows

    def run(self, kinds: Sequence[str], seed: int, steps: int) -> None:
        """Take up to ``steps`` drawn steps, as far as the text reaches."""
        rng, target = np.random.default_rng(seed), self.target
        for number in range(steps):
            kind, room = kinds[int(rng.integers(len(kinds)))], target.length - self.at
            if not room and kind not in ("rewind", "restore", "draft"):
                if "rewind" not in kinds:
                    break
                kind = "rewind"
            if kind == "prefill":
                self.take((kind, min(_size(rng, target.chunk), room)))
            elif kind == "rewind":
                self.take((kind, min(_size(rng, target.length), self.at) if rng.integers(8) else 0))
            elif kind == "draft":
                self.take((kind, DEPTHS[int(rng.integers(len(DEPTHS)))]))
            elif kind == "restore":
                self.take((kind, 0))
            else:
                most = target.info.max_rows
                rows = min(_size(rng, most) if rng.integers(3) else most, self.capacity - self.at)
                count = min(int(rng.integers(0, rows + 1)) if number % 2 else rows, room)
                self.take((kind, count), dropped=rows - count)
        self._expect_held()

    def take(self, *steps: tuple[str, int], dropped: int = 0) -> Play:
        """Take these steps; a pass has so many more rows, which are not committed."""
        for kind, count in steps:
            self.taken.append(f"{kind}({count}{f' of {count + dropped} rows' if dropped else ''})")
            try:
                self._step(kind, count, dropped)
            except Exception as error:
                raise Broken.by(error, {"steps": self.taken[-12:], "at": self.at, "needs": self.needs}) from error
        return self

    def _step(self, kind: str, count: int, dropped: int) -> None:
        if kind == "prefill":
            output = self._call(self.model.prefill, self.target.text[self.at : self.at + count])
            expect(output.logits is None, "prefill gives logits", got=output.logits)
            self._compare(output, count)
            self.at += count
        elif kind == "rewind":
            self._rewind(count)
        elif kind == "restore":
            self._restore()
            self.target.expect_next(self.state, DIFFERS)
        elif kind == "draft":
            self._draft(count)
        elif count + dropped:
            self._pass(kind, count, dropped)
        expect_equal(self.state.length, self.at, "the state has the wrong length")
        if self.needs.mtp:
            self.target.pairs(self.state)

    def _call(self, call: Callable[[State, list[int]], ForwardOutput], tokens: list[int]) -> ForwardOutput:
        """Call with a list of its own, which belongs to the caller again afterwards."""
        own = list(tokens)
        output = call(self.state, own)
        expect_equal(own, tokens, "the list of tokens was changed")
        own[:] = [0] * len(own)
        return output

    def _pass(self, kind: str, count: int, dropped: int) -> None:
        junk, rows = self.target.junk, count + dropped
        if kind == "twice":
            self.model.decode(self.state, junk[-rows:])
        tokens = self.target.text[self.at : self.at + count] + junk[self.at : self.at + dropped]
        output = self._call(self.model.decode, tokens)
        if kind == "beside":
            if self.other is None or self.other.length + rows > self.other.capacity:
                self.other = self.target.state(self.capacity, self.needs)
            self.model.decode(self.other, junk[-rows:])
            self.model.commit(self.other, (rows + 1) // 2)
        logits = output.need_logits()
        expect_equal(len(logits), rows, "decode does not give a row of logits per token")
        self.target.expect_plain(logits.rows()[:count], self.at, DIFFERS, exact=self.exact)
        self._compare(output, rows, committed=count)
        self.model.commit(self.state, count)
        self.at += count

    def _compare(self, output: ForwardOutput, rows: int, *, committed: int | None = None) -> None:
        """Compare what a pass gives with what the state was made for, and its hidden states with plain decoding."""
        needs, committed = self.needs, rows if committed is None else committed
        expect_equal(output.rows, rows, "a pass reports the wrong number of rows")
        expect_equal(output.hidden is not None, needs.final_hidden, "the final hidden state breaks needs")
        expect_equal(tuple(output.boundaries), needs.boundaries, "boundaries break needs")
        expect_equal(self.state.pairs is not None, needs.mtp, "the ledger of MTP pairs breaks needs")
        for name, hidden in hidden_by_name(output).items():
            lengths = [*map(len, (hidden, hidden[-1:], hidden[:0], hidden[:1].join([hidden, hidden[1:]])))]
            what = f"{name} or a part of it has the wrong number of rows"
            expect_equal(lengths, [rows, 1, 0, 2 * rows], what)
            self._expect_hidden(hidden[:committed], name, self.at, "hidden states differ")
        if needs.hidden:
            self.held.append((output, self.at, committed))

    def _expect_hidden(self, hidden: Hidden, name: str, first: int, what: str) -> None:
        values = hidden.rows()
        expect_equal(values.shape, (len(hidden), self.target.info.hidden_size), f"{name} has the wrong shape")
        self.target.expect_plain(values, first, f"{name}: {what}", name=name, exact=self.exact)

    def _expect_held(self) -> None:
        """Read again, joined, what passes of long ago handed over: slicing may copy, so it comes last."""
        for name in hidden_by_name(self.held[0][0]) if self.held else ():
            parts = [hidden_by_name(output)[name][:rows] for output, _, rows in self.held]
            joined, at = parts[0].join(parts[1:]), 0
            for _, first, rows in self.held:
                self._expect_hidden(joined[at : at + rows], name, first, "hidden states changed while they were held")
                at += rows

    def _draft(self, depth: int) -> None:
        """Draft after the committed tokens, as a fresh state does in single steps."""
        depth, target = min(depth, self.capacity - self.at - 1), self.target
        if not self.needs.mtp or self.at in (0, self.drafted) or depth < 1:  # a draft begins with a new pair
            return
        self.drafted, self.turns = self.at, self.turns + 1
        pending, fresh = target.text[self.at], target.prefilled(self.at, self.capacity, MTP)
        expected, truths = target.draft(fresh, pending, depth)
        if self.turns % 3:
            drafted, got = self.model.draft_mtp(self.state, pending, depth), truths
        else:
            drafted, got = target.draft(self.state, pending, depth)
        expect_equal(drafted, expected, "a draft has other tokens than that of a fresh state", depth=depth)
        exact = self.at <= target.info.max_rows or not target.chunks_differ
        for logits, truth in zip(got, truths, strict=True):
            target.expect_close(logits, truth, "a draft has other logits than that of a fresh state", exact=exact)
        expect_equal(target.pairs(self.state).fed, self.at, "a draft does not feed all waiting pairs")

    def _rewind(self, count: int) -> None:
        length = self.at - count
        reached = self.model.rewind(self.state, length)
        expect(0 <= reached <= length, "rewind reached an invalid length", got=reached, expected=f"0 to {length}")
        expect_equal(self.state.length, reached, "the state's length is not what rewind returned")
        self.at = length
        self.target.prefill(self.state, length)
        self.target.expect_next(self.state, DIFFERS)

    def _restore(self) -> None:
        if self.state.length + 1 < self.state.capacity:  # these rows are never committed
            self.model.decode(self.state, self.target.junk[:1])
        taken = self.model.snapshot(self.state)
        for name, value in taken.meta.items():
            plain = type(name) is str and type(value) is int
            expect(plain, "a snapshot's metadata is not a plain int under a name", got={name: value})
        lengths, what = (self.at, self.capacity), "a snapshot has another length or capacity than its state"
        expect_equal((taken.length, taken.capacity), lengths, what)
        self._go_elsewhere(self.state)
        if self.turns % 2:
            host = {name: torch.as_tensor(self.model.to_host(one)).clone() for name, one in taken.arrays.items()}
            arrays = {name: self.model.from_host(array) for name, array in host.items()}
            taken = attrs.evolve(taken, arrays=arrays)
        copy, self.state = (self.model.restore(taken, self.needs) for _ in range(2))
        for state in (copy, self.state):
            expect_equal(state.capacity, self.capacity, "the restored state has the wrong capacity")
            expect_equal(state.needs, self.needs, "the restored state is made for other needs")
        self._go_elsewhere(copy)

    def _go_elsewhere(self, state: State) -> None:
        """Rewind, continue with other text; copies must not change."""
        self.turns += 1
        self.model.rewind(state, max(state.length - _BACK[self.turns % len(_BACK)], 0))
        rows = self.target.junk[: min(3, self.target.info.max_rows, state.capacity - state.length)]
        if rows:
            self.model.decode(state, rows)
            self.model.commit(state, len(rows))


def _size(rng: np.random.Generator, most: int) -> int:
    """1 to ``most``, on a log scale."""
    return min(int(np.exp(rng.uniform(0, np.log(most + 1)))), most)
