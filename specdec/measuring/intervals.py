"""Jackknife intervals over prompts.

Tokens of one prompt resemble each other, so an interval over tokens would be far too narrow. Instead every rate is
recomputed with each prompt left out in turn. The spread of these values gives its standard error (Efron and Tibshirani
1993, "An Introduction to the Bootstrap", equation 11.5), and Student's t with n - 1 degrees of freedom its interval.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specdec.exchange import Float64

Interval = tuple[float, float] | None

LEVEL = 0.95
MIN_PROMPTS = 8  # fewer are too few to generalise


def left_out(counts: NDArray[Any]) -> Float64:
    """Sums of counters over all prompts but one: ``[prompts, ...]`` -> ``[prompts, ...]``."""
    counts = np.asarray(counts, dtype=np.float64)
    sums: Float64 = counts.sum(axis=0) - counts
    return sums


def interval(estimate: float, values: Float64, *, low: float = 0.0, high: float = math.inf) -> Interval:
    """The 95 % interval of an estimate, within ``low`` and ``high``, from its ``values`` without each prompt in turn.

    None if there are too few prompts, or if leaving one out makes the value unknown (NaN).
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
    """``part / whole``; NaN if ``whole`` is 0."""
    part, whole = np.asarray(part, dtype=np.float64), np.asarray(whole, dtype=np.float64)
    out: Float64 = np.full(np.broadcast(part, whole).shape, np.nan)
    np.divide(part, whole, out=out, where=whole != 0)
    return out
