"""Checks of depth policies: clauses P1 to P8 and P10.

One driver runs policies as the engine does, over records of every kind, and compares those that see the same records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import hypothesis.strategies as st
import numpy as np

from specdec.contract import CycleRecord, DepthPolicy, Stats
from specdec.testing.checks import Faults, Run, check, checks_of, expect, own_generators
from specdec.testing.memory import growth
from specdec.testing.strategies import lengths, seeds
from specdec.testing.subjects import DepthPolicySubject

LIMIT = 1024  # far above the rows of any pass: larger depths are mistakes that the engine's cap hides
LONG = 1000  # cycles of a long sequence; four times as many of one kind
TRIAL = 10  # cycles in a row that need no reason
BYTES = 4  # per cycle, that a policy may keep
ROWS = (2, 8, 16, 16, 33, 128)  # that a pass may have
_KINDS = ("mixed", "mixed", "mixed", "all accepted", "all accepted", "none accepted", "nothing drafted")


@attrs.frozen
class Step:
    """One cycle: the depth, if the engine caps it, its outcome, and its seconds for draft, verification and commit."""

    depth: int | None
    offered: int
    accepted: int
    position: int
    seconds: tuple[float, float, float]


class PolicyRun:
    """A policy and its sequence's counters."""

    def __init__(self, policy: DepthPolicy, rows: int) -> None:
        self.policy, self.rows, self.stats, self.cycles = policy, rows, Stats(), 0

    def depth(self) -> int:
        """What the policy says."""
        return self.policy.next_depth(self.stats)

    def record(self, step: Step, depth: int) -> None:
        """Count a cycle as the engine does and report it to the policy."""
        depth = min(depth if step.depth is None else step.depth, self.rows - 1)
        offered = min(step.offered, depth)
        accepted = min(step.accepted, offered)
        tokens = [(self.cycles * 2_654_435_761 + at * 40_503 >> 7) % 50 for at in range(offered + 1)]
        position = step.position + self.cycles
        emitted, drafted = tuple(tokens[: accepted + 1]), tuple(tokens[:offered])
        self.cycles += 1
        self.stats.cycles += 1
        self.stats.tokens += len(emitted)
        self.stats.count(offered, accepted)
        self.policy.record(CycleRecord(position, depth, offered, accepted, emitted, *step.seconds, drafted))


def _steps(seed: int, count: int, rows: int, kind: str = "mixed") -> list[Step]:
    """Steps of one kind; mixed ones come in stretches of all lengths, capped or not, anywhere in a text."""
    rng = np.random.default_rng([seed, 1])
    if kind != "mixed":
        accepted, offered = rows * (kind == "all accepted"), rows * (kind != "nothing drafted")
        return [Step(None, offered, accepted, 10, (0.001, float(rng.choice([0.0, 0.005])), 0.0))] * (4 * count)
    steps: list[Step] = []
    while len(steps) < count:
        position = int(2 ** rng.uniform(0, 12))  # a stretch may begin after a rewind
        outcome, capped = int(rng.integers(5)), rng.random() < 0.25
        for _ in range(int(2 ** rng.uniform(0, 8))):
            offered = 0 if outcome == 4 else rows if outcome < 3 else int(rng.integers(rows + 1))
            accepted = (rows, 0, int(rng.integers(3)), int(rng.integers(rows + 1)), 0)[outcome]
            depth = int(rng.integers(rows + 1)) if capped else None
            draft, verify, commit = rng.choice([0.0, 0.001, 0.03], 3).tolist()
            steps.append(Step(depth, offered, accepted, position, (draft, verify, commit)))
    return steps[:count]


def _counters(stats: Stats) -> tuple[object, ...]:
    return stats.cycles, stats.tokens, *stats.offered, *stats.reached, *stats.accepted


