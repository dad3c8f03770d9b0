"""Scripted acceptance and cost processes for depth policies. No clock is read: seconds are what the script says."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from specdec.contract import CycleRecord, DepthPolicy, Stats
from specdec.policies.adaptive import AdaptiveConfig, AdaptivePolicy, Learnt
from specdec.records.cost_table import CostTable

DEEPEST = 8


@attrs.frozen(kw_only=True)
class Process:
    """What happens in cycle n.

    ``acceptance(n)``: conditional rates by position, the last one for all further positions. ``cost(n, k)``: true
    seconds of a cycle that verifies k drafted tokens. ``noise``: half the width of a uniform factor on them.
    ``outliers``: the share of cycles that take ten times as long. ``opinion``: how often the drafter has a draft.
    ``draft``: seconds that it takes to look for one. ``catching_up``: more seconds for every cycle since the last.
    """

    acceptance: Callable[[int], Sequence[float]]
    cost: Callable[[int, int], float]
    noise: float = 0.03
    outliers: float = 0.0
    opinion: float = 1.0
    draft: float = 0.0
    catching_up: float = 0.0

    def table(self, wrong: Callable[[int], float] = lambda depth: 1.0) -> CostTable:
        """Costs as they would be measured before cycle 0, times ``wrong(depth)``."""
        seconds = [self.cost(0, depth) * wrong(depth) for depth in range(DEEPEST + 1)]
        draft = {depth: self.draft * wrong(depth) if depth else 0.0 for depth in range(DEEPEST + 1)}
        return CostTable(verify={depth + 1: value for depth, value in enumerate(seconds)}, draft=draft, commit=0.0)

    def tokens(self, cycle: int, depth: int) -> float:
        """Expected tokens of a cycle."""
        total, survival, rates = 1.0, self.opinion, self.acceptance(cycle)
        for position in range(depth):
            survival *= rates[min(position, len(rates) - 1)]
            total += survival
        return total

    def seconds(self, cycle: int, depth: int) -> float:
        """Expected seconds of a cycle, outliers left out: they hit every depth alike."""
        verify = self.opinion * self.cost(cycle, depth) + (1.0 - self.opinion) * self.cost(cycle, 0)
        return verify + (self.draft if depth else 0.0)


@attrs.frozen
class Played:
    """One cycle: what was asked for, what came of it, and what was to be expected of that depth."""

    asked: int
    record: CycleRecord
    tokens: float
    seconds: float


def play(policy: DepthPolicy, process: Process, cycles: int, seed: int = 0, begin: int = 0) -> list[Played]:
    """Cycles ``begin`` to ``begin + cycles`` of a process under a policy."""
    rng = random.Random(seed)
    played: list[Played] = []
    idle = 0
    for cycle in range(begin, begin + cycles):
        asked = policy.next_depth(Stats())
        offered = asked if rng.random() < process.opinion else 0
        rates, accepted = process.acceptance(cycle), 0
        while accepted < offered and rng.random() < rates[min(accepted, len(rates) - 1)]:
            accepted += 1
        seconds = process.cost(cycle, offered) * rng.uniform(1 - process.noise, 1 + process.noise)
        seconds *= 10.0 if rng.random() < process.outliers else 1.0
        record = CycleRecord(
            position=10 + cycle,
            depth=asked,
            offered=offered,
            accepted=accepted,
            emitted=(0,) * (accepted + 1),
            draft_seconds=process.draft + process.catching_up * idle if asked else 0.0,
            verify_seconds=seconds,
            commit_seconds=0.0,
        )
        idle = 0 if offered else idle + 1
        policy.record(record)
        played.append(Played(asked, record, process.tokens(cycle, asked), process.seconds(cycle, asked)))
    return played


def rate(played: Sequence[Played]) -> float:
    """The ratio of means E[tokens] / E[seconds] of the depths chosen, so that luck with the draws is no merit."""
    return sum(cycle.tokens for cycle in played) / sum(cycle.seconds for cycle in played)


def best_fixed_rate(process: Process, begin: int, end: int) -> float:
    """The same of the best fixed depth."""
    return max(
        sum(process.tokens(cycle, depth) for cycle in range(begin, end))
        / sum(process.seconds(cycle, depth) for cycle in range(begin, end))
        for depth in range(DEEPEST + 1)
    )


def adaptive(table: CostTable | None, **options: Any) -> AdaptivePolicy:
    """A policy with nothing but a table to start from, or not even that."""
    return AdaptivePolicy(AdaptiveConfig(**options), Learnt(table))


def line(step: float, first: float = 0.0) -> Callable[[int, int], float]:
    """``cost(n, k) = 1 + first + step k`` for k > 0, and 1 for plain decoding."""
    return lambda cycle, depth: 1.0 + (first + step * depth if depth else 0.0)


PROCESSES: dict[str, Process] = {
    "steep cost, high acceptance": Process(acceptance=lambda n: [0.9, 0.85, 0.8], cost=line(0.35)),
    "flat cost, high acceptance": Process(acceptance=lambda n: [0.85], cost=line(0.08)),
    "acceptance that falls by position": Process(acceptance=lambda n: [0.8, 0.5, 0.3, 0.1], cost=line(0.1)),
    "middling": Process(acceptance=lambda n: [0.6, 0.5, 0.4], cost=line(0.12)),
    "hopeless": Process(acceptance=lambda n: [0.05], cost=line(0.3)),
    "a dear first step": Process(acceptance=lambda n: [0.7], cost=line(0.05, first=0.55)),
    "a dear first step that does not pay": Process(acceptance=lambda n: [0.5], cost=line(0.05, first=1.2)),
    "a cliff in the rows": Process(acceptance=lambda n: [0.9], cost=lambda n, k: 1.0 + 0.05 * k + 0.8 * (k > 3)),
    "break-even": Process(acceptance=lambda n: [0.3], cost=line(0.3)),
    "jump up": Process(acceptance=lambda n: [0.0] if n < 300 else [0.9], cost=line(0.12)),
    "jump down": Process(acceptance=lambda n: [0.9] if n < 300 else [0.05], cost=line(0.12)),
    "noisy costs with outliers": Process(acceptance=lambda n: [0.75, 0.6], cost=line(0.15), noise=0.2, outliers=0.05),
    "load that doubles and goes": Process(
        acceptance=lambda n: [0.7], cost=lambda n, k: line(0.2)(n, k) * (2.0 if n // 100 % 2 else 1.0), noise=0.1
    ),
    "costs that drift": Process(acceptance=lambda n: [0.7], cost=lambda n, k: line(0.15)(n, k) * (1 + n / 300)),
    "drafts that grow dearer": Process(acceptance=lambda n: [0.6], cost=lambda n, k: 1.0 + k * (0.08 + n / 6000)),
    "a drafter that rarely has an opinion": Process(acceptance=lambda n: [0.95], cost=line(0.1), opinion=0.15),
    "a rare opinion that is wrong": Process(acceptance=lambda n: [0.1], cost=line(0.4), opinion=0.3),
}

TABLES: dict[str, Callable[[Process], CostTable]] = {
    "right": lambda process: process.table(),
    "twice too dear": lambda process: process.table(lambda depth: 2.0),
    "drafting twice too dear": lambda process: process.table(lambda depth: 2.0 if depth else 1.0),
    "drafting twice too cheap": lambda process: process.table(lambda depth: 0.5 if depth else 1.0),
    "deep drafts twice too dear": lambda process: process.table(lambda depth: 2.0 if depth > 2 else 1.0),
    "deep drafts twice too cheap": lambda process: process.table(lambda depth: 0.5 if depth > 2 else 1.0),
}
