"""Intervals over prompts: the cluster bootstrap.

Tokens of one prompt resemble each other, so an interval over tokens would be far too narrow. Whole prompts are drawn
with replacement instead, their counters are added, and every rate is computed from the sums, as it is for the prompts
that there are. Percentile intervals (Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13) are too
narrow for few units; their levels are therefore moved outwards, so that the mean of n normal values would get its t
interval (Hesterberg 2015, "What Teachers Should Know About the Bootstrap", section 5.3: the expanded percentile
interval).
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]

LEVEL = 0.95
DRAWS = 4000
MIN_PROMPTS = 8  # below, the prompts that there are say too little about those that there are not


def resampled(counts: NDArray[Any], *, draws: int = DRAWS, seed: int = 0) -> Float64:
    """Sums of counters over prompts drawn with replacement: ``[prompts, N]`` -> ``[draws, N]``.

    The draws depend on the number of prompts and the seed alone, so that sums of different counters over the same
    prompts belong together row by row.
    """
    prompts = len(counts)
    weights = np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=draws)
    sums: Float64 = weights.astype(np.float64) @ np.asarray(counts, dtype=np.float64)
    return sums


def interval(values: Float64, prompts: int) -> tuple[float, float] | None:
    """The interval of ``[draws]`` values, NaN (0 / 0) left out; None where there are too few prompts."""
    known = values[np.isfinite(values)]
    if prompts < MIN_PROMPTS or not len(known):
        return None
    tail = expanded_tail(prompts)
    low, high = np.quantile(known, [tail, 1 - tail])
    return float(low), float(high)


def expanded_tail(units: int) -> float:
    """The share left out at each end: ``Phi(-sqrt(n / (n - 1)) * t)`` with t the quantile of n - 1 degrees of freedom.

    The quantile is the expansion of Abramowitz and Stegun 1964, 26.7.5, to its third term: 0.3 % off at 4 degrees.
    """
    normal, freedom = statistics.NormalDist(), units - 1
    z = normal.inv_cdf((1 + LEVEL) / 2)
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    return normal.cdf(-math.sqrt(units / freedom) * t)


def ratio(part: Float64, whole: Float64) -> Float64:
    """``part / whole``, NaN where ``whole`` is 0."""
    part, whole = np.asarray(part, dtype=np.float64), np.asarray(whole, dtype=np.float64)
    out = np.full(np.broadcast(part, whole).shape, np.nan)
    np.divide(part, whole, out=out, where=whole != 0)
    return out
