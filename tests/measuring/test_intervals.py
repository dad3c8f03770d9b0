"""The jackknife over prompts: where the answer is known, and how often the interval holds the truth."""

import math

import numpy as np
import pytest

from specdec.measuring.intervals import MIN_PROMPTS, interval, left_out, ratio


@pytest.mark.parametrize("prompts", [8, 25])
def test_the_interval_holds_the_truth_as_often_as_it_says(prompts):
    """Rates that differ between prompts; an interval over tokens would hold the truth in two of three cases."""
    rng = np.random.default_rng(prompts)
    holds = tokens_hold = 0
    for _ in range(300):
        offered = rng.integers(10, 40, prompts)
        accepted = rng.binomial(offered, rng.beta(7, 3, prompts))
        rate, total = accepted.sum() / offered.sum(), offered.sum()
        low, high = interval(rate, ratio(left_out(accepted), left_out(offered))) or (math.nan, math.nan)
        holds += low <= 0.7 <= high
        tokens_hold += abs(rate - 0.7) <= 1.96 * math.sqrt(rate * (1 - rate) / total)
    assert 0.91 <= holds / 300 <= 0.99
    assert tokens_hold / 300 < 0.85


def test_too_few_prompts_have_no_interval():
    values = np.linspace(0.4, 0.6, 100)
    assert interval(0.5, values[: MIN_PROMPTS - 1]) is None
    assert interval(0.5, values[:MIN_PROMPTS]) is not None
    assert interval(math.nan, values) is None
    assert interval(0.5, np.concatenate([values, [np.nan]])) is None  # a single prompt decides
