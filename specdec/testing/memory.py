"""How much memory repeated calls leave behind."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

MOST_KEPT = 4
"""Objects of past calls that may be alive: what the last call gave, not what all of them did."""


def growth(call: Callable[[int], object], calls: int) -> float:
    """The bytes that ``call(number)`` leaves behind each time, once caches of up to ``calls`` entries are full.

    It is the least of up to six rounds of calls: other threads allocate too, and what leaks does so in every round.
    """
    least, before = float("inf"), None
    tracemalloc.start()
    try:
        for turn in range(7):
            for number in range(calls):
                call(turn * calls + number)
            gc.collect()
            after = tracemalloc.get_traced_memory()[0]
            if before is not None:
                least = min(least, after - before)
            if least <= 0:
                break
            before = after
    finally:
        tracemalloc.stop()
    return least / calls


def alive(references: Iterable[weakref.ref[Any]]) -> int:
    """How many of these objects are still in memory."""
    gc.collect()
    return sum(reference() is not None for reference in references)
