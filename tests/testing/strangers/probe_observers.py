"""For each broken observer, a few records that show its fault, and nothing where a right one is asked."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import attrs

from specdec import CycleRecord


def record(position: int = 10, offered: int = 2, accepted: int = 1) -> CycleRecord:
    emitted = tuple(range(accepted + 1))
    return CycleRecord(position, offered, offered, accepted, emitted, 0.01, 0.01, 0.0, drafted=tuple(range(offered)))


def see(kind: Any, *records: CycleRecord) -> Any:
    observer = kind()
    for one in records:
        observer.specdec_cycle(record=one)
    return observer


def raises(call: Callable[[], Any]) -> bool:
    try:
        call()
    except Exception:  # noqa: BLE001 - whatever it raises is the fault
        return True
    return False


def keeps(kind: Any) -> bool:
    kept = [value for value in vars(see(kind, *(record(at) for at in range(300)))).values() if isinstance(value, list)]
    for value in kept:
        for file in value:
            if hasattr(file, "close"):
                file.close()
    return any(len(value) >= 300 for value in kept)


def sleeps(kind: Any) -> bool:
    with mock.patch("time.sleep") as sleep:
        see(kind, *(record(at) for at in range(100)))
    return bool(sleep.called)


def prints(kind: Any) -> bool:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        see(kind, record(accepted=2))
    return bool(out.getvalue())


def moves_random(kind: Any) -> bool:
    before = random.getstate()
    see(kind, record())
    return random.getstate() != before


def fails_in_another_thread(kind: Any) -> bool:
    observer = see(kind, record())
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return raises(lambda: pool.submit(observer.specdec_cycle, record=record()).result())


def counts_drafts(kind: Any) -> bool:
    observer = see(kind, *(attrs.evolve(record(), drafted=(at, 1)) for at in range(300)))
    return any(isinstance(value, dict) and len(value) >= 300 for value in vars(observer).values())


PROBES: dict[str, Callable[[Any], bool]] = {
    "PositionTable": lambda kind: raises(lambda: see(kind, record(300))),
    "DividesByOffered": lambda kind: raises(lambda: see(kind, record(offered=0, accepted=0))),
    "OneSequence": lambda kind: raises(lambda: see(kind, record(50), record(20))),
    "KeepsRecords": keeps,
    "Waits": sleeps,
    "Prints": prints,
    "SamplesRecords": moves_random,
    "OneThread": fails_in_another_thread,
    "CountsDrafts": counts_drafts,
}
