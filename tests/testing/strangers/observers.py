"""Broken observers: each has one fault of those that an observer's author makes, and otherwise works.

Every docstring quotes the sentence of the documentation that the class breaks; "missing:" starts one that it ought to
have, since observers have no contract page.
"""

from __future__ import annotations

import random
import sqlite3
import sys
import time
from collections.abc import Callable
from typing import Any

from specdec import CycleRecord, hookimpl

BROKEN: dict[type[Any], str] = {}


def broken(fault: str) -> Callable[[type[Any]], type[Any]]:
    """Enter the class into the table under its class of fault."""

    def enter(kind: type[Any]) -> type[Any]:
        BROKEN[kind] = fault
        return kind

    return enter


def spec(kind: type[Any]) -> Any:
    """The plugin object to register."""
    return kind()


class Counter:
    """A right observer: it counts cycles and tokens."""

    def __init__(self) -> None:
        self.cycles = self.tokens = 0

    def see(self, record: CycleRecord) -> None:
        """What a broken one does beside counting."""

    @hookimpl
    def specdec_cycle(self, record: CycleRecord) -> None:
        self.cycles, self.tokens = self.cycles + 1, self.tokens + len(record.emitted)
        self.see(record)


@broken("late")
class PositionTable(Counter):
    """Counts by position, in a table of 256.

    "An observer that raises is switched off" (hooks). missing: "An observer takes every record, of any position".
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = [0] * 256

    def see(self, record: CycleRecord) -> None:
        self.table[record.position] += 1


@broken("edge")
class DividesByOffered(Counter):
    """Computes the acceptance of each cycle, also of those without a draft.

    "An observer that raises is switched off" (hooks). missing: "An observer takes records of depth 0 and without a
    draft, of 0 seconds and from a device".
    """

    rate = 0.0

    def see(self, record: CycleRecord) -> None:
        self.rate += record.accepted / record.offered


@broken("other")
class OneSequence(Counter):
    """Takes all records for those of one sequence, whose position only grows.

    "Observers see all sequences of the process" (tutorial: your first observer).
    """

    position = -1

    def see(self, record: CycleRecord) -> None:
        if record.position <= self.position:
            raise ValueError(f"position {record.position} after {self.position}")
        self.position = record.position


@broken("resources")
class KeepsRecords(Counter):
    """Keeps every record of the process.

    missing: "What an observer keeps does not grow with the number of cycles".
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: list[CycleRecord] = []

    def see(self, record: CycleRecord) -> None:
        self.records.append(record)


@broken("resources")
class Waits(Counter):
    """Sends what it has every 64 cycles and waits for the answer.

    "Be quick: the hook runs between two cycles" (tutorial: your first observer).
    """

    def see(self, record: CycleRecord) -> None:
        if self.cycles % 64 == 0:
            time.sleep(0.05)


@broken("handover")
class Prints(Counter):
    """Prints a line for every cycle that accepted everything.

    "With ``--json`` stdout is exactly one JSON object" (command line). missing: D16 for observers.
    """

    def see(self, record: CycleRecord) -> None:
        if record.offered and record.accepted == record.offered:
            sys.stdout.write(f"accepted {record.accepted}\n")


@broken("randomness")
class SamplesRecords(Counter):
    """Decides with Python's global generator which cycles it looks at.

    missing: "No plugin reads or advances a global generator" (said of drafters and verifiers only).
    """

    seen = 0

    def see(self, record: CycleRecord) -> None:
        self.seen += random.random() < 0.1


# --- a second set, written from the contract alone -------------------------------------------------------------------


@broken("other")
class OneThread(Counter):
    """Writes to a database that only the thread of the first record may use.

    "It sees the record of every finished cycle of every sequence in the process, in the thread that ran the cycle."
    """

    base: sqlite3.Connection | None = None

    def see(self, record: CycleRecord) -> None:
        if self.base is None:
            self.base = sqlite3.connect(":memory:")
            self.base.execute("create table totals (tokens)")
            self.base.execute("insert into totals values (0)")
        self.base.execute("update totals set tokens = tokens + ?", (len(record.emitted),))


@broken("resources")
class CountsDrafts(Counter):
    """Counts how often each draft came: nearly every draft is a new one.

    "What an observer keeps does not grow with the number of cycles" (S4).
    """

    def __init__(self) -> None:
        super().__init__()
        self.drafts: dict[tuple[int, ...], int] = {}

    def see(self, record: CycleRecord) -> None:
        self.drafts[record.drafted] = self.drafts.get(record.drafted, 0) + 1
