"""The adaptive policy against scripted acceptance and cost: regret, switching off, coming back. No clock is read."""

import itertools
import random
import statistics

import attrs
import pytest

from specdec.contract import CycleRecord, PrepareEnv, Stats
from specdec.errors import UnsupportedError
from specdec.policies.adaptive import GRANT, SHARE, AdaptiveConfig, AdaptivePolicy, Learnt, specdec_depth_policies
from specdec.records.cost_table import CostTable
from specdec.testing import TableModel
from tests.policies.simulation import DEEPEST, PROCESSES, TABLES, Process, adaptive, best_fixed_rate, line, play, rate
from tests.selection import cases

SEEDS = 8
MORE_SEEDS = {"noisy costs with outliers": 48}  # where luck is larger
JUDGED = {"jump up": (1200, 1500)}  # off since cycle 10, the jump at 300: two probes may be a thousand tokens apart


@pytest.mark.slow
@pytest.mark.parametrize("table", cases(TABLES, sample=["right"]))
@pytest.mark.parametrize("name", PROCESSES)
def test_regret_against_the_best_fixed_depth_is_under_five_per_cent(name, table):
    """From cycle 200 on, whatever the policy started from. Catches one that never leaves its first depth, counts
    positions wrongly, forgets that depth 0 is a candidate, believes a wrong table for ever, or takes a neighbour's load
    for the price of a depth."""
    process = PROCESSES[name]
    begin, end = JUDGED.get(name, (200, 600))
    judged = [
        cycle
        for seed in range(MORE_SEEDS.get(name, SEEDS))
        for cycle in play(adaptive(TABLES[table](process)), process, end, seed)[begin:]
    ]
    assert rate(judged) > 0.95 * best_fixed_rate(process, begin, end)


@pytest.mark.slow
@pytest.mark.parametrize("row", [*cases(range(DEEPEST + 1), sample=["2"]), None])
@pytest.mark.parametrize("name", [n for n in PROCESSES if not n.startswith("jump")])
def test_a_table_from_a_busy_moment_is_forgotten_within_fifty_cycles(name, row):
    """One row, or all, thirty times too slow: from cycle 50 on at least 93 % of the rate with the right table."""
    process = PROCESSES[name]

    def judged(wrong):
        policies = [adaptive(process.table(wrong)) for _ in range(SEEDS)]
        return rate([one for seed, policy in enumerate(policies) for one in play(policy, process, 250, seed)[50:]])

    poisoned = judged(lambda depth: 30.0 if row is None or depth == row else 1.0)
    assert poisoned > 0.93 * judged(lambda depth: 1.0)


BOUNDS = {  # tokens -> the share of their time that drafts of a useless head may take
    "right": {200: 0.03, 1000: 0.015, 4000: 0.011},
    "twice too dear": {200: 0.03, 1000: 0.015, 4000: 0.011},
    "drafting twice too dear": {200: 0.03, 1000: 0.015, 4000: 0.011},
    "drafting twice too cheap": {200: 0.08, 1000: 0.04, 4000: 0.02},
    "deep drafts twice too cheap": {200: 0.08, 1000: 0.04, 4000: 0.02},
}


@pytest.mark.slow
@pytest.mark.parametrize("table", cases(BOUNDS, sample=["right"]))
def test_what_a_useless_head_may_cost(table):
    """The bound that ``docs/how-to/choose-a-depth.md`` states, for drafts of 2 % of a plain step to two steps."""
    for step, seed in itertools.product((0.02, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0), range(3)):
        process = Process(acceptance=lambda n: [0.0], cost=line(step))
        played = play(adaptive(TABLES[table](process)), process, 4000, seed)
        for tokens, bound in BOUNDS[table].items():
            assert 1 - rate(played[:tokens]) <= bound, f"drafts of {step} steps, {tokens} tokens, seed {seed}"


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("draft", cases([1.0, 20.0, 0.0, 5.0], sample=2, mark="slow"))
def test_drafting_never_loses_more_than_its_budget(draft, table):
    """The budget, the first draft, which is free, and one draft that cost more than the one before it."""
    for acceptance, step in itertools.product((0.0, 0.3), (0.05, 1.0)):
        process = Process(acceptance=lambda n, rate=acceptance: [rate], cost=line(step), draft=draft)
        deepest = process.seconds(0, DEEPEST)
        lost = time = 0.0
        for cycle in play(adaptive(TABLES[table](process)), process, 2000):
            time += cycle.record.draft_seconds + cycle.record.verify_seconds
            lost = max(lost + cycle.seconds - len(cycle.record.emitted), 0.0) if cycle.asked else lost
            assert lost <= 1.1 * max(GRANT, SHARE * time) + 2 * deepest


