"""Checks of depth policies: clauses P1 to P10.

Most compare two policies that see the same records: one in a usual way, one that is asked more often, under another
clock, or while other sequences run.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import hypothesis.strategies as st
import numpy as np

from specdec.contract import CycleRecord, DepthPolicy, Stats
from specdec.testing.checks import Run, check, expect, expect_equal
from specdec.testing.memory import growth
from specdec.testing.strategies import Call, block, calls, log_uniform
from specdec.testing.subjects import DepthPolicySubject
from specdec.testing.surroundings import generator_states, other_hashes, seeded_generators, strange_clock

LIMIT = 1024  # far above the rows of any pass: larger depths are mistakes that the engine's cap hides
LONG = 1500  # cycles of a long sequence
ENDLESS = 8000  # cycles of one kind, one after the other
TRIAL = 10  # cycles in a row that need no reason
ROWS = 16  # the engine's cap in these sequences
BYTES = 4  # per cycle, that a policy may keep


class _Sequence:
    """A policy and its sequence's counters."""

    def __init__(self, policy: DepthPolicy) -> None:
        self.policy, self.stats, self.cycles = policy, Stats(), 0

    def depth(self) -> int:
        return self.policy.next_depth(self.stats)

    def count(self, depth: int, offered: int, accepted: int, milliseconds: int, position: int = 10) -> CycleRecord:
        """Count a cycle; the caller hands its record to the policy."""
        offered, accepted = min(offered, depth), min(accepted, offered, depth)
        seconds = milliseconds / 1000
        on_device = milliseconds == 1
        record = CycleRecord(
            position=position + self.cycles,
            depth=depth,
            offered=offered,
            accepted=accepted,
            emitted=block(self.cycles, accepted + 1),
            draft_seconds=0.0 if on_device else seconds * offered,
            verify_seconds=seconds,
            commit_seconds=0.0,
            on_device=on_device,
            drafted=block(self.cycles, offered),
        )
        self.cycles += 1
        self.stats.cycles += 1
        self.stats.tokens += len(record.emitted)
        self.stats.count(record.offered, record.accepted)
        return record

    def cycle(self, step: Call, asked: int = 1) -> list[int]:
        """One step; gives the depths that the policy said. The engine asks once, caps the depth, and reports."""
        depths = []
        depth, *others = step.numbers
        if step.name != "record_only":
            depths = [self.depth() for _ in range(asked)]
            if step.name == "cycle":
                with contextlib.suppress(TypeError):  # what is no number is for another clause
                    depth = int(depths[-1])
        if step.name != "ask_only":
            self.policy.record(self.count(max(0, min(depth, ROWS)), *others))
        return depths

    def run(self, steps: Iterable[Call]) -> list[int]:
        """The depths of all steps, and the one after them."""
        return [*(depth for step in steps for depth in self.cycle(step)), self.depth()]


_numbers = (st.integers(0, 16), st.integers(0, 16), st.integers(0, 16), st.integers(0, 50), log_uniform(1, 10**6))
_steps = calls(max_size=12, cycle=_numbers, capped=_numbers, record_only=_numbers, ask_only=_numbers)


def _long(seed: int, count: int) -> list[Call]:
    """Steps in stretches in which everything is accepted, or nothing, or some; the stretches have all lengths."""
    rng = np.random.default_rng([seed, 1])
    steps: list[Call] = []
    position = int(2 ** rng.uniform(0, 12))
    while len(steps) < count:
        kind, name = int(rng.integers(5)), str(rng.choice(["cycle", "cycle", "cycle", "capped"]))
        for _ in range(int(2 ** rng.uniform(0, 8))):
            offered = 0 if kind == 4 else ROWS if kind < 3 else int(rng.integers(ROWS + 1))
            accepted = (ROWS, 0, int(rng.integers(3)), int(rng.integers(ROWS + 1)), 0)[kind]
            depth = int(rng.integers(ROWS + 1))
            steps.append(Call(name, (depth, offered, accepted, int(rng.integers(0, 30)), position)))
    return steps[:count]


def _runs(run: Run, usual: int = 3) -> Iterator[list[Call]]:
    """Long sequences of steps; the first ones are the longest."""
    for number in run.repeat(usual):
        yield _long(run.seed % 2**32 * 1000 + number, LONG if number < 2 else int(40 * 2 ** (number % 5)))


