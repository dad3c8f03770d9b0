"""Tests of whether tokens follow a distribution, and distributions that differ from one to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from specdec.testing.checks import expect

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specdec.exchange import Float64


MERGE_BELOW = 5.0  # merge cells with smaller expected counts: chi-square is unreliable there


def goodness_of_fit(
    counts: Sequence[int] | NDArray[np.int64], probabilities: Sequence[float] | NDArray[np.float64]
) -> float:
    """The p-value of Pearson's chi-square of counts against the probabilities of the same cells.

    Cells expected fewer than ``MERGE_BELOW`` times are merged, smallest first, until no such cell is left. The p-value
    is 0 if a cell of probability 0 was hit.
    """
    observed, expected = np.asarray(counts, np.float64).ravel(), np.asarray(probabilities, np.float64).ravel()
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


TAIL = np.array([0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2])
EDGES = np.append(
    TAIL, 1 - TAIL[-2::-1]
)  # of the parts of the unit interval whose places are counted: fine at its ends
RARE = 1e-8  # false alarms of one group; there are some hundred


class Places:
    """Where drawn tokens hit the unit interval, by group: uniformly, whatever their distributions are.

    Each token has a part of the interval as long as its probability, and its place is drawn within that part. Under the
    distributions that the tokens should follow, places are uniform and independent (the probability integral transform:
    Rosenblatt 1952).
    """

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng([seed, 8])
        self._counts: dict[str, NDArray[np.int64]] = {}

    def add(self, groups: Sequence[str], token: int, probs: Float64, keys: Float64) -> float:
        """Add a token to groups, with its distribution ``[V]``; returns its place.

        Args:
            keys: ``[V]``: tokens lie in the interval in ascending order of these.
        """
        lower = (keys < keys[token]) | ((keys == keys[token]) & (np.arange(len(keys)) < token))
        place = float(probs[lower].sum() + self._rng.random() * probs[token]) / float(probs.sum())
        cell = int(np.searchsorted(EDGES, place, "right")) - 1
        for group in groups:
            self._counts.setdefault(group, np.zeros(len(EDGES) - 1, np.int64))[min(cell, len(EDGES) - 2)] += 1
        return place

    def judge(self, what: str, **case: object) -> None:
        """Raises: Broken if the places of a group are not uniform."""
        for group, counts in self._counts.items():
            fit, expected = goodness_of_fit(counts, np.diff(EDGES)), np.round(np.diff(EDGES) * counts.sum(), 1)
            expect(fit >= RARE, f"{what}: p = {fit:.0e}", got=counts, expected=expected, at=group, **case)
