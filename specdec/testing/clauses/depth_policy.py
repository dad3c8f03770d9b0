"""Checks of depth policies: clauses P1 to P6."""

from __future__ import annotations

import copy

import hypothesis.strategies as st

from specdec.contract import CycleRecord, DepthPolicy, Stats
from specdec.testing.checks import Run, check, expect, expect_equal
from specdec.testing.strategies import Call, calls
from specdec.testing.subjects import DepthPolicySubject

LIMIT = 1024  # far above the rows of any pass: larger depths are mistakes that the engine's cap hides


class _Sequence:
    """A policy and its sequence's counters."""

    def __init__(self, policy: DepthPolicy) -> None:
        self.policy, self.stats, self.cycles = policy, Stats(), 0

    def depth(self) -> int:
        return self.policy.next_depth(self.stats)

    def count(self, depth: int, offered: int, accepted: int, milliseconds: int) -> CycleRecord:
        """Count a cycle; the caller hands its record to the policy."""
        offered, accepted = min(offered, depth), min(accepted, offered, depth)
        seconds = milliseconds / 1000
        record = CycleRecord(
            position=10 + self.cycles,
            depth=depth,
            offered=offered,
            accepted=accepted,
            emitted=tuple(range(accepted + 1)),
            draft_seconds=seconds * offered,
            verify_seconds=seconds,
            commit_seconds=0.0,
        )
        self.cycles += 1
        self.stats.cycles += 1
        self.stats.tokens += len(record.emitted)
        self.stats.count(record.offered, record.accepted)
        return record

    def run(self, steps: list[Call]) -> list[int]:
        """Cycles as the engine runs them, and others: asked twice, recorded without being asked, capped depths."""
        depths = []
        for step in steps:
            depth, *others = step.numbers
            if step.name != "record_only":
                depths.append(self.depth())
                depth = depths[-1] if step.name == "cycle" and isinstance(depths[-1], int) else depth
            if step.name != "ask_only":
                self.policy.record(self.count(max(0, min(depth, 16)), *others))
        return [*depths, self.depth()]


_numbers = (st.integers(0, 16), st.integers(0, 16), st.integers(0, 16), st.integers(0, 50))
_steps = calls(max_size=12, cycle=_numbers, capped=_numbers, record_only=_numbers, ask_only=_numbers)


@check("P1")
def a_number(subject: DepthPolicySubject, run: Run) -> None:
    """``next_depth`` returns a plain int of 0 or more."""

    def body(steps: list[Call]) -> None:
        for depth in _Sequence(subject.make()).run(steps):
            expect(type(depth) is int, "the depth is not a plain int", got=f"{depth!r} of type {type(depth).__name__}")
            expect(depth >= 0, "the depth is negative", got=depth)

    run.explore(body, examples=60, steps=_steps)


@check("P2")
def works_from_nothing(subject: DepthPolicySubject, run: Run) -> None:
    """The first depth is chosen from fresh Stats, before any record."""
    subject.make().next_depth(Stats())


@check("P3")
def any_record(subject: DepthPolicySubject, run: Run) -> None:
    """Records of any kind are accepted in any order: unasked, capped, of zero seconds, with fewer tokens drafted."""

    def body(steps: list[Call]) -> None:
        sequence = _Sequence(subject.make())
        for step in steps:
            sequence.policy.record(sequence.count(*step.numbers))
        sequence.depth()

    run.explore(body, examples=60, steps=_steps)


@check("P4")
def bounded(subject: DepthPolicySubject, run: Run) -> None:
    """Depths stay bounded, however many drafts are accepted."""
    for milliseconds in (0, 1):
        sequence = _Sequence(subject.make())
        for cycle in range(run.count(300)):
            depth = sequence.depth()
            expect(depth <= LIMIT, "the depth grows without bound", got=depth, expected=f"at most {LIMIT}", cycle=cycle)
            sequence.policy.record(sequence.count(depth, depth, depth, milliseconds))


@check("P5")
def stats_are_the_engines(subject: DepthPolicySubject, run: Run) -> None:
    """Stats belong to the engine: a policy reads them but does not change them."""

    def body(steps: list[Call]) -> None:
        sequence = _Sequence(subject.make())
        for step in steps:
            record = sequence.count(*step.numbers)
            before = copy.deepcopy(sequence.stats)
            sequence.depth()
            sequence.policy.record(record)
            expect_equal(sequence.stats, before, "the stats were changed")

    run.explore(body, examples=25, steps=_steps)


@check("P6")
def own_sequence_only(subject: DepthPolicySubject, run: Run) -> None:
    """A policy decides from the records of its own sequence: the same records give the same depths."""

    def body(steps: list[Call], other: list[Call]) -> None:
        alone = _Sequence(subject.make()).run(steps)
        first, second = _Sequence(subject.make()), _Sequence(subject.make())
        second.run(other)
        expect_equal(first.run(steps), alone, "another sequence changed the depths")

    run.explore(body, examples=25, steps=_steps, other=_steps)