@check("P1")
def a_number(subject: DepthPolicySubject, run: Run) -> None:
    """``next_depth`` returns a plain int of 0 or more."""

    def look(depths: list[int]) -> None:
        for depth in depths:
            expect(type(depth) is int, "the depth is not a plain int", got=f"{depth!r} of type {type(depth).__name__}")
            expect(depth >= 0, "the depth is negative", got=depth)

    def body(steps: Sequence[Call]) -> None:
        look(_Sequence(subject.make()).run(steps))

    run.explore(body, examples=40, steps=_steps)
    for steps in _runs(run):
        run.halve(body, steps)


@check("P2")
def works_from_nothing(subject: DepthPolicySubject, run: Run) -> None:
    """The first depth is chosen from fresh Stats, before any record."""
    subject.make().next_depth(Stats())


def _unusual(record: CycleRecord) -> Iterator[CycleRecord]:
    """The record with any of its seconds 0, and one of a device's cycle that began after the end."""
    names = "draft_seconds", "verify_seconds", "commit_seconds"
    record = attrs.evolve(record, commit_seconds=0.001)
    for count in range(1, len(names) + 1):
        for zero in itertools.combinations(names, count):
            none: dict[str, Any] = dict.fromkeys(zero, 0.0)
            yield attrs.evolve(record, **none)
    yield attrs.evolve(record, accepted=0, emitted=(), commit_seconds=0.0, draft_seconds=0.0, on_device=True)
    yield attrs.evolve(record, offered=0, accepted=0, emitted=(), drafted=(), on_device=True)
    yield attrs.evolve(record, draft_seconds=0.0, verify_seconds=0.0, commit_seconds=0.0, on_device=True)


@check("P3")
def any_record(subject: DepthPolicySubject, run: Run) -> None:
    """Records of any kind and number are accepted in any order: unasked, of zero seconds, from a device, anywhere."""

    def body(steps: list[Call]) -> None:
        sequence = _Sequence(subject.make())
        for step in steps:
            sequence.policy.record(sequence.count(*step.numbers))
        sequence.depth()

    def endless(cycles: Sequence[int], offered: bool, accepted: bool) -> None:
        sequence = _Sequence(subject.make())
        for _ in cycles:
            depth = max(0, min(int(sequence.depth()), ROWS))
            sequence.policy.record(sequence.count(depth, depth * offered, depth * accepted, 5))

    def unusual(records: Sequence[CycleRecord]) -> None:
        sequence = _Sequence(subject.make())
        for record in records:
            sequence.policy.record(record)
            sequence.depth()

    run.halve(unusual, list(_unusual(_Sequence(subject.make()).count(3, 3, 2, 5))))
    run.explore(body, examples=60, steps=_steps)
    for offered, accepted in ((True, True), (True, False), (False, False)):
        how = partial(endless, offered=offered, accepted=accepted)
        run.halve(how, range(run.count(ENDLESS)), offered=offered, accepted=accepted)


@check("P4")
def bounded(subject: DepthPolicySubject, run: Run) -> None:
    """Depths stay bounded, however many drafts are accepted."""
    for milliseconds in (0, 1, 5):

        def body(cycles: Sequence[int], milliseconds: int = milliseconds) -> None:
            sequence = _Sequence(subject.make())
            for _ in cycles:
                depth = sequence.depth()
                expect(depth <= LIMIT, "the depth grows without bound", got=depth, expected=f"at most {LIMIT}")
                sequence.policy.record(sequence.count(depth, depth, depth, milliseconds))

        run.halve(body, range(run.count(LONG)), milliseconds=milliseconds)


@check("P5")
def stats_are_the_engines(subject: DepthPolicySubject, run: Run) -> None:
    """Stats belong to the engine: a policy reads them but does not change them."""

    def look(steps: Sequence[Call]) -> None:
        sequence = _Sequence(subject.make())
        for step in steps:
            record = sequence.count(*step.numbers)
            before = copy.deepcopy(sequence.stats)
            sequence.depth()
            _ = sequence.policy.reason
            sequence.policy.record(record)
            expect_equal(sequence.stats, before, "the stats were changed")

    run.explore(look, examples=25, steps=_steps)
    for steps in _runs(run, 2):
        run.halve(look, steps[:400])


