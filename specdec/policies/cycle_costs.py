"""What a cycle of each depth costs now: a table, corrected by the cycles' own wall-clock times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

CLOCK_STEP = 1e-9  # seconds; a coarse clock may read 0, and no cycle is free
SLOWER = 0.3  # nats; what a cycle took longer than this is put down to an accident, a neighbour's burst of work
FASTER = 1.5  # nats; nothing makes a cycle faster by accident
NOISE = 0.02  # variance of log seconds of a cycle, a deviation of 14 %, until two of one depth followed each other
NOISES = 16  # pairs of cycles whose mean is the noise
DOUBT = 0.08  # variance of a table's entry, in relation to the other entries, before the first visit
DRIFT = 0.02  # variance per cycle of what all depths share
UNKNOWN = 1.0  # variance of the load before it was seen: the first cycles may be unlike all later ones
TRUSTED = 100  # visits after which an entry is believed no more firmly
FIRST = 3  # cycles whose median is the first load: the very first one runs on cold caches
CONTRAST = 4  # cycles after a change of depth that compare the two
LEARNING = 10  # visits during which an entry also moves its unvisited neighbours


class CycleCosts:
    """Seconds of a cycle by drafted tokens.

    ``log seconds = log table[tokens] + load + own[tokens]``. The load is what all depths share (a neighbour's work, the
    clock rate); it changes fast, and no comparison of depths depends on it. A depth's own correction is learnt from
    visits and changes slowly; one never visited is believed to be off by as much as its nearest visited neighbours.
    Both follow a filter of two scalars with their covariance left out.
    """

    def __init__(self, table: Sequence[float]) -> None:
        self._table = [math.log(max(seconds, CLOCK_STEP)) for seconds in table]
        self._own = [0.0] * len(table)
        self._visits = [0] * len(table)
        self._first: list[float] = []
        self._load = 0.0  # of this generation, first seen after FIRST cycles
        self._load_doubt = UNKNOWN  # its variance
        self._noise = NOISE
        self._contrast = 0  # cycles for which the load is still that of another depth
        self._before = (-1, 0.0)  # drafted tokens and log seconds of the cycle before
        self.seconds = [math.exp(value) for value in self._table]
        """By drafted tokens, at the table's load: what depths are compared with."""

    def observe(self, tokens: int, seconds: float) -> None:
        """A cycle that verified ``tokens`` drafted tokens took so long. Longer drafts than the table's are left out."""
        if tokens >= len(self._own):
            return
        logged = math.log(max(seconds, CLOCK_STEP))
        measured = logged - self._table[tokens] - self._own[tokens]
        same, earlier = self._before[0] == tokens, self._before[1]
        self._contrast = CONTRAST if not same and len(self._first) == FIRST else max(self._contrast - 1, 0)
        self._before = tokens, logged
        if same:  # a difference knows nothing of tables and loads
            self._noise += (min(abs(logged - earlier), SLOWER) ** 2 / 2 - self._noise) / NOISES
        if len(self._first) < FIRST:
            self._first.append(measured)
            self._load = statistics.median(self._first)
            return
        surprise = min(max(measured - self._load, -FASTER), SLOWER)
        # Cycles of one depth alone say nothing about its price beside the others': there, all of it is load.
        doubt = DOUBT / (1 + self._visits[tokens]) if self._contrast else 0.0
        total = doubt + self._load_doubt + self._noise
        self._load += surprise * self._load_doubt / total
        self._own[tokens] += surprise * doubt / total
        self._load_doubt = max(DRIFT, self._load_doubt * (1 - self._load_doubt / total))
        if not self._contrast:
            return
        self._visits[tokens] = min(self._visits[tokens] + 1, TRUSTED)
        if self._visits[tokens] <= LEARNING:
            self._price_all()
        else:
            self._price(tokens)

    def adopt(self, other: CycleCosts) -> None:
        """Start from what another generation over the same table learnt; the load is measured anew."""
        self._own, self._visits = list(other._own), list(other._visits)
        self._price_all()

    def _price(self, tokens: int) -> None:
        self.seconds[tokens] = math.exp(self._table[tokens] + self._own[tokens])

    def _price_all(self) -> None:
        visited = [tokens for tokens, count in enumerate(self._visits) if count]
        for tokens, count in enumerate(self._visits):
            if not count:
                self._own[tokens] = self._between(tokens, visited)
            self._price(tokens)

    def _between(self, tokens: int, visited: list[int]) -> float:
        """The estimate for an entry never visited. Plain decoding shows nothing about the cost of drafts."""
        visited = [v for v in visited if v > 0]
        low = max((v for v in visited if v < tokens), default=None)
        high = min((v for v in visited if v > tokens), default=None)
        if low is None or high is None:
            nearest = low if low is not None else high
            return 0.0 if nearest is None else self._own[nearest]
        share = (tokens - low) / (high - low)
        return self._own[low] + share * (self._own[high] - self._own[low])
