"""The bootstrap over prompts: where the answer is known, and how often it holds the truth."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from specdec.measuring.intervals import MIN_PROMPTS, expanded_tail, interval, ratio, resampled


def test_prompts_that_are_all_alike_leave_no_doubt():
    sums = resampled(np.tile([3.0, 7.0, 10.0], (12, 1)))
    assert (sums == np.array([36.0, 84.0, 120.0])).all()
    assert interval(ratio(sums[:, 0], sums[:, 2]), 12) == pytest.approx((0.3, 0.3))


def test_the_spread_of_a_mean_is_the_known_one():
    """Of n values with variance s^2 (over n), the resampled mean has variance s^2 / n."""
    values = np.random.default_rng(3).normal(5.0, 2.0, 30)
    means = resampled(values[:, None], draws=20_000)[:, 0] / 30
    assert means.mean() == pytest.approx(values.mean(), abs=0.02)
    assert means.std() == pytest.approx(values.std() / math.sqrt(30), rel=0.03)


def test_counters_of_one_prompt_are_drawn_together():
    counts = np.random.default_rng(0).integers(1, 9, (10, 2))
    both, first = resampled(counts), resampled(counts[:, :1])
    assert (both[:, 0] == first[:, 0]).all()
    assert (resampled(np.repeat(counts[:, :1], 2, axis=1)) == np.repeat(first, 2, axis=1)).all()


@pytest.mark.parametrize(("freedom", "t"), [(7, 2.3646), (11, 2.2010), (24, 2.0639), (99, 1.9842)])
def test_the_tail_is_that_of_a_t_interval(freedom, t):
    """Against the printed table of Student's t at 95 %, two-sided."""
    wanted = statistics.NormalDist().cdf(-math.sqrt((freedom + 1) / freedom) * t)
    assert expanded_tail(freedom + 1) == pytest.approx(wanted, rel=5e-3)


@pytest.mark.parametrize("prompts", [8, 25])
def test_the_interval_holds_the_truth_as_often_as_it_says(prompts):
    """Rates that differ between prompts; an interval over tokens would hold it in two of three cases."""
    rng = np.random.default_rng(prompts)
    holds = tokens_hold = 0
    for _ in range(300):
        offered = rng.integers(10, 40, prompts)
        accepted = rng.binomial(offered, rng.beta(7, 3, prompts))
        sums = resampled(np.stack([accepted, offered], axis=1), draws=1000)
        low, high = interval(ratio(sums[:, 0], sums[:, 1]), prompts) or (math.nan, math.nan)
        holds += low <= 0.7 <= high
        rate, total = accepted.sum() / offered.sum(), offered.sum()
        tokens_hold += abs(rate - 0.7) <= 1.96 * math.sqrt(rate * (1 - rate) / total)
    assert 0.91 <= holds / 300 <= 0.99
    assert tokens_hold / 300 < 0.85


def test_too_few_prompts_have_no_interval():
    values = np.linspace(0.0, 1.0, 100)
    assert interval(values, MIN_PROMPTS - 1) is None
    assert interval(values, MIN_PROMPTS) is not None
    assert interval(np.full(100, np.nan), MIN_PROMPTS) is None
    low, high = interval(np.concatenate([values, [np.nan, np.inf]]), 1000) or (math.nan, math.nan)
    assert 0.0 <= low < high <= 1.0


def test_nothing_over_nothing_is_no_rate():
    assert np.isnan(ratio(np.array([0.0]), np.array([0.0])))[0]
    assert ratio(np.array([1.0]), np.array([4.0])).tolist() == [0.25]
