"""Statistics for checks: a chi-square test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

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
    if len(expected) < 2:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    halves = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*halves))  # the tail of chi-square: Abramowitz and Stegun 1964, 26.4.19