def test_a_slow_drafter_that_is_right_gets_its_chance():
    """A draft takes one and a half plain cycles, so only deep drafts pay."""
    process = Process(acceptance=lambda n: [0.95], cost=line(0.02), draft=1.5)
    for seed in range(5):
        asked = [cycle.asked for cycle in play(adaptive(process.table()), process, 1500, seed)]
        assert sum(depth > 3 for depth in asked[-300:]) > 250


@pytest.mark.parametrize(("often", "deep", "slow"), [(0.0, [], [3, 4]), (0.3, [6], [1, 2, 3]), (0.95, [6], [0, 1])])
def test_the_drafters_of_a_chain_have_depths_of_their_own(often, deep, slow):
    """A look-up that costs nothing and is nearly always right, and a model whose draft takes .3 plain cycles a token:
    alone it drafts 3 or 4, beside the look-up fewer, and trials only where time is worth more than it gives."""
    for seed in range(4):
        rng, policy, depths = random.Random(seed), adaptive(None, max_depth=6), []
        for _ in range(600):
            asked, name, depth, rate = policy.next_depth(Stats()), "", 0, 0.0
            if asked and rng.random() < often:
                name, depth, rate = "look-up", policy.depth_of("look-up", asked), 0.98
            elif asked:
                policy.depth_of("look-up", asked)
            if asked and not depth:
                name, depth, rate = "model", policy.depth_of("model", asked), 0.85
            accepted = next((at for at in range(depth) if rng.random() > rate), depth)
            seconds = 0.3 * depth if name == "model" else 0.0
            emitted = (0,) * (accepted + 1)
            depths.append((name if depth else "", depth))
            record = CycleRecord(9, asked, depth, accepted, emitted, seconds, 1 + 0.02 * depth, 0.0, (0,) * depth, name)
            policy.record(record)
        last = [depth for name, depth in depths[300:] if name == "model"]
        plain = sum(name == "" for name, _ in depths[300:])
        usual = 0 if plain > len(last) else statistics.mode(last)
        assert usual in slow
        assert not deep or statistics.mode(depth for name, depth in depths[300:] if name == "look-up") in deep


def test_a_table_prices_the_drafter_that_it_was_measured_with():
    """The look-up in front of a slow model starts as free as it is."""
    costs = {"verify": {1: 1.0, 9: 1.1}, "draft": {0: 0.0, 8: 24.0}, "commit": 0.0}
    for measured, free in (("model", "look-up"), ("look-up", "model")):
        policy = adaptive(CostTable(**costs, drafter=measured))
        assert policy.depth_of(free, 8) > policy.depth_of(measured, 8) == 1  # a trial


def test_a_draft_that_the_budget_forbids_has_a_reason():
    policy = adaptive(None)
    play(policy, Process(acceptance=lambda n: [0.0], cost=line(0.1), draft=30.0), 20)
    assert policy.next_depth(Stats()) == 0
    assert policy.reason


