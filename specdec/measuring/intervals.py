"""Intervals over prompts: the jackknife.

Tokens of one prompt resemble each other, so an interval over tokens would be far too narrow. Every rate is computed
again with one prompt left out, from the sums over all others; the spread of these values is its standard error
(Efron and Tibshirani 1993, "An Introduction to the Bootstrap", equation 11.5), and Student's t of n - 1 degrees of
freedom makes it an interval.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]

Interval = tuple[float, float] | None

LEVEL = 0.95
MIN_PROMPTS = 8  # fewer say too little about other prompts


def left_out(counts: NDArray[Any]) -> Float64:
    """Sums of counters over all prompts but one: ``[prompts, ...]`` -> ``[prompts, ...]``."""
    counts = np.asarray(counts, dtype=np.float64)
    sums: Float64 = counts.sum(axis=0) - counts
    return sums


def interval(estimate: float, values: Float64, *, low: float = 0.0, high: float = math.inf) -> Interval:
    """The 95 % interval of an estimate between ``low`` and ``high``, from its ``values`` without each prompt in turn.

    None where there are too few prompts, or where a value is unknown without one of them (NaN).
    """
    prompts = len(values)
    if prompts < MIN_PROMPTS or not math.isfinite(estimate) or not np.isfinite(values).all():
        return None
    error = math.sqrt((prompts - 1) * float(np.var(values)))
    reach = student_t(prompts - 1) * error
    return max(low, estimate - reach), min(high, estimate + reach)


def student_t(freedom: int) -> float:
    """The two-sided quantile of Student's t: Abramowitz and Stegun 1964, 26.7.5; 0.03 % off at 7 degrees."""
    z = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2)
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return t + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)


def ratio(part: Any, whole: Any) -> Float64:
    """``part / whole``, NaN where ``whole`` is 0."""
    part, whole = np.asarray(part, dtype=np.float64), np.asarray(whole, dtype=np.float64)
    out: Float64 = np.full(np.broadcast(part, whole).shape, np.nan)
    np.divide(part, whole, out=out, where=whole != 0)
    return out
