"""Break-even and verdicts against enumeration, published figures and the thresholds themselves."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.measuring.speed_model import Advice, Prediction, advise, break_even


def enumerated(acceptance):
    """Tokens of a cycle over all outcomes: every draft token is right or wrong, the first wrong one ends it."""
    expected = 0.0
    for outcome in itertools.product((True, False), repeat=len(acceptance)):
        probability = math.prod(a if right else 1 - a for a, right in zip(acceptance, outcome, strict=True))
        expected += probability * (1 + [*outcome, False].index(False))
    return expected


@given(st.floats(0.2, 12.0), st.integers(1, 8))
def test_at_the_break_even_a_depth_is_as_fast_as_plain_decoding(cost, depth):
    needed = break_even(cost, depth)
    if cost > depth + 1:
        assert needed is None
        assert enumerated([1.0] * depth) < cost  # not even a draft that is always right pays
    elif cost <= 1:
        assert needed == 0.0
        assert enumerated([0.0] * depth) >= cost
    else:
        assert enumerated([needed] * depth) == pytest.approx(cost, abs=1e-6)
        if needed > 1e-3:
            assert enumerated([needed - 1e-3] * depth) < cost


@given(st.floats(0.1, 5.0), st.floats(0.0, 3.0))
def test_verdicts_follow_from_the_ends_of_the_interval(low, width):
    found, decided_by = advise(Prediction(depth=2, tokens=2.0, speedup=low + width / 2, interval=(low, low + width)))
    assert (found is Advice.TURN_ON) == (low > 1.05)
    assert (found is Advice.NOT_WORTH_IT) == (low + width < 1.02)
    assert ("lower end" in decided_by) == (found is not Advice.NOT_WORTH_IT)
