"""Checks of observers: clauses S1 to S3 and S6."""

from __future__ import annotations

import concurrent.futures

import numpy as np

from specdec.contract import CycleRecord
from specdec.testing.checks import Broken, Faults, driven, own_generators
from specdec.testing.strategies import lengths, seeds
from specdec.testing.subjects import OBSERVES, PluginSubject

LONG = 1500  # records of a long run


def _record(rng: np.random.Generator) -> CycleRecord:
    """A cycle at any position; some have no draft, end at a stop token or take zero seconds."""
    offered = int(rng.integers(0, 17)) if rng.random() < 0.8 else 0
    accepted = (0, offered, int(rng.integers(0, offered + 1)))[int(rng.integers(3))]
    drafted = tuple(rng.integers(0, 150_000, offered).tolist())
    emitted = (*drafted[:accepted], int(rng.integers(150_000)))[: None if rng.random() < 0.98 else 1]
    position, depth = int(2 ** rng.uniform(0, 17)), offered + int(rng.integers(3))
    draft, verify, commit = rng.choice([0.0, 1e-4, 2.0], 3).tolist()
    return CycleRecord(position, depth, offered, accepted, emitted, draft, verify, commit, drafted)


def _observers(subject: PluginSubject, length: int, seed: int) -> Faults:
    """Show records to an observer, then some to another one from two threads in turn."""
    faults, rng = Faults(), np.random.default_rng([seed, 2])
    records = [_record(rng) for _ in range(length)]
    see = getattr(subject.make(), OBSERVES)
    with faults.of("S2"), own_generators(1), faults.if_printed("S3"):
        for record in records:
            see(record=record)
    see = getattr(subject.make(), OBSERVES)
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        try:
            for record in records[:20]:
                see(record=record)
                other.submit(see, record=record).result()
        except Exception as error:  # noqa: BLE001  (whatever an observer raises)
            faults.setdefault("S6", Broken.by(error, {}))
    return faults


driven(
    _observers,
    {
        "S1": "Every record is taken: of any sequence, at any position, without a draft, of zero seconds.",
        "S2": "An observer moves no global random generator.",
        "S3": "An observer prints nothing: standard output belongs to the calling program.",
        "S6": "Records come from any thread of the program, and from several in turn.",
    },
    examples=8,
    length=lengths(LONG),
    seed=seeds,
)
