"""Tokens that plain decoding would not have chosen, and whether rounding explains them."""

from __future__ import annotations

import abc
import enum
import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

GAP_EDGES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Edges of the gap histogram in nats; the first bin starts at 0 (a tie), the last is open."""

ROUNDING: Mapping[str, float] = {"float32": 1e-3, "float16": 2**-5, "bfloat16": 2**-2}
"""Nats between two logits that rounding may exchange, by the format of the activations.

For the 16-bit formats, two steps of a number from 16 to 32, where the best logits of a row usually are. For float32,
what sums in another order differ by (1e-4 or less in the runs of ``docs/how-to/audit-another-engine.md``), with room.
"""


class Verdict(enum.Enum):
    """What a divergence is."""

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

    def verdict(self, gap: float) -> Verdict:
        """The verdict on a token ``gap`` nats below the best one."""
        if math.isnan(gap):
            return Verdict.UNKNOWN
        return Verdict.TIE if gap <= self.tie else Verdict.REAL if gap > self.real else Verdict.UNKNOWN


def rounding_of(explained: float | str | None) -> Rounding:
    """From nats that rounding explains, or a number format; whatever any of ``ROUNDING`` allows if it is not known."""
    if isinstance(explained, float | int):
        return Rounding(explained, explained)
    known = [ROUNDING[explained]] if explained and explained in ROUNDING else list(ROUNDING.values())
    return Rounding(min(known), max(known))


@attrs.frozen
class Divergence:
    """A token that plain decoding would not have chosen: its id, or its text where an engine gives no ids."""

    position: int  # in the audited tokens; 0 is the first after the prompt
    token: int | str  # what the run committed
    chosen: int | str  # what plain decoding chooses there
    gap: float  # nats from the row's best logit to the committed token's; inf for a banned token
    top_two: float  # nats between the row's two best logits


class GapReport(abc.ABC):
    """What reports of divergences share: where they are, and how near the choices were.

    Subclasses have the fields ``tokens`` (how many were compared), ``gaps`` and ``divergences``.
    """

    tokens: int
    gaps: Sequence[float]  # the top-two gap of every position
    divergences: Sequence[Divergence]

    @abc.abstractmethod
    def verdict(self, divergence: Any) -> Verdict:
        """Whether rounding explains one of the divergences."""

    def histogram(self) -> list[tuple[float, float, int, int]]:
        """Bins of the top-two gap: from, to (inf at last), positions, divergences."""
        everywhere = Counter(bisect_right(GAP_EDGES, gap) for gap in self.gaps)
        diverging = Counter(bisect_right(GAP_EDGES, divergence.top_two) for divergence in self.divergences)
        edges = itertools.pairwise((0.0, *GAP_EDGES, math.inf))
        return [(low, high, everywhere[i], diverging[i]) for i, (low, high) in enumerate(edges)]

    def histogram_dict(self) -> list[dict[str, Any]]:
        """The histogram for JSON."""
        names = ("from", "to", "positions", "divergences")
        return [finite(dict(zip(names, row, strict=True))) for row in self.histogram()]


def finite(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields for JSON, which has no number for infinity and NaN: null instead."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in fields.items()
    }


def bin_label(low: float, high: float) -> str:
    """A bin of the histogram as text: ``0.1 to 0.3``."""
    return f"{low:g} to {high:g}" if math.isfinite(high) else f"{low:g} and more"
