"""Checks of observers: clauses S1, S2 and S6."""

from __future__ import annotations

import concurrent.futures

from specdec.policies.fixed import MAX_DEPTH, FixedConfig, FixedPolicy
from specdec.testing.checks import Broken, Faults, driven, own_generators
from specdec.testing.clauses.depth_policy import PolicyRun, drawn_steps
from specdec.testing.strategies import lengths, seeds
from specdec.testing.subjects import OBSERVES, PluginSubject

LONG = 1500  # records of a long run


def _observers(subject: PluginSubject, length: int, seed: int) -> Faults:
    """Show records to an observer, then some to another one from two threads in turn."""
    faults, run = Faults(), PolicyRun(FixedPolicy(FixedConfig(depth=MAX_DEPTH)), MAX_DEPTH + 1)
    records = [run.record(step, MAX_DEPTH) for step in drawn_steps(seed, length, MAX_DEPTH + 1, None)]
    see = getattr(subject.make(), OBSERVES)
    with faults.of("S2"), own_generators(1):
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
        "S6": "Records come from any thread of the program, and from several in turn.",
    },
    examples=8,
    length=lengths(LONG),
    seed=seeds,
)
