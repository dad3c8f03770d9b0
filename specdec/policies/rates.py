"""Estimates the rate of each depth: expected tokens over expected seconds of a cycle."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.contract import CycleRecord
from specdec.policies.acceptance import Acceptance
from specdec.policies.cycle_costs import CycleCosts

STALE = 4  # plain cycles after which a drafter must catch up, so that its next cycle takes unusually long
MISSES = 8  # empty drafts over which the cost of one is averaged


class Rates:
    """The rate ``E(k) / t(k)`` of every depth k, learnt from cycles.

    Cycles are renewals, so this is the long-run rate of tokens at depth k. E comes from ``Acceptance``, t from
    ``CycleCosts``.

    Args:
        seconds: of a cycle, by drafted tokens from 0 to the deepest; only their ratios matter.
        window: cycles that acceptance remembers.

    Attributes:
        by_depth: tokens per second, from depth 0 to the deepest draft; computed by ``update``.
        plain_cycles: consecutive cycles without a draft.
    """

    def __init__(self, seconds: Sequence[float], window: int) -> None:
        self._costs = CycleCosts(seconds)
        self._acceptance = Acceptance(len(seconds) - 1, window)
        self._miss = 0.0  # seconds that the drafter takes to draft nothing
        self.plain_cycles = 0
        self.by_depth: list[float] = []
        self.update()

    @property
    def first_acceptance(self) -> float:
        """The estimated acceptance at position 0."""
        return self._acceptance.gains[0]

    @property
    def drafts(self) -> float:
        """Decayed count of the cycles that observed position 0."""
        return self._acceptance.drafts

    def adopt(self, other: Rates) -> None:
        """Start from what another generation learnt; its acceptance counts for less."""
        self._acceptance.adopt(other._acceptance)
        self._costs.adopt(other._costs)
        self._miss = other._miss

    def observe(self, cycle: CycleRecord) -> None:
        """Learn from a cycle; the time of a drafter that catches up after a pause is ignored."""
        if cycle.depth:
            self._acceptance.observe(cycle)
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

    def restart(self, cycle: CycleRecord) -> None:
        """Discard what was learnt about acceptance and start again from this cycle."""
        self._acceptance.forget()
        self._acceptance.observe(cycle)

    def update(self) -> None:
        """Compute ``by_depth``. t(k) is the mean over the drafts returned for depth k."""
        rates = []
        tokens = survival = given = 1.0  # E(k); A_k; the probability of a draft of k tokens or more
        shorter = 0.0  # seconds of drafts of fewer than k tokens, weighted by probability
        extra = self._miss
        for seconds, gain, offer in zip(
            self._costs.seconds, (*self._acceptance.gains, 0.0), (*self._acceptance.offers, 0.0), strict=True
        ):
            rates.append(tokens / (shorter + given * seconds))
            survival *= gain
            tokens += survival
            shorter += given * (1.0 - offer) * (seconds + extra)
            given *= offer
            extra = 0.0
        self.by_depth = rates
