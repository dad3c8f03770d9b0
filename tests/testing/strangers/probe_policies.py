"""For each broken depth policy, a few calls that show its fault, and nothing where a right policy is asked."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import pathlib
import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import attrs

import specdec
from specdec import CycleRecord, Stats


def cycle(
    accepted: int, offered: int = 2, position: int = 10, depth: int | None = None, seconds: float = 0.01
) -> CycleRecord:
    depth, emitted = offered if depth is None else depth, tuple(range(accepted + 1))
    drafted = tuple(range(offered))
    return CycleRecord(position, depth, offered, accepted, emitted, seconds, seconds, seconds, drafted=drafted)


def count(stats: Stats, record: CycleRecord) -> None:
    stats.cycles, stats.tokens = stats.cycles + 1, stats.tokens + record.accepted + 1
    stats.count(record.offered, record.accepted)


def make(kind: Any, shared: Any = None) -> Any:
    return kind(None) if kind.prepare is None else kind(None, {} if shared is None else shared)


def raises(call: Callable[[], Any]) -> bool:
    try:
        call()
    except Exception:  # noqa: BLE001 - whatever it raises is the fault
        return True
    return False


def depths(kind: Any, accepted: list[int], *, asks: int = 1, cap: int = 15) -> list[Any]:
    """The depths of a run in which so many tokens were accepted in each cycle; -1 rejects all, 99 accepts all."""
    policy, stats, seen, position = make(kind), Stats(), [], 5
    for wanted in accepted:
        for _ in range(asks):
            depth = policy.next_depth(stats)
        seen.append(depth)
        offered = max(min(int(depth), cap), 0)
        record = cycle(max(min(wanted, offered), 0), offered, position)
        position += record.accepted + 1
        policy.record(record)
        count(stats, record)
    return seen


def odd(seen: list[Any]) -> bool:
    return any(type(depth) is not int or depth < 0 or depth > 1000 for depth in seen)


def takes(kind: Any, *records: CycleRecord) -> bool:
    """Whether it takes these records, each after a question."""
    policy, stats = make(kind), Stats()
    for record in records:
        policy.next_depth(stats)
        policy.record(record)
        count(stats, record)
    return not odd([policy.next_depth(stats)])


def fails(kind: Any, *records: CycleRecord) -> bool:
    return raises(lambda: takes(kind, *records)) or not takes(kind, *records)


def changes_stats(kind: Any, cycles: int) -> bool:
    policy, stats = make(kind), Stats()
    for _ in range(cycles):
        count(stats, cycle(1))
    before = copy.deepcopy(stats)
    policy.next_depth(stats)
    return bool(stats != before)


def asked_twice(kind: Any) -> bool:
    run = [-1] * 5 + [0] * 30
    return depths(kind, run) != depths(kind, run, asks=2)


def wrong_reason(kind: Any) -> bool:
    """Whether a depth of 0 has no reason, or another depth one."""
    policy, stats, wrong = make(kind), Stats(), False
    for _ in range(12):
        depth = policy.next_depth(stats)
        wrong |= not isinstance(policy.reason, str) or (depth == 0) != bool(policy.reason)
        policy.record(cycle(0, depth))
    return wrong


def reads_shared(kind: Any) -> bool:
    shared: dict[str, int] = {}
    policy = make(kind, shared)
    before = policy.next_depth(Stats())
    shared["depth"] = 5
    return policy.next_depth(Stats()) != before


def sees_others(kind: Any) -> bool:
    run = [99] * 4 + [-1, 0]
    alone = depths(kind, run)
    depths(kind, [-1] * 30)
    return depths(kind, run) != alone


def by_generator(kind: Any) -> bool:
    seen = set()
    for seed in range(8):
        random.seed(seed)
        seen.add(tuple(depths(kind, [1] * 70)))
    return len(seen) > 1


def by_clock(kind: Any) -> bool:
    with mock.patch("time.monotonic", side_effect=itertools.count().__next__):
        slow = depths(kind, [99] * 10)
    with mock.patch("time.monotonic", side_effect=itertools.repeat(1.0).__next__):
        return slow != depths(kind, [99] * 10)


def keeps_records(kind: Any) -> bool:
    policy, first = make(kind), cycle(1)
    alive = weakref.ref(first)
    policy.record(first)
    del first
    for _ in range(300):
        policy.record(cycle(1))
    gc.collect()
    return alive() is not None


def other_process_differs(kind: Any) -> bool:
    """Whether processes whose texts have other hashes go through other depths."""
    source = (
        f"from {kind.__module__} import {kind.__name__} as kind;"
        f"from {__name__} import depths; print(depths(kind, [1, 99] * 40))"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", source],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=pathlib.Path(specdec.__file__).parents[1],
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    return found[0] != found[1]


def shares_records(kind: Any) -> bool:
    shared: dict[str, Any] = {}
    if kind.prepare is None:
        return False
    policy = make(kind, shared)
    for at in range(200):
        policy.record(cycle(1, position=at))
    return any(isinstance(value, list) and len(value) >= 200 for value in shared.values())


def keeps_blocks(kind: Any) -> bool:
    policy = make(kind)
    for number in range(300):
        policy.record(attrs.evolve(cycle(1), emitted=(number, 2)))
    return any(isinstance(value, set) and len(value) >= 300 for value in vars(policy).values())


PROBES: dict[str, Callable[[Any], bool]] = {
    "GrowsAfterLong": lambda kind: depths(kind, [99] * 120, cap=2000)[-1] > 15,
    "MeanDepth": lambda kind: odd(depths(kind, [99] * 60)),
    "EightBits": lambda kind: odd(depths(kind, [99] * 60)),
    "PositionTable": lambda kind: raises(lambda: depths(kind, [1] * 200)),
    "DecaysStats": lambda kind: changes_stats(kind, 100),
    "DividesByTime": lambda kind: fails(kind, cycle(1, seconds=0.0)),
    "ExpectsItsDepth": lambda kind: fails(kind, cycle(1, 1, depth=1)),
    "FirstToken": lambda kind: fails(kind, cycle(0, 0, depth=2)),
    "BelowZero": lambda kind: odd(depths(kind, [99, -1, -1, -1])),
    "BooleanDepth": lambda kind: odd(depths(kind, [-1] * 5 + [0] * 30)),
    "NumpyDepth": lambda kind: odd(depths(kind, [1] * 20)),
    "ByProgress": lambda kind: fails(kind, cycle(1, position=50), cycle(1, position=20)),
    "ReadsDrafted": lambda kind: fails(kind, cycle(0, 0, depth=2)),
    "PadsStats": lambda kind: changes_stats(kind, 20),
    "CountsQuestions": asked_twice,
    "AlwaysReasons": wrong_reason,
    "GivesNoReason": wrong_reason,
    "AsDeepAsPossible": lambda kind: odd(depths(kind, [99] * 20, cap=15)),
    "ReadsShared": reads_shared,
    "ClassStreak": sees_others,
    "Explores": by_generator,
    "WallClock": by_clock,
    "KeepsRecords": keeps_records,
    "Compounds": lambda kind: raises(lambda: depths(kind, [99] * 1800)),
    "ByHash": other_process_differs,
    "SharedHistory": shares_records,
    "ShareOfTime": lambda kind: raises(lambda: make(kind).record(attrs.evolve(cycle(1), verify_seconds=0.0))),
    "LastEmitted": lambda kind: raises(lambda: make(kind).record(attrs.evolve(cycle(1), emitted=()))),
    "KeepsBlocks": keeps_blocks,
}