def _alone(policy: DepthPolicy, steps: Sequence[Step], rows: int, faults: Faults) -> list[int]:
    """The depths of a policy that is asked once a cycle, with a look at each answer."""
    run, depths, zero, drafting = PolicyRun(policy, rows), [], 0, 0
    for number, step in enumerate(steps):
        before = _counters(run.stats)
        depth: Any = run.depth()
        faults.note("P1", type(depth) is int, "the depth is not a plain int", got=f"{depth!r}, {type(depth).__name__}")
        faults.note("P1", depth >= 0, "the depth is negative", got=depth)
        faults.note("P4", depth <= LIMIT, "the depth grows without bound", got=depth, expected=f"at most {LIMIT}")
        zero, drafting = (zero + 1, 0) if depth == 0 else (0, drafting + 1)
        reason: Any = policy.reason
        faults.note("P5", _counters(run.stats) == before, "the stats were changed", cycle=number)
        faults.note("P8", isinstance(reason, str), "the reason is not a string", got=reason, cycle=number)
        what = f"there is a reason although drafts were asked for in the last {drafting} cycles"
        faults.note("P8", drafting < TRIAL or not reason, what, got=reason, expected="", cycle=number)
        what = f"the depth was 0 in the last {zero} cycles, without a reason"
        faults.note("P8", zero < TRIAL or reason, what, got=reason, cycle=number)
        depths.append(depth)
        if "P1" in faults:
            break
        run.record(step, depth)
    return depths


def _policies(subject: DepthPolicySubject, length: int, seed: int, rows: int, kind: str) -> Faults:
    """Drive policies over the same records: alone, asked twice, beside another sequence, and after them."""
    faults, steps = Faults(), _steps(seed, length, rows, kind)

    def make(shared: Any) -> DepthPolicy:
        return subject.make() if subject.shared is None else subject.make(shared)

    def new() -> Any:
        return None if subject.shared is None else subject.shared()

    with faults.of("P6"), own_generators(1):
        expected = _alone(make(new()), steps, rows, faults)
    if "P1" in faults:
        return faults
    shared, often = new(), PolicyRun(make(new()), rows)
    first, second = PolicyRun(make(shared), rows), PolicyRun(make(shared), rows)
    with faults.of("P6"), own_generators(2):
        for number, (step, depth) in enumerate(zip(steps, expected, strict=True)):
            got = first.depth()
            first.record(step, got)
            second.record(steps[-number - 1], second.depth())
            what = "another sequence, or a global generator, changed the depth"
            faults.note("P6", got == depth, what, got=got, expected=depth, cycle=number)
            answers = [often.depth(), (often.policy.reason, often.depth())[1], often.depth()]
            often.record(step, depth)
            what = "asked more often, it chooses another depth"
            faults.note("P7", answers == [depth] * 3, what, got=answers, expected=depth, cycle=number)
    unasked = PolicyRun(make(new()), rows)
    for step in steps[:100]:
        unasked.record(step, 3)
    unasked.depth()
    what = "an earlier sequence changed the depths"
    faults.note_equal("P6", _alone(make(new()), steps, rows, Faults()), expected, what)
    return faults


def _drive(subject: DepthPolicySubject, run: Run, clause: str) -> None:
    drawn: dict[str, Any] = {"rows": st.sampled_from(ROWS), "kind": st.sampled_from(_KINDS)}
    run.drive(subject, clause, _policies, examples=16, length=lengths(LONG), seed=seeds, **drawn)


checks_of(
    _drive,
    {
        "P1": "``next_depth`` returns a plain int of 0 or more.",
        "P2": "The first depth is chosen from fresh Stats, before any record.",
        "P3": "Records of any kind and number are accepted in any order: unasked, capped, of zero seconds, anywhere.",
        "P4": "Depths stay bounded, however many drafts are accepted.",
        "P5": "Stats belong to the engine: a policy reads them but does not change them.",
        "P6": "A policy decides from the records of its own sequence: the same records give the same depths, and no "
        "global random generator is read or moved.",
        "P7": "Asking changes nothing: the depths are the same however often ``next_depth`` and ``reason`` are asked.",
        "P8": "``reason`` is text: empty while drafts are asked for, and why when the depth stays 0.",
    },
)


@check("P10")
def bounded_memory(subject: DepthPolicySubject, run: Run) -> None:
    """What a policy keeps does not grow with the number of cycles."""
    steps, sequence = _steps(run.seed % 2**32, 2000, 16), PolicyRun(subject.make(), 16)
    grown = growth(lambda number: sequence.record(steps[number % len(steps)], sequence.depth()), len(steps))
    expect(grown <= BYTES, "memory grows with every cycle", got=f"{grown:.0f} bytes a cycle after {len(steps)}")
