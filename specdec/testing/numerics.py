"""Numbers for checks: a chi-square test without SciPy, tolerances with their derivation, NaN filling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MERGE_BELOW = 5.0  # expected counts under which the chi-square approximation is not trusted; such cells are merged

EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Distance from 1 to the next number; rounding to nearest moves a value by at most half of it, relatively."""

SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}
"""Distance between the numbers next to 0, which no rounding is finer than."""


@attrs.frozen
class Fit:
    """How well counts fit a law. ``impossible`` lists cells of probability 0 that occurred: no luck explains those."""

    p_value: float
    statistic: float
    freedom: int
    impossible: tuple[int, ...] = ()

    def passes(self, threshold: float) -> bool:
        """Whether the counts may come from the law, at this level of false alarms."""
        return not self.impossible and self.p_value >= threshold

    def __str__(self) -> str:
        if self.impossible:
            return (
                f"{len(self.impossible)} outcome(s) of probability 0 occurred, the first is cell {self.impossible[0]}"
            )
        return f"chi-square {self.statistic:.1f} with {self.freedom} degrees of freedom, p = {self.p_value:.1e}"


def goodness_of_fit(counts: Sequence[int] | NDArray[np.int64], law: Sequence[float] | NDArray[np.float64]) -> Fit:
    """Pearson's chi-square of counts against the probabilities of the same cells.

    Cells expected fewer than ``MERGE_BELOW`` times are merged, smallest first, until no such cell is left.
    """
    observed, expected = np.asarray(counts, np.float64).ravel(), np.asarray(law, np.float64).ravel()
    if observed.shape != expected.shape:
        raise ValueError(f"{observed.size} counts and {expected.size} probabilities")
    impossible = tuple(int(cell) for cell in np.flatnonzero((expected <= 0) & (observed > 0)))
    possible = expected > 0
    order = np.argsort(expected[possible], kind="stable")
    observed, expected = observed[possible][order], expected[possible][order]
    expected = expected / expected.sum() * observed.sum()
    low = int(np.searchsorted(expected, MERGE_BELOW))
    if 0 < low < len(expected) and expected[:low].sum() < MERGE_BELOW:
        low += 1  # the merged cell takes in the smallest of the others
    if low:
        observed = np.append(observed[:low].sum(), observed[low:])
        expected = np.append(expected[:low].sum(), expected[low:])
    statistic = float(((observed - expected) ** 2 / expected).sum()) if len(expected) else 0.0
    freedom = max(len(expected) - 1, 0)
    return Fit(chi_square_tail(statistic, freedom), statistic, freedom, impossible)


def chi_square_tail(statistic: float, freedom: int) -> float:
    """Probability that a chi-square variable exceeds ``statistic``: ``Q(freedom / 2, statistic / 2)``."""
    return 1.0 if freedom <= 0 or statistic <= 0 else _upper_gamma(freedom / 2.0, statistic / 2.0)


def _upper_gamma(a: float, x: float) -> float:
    """The regularised upper incomplete gamma function, by series for small x, else by Lentz's continued fraction.

    Source: DLMF 8.11.4 (series) and 8.9.2 (fraction), https://dlmf.nist.gov/8.
    """
    log_scale = a * math.log(x) - x - math.lgamma(a)
    if x < a + 1.0:
        term = total = 1.0 / a
        n = a
        while abs(term) > abs(total) * 1e-15:
            n += 1.0
            term *= x / n
            total += term
        return max(0.0, 1.0 - total * math.exp(log_scale))
    tiny = 1e-300
    b = x + 1.0 - a
    c, d = 1.0 / tiny, 1.0 / b
    h = d
    for i in range(1, 10_000):
        an = -i * (i - a)
        b += 2.0
        d = 1.0 / (an * d + b or tiny)
        c = b + an / c or tiny
        h *= d * c
        if abs(d * c - 1.0) < 1e-15:
            break
    return math.exp(log_scale) * h


def binomial_interval(successes: int, trials: int, z: float = 4.5) -> tuple[float, float]:
    """Wilson's score interval for a rate; z = 4.5 is missed 7 times in a million."""
    if trials == 0:
        return 0.0, 1.0
    rate, square = successes / trials, z * z
    centre = (rate + square / (2 * trials)) / (1 + square / trials)
    half = z * math.sqrt(rate * (1 - rate) / trials + square / (4 * trials * trials)) / (1 + square / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


def dot_tolerance(dtype: str, length: int, magnitude: NDArray[np.float64], roundings: int = 1) -> NDArray[np.float64]:
    """How far a dot product over ``length`` terms may be from the float64 one.

    ``magnitude`` is ``sum |x_i w_i|``. Float32 accumulation in any order is off by at most ``length * 2^-24`` of it
    (Higham 2002, section 3.1); each rounding to the activation dtype adds half its epsilon of the value, which is at
    most the magnitude. Twice that, since inputs of later roundings are rounded themselves.
    """
    bound: NDArray[np.float64] = magnitude * (length * 2.0**-23 + roundings * EPSILON[dtype]) + 1e-30
    return bound


def fill_with_nan(owner: object) -> int:
    """Fill every writable floating-point array among an object's attributes with NaN; returns how many there were.

    For buffers whose contents must not matter: a value that is read from one shows up as NaN.
    """
    filled = 0
    for array in vars(owner).values():
        if isinstance(array, np.ndarray) and np.issubdtype(array.dtype, np.floating):
            array.fill(np.nan)
            filled += 1
        elif hasattr(array, "is_floating_point") and array.is_floating_point():
            array.fill_(math.nan)
            filled += 1
    return filled
