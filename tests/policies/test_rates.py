"""What a depth is worth: expected tokens over expected seconds, learnt from cycles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.contract import CycleRecord
from specdec.policies.rates import STALE, Rates


def cycle(
    depth: int, accepted: int, *, offered: int | None = None, draft: float = 0.0, verify: float = 1.0
) -> CycleRecord:
    drafted = depth if offered is None else offered
    return CycleRecord(9, depth, drafted, accepted, (0,) * (accepted + 1), draft, verify, 0.0)


@given(seconds=st.lists(st.floats(1e-3, 10.0), min_size=2, max_size=8), accepted=st.booleans())
def test_certain_acceptance_gives_tokens_over_seconds(seconds, accepted):
    """Every draft accepted: k + 1 tokens from depth k; none: one token, whatever the depth costs."""
    rates = Rates(seconds, window=4096)
    deepest = len(seconds) - 1
    for _ in range(2000):
        rates._count(cycle(deepest, deepest if accepted else 0))  # times left out
    rates.update()
    for depth, rate in enumerate(rates.by_depth):
        assert rate == pytest.approx((1 + accepted * depth) / seconds[depth], rel=0.02)


def test_empty_drafts_cost_their_seconds_and_no_pass():
    rates = Rates([1.0, 2.0, 3.0], window=48)
    for _ in range(400):
        rates.observe(cycle(2, 0, offered=0, draft=0.25))
    rates.update()
    assert rates.by_depth[2] == pytest.approx(1 / 1.25, rel=0.05)


@pytest.mark.parametrize(("pause", "counted"), [(STALE - 1, True), (STALE, False)])
def test_the_time_of_a_drafter_that_catches_up_does_not_count(pause, counted):
    rates = Rates([1.0, 1.5], window=48)
    for _ in range(20):
        rates.observe(cycle(1, 1, verify=1.5))
        for _ in range(pause):
            rates.observe(cycle(0, 0))
    before = rates._costs.seconds[1]
    rates.observe(cycle(1, 1, verify=6.0))
    assert (rates._costs.seconds[1] > before) == counted


def test_a_restart_forgets_acceptance_and_keeps_times():
    rates = Rates([1.0, 1.5], window=48)
    for _ in range(50):
        rates.observe(cycle(1, 0, verify=1.5))
    seconds, hopeless = list(rates._costs.seconds), rates.first_acceptance
    rates.restart(cycle(1, 1))
    assert rates.first_acceptance > 0.6 > hopeless
    assert rates._costs.seconds == seconds
