"""The adaptive policy against scripted acceptance and cost: regret, switching off, coming back. No clock is read."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from specdec.contract import CycleRecord, Stats
from specdec.policies.adaptive import AdaptiveConfig, AdaptivePolicy

Costs = Callable[[int], float]  # depth -> seconds of a cycle


def run(policy: AdaptivePolicy, acceptance: Callable[[int], Sequence[float]], cost: Costs, cycles: int, seed: int = 0):
    """Play cycles; ``acceptance(cycle)`` gives the conditional rates. Yields (depth, tokens, seconds)."""
    random_ = random.Random(seed)
    position = 10
    for number in range(cycles):
        depth = policy.next_depth(Stats())
        rates = acceptance(number)
        accepted = 0
        while accepted < depth and random_.random() < rates[min(accepted, len(rates) - 1)]:
            accepted += 1
        seconds = cost(depth) * random_.uniform(0.97, 1.03)
        policy.record(
            CycleRecord(
                position=position, depth=depth, offered=depth, accepted=accepted, emitted=(0,) * (accepted + 1),
                draft_seconds=0.0, verify_seconds=seconds, commit_seconds=0.0,
            )
        )  # fmt: skip
        position += accepted + 1
        yield depth, accepted + 1, seconds


def expected_rate(rates: Sequence[float], cost: Costs, depth: int) -> float:
    total = survival = 1.0
    for position in range(depth):
        survival *= rates[min(position, len(rates) - 1)]
        total += survival
    return total / cost(depth)


PROCESSES = {
    "steep cost, high acceptance": ([0.9, 0.85, 0.8], lambda k: 1.0 + 0.35 * k),
    "flat cost, high acceptance": ([0.85], lambda k: 1.0 + 0.08 * k),
    "flat cost, middling acceptance": ([0.6, 0.5, 0.4], lambda k: 1.0 + 0.12 * k),
    "hopeless": ([0.05], lambda k: 1.0 + 0.3 * k),
    "a dear first step": ([0.7, 0.7], lambda k: 1.0 if k == 0 else 1.6 + 0.05 * k),
    "break-even": ([0.3], lambda k: 1.0 + 0.3 * k),
}


@pytest.mark.parametrize("name", PROCESSES)
def test_regret_against_the_best_fixed_depth_is_small(name):
    """After 200 cycles the rate is within 5 % of the best fixed depth's, averaged over seeds. Catches a policy that
    never leaves its trials, counts positions wrongly, or forgets that depth 0 is a candidate."""
    rates, cost = PROCESSES[name]
    best = max(expected_rate(rates, cost, depth) for depth in range(7))
    reached = []
    for seed in range(12):
        played = list(run(AdaptivePolicy(AdaptiveConfig()), lambda _: rates, cost, 400, seed))[200:]
        # judged by expected tokens of the depths chosen, so that luck with the draws is no merit
        tokens = sum(expected_rate(rates, cost, depth) * cost(depth) for depth, _, _ in played)
        reached.append(tokens / sum(cost(depth) for depth, _, _ in played))
    assert sum(reached) / len(reached) > 0.95 * best


def test_a_useless_drafter_costs_under_two_per_cent_over_200_tokens():
    """Random heads must not slow anybody down; trials and probes are the whole price."""
    for seed in range(10):
        played = list(run(AdaptivePolicy(AdaptiveConfig()), lambda _: [0.0], lambda k: 1.0 + 0.1 * k, 1000, seed))
        seconds = tokens = 0.0
        for _, emitted, taken in played:
            seconds, tokens = seconds + taken, tokens + emitted
            if tokens >= 200:
                break
        assert tokens / seconds > 0.98


def test_it_comes_back_when_acceptance_does():
    """Off during a hopeless stretch, on again within two probes of the jump."""
    policy = AdaptivePolicy(AdaptiveConfig(first_probe=16, last_probe=64))
    played = list(run(policy, lambda n: [0.0] if n < 300 else [0.95], lambda k: 1.0 + 0.1 * k, 600))
    assert all(depth <= 1 for depth, _, _ in played[60:300])
    assert sum(depth > 0 for depth, _, _ in played[100:300]) <= 6  # probes only
    assert sum(depth > 0 for depth, _, _ in played[300 + 2 * 64 + 4 :]) > 100


def test_off_says_why_and_on_does_not():
    policy = AdaptivePolicy(AdaptiveConfig())
    list(run(policy, lambda _: [0.0], lambda k: 1.0 + 0.3 * k, 60))
    assert policy.reason.startswith("plain decoding is faster")
    policy = AdaptivePolicy(AdaptiveConfig())
    list(run(policy, lambda _: [0.9], lambda k: 1.0 + 0.1 * k, 60))
    assert policy.reason == ""


def test_depth_never_exceeds_the_limit():
    for limit in (1, 2, 5, 15):
        policy = AdaptivePolicy(AdaptiveConfig(max_depth=limit))
        assert max(d for d, _, _ in run(policy, lambda _: [0.99], lambda k: 1.0 + 0.01 * k, 200)) <= limit
