"""Running averages that price a depth: acceptance by position, and seconds of a cycle by depth."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdec.contract import CycleRecord

FIRST_GUESS = 0.6  # acceptance of a position that no draft has reached
PRIOR_WEIGHT = 2.0  # cycles that a prior counts as
FADING = 32.0  # cycles after which a prior counts half; without it drafts of 2 % of a step are never given up
CARRIED = 8.0  # most cycles per position that one generation hands to the next
CLOCK_STEP = 1e-9  # seconds; a coarse clock may read 0, and no cycle is free
SLOWER, FASTER = 0.3, 1.5  # nats by which a cycle may surprise; only outliers are slower than that
LOAD_SHARE = 0.25  # of a surprise that is put down to the load
TRUSTED = 24  # visits after which a depth's average stops getting slower
MISSES = 8  # empty drafts over which the cost of one is averaged
CONTRAST = 4  # cycles after a change of depth that compare the two depths
STALE = 4  # plain cycles after which a drafter must catch up, so that its next cycle takes unusually long


class Acceptance:
    """Two running averages per lookahead position; neither assumes that drafter and target are independent.

    *Gain* of position i: of the cycles that asked for more than i tokens and accepted the first i, the share that also
    accepted token i. The product of gains is the survival A_i; a cycle of depth k gives ``E(k) = 1 + A_1 + ... + A_k``
    tokens. *Offer* of position i: of the cycles that asked for more than i tokens and got at least i, the share that
    got one more. A drafter may give fewer tokens than asked for, and a shorter draft costs less.
    """

    def __init__(self, positions: int, window: int) -> None:
        self._keep = 1.0 - 1.0 / window
        self._gains = [(0.0, 0.0)] * positions  # decayed counts: cycles that reached the position, of those accepted
        self._offers = [(0.0, 0.0)] * positions

    def observe(self, cycle: CycleRecord) -> None:
        """Count one cycle; a cycle of depth 0 carries no information."""
        for counts, passed in ((self._gains, cycle.accepted), (self._offers, cycle.offered)):
            for position in range(min(cycle.depth, len(counts), passed + 1)):
                reached, held = counts[position]
                counts[position] = reached * self._keep + 1.0, held * self._keep + (position < passed)

    def rates(self) -> list[tuple[float, float]]:
        """Gain and offer by position.

        The prior of a gain is the acceptance of offered tokens at the position before; that of an offer is 1.
        """
        rates, guess = [], FIRST_GUESS
        for (reached, accepted), (asked, offered) in zip(self._gains, self._offers, strict=True):
            weight = PRIOR_WEIGHT / (1.0 + reached / FADING)
            gain = (accepted + weight * guess) / (reached + weight)
            offer = (offered + PRIOR_WEIGHT) / (asked + PRIOR_WEIGHT)
            guess = min(gain / offer, 1.0)
            rates.append((gain, offer))
        return rates

    def forget(self) -> None:
        """Discard all counts."""
        self._gains[:] = self._offers[:] = [(0.0, 0.0)] * len(self._gains)

    def adopt(self, other: Acceptance) -> None:
        """Start from another generation's counts, weighted as at most ``CARRIED`` cycles."""
        for counts, theirs in ((self._gains, other._gains), (self._offers, other._offers)):
            for position, (reached, held) in enumerate(theirs[: len(counts)]):
                share = min(1.0, CARRIED / max(reached, CARRIED))
                counts[position] = share * reached, share * held


