"""Checks of depth policies: clauses P1 to P8 and P10.

One driver runs a policy as the engine does; most checks compare two policies that see the same records.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import attrs
import hypothesis.strategies as st
import numpy as np

from specdec.contract import CycleRecord, DepthPolicy, Stats
from specdec.testing.checks import Run, check, expect, expect_equal, own_generators
from specdec.testing.memory import growth
from specdec.testing.strategies import lengths, seeds
from specdec.testing.subjects import DepthPolicySubject

LIMIT = 1024  # far above the rows of any pass: larger depths are mistakes that the engine's cap hides
LONG = 1500  # cycles of a long sequence
ENDLESS = 6000  # cycles of one kind, one after the other
TRIAL = 10  # cycles in a row that need no reason
ROWS = 16  # the engine's cap in these sequences
BYTES = 4  # per cycle, that a policy may keep


@attrs.frozen
class Step:
    """One cycle: the depth, if the engine caps it, and its outcome."""

    depth: int | None
    offered: int
    accepted: int
    milliseconds: int
    position: int


class PolicyRun:
    """A policy and its sequence's counters."""

    def __init__(self, policy: DepthPolicy) -> None:
        self.policy, self.stats, self.cycles = policy, Stats(), 0

    def count(self, step: Step, depth: int) -> CycleRecord:
        """Count a cycle; the caller hands its record to the policy."""
        offered = min(step.offered, depth)
        accepted, seconds = min(step.accepted, offered), step.milliseconds / 1000
        rng = (self.cycles * 2_654_435_761 + at * 40_503 >> 7 for at in itertools.count())
        tokens = [next(rng) % 50 for _ in range(offered + 1)]
        record = CycleRecord(
            position=step.position + self.cycles,
            depth=depth,
            offered=offered,
            accepted=accepted,
            emitted=tuple(tokens[: accepted + 1]),
            draft_seconds=seconds * offered,
            verify_seconds=seconds,
            commit_seconds=0.0,
            drafted=tuple(tokens[:offered]),
        )
        self.cycles += 1
        self.stats.cycles += 1
        self.stats.tokens += len(record.emitted)
        self.stats.count(record.offered, record.accepted)
        return record

    def cycle(self, step: Step) -> int:
        """The engine asks once, caps the depth, and reports. Returns what the policy said."""
        depth = self.policy.next_depth(self.stats)
        expect(type(depth) is int, "the depth is not a plain int", got=f"{depth!r} of type {type(depth).__name__}")
        expect(depth >= 0, "the depth is negative", got=depth)
        self.policy.record(self.count(step, min(depth if step.depth is None else step.depth, ROWS)))
        return depth

    def run(self, steps: Sequence[Step]) -> list[int]:
        """The depths of all steps, and the one after them."""
        return [*map(self.cycle, steps), self.policy.next_depth(self.stats)]


def _steps(seed: int, count: int) -> list[Step]:
    """Steps in stretches in which everything is accepted, or nothing, or some; the stretches have all lengths."""
    rng = np.random.default_rng([seed, 1])
    steps: list[Step] = []
    while len(steps) < count:
        position = int(2 ** rng.uniform(0, 12))  # a stretch may begin after a rewind
        kind, capped = int(rng.integers(5)), rng.random() < 0.25
        for _ in range(int(2 ** rng.uniform(0, 8))):
            offered = 0 if kind == 4 else ROWS if kind < 3 else int(rng.integers(ROWS + 1))
            accepted = (ROWS, 0, int(rng.integers(3)), int(rng.integers(ROWS + 1)), 0)[kind]
            depth = int(rng.integers(ROWS + 1)) if capped else None
            steps.append(Step(depth, offered, accepted, int(rng.integers(0, 30)), position))
    return steps[:count]


def _drawn(run: Run, body: Any, most: int = LONG, examples: int = 12) -> None:
    """Call ``body`` with drawn steps, which shrink by their number."""
    run.explore(lambda length, seed: body(_steps(seed, length)), examples=examples, length=lengths(most), seed=seeds)


@check("P1")
def a_number(subject: DepthPolicySubject, run: Run) -> None:
    """``next_depth`` returns a plain int of 0 or more."""
    _drawn(run, lambda steps: PolicyRun(subject.make()).run(steps))


@check("P2")
def works_from_nothing(subject: DepthPolicySubject, run: Run) -> None:
    """The first depth is chosen from fresh Stats, before any record."""
    subject.make().next_depth(Stats())


@check("P3")
def any_record(subject: DepthPolicySubject, run: Run) -> None:
    """Records of any kind and number are accepted in any order: unasked, capped, of zero seconds, anywhere."""
    names = ("draft_seconds", "verify_seconds", "commit_seconds")

    def unasked(steps: Sequence[Step]) -> None:
        sequence = PolicyRun(subject.make())
        for number, step in enumerate(steps):
            record = attrs.evolve(sequence.count(step, ROWS), commit_seconds=0.001)
            zero: dict[str, Any] = {name: 0.0 for bit, name in enumerate(names) if number >> bit & 1}
            sequence.policy.record(attrs.evolve(record, **zero))
        sequence.policy.next_depth(sequence.stats)

    def endless(length: int, offered: bool, accepted: bool) -> None:
        PolicyRun(subject.make()).run([Step(None, ROWS * offered, ROWS * accepted, 5, 10)] * length)

    _drawn(run, unasked, 100, 20)
    run.explore(endless, examples=6, length=lengths(ENDLESS), offered=st.booleans(), accepted=st.booleans())


