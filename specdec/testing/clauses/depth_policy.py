"""Checks of depth policies: clauses P1 to P4 and P6 to P8.

One driver runs policies as the engine does, over records of every kind, and compares those that see the same records.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np

from specdec.contract import CycleRecord, DepthPolicy, Stats
from specdec.testing.checks import Faults, driven, own_generators
from specdec.testing.strategies import lengths, seeds
from specdec.testing.subjects import PluginSubject

LIMIT = 1024  # far above the rows of any pass: larger depths are mistakes that the engine's cap hides
LONG = 1000  # cycles of a long sequence; four times as many of one outcome
TRIAL = 10  # cycles in a row that need no reason
ROWS = (2, 8, 16, 16, 33, 128)  # that a pass may have
_OUTCOMES = (None, None, None, "all", "all", "none", "no draft")  # None: stretches of all outcomes

Step = tuple[int | None, int, int, int, list[float]]
"""One cycle: the depth if the engine caps it, drafted and accepted tokens, position, seconds by phase."""


def drawn_steps(seed: int, count: int, rows: int, outcome: str | None) -> list[Step]:
    """Stretches of all lengths, capped or not, anywhere in a text; or a long one of the same outcome."""
    rng = np.random.default_rng([seed, 1])
    steps: list[Step] = []
    while len(steps) < count:
        kind = outcome or str(rng.choice(["all", "none", "few", "any", "no draft"]))
        position, capped = int(2 ** rng.uniform(0, 12)), outcome is None and rng.random() < 0.25
        for _ in range(4 * count if outcome else int(2 ** rng.uniform(0, 8))):
            offered = {"no draft": 0, "any": int(rng.integers(rows + 1))}.get(kind, rows)
            accepted = {"all": rows, "few": int(rng.integers(3)), "any": int(rng.integers(rows + 1))}.get(kind, 0)
            cap = int(rng.integers(rows + 1)) if capped else None
            steps.append((cap, offered, accepted, position, rng.choice([0.0, 0.001, 0.03], 3).tolist()))
    return steps if outcome else steps[:count]


class PolicyRun:
    """A policy and its sequence's counters."""

    def __init__(self, policy: DepthPolicy, rows: int) -> None:
        self.policy, self.rows, self.stats = policy, rows, Stats()

    def depth(self) -> int:
        """What the policy says."""
        return self.policy.next_depth(self.stats)

    def record(self, step: Step, depth: int) -> CycleRecord:
        """Count a cycle as the engine does and report it to the policy; returns the record."""
        cap, offered, accepted, position, seconds = step
        depth = min(depth if cap is None else cap, self.rows - 1)
        offered = min(offered, depth)
        accepted = min(accepted, offered)
        tokens = tuple((self.stats.cycles * 2_654_435_761 + at * 40_503 >> 7) % 50 for at in range(offered + 1))
        position += self.stats.cycles
        self.stats.cycles += 1
        self.stats.tokens += accepted + 1
        self.stats.count(offered, accepted)
        emitted, drafted, (draft, verify, commit) = tokens[: accepted + 1], tokens[:offered], seconds
        record = CycleRecord(position, depth, offered, accepted, emitted, draft, verify, commit, drafted)
        self.policy.record(record)
        return record

    def alone(self, steps: list[Step], faults: Faults) -> list[int]:
        """The depths when asked once a cycle, with a look at each answer."""
        depths, zero, drafting = [], 0, 0
        for number, step in enumerate(steps):
            depth: Any = self.depth()
            kind = f"{depth!r} of type {type(depth).__name__}"
            faults.note("P1", type(depth) is int and depth >= 0, "the depth is no plain int of 0 or more", got=kind)
            if "P1" in faults:
                break
            faults.note("P4", depth <= LIMIT, "the depth grows without bound", got=depth, expected=f"at most {LIMIT}")
            zero, drafting = (zero + 1, 0) if depth == 0 else (0, drafting + 1)
            reason: Any = self.policy.reason
            faults.note("P8", isinstance(reason, str), "the reason is not a string", got=reason, cycle=number)
            what = f"there is a reason although drafts were asked for in the last {drafting} cycles"
            faults.note("P8", drafting < TRIAL or not reason, what, got=reason, expected="", cycle=number)
            what = f"the depth was 0 in the last {zero} cycles, without a reason"
            faults.note("P8", zero < TRIAL or reason, what, got=reason, cycle=number)
            depths.append(depth)
            self.record(step, depth)
        return depths


def _policies(subject: PluginSubject, length: int, seed: int, rows: int, outcome: str | None) -> Faults:
    """Run policies over the same records: alone, asked more often, beside another sequence, and after them."""
    faults, steps = Faults(), drawn_steps(seed, length, rows, outcome)

    def policies(count: int) -> list[PolicyRun]:
        """Policies of one pipeline."""
        shared = [] if subject.shared is None else [subject.shared()]
        return [PolicyRun(subject.make(*shared), rows) for _ in range(count)]

    with faults.of("P6"), own_generators(1):
        expected = policies(1)[0].alone(steps, faults)
    if "P1" in faults:
        return faults
    (often, unasked), (first, second) = policies(2), policies(2)
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
    for step in steps[:100]:
        unasked.record(step, 3)
    unasked.depth()
    what = "an earlier sequence changed the depths"
    faults.note_equal("P6", policies(1)[0].alone(steps, Faults()), expected, what)
    return faults


driven(
    _policies,
    {
        "P1": "``next_depth`` returns a plain int of 0 or more.",
        "P2": "The first depth is chosen from fresh Stats, before any record.",
        "P3": "Records of any kind and number are accepted in any order: unasked, capped, of zero seconds, anywhere.",
        "P4": "Depths stay bounded, however many drafts are accepted.",
        "P6": "A policy decides from the records of its own sequence: the same records give the same depths, and no "
        "global random generator is read or moved.",
        "P7": "Asking changes nothing: the depths are the same however often ``next_depth`` and ``reason`` are asked.",
        "P8": "``reason`` is text: empty while drafts are asked for, and why when the depth stays 0.",
    },
    examples=16,
    length=lengths(LONG),
    seed=seeds,
    rows=st.sampled_from(ROWS),
    outcome=st.sampled_from(_OUTCOMES),
)