class Seconds:
    """Seconds of a cycle by drafted tokens: a table of guesses, corrected by what cycles took.

    ``log seconds = log table[tokens] + load + correction[tokens]``. The load (other work, clock rate) is common to all
    depths, changes fast and does not affect comparisons. A correction is a running average over the cycles after a
    change of depth: while the depth stays the same, a surprise may as well be the load, and all of it counts as that.
    """

    def __init__(self, table: Sequence[float]) -> None:
        self._table = [math.log(max(seconds, CLOCK_STEP)) for seconds in table]
        self._correction = [0.0] * len(table)
        self._visits = [0] * len(table)
        self._load: float | None = None  # of this generation
        self._tokens = -1  # of the previous cycle
        self._contrast = 0
        self.expected = [math.exp(seconds) for seconds in self._table]
        """By drafted tokens, at the table's load; depths are compared by these."""

    def observe(self, tokens: int, seconds: float) -> bool:
        """Learn what a cycle with so many drafted tokens took; returns whether ``expected`` has changed."""
        if tokens >= len(self._table):  # a deeper draft than this policy asks for
            return False
        surprise = math.log(max(seconds, CLOCK_STEP)) - self._table[tokens] - self._correction[tokens]
        if self._load is None:
            self._load = surprise
        surprise = min(max(surprise - self._load, -FASTER), SLOWER)
        self._contrast = max(self._contrast - 1, 0) if tokens == self._tokens else CONTRAST * (self._tokens >= 0)
        self._tokens = tokens
        share = 1 / (self._visits[tokens] + 1.5) if self._contrast else 0.0
        self._load += LOAD_SHARE * (1.0 - share) * surprise
        if self._contrast:
            self._correction[tokens] += share * surprise
            self._visits[tokens] = min(self._visits[tokens] + 1, TRUSTED)
            self._spread()
        return self._contrast > 0

    def adopt(self, other: Seconds) -> None:
        """Start from what another generation learnt; the load is measured again."""
        self._correction, self._visits = list(other._correction), list(other._visits)
        self._spread()

    def _spread(self) -> None:
        """Correct unvisited depths like their nearest visited neighbour, plain decoding apart, and price all."""
        visited = [tokens for tokens, visits in enumerate(self._visits) if visits and tokens]
        for tokens, visits in enumerate(self._visits):
            if tokens and visited and not visits:
                self._correction[tokens] = self._correction[min(visited, key=lambda other: abs(other - tokens))]
            self.expected[tokens] = math.exp(self._table[tokens] + self._correction[tokens])


class Rates:
    """The rate ``E(k) / t(k)`` of every depth k. Cycles are renewals, so this is the long-run rate at depth k.

    Args:
        table: seconds of a cycle, by drafted tokens; only their ratios matter.
        window: cycles that acceptance remembers.
    """

    def __init__(self, table: Sequence[float], window: int) -> None:
        self._acceptance = Acceptance(len(table) - 1, window)
        self._seconds = Seconds(table)
        self._miss = 0.0  # seconds that the drafter takes to draft nothing
        self._plain_cycles = 0  # since the last draft
        self.by_depth: list[float] = []
        self.first_acceptance = FIRST_GUESS
        self._update()

    def observe(self, cycle: CycleRecord, *, news: bool = False) -> bool:
        """Learn from a cycle; the time of a drafter that catches up after a pause is ignored.

        ``news``: what was learnt about acceptance is of another text, and is discarded.

        Returns: whether ``by_depth`` was computed anew. Most plain cycles do not: 7 µs and not 27 for each, measured by
            ``benchmarks.adaptive --part bookkeeping``.
        """
        if not cycle.depth:
            self._plain_cycles += 1
            changed = self._seconds.observe(0, cycle.verify_seconds + cycle.commit_seconds)
            if changed:
                self._update()
            return changed
        if news:
            self._acceptance.forget()
        self._acceptance.observe(cycle)
        fresh = self._plain_cycles < STALE
        if not cycle.offered:
            self._miss += (cycle.draft_seconds - self._miss) / MISSES if fresh else 0.0
            self._seconds.observe(0, cycle.verify_seconds + cycle.commit_seconds)
        elif fresh:
            self._seconds.observe(cycle.offered, cycle.draft_seconds + cycle.verify_seconds + cycle.commit_seconds)
        self._plain_cycles = 0 if cycle.offered else self._plain_cycles
        self._update()
        return True

    def adopt(self, other: Rates) -> None:
        """Start from what another generation learnt; its acceptance counts for less."""
        self._acceptance.adopt(other._acceptance)
        self._seconds.adopt(other._seconds)
        self._miss = other._miss
        self._update()

    def _update(self) -> None:
        """Compute ``by_depth``. t(k) is the mean over the drafts returned for depth k."""
        tokens = survival = given = 1.0  # E(k); A_k; the probability of a draft of k tokens or more
        shorter, extra = 0.0, self._miss  # seconds of drafts of fewer than k tokens, weighted by probability
        rates, acceptance = [], self._acceptance.rates()
        for seconds, (gain, offer) in zip(self._seconds.expected, [*acceptance, (0.0, 0.0)], strict=True):
            rates.append(tokens / (shorter + given * seconds))
            survival *= gain
            tokens += survival
            shorter += given * (1.0 - offer) * (seconds + extra)
            given *= offer
            extra = 0.0
        self.by_depth, self.first_acceptance = rates, acceptance[0][0]
