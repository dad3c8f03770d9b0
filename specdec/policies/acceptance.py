"""Estimates draft acceptance by lookahead position, from decayed counts."""

from __future__ import annotations

from specdec.contract import CycleRecord

PRIOR_WEIGHT = 2.0  # observations that a prior counts as
FIRST_GUESS = 0.6  # prior of position 0
CARRIED = 8.0  # most observations per position that one generation hands to the next


class Acceptance:
    """Two decayed ratios per lookahead position; neither assumes that drafter and target are independent.

    *Gain* of position i: of the cycles that asked for more than i tokens and accepted the first i, the share that also
    accepted token i. The product of gains is the survival A_i; a cycle of depth k gives ``E(k) = 1 + A_1 + ... + A_k``
    tokens. *Offer* of position i: of the cycles that asked for more than i tokens and got at least i, the share that
    got one more. A drafter may give fewer tokens than asked for, and a shorter draft costs less.
    """

    def __init__(self, positions: int, window: int) -> None:
        self._keep = 1.0 - 1.0 / window
        self._gain_seen = [0.0] * positions
        self._gain_held = [0.0] * positions
        self._offer_seen = [0.0] * positions
        self._offer_held = [0.0] * positions
        self.gains: list[float] = []
        """By position; the prior of a position is the acceptance of offered tokens at the one before it."""
        self.offers: list[float] = []
        """By position; a drafter is assumed to give as many tokens as asked for until it does not."""
        self._share_out()

    def observe(self, cycle: CycleRecord) -> None:
        """Count one cycle; a cycle of depth 0 carries no information."""
        keep, asked = self._keep, min(cycle.depth, len(self._gain_seen))
        for position in range(min(asked, cycle.accepted + 1)):
            self._gain_seen[position] = self._gain_seen[position] * keep + 1.0
            self._gain_held[position] = self._gain_held[position] * keep + (position < cycle.accepted)
        for position in range(min(asked, cycle.offered + 1)):
            self._offer_seen[position] = self._offer_seen[position] * keep + 1.0
            self._offer_held[position] = self._offer_held[position] * keep + (position < cycle.offered)
        self._share_out()

    def _share_out(self) -> None:
        gains, offers, guess = [], [], FIRST_GUESS
        for seen, held, offer_seen, offer_held in zip(
            self._gain_seen, self._gain_held, self._offer_seen, self._offer_held, strict=True
        ):
            gain = (held + PRIOR_WEIGHT * guess) / (seen + PRIOR_WEIGHT)
            offer = (offer_held + PRIOR_WEIGHT) / (offer_seen + PRIOR_WEIGHT)
            guess = min(gain / offer, 1.0)
            gains.append(gain)
            offers.append(offer)
        self.gains, self.offers = gains, offers

    @property
    def drafts(self) -> float:
        """Decayed count of the cycles that observed position 0."""
        return self._gain_seen[0]

    def forget(self) -> None:
        """Discard all counts."""
        for counts in (self._gain_seen, self._gain_held, self._offer_seen, self._offer_held):
            counts[:] = [0.0] * len(counts)
        self._share_out()

    def adopt(self, other: Acceptance) -> None:
        """Start from another generation's counts, weighted as at most ``CARRIED`` observations."""
        for position in range(min(len(self._gain_seen), len(other._gain_seen))):
            for seen, held, their_seen, their_held in (
                (self._gain_seen, self._gain_held, other._gain_seen, other._gain_held),
                (self._offer_seen, self._offer_held, other._offer_seen, other._offer_held),
            ):
                share = min(1.0, CARRIED / max(their_seen[position], CARRIED))
                seen[position], held[position] = share * their_seen[position], share * their_held[position]
        self._share_out()
