"""The sequences that a host decodes, found again by their tokens, since hosts give no names for them.

A request's history grows by what was committed, so the session whose tokens are a prefix of a history is that
request's. Hosts also go back in a text and end requests without a word: a session is then found by the longest common
prefix and rewound, and those unused for longest expire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Tokens = NDArray[np.int64]


class HostSession:
    """One request's committed tokens; the list keeps its identity."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._history: Tokens = np.zeros(0, np.int64)  # the same tokens, for comparisons

    def __len__(self) -> int:
        return len(self.tokens)

    def common(self, history: Tokens) -> int:
        """How many leading tokens it shares with ``history``."""
        length = min(len(self.tokens), len(history))
        differing = np.flatnonzero(self._history[:length] != history[:length])
        return int(differing[0]) if len(differing) else length

    def begins(self, history: Tokens) -> bool:
        """Whether its tokens are the beginning of ``history``."""
        return self.common(history) == len(self.tokens)

    def follow(self, history: Tokens) -> int:
        """Take over ``history``, which nobody changes later; returns how many of its own tokens stayed."""
        kept = self.common(history)
        self.tokens[kept:] = history[kept:].tolist()
        self._history = history
        return kept


S = TypeVar("S", bound=HostSession)


class HostSessions(Generic[S]):
    """At most ``limit`` sessions, unless one batch has more."""

    def __init__(self, limit: int, make: Callable[[], S]) -> None:
        self._limit, self._make = limit, make
        self._batch: list[S | None] = []  # the sessions of the last one, by row
        self._sessions: list[S] = []  # the one unused for longest first
        self.begun = 0

    def find(self, histories: Sequence[Tokens | None]) -> list[S | None]:
        """The session of each row of a batch, no session twice; None for a row that is None.

        A row gets a session whose tokens begin its history: the one it had in the last batch, else the longest.
        Otherwise it gets the one with the longest common prefix, if more than half of that session's tokens stay, and
        otherwise a new one.
        """
        sessions: list[S | None] = [None] * len(histories)
        unused = dict.fromkeys(reversed(self._sessions))  # latest first
        for choose in (self._of_the_row, self._longest, self._nearest, self._new):
            for row, history in enumerate(histories):
                if history is not None and sessions[row] is None:
                    sessions[row] = session = choose(row, history, unused)
                    unused.pop(session, None)  # type: ignore[arg-type]
        used = dict.fromkeys(session for session in sessions if session is not None)
        self._sessions = [session for session in self._sessions if session not in used] + list(used)
        self._batch = sessions
        return sessions

    def close(self) -> None:
        """End all sessions."""
        self._sessions, self._batch = [], []

    def _of_the_row(self, row: int, history: Tokens, unused: dict[S, None]) -> S | None:
        session = self._batch[row] if row < len(self._batch) else None
        return session if session is not None and session in unused and session.begins(history) else None

    def _longest(self, row: int, history: Tokens, unused: dict[S, None]) -> S | None:
        return max((session for session in unused if session.begins(history)), key=len, default=None)

    def _nearest(self, row: int, history: Tokens, unused: dict[S, None]) -> S | None:
        nearest = max(unused, key=lambda session: session.common(history), default=None)
        return nearest if nearest is not None and 2 * nearest.common(history) > len(nearest) else None

    def _new(self, row: int, history: Tokens, unused: dict[S, None]) -> S:
        while len(self._sessions) >= self._limit and unused:
            oldest, _ = unused.popitem()
            self._sessions.remove(oldest)
        self.begun += 1
        self._sessions.append(self._make())
        return self._sessions[-1]
