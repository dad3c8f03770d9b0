"""What a depth is worth: expected tokens over expected seconds, learnt from cycles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.contract import CycleRecord
from specdec.policies.estimates import STALE, Rates
from tests.selection import examples


def cycle(
    depth: int, accepted: int, *, offered: int | None = None, draft: float = 0.0, verify: float = 1.0
) -> CycleRecord:
    drafted = depth if offered is None else offered
    return CycleRecord(9, depth, drafted, accepted, (0,) * (accepted + 1), draft, verify, 0.0)


@examples(20)
@given(seconds=st.lists(st.floats(1e-3, 10.0), min_size=2, max_size=8), accepted=st.booleans())
def test_certain_acceptance_gives_tokens_over_seconds(seconds: list[float], accepted: bool) -> None:
    """Every draft accepted: k + 1 tokens from depth k; none: one token, whatever the depth costs."""
    rates = Rates(seconds, window=4096)
    deepest = len(seconds) - 1
    for _ in range(2000):
        rates.observe(cycle(deepest, deepest if accepted else 0, verify=seconds[deepest]))
    for depth, rate in enumerate(rates.by_depth):
        assert rate == pytest.approx((1 + accepted * depth) / seconds[depth], rel=0.02)


def test_empty_drafts_cost_their_seconds_and_no_pass() -> None:
    rates = Rates([1.0, 2.0, 3.0], window=48)
    for _ in range(400):
        rates.observe(cycle(2, 0, offered=0, draft=0.25))
    assert rates.by_depth[2] == pytest.approx(1 / 1.25, rel=0.05)


@pytest.mark.parametrize(("pause", "counted"), [(STALE - 1, True), (STALE, False)])
def test_the_time_of_a_drafter_that_catches_up_does_not_count(pause: int, counted: bool) -> None:
    rates, unbroken = Rates([1.0, 1.5], window=48), Rates([1.0, 1.5], window=48)
    for each, verify in ((rates, 6.0), (unbroken, 1.5)):
        for _ in range(20):
            each.observe(cycle(1, 1, verify=1.5))
            for _ in range(pause):
                each.observe(cycle(0, 0))
        each.observe(cycle(1, 1, verify=verify))
    assert (rates.by_depth[1] < unbroken.by_depth[1]) == counted


def test_news_forget_acceptance_and_keep_times() -> None:
    rates = Rates([1.0, 1.5], window=48)
    for number in range(50):
        rates.observe(cycle(number % 2, 0, verify=2.5 if number % 2 else 1.0))
    assert rates.first_acceptance < 0.1
    rates.observe(cycle(1, 1, verify=2.5), news=True)
    assert rates.first_acceptance > 0.6
    assert rates.by_depth[1] == pytest.approx((1 + rates.first_acceptance) / 2.5, rel=0.15)


def test_an_unvisited_depth_is_corrected_like_its_neighbour() -> None:
    """Depth 1 takes twice what the table says, measured beside plain decoding: so do the depths behind it."""
    rates = Rates([1.0, 1.2, 1.4], window=48)
    before = rates.by_depth[2]
    for number in range(60):
        rates.observe(cycle(number % 2, 0, verify=2.4 if number % 2 else 1.0))
    assert rates._seconds.expected == pytest.approx([1.0, 2.4, 2.8], rel=0.15)
    assert rates.by_depth[2] < before
