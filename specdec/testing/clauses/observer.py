"""Checks of observers: clauses S1 to S6."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import attrs
import numpy as np

from specdec.contract import CycleRecord
from specdec.testing.checks import Run, check, expect, expect_equal
from specdec.testing.memory import growth
from specdec.testing.strategies import block
from specdec.testing.subjects import OBSERVES, ObserverSubject
from specdec.testing.surroundings import generator_states, seeded_generators, strange_clock

LONG = 3000  # records of a long run
BYTES = 4  # per record, that an observer may keep
THREADS = 3  # that run cycles in turn
SLOW = 0.01  # seconds that one record may take, in the fastest of three runs


def _records(seed: int, count: int) -> list[CycleRecord]:
    """Cycles of several sequences, in turn: at all positions, without drafts, of zero seconds, from a device."""
    rng = np.random.default_rng([seed, 2])
    positions = [1, 7, int(2 ** rng.uniform(0, 17))]
    records = []
    for number in range(count):
        one = int(rng.integers(len(positions)))
        depth = int(rng.integers(0, 17)) if rng.random() < 0.8 else 0
        offered = int(rng.integers(0, depth + 1)) if rng.random() < 0.5 else depth
        accepted = (0, offered, int(rng.integers(0, offered + 1)))[int(rng.integers(3))]
        emitted = tuple(int(token) for token in rng.integers(0, 150_000, accepted + 1))
        if number % 50 == 49:
            emitted = emitted[: int(rng.integers(2))]  # ended by a stop token, or begun after the end
        seconds, on_device = float(rng.choice([0.0, 1e-4, 2.0])), bool(rng.random() < 0.2)
        drafted = (*emitted[:accepted], *([3] * offered))[:offered]
        records.append(
            CycleRecord(
                position=positions[one],
                depth=depth,
                offered=offered,
                accepted=accepted,
                emitted=emitted,
                draft_seconds=0.0 if on_device else float(rng.choice([0.0, seconds])),
                verify_seconds=float(rng.choice([0.0, seconds])),
                commit_seconds=0.0 if on_device else seconds / 2,
                on_device=on_device,
                drafted=drafted,
            )
        )
        positions[one] += len(emitted)
        if rng.random() < 0.01:  # a sequence ends, and another begins
            positions[one] = int(2 ** rng.uniform(0, 17))
    return records


def _see(subject: ObserverSubject, records: Sequence[CycleRecord]) -> Any:
    observer = subject.make()
    for record in records:
        getattr(observer, OBSERVES)(record=record)
    return observer


def _runs(run: Run, usual: int = 3) -> Iterator[list[CycleRecord]]:
    for number in run.repeat(usual):
        yield _records(run.seed % 2**32 * 1000 + number, (LONG, 300, 40)[number % 3])


@check("S1")
def every_record(subject: ObserverSubject, run: Run) -> None:
    """Every record is taken: of any sequence, at any position, without a draft, of zero seconds, from a device."""
    for records in _runs(run):
        run.halve(lambda some: _see(subject, some), records)


@check("S2")
def nothing_moved(subject: ObserverSubject, run: Run) -> None:
    """An observer moves no global random generator and works under any clock."""

    def look(records: Sequence[CycleRecord]) -> None:
        with seeded_generators(1), strange_clock(10.0):
            before = generator_states()
            _see(subject, records)
            expect(generator_states() == before, "a global generator was advanced")

    for records in _runs(run):
        run.halve(look, records)


@check("S3")
def says_nothing(subject: ObserverSubject, run: Run) -> None:
    """An observer prints nothing: standard output belongs to the calling program."""

    def look(records: Sequence[CycleRecord]) -> None:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            _see(subject, records)
        expect(not printed.getvalue(), "something was printed", got=printed.getvalue())

    for records in _runs(run):
        run.halve(look, records)


@check("S4")
def bounded_memory(subject: ObserverSubject, run: Run) -> None:
    """What an observer keeps does not grow with the number of cycles."""
    observer, records = subject.make(), _records(run.seed % 2**32, LONG)

    def see(number: int) -> None:
        record = records[number % LONG]
        emitted, drafted = block(number, len(record.emitted)), block(number, record.offered)
        record = attrs.evolve(record, position=number, emitted=emitted, drafted=drafted)
        getattr(observer, OBSERVES)(record=record)

    grown = growth(see, LONG)
    expect(grown <= BYTES, "memory grows with every cycle", got=f"{grown:.0f} bytes a cycle after {LONG}")


@check("S5")
def quick(subject: ObserverSubject, run: Run) -> None:
    """An observer is quick: it neither sleeps nor waits, because the hook runs between two cycles."""
    records = _records(run.seed % 2**32, LONG)
    with strange_clock(1e-6) as slept:
        _see(subject, records)
    expect_equal(slept, [], "it sleeps")
    fastest = np.full(len(records), np.inf)
    for _ in range(3):
        observer = subject.make()
        for number, record in enumerate(records):
            began = perf_counter()
            getattr(observer, OBSERVES)(record=record)
            fastest[number] = min(fastest[number], perf_counter() - began)
    at = int(fastest.argmax())
    expect(fastest[at] <= SLOW, "a record takes long, each time", got=f"{fastest[at]:.3f} s", record=at)


@check("S6")
def any_thread(subject: ObserverSubject, run: Run) -> None:
    """Records come from any thread of the program, and from several in turn."""

    def look(records: Sequence[CycleRecord]) -> None:
        observer = subject.make()
        with contextlib.ExitStack() as stack:
            pools = [stack.enter_context(concurrent.futures.ThreadPoolExecutor(1)) for _ in range(THREADS)]
            for number, record in enumerate(records):
                pools[number % THREADS].submit(getattr(observer, OBSERVES), record=record).result()

    run.halve(look, _records(run.seed % 2**32, 40))
