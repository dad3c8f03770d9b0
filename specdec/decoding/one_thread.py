"""Keeps a second thread out of a session."""

from __future__ import annotations

import threading

from specdec.errors import StateError


class OneThread:
    """A context that one thread at a time can enter; another thread gets an error at once instead of waiting.

    The thread that holds it may enter again: an interruption that falls into ``__exit__`` must not lock it for ever.
    """

    def __init__(self) -> None:
        self._holder: dict[str, int] = {}

    def __enter__(self) -> None:
        """Raises: StateError when another thread is inside."""
        here = threading.get_ident()
        if self._holder.setdefault("thread", here) != here:  # one step, so only one of two threads comes in
            raise StateError(
                "another thread is using this session",
                try_="a session for each thread; Stream.stop may be called from any thread",
            )

    def __exit__(self, *_: object) -> None:
        self._holder.pop("thread", None)