@pytest.mark.parametrize("catching_up", [0.0, 0.04])
def test_it_comes_back_within_three_trials_of_a_jump(catching_up):
    """Off during a hopeless stretch; a probe that is accepted brings speculation back, and 0.95 of them are.

    Also if catching up with the tokens of the stretch takes more than drafting may lose.
    """
    process = attrs.evolve(
        Process(acceptance=lambda n: [0.0] if n < 300 else [0.95], cost=line(0.1), draft=0.1), catching_up=catching_up
    )
    for seed in range(SEEDS):
        policy = adaptive(process.table())
        assert sum(cycle.asked > 0 for cycle in play(policy, process, 300, seed)[-40:]) <= 4
        after = play(policy, process, 1200, seed, begin=300)
        asked = [cycle.asked for cycle in after]
        back = next(at for at, depth in enumerate(asked) if depth > 1)
        probes = sum(depth == 1 and (at == 0 or asked[at - 1] == 0) for at, depth in enumerate(asked[:back]))
        assert probes <= 3, f"seed {seed}"
        assert sum(depth > 1 for depth in asked[back : back + 100]) > 80


@pytest.mark.parametrize("limit", [1, 2, 5, 15])
def test_depth_never_exceeds_the_limit(limit):
    process = Process(acceptance=lambda n: [0.99], cost=line(0.01))
    asked = [cycle.asked for cycle in play(adaptive(process.table(), max_depth=limit), process, 200)]
    assert max(asked) == limit


def test_with_a_table_the_first_cycle_is_at_the_depth_that_the_table_favours():
    """No trial cycles: cheap drafts start deep, dear ones are probed once, with two cycles at most."""
    assert adaptive(PROCESSES["flat cost, high acceptance"].table()).next_depth(Stats()) >= 2
    dear = Process(acceptance=lambda n: [0.0], cost=line(0.0, first=1.5))
    assert [cycle.asked for cycle in play(adaptive(dear.table()), dear, 12)] in ([1, 1, *[0] * 10], [1, *[0] * 11])


# --- from one generation to the next ----------------------------------------------------------------------------------


def test_a_generation_starts_from_what_the_one_before_it_learnt():
    process = PROCESSES["hopeless"]
    learnt = Learnt(process.table())
    config = AdaptiveConfig()
    first = play(AdaptivePolicy(config, learnt), process, 100)
    again = play(AdaptivePolicy(config, learnt), process, 30, seed=1)
    assert first[0].asked > 0
    assert sum(cycle.asked for cycle in again) <= 2


def test_short_generations_of_a_model_that_is_off_still_probe():
    """The tokens until a probe are counted across generations; per generation none would ever be reached."""
    process = PROCESSES["flat cost, high acceptance"]
    learnt, config = Learnt(process.table()), AdaptiveConfig()
    play(AdaptivePolicy(config, learnt), PROCESSES["hopeless"], 100)
    asked = [cycle.asked for seed in range(40) for cycle in play(AdaptivePolicy(config, learnt), process, 20, seed)]
    assert asked[:20] == [0] * 20
    assert sum(depth > 1 for depth in asked[400:]) > 300


def test_what_was_learnt_gives_way_to_another_text():
    """Eight observations per position are carried, so a text that drafts well is not kept back by one that did not."""
    useful, useless = (Process(acceptance=lambda n, rate=rate: [rate], cost=line(0.3)) for rate in (0.9, 0.0))
    learnt, config = Learnt(useful.table()), AdaptiveConfig()
    play(AdaptivePolicy(config, learnt), useful, 500)
    asked = [cycle.asked for cycle in play(AdaptivePolicy(config, learnt), useless, 60)]
    assert sum(depth > 0 for depth in asked) < 25


def test_where_costs_cannot_be_measured_it_says_so():
    def costs():
        raise UnsupportedError("passes of 1 row")

    spec = specdec_depth_policies()[0]
    env = PrepareEnv(target=TableModel.random(), costs=costs)
    assert spec.prepare is not None
    spec.factory(AdaptiveConfig(), spec.prepare(AdaptiveConfig(), env))
    assert env.notices == ["the depth policy 'adaptive' starts without measured costs: passes of 1 row"]
