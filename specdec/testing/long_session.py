"""A long sequence of calls to a target, compared at every position with plain decoding, and cut down when it fails.

The text is fixed, so a step only says how the tokens at its place are taken in; whichever way that is, the next logits
must be those of plain decoding.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from specdec.contract import NO_NEEDS, ForwardOutput, Logits, Needs, Snapshot, State, Stats
from specdec.decoding.session_file import SavedSession, read_session, restore_state, write_session
from specdec.testing.checks import Broken, Run, expect, expect_equal
from specdec.testing.target_under_test import TargetUnderTest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float32 = NDArray[np.float32]

LONGEST = 700  # tokens of a text
LEAST = 12  # steps of a session, however little time there is
_BACK = (1, 4, 1, 30, 2, 300)
"""Tokens that a state goes back before it goes on with another text."""
_HOST = 64_000_000  # logits of the reference that are kept on the host


@attrs.frozen
class Step:
    """How the next ``count`` tokens are taken in; ``more`` rows after them are dropped again.

    ``plain``: one row per pass. ``prefill``: one chunk. ``decode``: one pass. ``decode twice``: after another pass that
    is not committed. ``rewind``: ``count`` tokens back. ``restore``: no tokens; the copy of the state goes on.
    ``file``: likewise, by way of a session's file. ``other sequence``: like decode, and another sequence has a pass
    before the logits are read.
    """

    name: str
    count: int
    more: int = 0

    def __repr__(self) -> str:
        return f"{self.name}({self.count}{f' of {self.count + self.more} rows' if self.more else ''})"


class LongSession:
    """One text, its plain decoding, and ways to take it in."""

    def __init__(self, target: TargetUnderTest, run: Run, *, needs: Needs = NO_NEEDS, hostile: bool = False) -> None:
        self.target, self.run, self.needs, self.hostile = target, run, needs, hostile
        self.rng = np.random.default_rng(run.seed)
        info = target.info
        self.capacity = min(LONGEST + 64, info.max_positions)
        self.length = max(min(LONGEST, info.max_positions - 1, _HOST // info.vocab_size), 2)
        self.text = self._drawn(self.length + 1)
        self.junk = self._drawn(4 * self.length)
        self._plain: list[Float32] = []
        self._reference: State | None = None

    def _drawn(self, count: int) -> list[int]:
        """Tokens that come again soon, and every fourth one of the whole vocabulary, which comes again late."""
        rng, vocab = self.rng, self.target.info.vocab_size
        known = np.unique([0, vocab - 1, *self.target.tokens(range(20))])
        rare = np.unique(np.linspace(0, vocab - 1, min(vocab, 100)).astype(np.int64))
        common = rng.integers(0, 4, count) > 0
        drawn: list[int] = np.where(common, rng.choice(known, count), rng.choice(rare, count)).tolist()
        return drawn

    def plain(self, position: int) -> Float32:
        """The logits ``[V]`` after the token at ``position``, by plain decoding."""
        if self._reference is None:
            self._reference = self.target.state(self.capacity)
        while len(self._plain) <= position:
            output = self.target.model.decode(self._reference, [self.text[len(self._plain)]])
            self._plain.append(output.need_logits().rows()[0].copy())
            self.target.model.commit(self._reference, 1)
        return self._plain[position]

    # --- which steps -------------------------------------------------------------------------------------------------

    def steps(self, *names: str) -> list[Step]:
        """Steps of these kinds, of all sizes, to the end of the text."""
        made: list[Step] = []
        at, most, rng = 0, self.target.info.max_rows, self.rng
        chunk = most if self.target.chunks_differ else 300
        while at < self.length and len(made) < 500:
            name, room = names[rng.integers(len(names))], self.length - at
            if name == "prefill":
                step = Step(name, min(_size(rng, chunk), room))
            elif name == "rewind":
                step = Step(name, min(_size(rng, self.length), at) if rng.integers(8) else 0)
            elif name in ("restore", "file"):
                step = Step(name, 0)
            else:
                rows = min(_size(rng, most) if rng.integers(3) else most, self.capacity - at)
                kept = min(int(rng.integers(0, rows + 1)), room)
                step = Step(name, kept, rows - kept)
            made.append(step)
            at += -step.count if step.name == "rewind" else step.count
            if step.name == "rewind" and at < self.length // 2 and len(made) > 40:
                names = tuple(other for other in names if other != "rewind") or names  # it has to come to an end
        return made

    # --- taking them -------------------------------------------------------------------------------------------------

    def check(self, steps: Sequence[Step], what: str) -> None:
        """Raises: Broken with few steps if some logits are not those of plain decoding."""
        failing = self._failing(steps, what)
        if failing is None:
            return
        number, broken = failing
        least = list(steps[: number + 1])
        if self.run.shrink:
            least = self._shortest(least, what)
            found = self._failing(least, what)
            broken = broken if found is None else found[1]
        raise Broken.by(broken, {"steps": least, "first_tokens": self.text[:12]}) from broken

    def _shortest(self, steps: list[Step], what: str) -> list[Step]:
        """Steps that still fail, after some tries to do without others."""
        tries = 40
        while True:
            for one in _shorter(steps):
                tries -= 1
                if not tries:
                    return steps
                if self._failing(one, what) is not None:
                    steps = one
                    break
            else:
                return steps

    def _failing(self, steps: Sequence[Step], what: str) -> tuple[int, Broken] | None:
        """The number of the first step that fails, and how."""
        play = _Play(self, what)
        for number, step in enumerate(steps):
            if self.run.spent and number >= LEAST:
                return None
            try:
                play.take(step)
            except Exception as error:  # noqa: BLE001 - any exception is the target's failure
                return number, Broken.by(error, {})
        return None


def _size(rng: np.random.Generator, most: int) -> int:
    """1 to ``most``, on a log scale."""
    return min(int(np.exp(rng.uniform(0, np.log(most + 1)))), most)


def _shorter(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """The same place of the text by fewer kinds of calls: parts of the steps replaced by plain decoding."""
    width = len(steps) - 1
    while width:
        for first in range(0, len(steps) - 1, width):
            part = steps[first : min(first + width, len(steps) - 1)]
            before = _place(steps[:first])
            after = before + _place(part)
            if all(step.name == "plain" for step in part):
                continue
            if after >= before:
                yield _joined([*steps[:first], Step("plain", after - before), *steps[first + len(part) :]])
            elif all(step.name == "plain" for step in steps[:first]):  # a text that never was longer
                yield _joined([Step("plain", after), *steps[first + len(part) :]])
        width //= 2


def _place(steps: Sequence[Step]) -> int:
    return sum(-step.count if step.name == "rewind" else step.count for step in steps)


def _joined(steps: Sequence[Step]) -> list[Step]:
    """Neighbouring plain steps as one."""
    made: list[Step] = []
    for step in steps:
        if step.name == "plain" and made and made[-1].name == "plain":
            made[-1] = Step("plain", made[-1].count + step.count)
        elif step.name != "plain" or step.count:
            made.append(step)
    return made


class _Play:
    """One way through the text."""

    def __init__(self, session: LongSession, what: str) -> None:
        self.session, self.target, self.model, self.what = session, session.target, session.target.model, what
        self.state = session.target.state(session.capacity, session.needs)
        self.other: State | None = None
        self.at = self.turns = 0

    def take(self, step: Step) -> None:
        getattr(self, f"_{step.name.replace(' ', '_')}")(step)
        length = self.state.length
        expect(length == self.at, "the state has the wrong length", got=length, expected=self.at)

    def _tokens(self, count: int, more: int = 0) -> list[int]:
        return self.session.text[self.at : self.at + count] + self.session.junk[self.at : self.at + more]

    def _plain(self, step: Step) -> None:
        for token in self._tokens(step.count):
            output = self.model.decode(self.state, [token])
            self._compare(output.need_logits(), 1)
            self.model.commit(self.state, 1)
            self.at += 1

    def _given(self, call: Callable[[State, list[int]], ForwardOutput], tokens: list[int]) -> ForwardOutput:
        """Call with a list of its own, which belongs to the caller again afterwards."""
        given = list(tokens)
        output = call(self.state, given)
        expect_equal(given, tokens, "the list of tokens was changed")
        if self.session.hostile:
            given[:] = [0] * len(given)
        return output

    def _prefill(self, step: Step) -> None:
        output = self._given(self.model.prefill, self._tokens(step.count))
        self.at += step.count
        if self.session.hostile:
            _spoil_output(output)

    def _decode(self, step: Step, between: Callable[[], None] = lambda: None) -> None:
        rows = self._tokens(step.count, step.more)
        output = self._given(self.model.decode, rows)
        between()
        self._compare(output.need_logits(), step.count)
        if self.session.hostile:
            _spoil_output(output)
        self.model.commit(self.state, step.count)
        self.at += step.count

    def _decode_twice(self, step: Step) -> None:
        self.model.decode(self.state, self.session.junk[-step.count - step.more :])
        self._decode(step)

    def _other_sequence(self, step: Step) -> None:
        def between() -> None:
            if self.other is None or self.other.length + len(rows) > self.other.capacity:
                self.other = self.target.state(self.session.capacity, self.session.needs)
            self.model.decode(self.other, rows)
            self.model.commit(self.other, (len(rows) + 1) // 2)

        rows = self.session.junk[-step.count - step.more :]
        self._decode(step, between)

    def _rewind(self, step: Step) -> None:
        length = self.at - step.count
        reached = self.model.rewind(self.state, length)
        expect(0 <= reached <= length, "rewind reached an invalid length", got=reached, expected=f"0 to {length}")
        self.at = length
        most = self.target.info.max_rows if self.target.chunks_differ else length or 1
        for at in range(reached, length, most):
            self.model.prefill(self.state, self.session.text[at : min(at + most, length)])
        self._next()

    def _restore(self, step: Step) -> None:
        taken = self.model.snapshot(self.state)
        self._go_elsewhere(self.state)
        copy = self.model.restore(taken, self.session.needs)
        self.state = self.model.restore(taken, self.session.needs)
        self._go_elsewhere(copy)
        if self.session.hostile:
            for array in taken.arrays.values():
                spoil(array)
        self._next()

    def _go_elsewhere(self, state: State) -> None:
        """Let a state go back and on with another text, which is nothing to its copies."""
        self.turns += 1
        self.model.rewind(state, max(state.length - _BACK[self.turns % len(_BACK)], 0))
        rows = self.session.junk[: min(3, self.target.info.max_rows, state.capacity - state.length)]
        if rows:
            self.model.decode(state, rows)
            self.model.commit(state, len(rows))

    def _file(self, step: Step) -> None:
        self.state = through_file(self.target, self.state, self.session.text[: self.at + 1], self.session.needs)
        self._next()

    def _next(self) -> None:
        """The next row, which is dropped again."""
        if self.state.length < self.state.capacity:
            output = self.model.decode(self.state, self._tokens(1))
            self._compare(output.need_logits(), 1)
            self.model.commit(self.state, 0)

    def _compare(self, logits: Logits, count: int) -> None:
        rows = logits.rows() if count else None
        for row in range(count):
            assert rows is not None
            wanted = self.session.plain(self.at + row)
            self.target.expect_close(rows[row], wanted, self.what, position=self.at + row, row=row)


# --- hands that write ------------------------------------------------------------------------------------------------


def spoil(array: Any) -> None:
    """Overwrite an array of numpy or torch in host memory; others are left alone."""
    with contextlib.suppress(ValueError, RuntimeError, TypeError):
        if isinstance(array, np.ndarray):
            array[...] = 77
        elif hasattr(array, "fill_") and str(getattr(array, "device", "")) == "cpu":
            array.fill_(77)


def _spoil_output(output: ForwardOutput) -> None:
    for one in (output.logits, output.hidden, *output.boundaries.values()):
        if one is not None:
            spoil(one.rows())


# --- through a file --------------------------------------------------------------------------------------------------


def through_file(target: TargetUnderTest, state: State, tokens: Sequence[int], needs: Needs) -> State:
    """The state that a session's file gives back; ``tokens`` are the state's, and one more."""
    with tempfile.TemporaryDirectory() as folder:
        path, model = Path(folder) / "session", target.model
        taken = model.snapshot(state)
        expect_plain_snapshot(taken, state)
        write_session(path, SavedSession(tokens=tuple(tokens), cycle=0, stats=Stats(), snapshot=taken), model)
        return restore_state(read_session(path, model), model, state.capacity, needs, path)


def expect_plain_snapshot(taken: Snapshot, state: State) -> None:
    """Raises: Broken unless the metadata can be written to a file, and the lengths are those of the state."""
    for name, value in taken.meta.items():
        plain = type(name) is str and type(value) is int
        expect(plain, "a snapshot's metadata is not a plain int under a name", got={name: value})
    held = (taken.length, taken.capacity)
    expect_equal(held, (state.length, state.capacity), "a snapshot has another length or capacity than its state")
