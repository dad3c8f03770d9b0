"""What a depth is worth, learnt from cycles; and when another depth is tried."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.contract import CycleRecord
from specdec.policies.adaptive import LASTING, TRIES, AdaptiveConfig, Budget, DrafterDepth
from specdec.policies.rates import STALE, PassCosts, Rates


def cycle(depth, accepted, *, offered=None, draft=0.0, verify=1.0):
    drafted = depth if offered is None else offered
    return CycleRecord(9, depth, drafted, accepted, (0,) * (accepted + 1), draft, verify, 0.0)


@given(seconds=st.lists(st.floats(1e-3, 10.0), min_size=2, max_size=8), accepted=st.booleans())
def test_certain_acceptance_gives_tokens_over_seconds(seconds, accepted):
    """Every draft accepted: k + 1 tokens from depth k; none: one token, whatever the depth costs."""
    rates = Rates(PassCosts(seconds), [0.0] * len(seconds), window=4096)
    deepest = len(seconds) - 1
    for _ in range(2000):
        rates._count(cycle(deepest, deepest if accepted else 0))  # times left out
    rates.update()
    for depth, rate in enumerate(rates.by_depth):
        assert rate == pytest.approx((1 + accepted * depth) / seconds[depth], rel=0.02)


def test_empty_drafts_cost_their_seconds_and_no_pass():
    rates = Rates(PassCosts([1.0, 2.0, 3.0]), [0.0] * 3, window=48)
    for _ in range(400):
        rates.observe(cycle(2, 0, offered=0, draft=0.25))
    rates.update()
    assert rates.by_depth[2] == pytest.approx(1 / 1.25, rel=0.05)


@pytest.mark.parametrize(("pause", "counted"), [(STALE - 1, True), (STALE, False)])
def test_the_time_of_a_drafter_that_catches_up_does_not_count(pause, counted):
    rates = Rates(PassCosts([1.0, 1.5]), [0.0, 0.0], window=48)
    for _ in range(20):
        rates.observe(cycle(1, 1, draft=0.1))
        for _ in range(pause):
            rates.observe(cycle(0, 0))
    before = rates._drafts(1)
    rates.observe(cycle(1, 1, draft=2.0))
    assert (rates._drafts(1) > before) == counted


SECONDS = st.floats(1e-5, 1e-4) | st.floats(1e-3, 0.1)  # as usual; interrupted by other work


@given(drafts=st.lists(st.tuples(st.sampled_from([0, 1, 2, 4, 8]), SECONDS), min_size=3, max_size=12))
def test_the_next_draft_is_not_expected_to_lose_far_more_than_any_before(drafts):
    """Catches: a draft that was interrupted, then an empty one, and the drafter is not asked again for hours."""
    rates = Rates(PassCosts([1.0] * 9), [0.0] * 9, window=48)
    for offered, seconds in drafts:
        rates.observe(cycle(8, 0, offered=offered, draft=seconds))
        assert rates.worst_loss(1) < 16.0 * max(taken for _, taken in drafts)


def test_a_restart_forgets_acceptance_and_keeps_times():
    rates = Rates(PassCosts([1.0, 1.5]), [0.0, 0.0], window=48)
    for _ in range(50):
        rates.observe(cycle(1, 0, draft=0.5))
    seconds, hopeless = rates._drafts(1), rates.first_acceptance
    rates.restart(cycle(1, 1))
    assert rates.first_acceptance > 0.6 > hopeless
    assert rates._drafts(1) == seconds


# --- trials ----------------------------------------------------------------------------------------------------------


def run(current, cycles, *, wait=4, opinion=True, accepted=()):
    """The depths of so many cycles of one token each; a trial comes after ``wait`` tokens, if any are given."""
    config = AdaptiveConfig(max_depth=6, first_probe=4, last_probe=16)
    one = DrafterDepth(config, PassCosts([1.0] * 7), [0.0] * 7)
    one.depth, one._best, one._lasted = current, lambda pace: current, LASTING
    if wait is not None:
        one._wait = lambda: wait
    depths = []
    for at in range(cycles):
        depth = one.next_depth(Budget(1.0))
        depths.append(depth)
        offered = depth if opinion else 0
        one.observe(CycleRecord(9, depth, offered, int(at in accepted), (0,), 0.0, 1.0, 0.0), 0.0)
    return depths, one


def test_distances_double_up_to_the_last():
    asked, _ = run(3, 80, wait=None)
    at = [cycle for cycle, depth in enumerate(asked) if depth != 3]
    assert at[:2] == [4, 13]  # after 4 and 8 tokens, the trial's own token not counted
    assert {later - earlier for earlier, later in zip(at[2:], at[3:], strict=False)} == {17}


def test_a_drafter_without_a_draft_is_asked_a_few_times():
    assert run(0, 4 + TRIES + 2, opinion=False)[0] == [0] * 4 + [1] * TRIES + [0] * 2


def test_only_a_hopeless_draft_has_no_second_cycle():
    assert run(0, 16)[0] == [*[0] * 4, 1, 1, *[0] * 4, 1, *[0] * 4, 1]


def test_speculation_tries_plain_decoding_and_both_neighbours_in_turn():
    assert [depth for depth in run(6, 6, wait=1)[0] if depth != 6] == [0, 5]  # one token between trials
    assert [depth for depth in run(3, 6, wait=1)[0] if depth != 3] == [0, 4, 2]


@pytest.mark.parametrize(("accepted", "drafts"), [((), 2), ((4,), 2), ((5,), 2), ((10,), 1)])
def test_an_accepted_first_draft_is_news_while_speculation_is_off(accepted, drafts):
    """What was learnt before it is forgotten; the second cycle of a trial is for its time."""
    _, one = run(0, 11 if accepted == (10,) else 6, accepted=accepted)
    assert round(one.rates.drafts) == drafts