@check("P6", early=True)
def own_sequence_only(subject: DepthPolicySubject, run: Run) -> None:
    """A policy decides from the records of its own sequence: the same records give the same depths."""

    def make(shared: Any) -> _Sequence:
        return _Sequence(subject.make() if subject.shared is None else subject.make(shared))

    def new() -> Any:
        return None if subject.shared is None else subject.shared()

    def look(steps: Sequence[Call], other: Sequence[Call]) -> None:
        alone = make(new()).run(steps)
        shared = new()
        first, second = make(shared), make(shared)
        depths = []
        for number, step in enumerate(steps):
            if other:
                second.cycle(other[number % len(other)])
            depths += first.cycle(step)
        second.run(other)
        expect_equal([*depths, first.depth()], alone, "another sequence changed the depths")
        expect_equal(make(new()).run(steps), alone, "an earlier sequence changed the depths")

    other = _long(run.seed % 2**32 + 7, 300)
    for steps in _runs(run, 2):
        run.halve(partial(look, other=other), steps[:600])
    run.explore(look, examples=25, steps=_steps, other=_steps)


def _twins(subject: DepthPolicySubject, steps: Sequence[Call], asked: int) -> None:
    """Raises: Broken if a policy that is asked ``asked`` times chooses other depths than one that is asked once."""
    once, often = _Sequence(subject.make()), _Sequence(subject.make())
    for number, step in enumerate(steps):
        said = often.cycle(step, asked)
        expect(len(set(map(repr, said))) <= 1, "asked again, it chooses another depth", got=said, cycle=number)
        _ = often.policy.reason, often.policy.reason
        expect_equal(said[:1], once.cycle(step), "asked more often, it chooses another depth", cycle=number)


@check("P7")
def asking_changes_nothing(subject: DepthPolicySubject, run: Run) -> None:
    """Asking changes nothing: the depths are the same however often ``next_depth`` and ``reason`` are asked."""
    for number, steps in enumerate(_runs(run)):
        run.halve(partial(_twins, subject, asked=2 + number), steps)


@check("P8")
def reasons(subject: DepthPolicySubject, run: Run) -> None:
    """``reason`` is text: empty while drafts are asked for, and why when the depth stays 0."""

    def look(steps: Sequence[Call]) -> None:
        sequence, zero, drafting = _Sequence(subject.make()), 0, 0
        for number, step in enumerate(steps):
            depth = (sequence.cycle(step) or [sequence.depth()])[-1]
            zero, drafting = (zero + 1, 0) if depth == 0 else (0, drafting + 1)
            if sequence.depth() != depth:
                continue
            reason: object = sequence.policy.reason
            expect(isinstance(reason, str), "the reason is not a string", got=reason, cycle=number)
            if drafting >= TRIAL:
                what = f"there is a reason although drafts were asked for in the last {drafting} cycles"
                expect(not reason, what, got=reason, expected="", cycle=number)
            if zero >= TRIAL:
                expect(reason, f"the depth was 0 in the last {zero} cycles, without a reason", got=reason, cycle=number)

    for steps in _runs(run):
        run.halve(look, steps)


@check("P9")
def records_alone(subject: DepthPolicySubject, run: Run) -> None:
    """A policy reads no clock, random generator or hash of text, moves no generator, and prints nothing."""

    def look(steps: Sequence[Call]) -> None:
        expected: list[int] | None = None
        for seed, seconds in ((1, 1e-9), (2, 10.0), (3, 0.3)):
            printed = io.StringIO()
            with (
                seeded_generators(seed),
                other_hashes(seed),
                strange_clock(seconds) as slept,
                contextlib.redirect_stdout(printed),
            ):
                sequence, before = _Sequence(subject.make()), generator_states()
                depths = sequence.run(steps)
                expect(generator_states() == before, "a global generator was advanced")
            expect(not slept, "it sleeps", got=slept)
            expect(not printed.getvalue(), "something was printed", got=printed.getvalue())
            expected = depths if expected is None else expected
            expect_equal(depths, expected, "the same records gave other depths under another clock, generator and hash")

    for steps in _runs(run, 2):
        run.halve(look, steps)


@check("P10")
def bounded_memory(subject: DepthPolicySubject, run: Run) -> None:
    """What a policy keeps does not grow with the number of cycles."""
    steps = _long(run.seed % 2**32, 2000)
    sequence = _Sequence(subject.make())
    grown = growth(lambda number: sequence.cycle(steps[number % len(steps)]), len(steps))
    expect(grown <= BYTES, "memory grows with every cycle", got=f"{grown:.0f} bytes a cycle after {len(steps)}")
