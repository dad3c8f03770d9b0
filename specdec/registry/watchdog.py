"""Logs calls into plugins that do not return: a report, since Python code cannot be stopped from outside.

One daemon thread looks at the guards a few times per limit; calls themselves look at no clock. A call that holds the
interpreter's lock all the time cannot be seen.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from typing import Protocol

import attrs

from specdec.errors import ConfigError, shown
from specdec.logs import get_logger

log = get_logger(__name__)

SECONDS = "SPECDEC_PLUGIN_SECONDS"
DEFAULT_S = 60.0
SHORTEST_S, LONGEST_S = 0.01, 1e6
LOOKS = 4  # per limit


class Watched(Protocol):
    """What the watchdog reads of a guard."""

    inside: str
    calls: int


guards: set[weakref.ref[Watched]] = set()
"""All guards. Adding, discarding and copying are one step each."""

_NAME = "specdec-plugins"
_lock = threading.RLock()
_thread: threading.Thread | None = None


def limit_s() -> float:
    """Seconds after which a call is logged; infinite for 0. Raises: ConfigError for anything but 0 or a usual limit."""
    given = os.environ.get(SECONDS)
    if given is None:
        return DEFAULT_S
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if seconds == 0:
        return math.inf
    if not SHORTEST_S <= seconds <= LONGEST_S:  # NaN fails the comparison
        takes = f"{SHORTEST_S:g} to {LONGEST_S:,.0f} seconds, or 0 for no limit"
        raise ConfigError(f"{SECONDS} takes {takes}, got {shown(given)}")
    return seconds


def watch(guard: Watched) -> None:
    """Watch a guard's calls for as long as it exists; starts the thread, unless it runs or the limit is off."""
    global _thread
    guards.add(weakref.ref(guard, guards.discard))
    if _thread is not None:
        return
    with _lock:
        limit = limit_s()
        if limit < math.inf and not any(thread.name == _NAME for thread in threading.enumerate()):
            _thread = threading.Thread(target=_run, args=(limit,), name=_NAME, daemon=True)
            _thread.start()


@attrs.frozen
class Overdue:
    """A call that has not returned."""

    guard: Watched
    method: str
    seconds: float


@attrs.define
class Looks:
    """Finds the calls that were running at every look for longer than ``limit`` seconds; each is found once."""

    limit: float
    _since: dict[tuple[weakref.ref[Watched], int], float] = attrs.field(factory=dict)  # a guard's call, when first seen

    def look(self, now: float) -> list[Overdue]:
        """Look at every guard. Args: ``now``: seconds of any clock that does not go backwards."""
        found: list[Overdue] = []
        since: dict[tuple[weakref.ref[Watched], int], float] = {}
        for reference in guards.copy():
            guard = reference()
            if guard is None or not (method := guard.inside):
                continue
            call = reference, guard.calls
            since[call] = first = self._since.get(call, now)
            if now - first > self.limit:
                found.append(Overdue(guard, method, now - first))
                since[call] = math.inf  # found
        self._since = since
        return found


def _run(limit: float) -> None:
    looks = Looks(limit)
    while True:
        time.sleep(limit / LOOKS)
        for call in looks.look(time.monotonic()):
            log.warning(
                "plugin_has_not_returned",
                plugin=str(call.guard),
                moment=call.method,
                seconds=round(call.seconds),
                limit=SECONDS,
            )


def _after_fork() -> None:
    global _thread, _lock
    _thread, _lock = None, threading.RLock()  # a child has none of its parent's threads, which may be inside calls
    guards.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
