"""Checks of observers: clauses S1 to S4 and S6."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io

import attrs
import numpy as np

from specdec.contract import CycleRecord
from specdec.testing.checks import Broken, Faults, Run, check, checks_of, expect, own_generators
from specdec.testing.memory import growth
from specdec.testing.strategies import lengths, seeds
from specdec.testing.subjects import OBSERVES, ObserverSubject

LONG = 1500  # records of a long run
BYTES = 4  # per record, that an observer may keep


def _records(seed: int, count: int) -> list[CycleRecord]:
    """Cycles of several sequences, in turn: at all positions, without drafts, of zero seconds."""
    rng = np.random.default_rng([seed, 2])
    positions = [1, 7, int(2 ** rng.uniform(0, 17))]
    records = []
    for number in range(count):
        sequence = int(rng.integers(len(positions)))
        depth = int(rng.integers(0, 17)) if rng.random() < 0.8 else 0
        offered = int(rng.integers(0, depth + 1)) if rng.random() < 0.5 else depth
        accepted = (0, offered, int(rng.integers(0, offered + 1)))[int(rng.integers(3))]
        emitted = tuple(int(token) for token in rng.integers(0, 150_000, accepted + 1))
        if number % 50 == 49:
            emitted = emitted[:1]  # ended by a stop token
        draft, verify, commit = (float(rng.choice([0.0, 1e-4, 2.0])) for _ in range(3))
        drafted = (*emitted[:accepted], *([3] * offered))[:offered]
        at = positions[sequence]
        records.append(CycleRecord(at, depth, offered, accepted, emitted, draft, verify, commit, drafted))
        positions[sequence] = int(2 ** rng.uniform(0, 17)) if rng.random() < 0.01 else at + len(emitted)
    return records


def _observers(subject: ObserverSubject, length: int, seed: int) -> Faults:
    """Show records to an observer, the last of them from several threads in turn."""
    faults, observer, records = Faults(), subject.make(), _records(seed, length)
    see, printed = getattr(observer, OBSERVES), io.StringIO()
    with faults.of("S2"), own_generators(1), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        for record in records:
            see(record=record)
    faults.note("S3", not printed.getvalue(), "something was printed", got=printed.getvalue())
    see = getattr(subject.make(), OBSERVES)
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(concurrent.futures.ThreadPoolExecutor(1)) for _ in range(3)]
        for number, record in enumerate(records[:40]):
            try:
                pools[number % 3].submit(see, record=record).result()
            except Exception as error:  # noqa: BLE001  (whatever an observer raises)
                faults.setdefault("S6", Broken.by(error, {"thread": number % 3}))
    return faults


def _drive(subject: ObserverSubject, run: Run, clause: str) -> None:
    run.drive(subject, clause, _observers, examples=8, length=lengths(LONG), seed=seeds)


checks_of(
    _drive,
    {
        "S1": "Every record is taken: of any sequence, at any position, without a draft, of zero seconds.",
        "S2": "An observer moves no global random generator.",
        "S3": "An observer prints nothing: standard output belongs to the calling program.",
        "S6": "Records come from any thread of the program, and from several in turn.",
    },
)


@check("S4")
def bounded_memory(subject: ObserverSubject, run: Run) -> None:
    """What an observer keeps does not grow with the number of cycles."""
    observer, records = subject.make(), _records(run.seed % 2**32, LONG)

    def see(number: int) -> None:
        record = records[number % LONG]
        drafted = tuple((number * 2_654_435_761 + at * 40_503 >> 7) % 50 for at in range(record.offered))
        getattr(observer, OBSERVES)(record=attrs.evolve(record, position=number, drafted=drafted))

    grown = growth(see, LONG)
    expect(grown <= BYTES, "memory grows with every cycle", got=f"{grown:.0f} bytes a cycle after {LONG}")
