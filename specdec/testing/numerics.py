"""Statistics for checks: a chi-square test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MERGE_BELOW = 5.0  # merge cells with smaller expected counts: chi-square is unreliable there


def goodness_of_fit(
    counts: Sequence[int] | NDArray[np.int64], probabilities: Sequence[float] | NDArray[np.float64]
) -> float:
    """The p-value of Pearson's chi-square of counts against the probabilities of the same cells.

    Cells expected fewer than ``MERGE_BELOW`` times are merged, smallest first, until no such cell is left. The p-value
    is 0 if a cell of probability 0 was hit.
    """
    observed, expected = np.asarray(counts, np.float64).ravel(), np.asarray(probabilities, np.float64).ravel()
    if observed.shape != expected.shape:
        raise ValueError(f"{observed.size} counts and {expected.size} probabilities")
    possible = expected > 0
    if (observed[~possible] > 0).any():
        return 0.0
    order = np.argsort(expected[possible], kind="stable")
    observed, expected = observed[possible][order], expected[possible][order]
    expected = expected / expected.sum() * observed.sum()
    low = int(np.searchsorted(expected, MERGE_BELOW))
    if 0 < low < len(expected) and expected[:low].sum() < MERGE_BELOW:
        low += 1  # the merged cell absorbs the smallest of the others
    if low:
        observed = np.append(observed[:low].sum(), observed[low:])
        expected = np.append(expected[:low].sum(), expected[low:])
    statistic = float(((observed - expected) ** 2 / expected).sum()) if len(expected) else 0.0
    return chi_square_tail(statistic, len(expected) - 1)


def chi_square_tail(statistic: float, freedom: int) -> float:
    """Probability that a chi-square variable of ``freedom`` degrees exceeds ``statistic``.

    Source: Abramowitz and Stegun 1964, 26.4.4 and 26.4.5: finite sums, odd and even degrees of freedom.
    """
    if freedom <= 0 or statistic <= 0:
        return 1.0
    half = statistic / 2
    tail = math.erfc(math.sqrt(half)) if freedom % 2 else 0.0
    powers = [freedom / 2 - i for i in range(1, freedom // 2 + 1)]
    return tail + sum(math.exp(power * math.log(half) - half - math.lgamma(power + 1)) for power in powers)
