"""A lock that a forked process finds free."""

from __future__ import annotations

import os
import threading
import weakref


class ForkSafeLock:
    """A reentrant lock: ``with lock.held: ...``.

    A fork copies a lock as it is, also while another thread of the parent holds it, and that thread is not in the
    child: there the lock is renewed. ``held`` is the interpreter's own lock, because Python code that acquires or
    releases one can be interrupted before it says so; the lock would stay held, and other threads would wait for ever.
    """

    def __init__(self) -> None:
        self.held = threading.RLock()
        _all.add(self)

    def renew(self) -> None:
        """Make it free, whoever holds it."""
        self.held = threading.RLock()


_all: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in _all:
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