@check("P4")
def bounded(subject: DepthPolicySubject, run: Run) -> None:
    """Depths stay bounded, however many drafts are accepted."""

    def body(length: int, milliseconds: int) -> None:
        sequence = PolicyRun(subject.make())
        for _ in range(length):
            depth = sequence.policy.next_depth(sequence.stats)
            expect(depth <= LIMIT, "the depth grows without bound", got=depth, expected=f"at most {LIMIT}")
            sequence.policy.record(sequence.count(Step(None, depth, depth, milliseconds, 10), depth))

    run.explore(body, examples=6, length=lengths(LONG), milliseconds=st.sampled_from((0, 1, 5)))


@check("P5")
def stats_are_the_engines(subject: DepthPolicySubject, run: Run) -> None:
    """Stats belong to the engine: a policy reads them but does not change them."""

    def body(steps: Sequence[Step]) -> None:
        sequence = PolicyRun(subject.make())
        for step in steps:
            record = sequence.count(step, 3 if step.depth is None else step.depth)
            before = copy.deepcopy(sequence.stats)
            sequence.policy.next_depth(sequence.stats)
            _ = sequence.policy.reason
            sequence.policy.record(record)
            expect_equal(sequence.stats, before, "the stats were changed")

    _drawn(run, body, 400, 6)


@check("P6", early=True)
def own_sequence_only(subject: DepthPolicySubject, run: Run) -> None:
    """A policy decides from the records of its own sequence: the same records give the same depths, and no global
    random generator is read or moved."""

    def sequence(shared: Any) -> PolicyRun:
        return PolicyRun(subject.make() if subject.shared is None else subject.make(shared))

    def new() -> Any:
        return None if subject.shared is None else subject.shared()

    def body(steps: Sequence[Step]) -> None:
        with own_generators(1):
            alone = sequence(new()).run(steps)
        shared = new()
        first, second = sequence(shared), sequence(shared)
        depths = []
        with own_generators(2):
            for number, step in enumerate(steps):
                second.cycle(steps[-number - 1])
                depths.append(first.cycle(step))
        depths.append(first.policy.next_depth(first.stats))
        expect_equal(depths, alone, "another sequence, or a global generator, changed the depths")
        expect_equal(sequence(new()).run(steps), alone, "an earlier sequence changed the depths")

    _drawn(run, body, 600, 8)


@check("P7")
def asking_changes_nothing(subject: DepthPolicySubject, run: Run) -> None:
    """Asking changes nothing: the depths are the same however often ``next_depth`` and ``reason`` are asked."""

    def body(steps: Sequence[Step]) -> None:
        once, often = PolicyRun(subject.make()), PolicyRun(subject.make())
        for number, step in enumerate(steps):
            asked = [often.policy.next_depth(often.stats) for _ in range(2)]
            _ = often.policy.reason, often.policy.reason
            said = once.cycle(step)
            expect_equal([*asked, often.cycle(step)], [said] * 3, "asked more often, it chooses another", cycle=number)

    _drawn(run, body, LONG, 8)


@check("P8")
def reasons(subject: DepthPolicySubject, run: Run) -> None:
    """``reason`` is text: empty while drafts are asked for, and why when the depth stays 0."""

    def body(steps: Sequence[Step]) -> None:
        sequence, zero, drafting = PolicyRun(subject.make()), 0, 0
        for number, step in enumerate(steps):
            depth = sequence.cycle(step)
            zero, drafting = (zero + 1, 0) if depth == 0 else (0, drafting + 1)
            if sequence.policy.next_depth(sequence.stats) != depth:
                continue
            reason: object = sequence.policy.reason
            expect(isinstance(reason, str), "the reason is not a string", got=reason, cycle=number)
            what = f"there is a reason although drafts were asked for in the last {drafting} cycles"
            expect(drafting < TRIAL or not reason, what, got=reason, expected="", cycle=number)
            what = f"the depth was 0 in the last {zero} cycles, without a reason"
            expect(zero < TRIAL or reason, what, got=reason, cycle=number)

    _drawn(run, body, LONG, 8)


@check("P10")
def bounded_memory(subject: DepthPolicySubject, run: Run) -> None:
    """What a policy keeps does not grow with the number of cycles."""
    steps = _steps(run.seed % 2**32, 2000)
    sequence = PolicyRun(subject.make())
    grown = growth(lambda number: sequence.cycle(steps[number % len(steps)]), len(steps))
    expect(grown <= BYTES, "memory grows with every cycle", got=f"{grown:.0f} bytes a cycle after {len(steps)}")
