"""Estimates the cost of a cycle at each depth: a cost table corrected by measured cycle times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

CLOCK_STEP = 1e-9  # seconds; a coarse clock may read 0, and no cycle is free
SLOWER = 0.3  # nats; anything slower is clipped as an outlier, such as a burst of other work on the machine
FASTER = 1.5  # nats; the limit is wider here because no outlier makes a cycle faster
NOISE = 0.02  # initial variance of a cycle's log seconds, a deviation of 14 %
NOISES = 16  # pairs of equal cycles over which the noise is averaged
DOUBT = 0.08  # variance of a table entry, relative to the other entries, before the first visit
DRIFT = 0.02  # variance per cycle of the load that all depths share
UNKNOWN = 1.0  # variance of the load before it is measured: the first cycles may be unlike all later ones
TRUSTED = 100  # visits after which confidence in an entry stops growing
FIRST = 3  # cycles whose median is the first load: the very first one runs on cold caches
CONTRAST = 4  # cycles after a change of depth that compare the two depths
LEARNING = 10  # visits during which an entry also moves its unvisited neighbours


class CycleCosts:
    """Seconds of a cycle by drafted tokens.

    ``log seconds = log table[tokens] + load + own[tokens]``. All depths share the load (other work, clock rate); it
    changes fast and does not affect comparisons of depths. A depth's own correction is learnt from visits and changes
    slowly; an unvisited depth is interpolated from its nearest visited neighbours. Both are estimated by a filter of
    two scalars that ignores their covariance.
    """

    def __init__(self, table: Sequence[float]) -> None:
        self._table = [math.log(max(seconds, CLOCK_STEP)) for seconds in table]
        self._own = [0.0] * len(table)
        self._visits = [0] * len(table)
        self._first: list[float] = []
        self._load = 0.0  # of this generation, first measured after FIRST cycles
        self._load_doubt = UNKNOWN  # its variance
        self._noise = NOISE
        self._contrast = 0  # cycles for which the load is still that of another depth
        self._before = (-1, 0.0)  # drafted tokens and log seconds of the previous cycle
        self.seconds = [math.exp(value) for value in self._table]
        """By drafted tokens, at the table's load; depths are compared by these."""

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn that a cycle with ``tokens`` drafted tokens took ``seconds``; ignores drafts beyond the table."""
        if tokens >= len(self._own):
            return
        logged = math.log(max(seconds, CLOCK_STEP))
        measured = logged - self._table[tokens] - self._own[tokens]
        same, earlier = self._before[0] == tokens, self._before[1]
        self._contrast = CONTRAST if not same and len(self._first) == FIRST else max(self._contrast - 1, 0)
        self._before = tokens, logged
        if same:  # the difference of two equal cycles depends on neither table nor load
            self._noise += (min(abs(logged - earlier), SLOWER) ** 2 / 2 - self._noise) / NOISES
        if len(self._first) < FIRST:
            self._first.append(measured)
            self._load = statistics.median(self._first)
            return
        surprise = min(max(measured - self._load, -FASTER), SLOWER)
        # Cycles of a single depth say nothing about its cost relative to others: attribute all of it to the load.
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
        """Start from what another generation with the same table learnt; the load is measured again."""
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
        """The estimate for an unvisited entry. Plain decoding says nothing about the cost of drafts."""
        visited = [v for v in visited if v > 0]
        low = max((v for v in visited if v < tokens), default=None)
        high = min((v for v in visited if v > tokens), default=None)
        if low is None or high is None:
            nearest = low if low is not None else high
            return 0.0 if nearest is None else self._own[nearest]
        share = (tokens - low) / (high - low)
        return self._own[low] + share * (self._own[high] - self._own[low])
