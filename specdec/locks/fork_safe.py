"""A lock that a forked process finds free."""

from __future__ import annotations

import os
import threading
import weakref


class ForkSafeLock:
    """A reentrant lock, as a context manager.

    Reentrant, because an interruption may leave it held. A fork copies a lock as it is, also while another thread of
    the parent holds it, and that thread is not in the child: there the lock is renewed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Make it free, whoever holds it."""
        self._lock = threading.RLock()


_all: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in _all:
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
