"""Checks of depth policies: clauses P1 to P6."""

from __future__ import annotations

import copy

import hypothesis.strategies as st

from specdec.contract import CycleRecord, DepthPolicy, Stats
from specdec.testing.registry import DepthPolicySubject, Run, check, expect
from specdec.testing.strategies import Call, calls

LIMIT = 1024  # the engine caps depths by rows, room and budget; what is above this is no depth but a mistake


def _record(position: int, depth: int, offered: int, accepted: int, milliseconds: int) -> CycleRecord:
    offered, accepted = min(offered, depth), min(accepted, offered, depth)
    seconds = milliseconds / 1000
    return CycleRecord(
        position=position,
        depth=depth,
        offered=offered,
        accepted=accepted,
        emitted=tuple(range(accepted + 1)),
        draft_seconds=seconds * offered,
        verify_seconds=seconds,
        commit_seconds=0.0,
    )


def _told(stats: Stats, record: CycleRecord) -> None:
    stats.cycles += 1
    stats.tokens += len(record.emitted)
    stats.count(record.offered, record.accepted)


def _play(policy: DepthPolicy, steps: list[Call]) -> list[int]:
    """Cycles in the engine's order and out of it: asked twice, recorded without being asked, capped depths."""
    stats, depths = Stats(), []
    for number, step in enumerate(steps):
        depth, offered, accepted, milliseconds = step.numbers
        if step.name != "record_only":
            depths.append(policy.next_depth(stats))
            depth = depths[-1] if step.name == "cycle" and isinstance(depths[-1], int) else depth
        if step.name == "ask_only":
            continue
        record = _record(10 + number, max(0, min(depth, 16)), offered, accepted, milliseconds)
        _told(stats, record)
        policy.record(record)
    depths.append(policy.next_depth(stats))
    return depths


_numbers = (st.integers(0, 16), st.integers(0, 16), st.integers(0, 16), st.integers(0, 50))
_steps = calls(max_size=12, cycle=_numbers, capped=_numbers, record_only=_numbers, ask_only=_numbers)


@check("P1")
def a_number(subject: DepthPolicySubject, run: Run) -> None:
    """``next_depth`` is a plain int of 0 or more."""

    def body(steps: list[Call]) -> None:
        for depth in _play(subject.make(), steps):
            expect(type(depth) is int, "a depth is a plain int", got=f"{depth!r} of type {type(depth).__name__}")
            expect(depth >= 0, "a depth is never negative", got=depth)

    run.explore(body, examples=60, steps=_steps)


@check("P2")
def works_from_nothing(subject: DepthPolicySubject, run: Run) -> None:
    """The first depth is chosen from fresh Stats, before any record."""
    subject.make().next_depth(Stats())


@check("P3")
def any_record(subject: DepthPolicySubject, run: Run) -> None:
    """Records are taken in any order and of any kind: unasked, capped, of zero seconds, with fewer tokens offered."""

    def body(steps: list[Call]) -> None:
        policy, stats = subject.make(), Stats()
        for number, step in enumerate(steps):
            record = _record(10 + number, *step.numbers)
            _told(stats, record)
            policy.record(record)
        policy.next_depth(stats)

    run.explore(body, examples=60, steps=_steps)


@check("P4")
def bounded(subject: DepthPolicySubject, run: Run) -> None:
    """Depths stay bounded, however well drafts do."""
    for milliseconds in (0, 1):
        policy, stats = subject.make(), Stats()
        for number in range(run.count(300)):
            depth = policy.next_depth(stats)
            expect(
                depth <= LIMIT, "the depth grows without bound", got=depth, expected=f"{LIMIT} at most", cycle=number
            )
            record = _record(10 + number, depth, depth, depth, milliseconds)
            _told(stats, record)
            policy.record(record)


@check("P5")
def stats_are_the_engines(subject: DepthPolicySubject, run: Run) -> None:
    """Stats belong to the engine: a policy reads them and changes nothing."""

    def body(steps: list[Call]) -> None:
        policy, stats = subject.make(), Stats()
        for number, step in enumerate(steps):
            record = _record(10 + number, *step.numbers)
            _told(stats, record)
            before = copy.deepcopy(stats)
            policy.next_depth(stats)
            policy.record(record)
            expect(stats == before, "the stats were changed", got=stats, expected=before)

    run.explore(body, examples=25, steps=_steps)


@check("P6")
def own_sequence_only(subject: DepthPolicySubject, run: Run) -> None:
    """A policy decides from its own sequence's records: the same records give the same depths, whatever others did."""

    def body(steps: list[Call], other: list[Call]) -> None:
        alone = _play(subject.make(), steps)
        policy, second = subject.make(), subject.make()
        _play(second, other)
        together = _play(policy, steps)
        expect(together == alone, "the same records gave other depths", got=together, expected=alone)

    run.explore(body, examples=25, steps=_steps, other=_steps)
