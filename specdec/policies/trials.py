"""Schedules trial cycles at depths other than the best one, to keep their estimates up to date."""

from __future__ import annotations

from specdec.contract import CycleRecord

OPENING = 2  # cycles of each depth tried at the start if nothing was measured
TRIES = 8  # cycles that a trial waits for a draft: an empty draft carries no information
NEARER = 4  # while speculation is on, trials are this many times as frequent, because they cost less
HOPELESS = 0.3  # acceptance at position 0 below which a rejected trial gets no second cycle


class Trials:
    """A schedule of trial cycles.

    While speculation is off, a trial is one cycle of depth 1, plus a second one for timing unless drafts are hopeless.
    While it is on, a trial is one cycle of another depth. The first trial comes after ``first`` tokens; the distance
    then doubles up to ``last``.

    Args:
        first, last: shortest and longest distance between trials, in tokens.
        max_depth: the deepest draft.
    """

    def __init__(self, first: int, last: int, max_depth: int) -> None:
        self._first, self._last, self._max_depth = first, last, max_depth
        self._opening: list[int] = []
        self._distance = first  # tokens until the next trial
        self._tokens = 0  # tokens since the last trial
        self._cycles = 0  # cycles that the running trial may still take; 0 when none runs
        self._second = False  # whether this is a trial's second cycle
        self._others = 0  # trials of other depths so far

    @property
    def opening(self) -> bool:
        """Whether the trials at the start are still running."""
        return bool(self._opening)

    def open(self) -> None:
        """Begin with plain decoding, three depths and plain decoding again, because nothing is known yet."""
        depths = sorted({1, min(3, self._max_depth), self._max_depth})
        self._opening = [0, *(depth for depth in depths for _ in range(OPENING)), 0]

    def adopt(self, other: Trials) -> None:
        """Continue the schedule of an earlier generation."""
        self._others, self._distance, self._tokens = other._others, other._distance, other._tokens

    def due(self) -> None:
        """Make the next cycle a trial."""
        self._tokens = self._distance

    def reset(self) -> None:
        """Reset the distance to the shortest."""
        self._distance = self._first

    def cancel(self) -> None:
        """End the running trial and start counting tokens towards the next one."""
        self._tokens = self._cycles = 0
        self._second = False

    def depth(self, current: int) -> int:
        """The depth of the next cycle: ``current``, or a trial depth."""
        if self._opening:
            return self._opening[0]
        if not self._cycles:
            if self._tokens < (self._distance // NEARER if current else self._distance):
                return current
            self._cycles = TRIES
        if current == 0:
            return 1
        others = (0, min(current + 1, self._max_depth), current - 1)
        return others[self._others % len(others)]

    def passed(self, tokens: int) -> None:
        """Count a cycle's tokens."""
        if self._opening:
            self._opening.pop(0)
        else:
            self._tokens += tokens

    def is_news(self, cycle: CycleRecord, current: int) -> bool:
        """Whether a trial's first draft was accepted although speculation is off."""
        return bool(self._cycles and current == 0 and not self._second and cycle.accepted)

    def observe(self, cycle: CycleRecord, current: int, first_acceptance: float) -> None:
        """Continue or end the running trial, if any.

        Args:
            current: the depth in force, not the trial depth.
            first_acceptance: the estimate for position 0.
        """
        if not self._cycles:
            return
        self._cycles -= 1
        if cycle.depth and not cycle.offered and self._cycles:
            return  # nothing was drafted
        if current == 0 and not self._second and first_acceptance > HOPELESS:
            self._second, self._cycles = True, 1
            return
        self._others += current > 0
        self._distance = min(2 * self._distance, self._last)
        self.cancel()
