"""Whether rounding explains that another token was chosen."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping

import attrs

ROUNDING: Mapping[str, float] = {"float32": 1e-3, "float16": 2**-5, "bfloat16": 2**-2}
"""Nats between two logits that rounding may exchange, by the format of the activations.

For the 16-bit formats, two steps of a number from 16 to 32, where the best logits of a row usually are. For float32,
what sums in another order differ by (1e-4 or less in the runs of ``docs/how-to/audit-another-engine.md``), with room.
"""


class Verdict(enum.Enum):
    """What a difference is."""

    TIE = "tie within rounding"
    REAL = "other token with a real gap"
    UNKNOWN = "cannot tell"


@attrs.frozen
class Rounding:
    """Which gaps rounding explains.

    Attributes:
        tie: nats; up to here, rounding explains a gap.
        real: nats, at least ``tie``; above, it does not. Between them nobody can tell.
    """

    tie: float
    real: float

    @classmethod
    def of(cls, tolerance: float | None) -> Rounding:
        """From nats that rounding explains; if they are not known, what any of ``ROUNDING`` allows."""
        if tolerance is None:
            return cls(min(ROUNDING.values()), max(ROUNDING.values()))
        return cls(tolerance, tolerance)

    def verdict(self, gap: float) -> Verdict:
        """The verdict on a token ``gap`` nats below the best one."""
        if math.isnan(gap):
            return Verdict.UNKNOWN
        return Verdict.TIE if gap <= self.tie else Verdict.REAL if gap > self.real else Verdict.UNKNOWN
