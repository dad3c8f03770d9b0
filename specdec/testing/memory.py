"""How much memory repeated calls leave behind."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

MOST_KEPT = 4
"""Objects of past calls that may be alive: what the last call gave, not what all of them did."""


def growth(call: Callable[[int], object], calls: int) -> float:
    """The bytes that ``call(number)`` leaves behind each time, once caches of up to ``calls`` entries are full."""
    tracing, sizes = tracemalloc.is_tracing(), []
    if not tracing:
        tracemalloc.start()
    try:
        for turn in range(3):
            for number in range(calls):
                call(turn * calls + number)
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        if not tracing:
            tracemalloc.stop()
    return min(later - earlier for earlier, later in zip(sizes, sizes[1:], strict=False)) / calls


def still_alive(make: Callable[[int], Any], count: int) -> int:
    """How many of ``count`` objects, each dropped as soon as ``make(number)`` gave it, are still in memory."""
    made = [weakref.ref(make(number)) for number in range(count)]
    gc.collect()
    return sum(one() is not None for one in made)


def open_things() -> int:
    """Threads and open files of this process; files only where the system lists them."""
    files = 0
    with contextlib.suppress(OSError):
        files = len(os.listdir("/proc/self/fd"))
    return threading.active_count() + files
