"""Estimates the rate of each depth: expected tokens over expected seconds of a cycle."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from specdec.contract import CycleRecord

# acceptance
PRIOR_WEIGHT = 2.0  # observations that a prior counts as
FIRST_GUESS = 0.6  # prior of position 0
CARRIED = 8.0  # most observations per position that one generation hands to the next
# costs
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
# rates
STALE = 4  # plain cycles after which a drafter must catch up, so that its next cycle takes unusually long
MISSES = 8  # empty drafts over which the cost of one is averaged


class Counts:
    """Decayed counts by lookahead position: cycles that got to it, and those of them that got past it."""

    def __init__(self, positions: int, window: int) -> None:
        self._keep = 1.0 - 1.0 / window
        self.seen = [0.0] * positions
        self.passed = [0.0] * positions

    def observe(self, asked: int, passed: int) -> None:
        """Count a cycle that asked for so many tokens and got past the first ``passed`` positions."""
        for position in range(min(asked, passed + 1, len(self.seen))):
            self.seen[position] = self.seen[position] * self._keep + 1.0
            self.passed[position] = self.passed[position] * self._keep + (position < passed)

    def forget(self) -> None:
        """Discard all counts."""
        self.seen, self.passed = [0.0] * len(self.seen), [0.0] * len(self.seen)

    def adopt(self, other: Counts) -> None:
        """Start from another generation's counts, weighted as at most ``CARRIED`` observations."""
        for position in range(min(len(self.seen), len(other.seen))):
            share = min(1.0, CARRIED / max(other.seen[position], CARRIED))
            self.seen[position], self.passed[position] = share * other.seen[position], share * other.passed[position]

    def ratio(self, position: int, prior: float) -> float:
        """The share that got past a position; the prior counts as ``PRIOR_WEIGHT`` observations."""
        return (self.passed[position] + PRIOR_WEIGHT * prior) / (self.seen[position] + PRIOR_WEIGHT)


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


class Rates:
    """The rate ``E(k) / t(k)`` of every depth k, learnt from cycles.

    Cycles are renewals, so this is the long-run rate of tokens at depth k. t comes from ``CycleCosts``, E from two
    decayed ratios by lookahead position; neither assumes that drafter and target are independent.

    *Gain* of position i: of the cycles that asked for more than i tokens and accepted the first i, the share that also
    accepted token i. The product of gains is the survival A_i; a cycle of depth k gives ``E(k) = 1 + A_1 + ... + A_k``
    tokens. *Offer* of position i: of the cycles that asked for more than i tokens and got at least i, the share that
    got one more. A drafter may give fewer tokens than asked for, and a shorter draft costs less.

    Args:
        seconds: of a cycle, by drafted tokens from 0 to the deepest; only their ratios matter.
        window: cycles that acceptance remembers.

    Attributes:
        by_depth: tokens per second, from depth 0 to the deepest draft; computed by ``update``.
        plain_cycles: consecutive cycles without a draft.
    """

    def __init__(self, seconds: Sequence[float], window: int) -> None:
        self._costs = CycleCosts(seconds)
        self._gains, self._offers = Counts(len(seconds) - 1, window), Counts(len(seconds) - 1, window)
        self._miss = 0.0  # seconds that the drafter takes to draft nothing
        self.plain_cycles = 0
        self.by_depth: list[float] = []
        self.update()

    @property
    def first_acceptance(self) -> float:
        """The estimated acceptance at position 0."""
        return self._gains.ratio(0, FIRST_GUESS)

    @property
    def drafts(self) -> float:
        """Decayed count of the cycles that observed position 0."""
        return self._gains.seen[0]

    def adopt(self, other: Rates) -> None:
        """Start from what another generation learnt; its acceptance counts for less."""
        self._gains.adopt(other._gains)
        self._offers.adopt(other._offers)
        self._costs.adopt(other._costs)
        self._miss = other._miss

    def observe(self, cycle: CycleRecord) -> None:
        """Learn from a cycle; the time of a drafter that catches up after a pause is ignored."""
        self._count(cycle)
        if cycle.offered:
            if self.plain_cycles < STALE:
                seconds = cycle.draft_seconds + cycle.verify_seconds + cycle.commit_seconds
                self._costs.observe(cycle.offered, seconds)
            self.plain_cycles = 0
            return
        if cycle.depth and self.plain_cycles < STALE:
            self._miss += (cycle.draft_seconds - self._miss) / MISSES
        self._costs.observe(0, cycle.verify_seconds + cycle.commit_seconds)
        if not cycle.depth:
            self.plain_cycles += 1

    def _count(self, cycle: CycleRecord) -> None:
        self._gains.observe(cycle.depth, cycle.accepted)
        self._offers.observe(cycle.depth, cycle.offered)

    def restart(self, cycle: CycleRecord) -> None:
        """Discard what was learnt about acceptance and start again from this cycle."""
        self._gains.forget()
        self._offers.forget()
        self._count(cycle)

    def update(self) -> None:
        """Compute ``by_depth``. t(k) is the mean over the drafts returned for depth k.

        The prior of a gain is the acceptance of offered tokens at the position before it. A drafter is assumed to give
        as many tokens as asked for until it does not.
        """
        rates = []
        tokens = survival = reached = 1.0  # E(k); A_k; the probability of a draft of k tokens or more
        shorter = 0.0  # seconds of drafts of fewer than k tokens, weighted by probability
        extra, guess = self._miss, FIRST_GUESS
        for position, seconds in enumerate(self._costs.seconds):
            rates.append(tokens / (shorter + reached * seconds))
            if position == len(self._gains.seen):
                break
            gain, offer = self._gains.ratio(position, guess), self._offers.ratio(position, 1.0)
            guess = min(gain / offer, 1.0)
            survival *= gain
            tokens += survival
            shorter += reached * (1.0 - offer) * (seconds + extra)
            reached *= offer
            extra = 0.0
        self.by_depth = rates
