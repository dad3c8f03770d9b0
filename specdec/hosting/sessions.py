"""The sequences that a host decodes, found again by their tokens, since hosts give no names for them.

A request's history grows by what was committed. So the session whose tokens are a prefix of a history is that
request's. Hosts also skip calls, preempt requests, go back in a conversation, and end requests without a word: a
session is then found by the longest common prefix and rewound, and those unused for longest expire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Tokens = NDArray[np.int64]

D = TypeVar("D")

_TAIL = 8  # tokens compared before a whole history is


class HostSession(Generic[D]):
    """One request's tokens and what belongs to it.

    Attributes:
        tokens: all committed tokens; the list keeps its identity.
        own: what ``HostSessions`` made for it.
        number: counts the sessions of a host from 0; never used twice.
    """

    def __init__(self, number: int, make: Callable[[HostSession[D]], D]) -> None:
        self.number = number
        self.tokens: list[int] = []
        self._array = np.zeros(256, np.int64)  # the same tokens, for comparisons
        self.own = make(self)

    def __len__(self) -> int:
        return len(self.tokens)

    def common(self, history: Tokens) -> int:
        """How many leading tokens it shares with ``history``."""
        length = min(len(self.tokens), len(history))
        differ = self._array[:length] != history[:length]
        at = int(differ.argmax()) if length else 0
        return at if length and differ[at] else length

    def begins(self, history: Tokens) -> bool:
        """Whether its tokens are the beginning of ``history``."""
        length = len(self.tokens)
        if length > len(history):
            return False
        tail = slice(max(length - _TAIL, 0), length)
        return np.array_equal(self._array[tail], history[tail]) and np.array_equal(
            self._array[:length], history[:length]
        )

    def follow(self, history: Tokens) -> int:
        """Take over ``history``; returns how many of its own tokens stayed."""
        kept = self.common(history)
        self.tokens[kept:] = history[kept:].tolist()
        if len(history) > len(self._array):
            self._array = np.resize(self._array, 2 * len(history))
        self._array[kept : len(history)] = history[kept:]
        return kept


class HostSessions(Generic[D]):
    """At most ``limit`` sessions; ``make`` gives a new one its own, ``ended`` is called for one that goes."""

    def __init__(
        self,
        limit: int,
        make: Callable[[HostSession[D]], D],
        ended: Callable[[HostSession[D]], object] = lambda session: None,
    ) -> None:
        self._limit, self._make, self._ended = limit, make, ended
        self._rows: list[HostSession[D] | None] = []  # of the last batch, by row
        self._sessions: list[HostSession[D]] = []  # the one unused for longest first
        self.begun = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[HostSession[D]]:
        return iter(self._sessions)

    def find(self, histories: Sequence[Tokens | None]) -> list[HostSession[D] | None]:
        """The session of each row of a batch, no session twice; None for a row that is None.

        A row gets the session whose tokens begin its history: the one it had in the last batch, or the longest.
        Otherwise it gets the unused session with the longest common prefix, if going back in that costs less than
        beginning again: if more than half of its tokens stay. Otherwise it gets a new one.
        """
        found: list[HostSession[D] | None] = [None] * len(histories)
        free = dict.fromkeys(reversed(self._sessions))  # latest first
        for row, history in enumerate(histories):
            before = self._rows[row] if row < len(self._rows) else None
            if history is not None and before is not None and before in free and before.begins(history):
                found[row] = before
                del free[before]
        for row, history in enumerate(histories):
            if history is not None and found[row] is None:
                own = max((one for one in free if one.begins(history)), key=len, default=None)
                if own is not None:
                    found[row] = own
                    del free[own]
        for row, history in enumerate(histories):
            if history is not None and found[row] is None:
                found[row] = self._nearest(history, free) or self._new(free)
        used = dict.fromkeys(one for one in found if one is not None)
        self._sessions = [one for one in self._sessions if one not in used] + list(used)
        self._rows = found
        return found

    def close(self) -> None:
        """End all sessions."""
        while self._sessions:
            self._ended(self._sessions.pop(0))
        self._rows = []

    def _nearest(self, history: Tokens, free: dict[HostSession[D], None]) -> HostSession[D] | None:
        shared = [(one.common(history), one) for one in free]
        length, near = max(shared, key=lambda entry: entry[0], default=(0, None))
        if near is None or 2 * length <= len(near):
            return None
        del free[near]
        return near

    def _new(self, free: dict[HostSession[D], None]) -> HostSession[D]:
        while len(self._sessions) >= self._limit and free:
            oldest = next(one for one in self._sessions if one in free)
            self._sessions.remove(oldest)
            del free[oldest]
            self._ended(oldest)
        session = HostSession(self.begun, self._make)
        self.begun += 1
        self._sessions.append(session)
        return session
