"""The adaptive depth policy: picks the depth with the best rate, depth 0 (plain decoding) included.

``Rates`` estimates the rate of each depth from running averages, and one timer starts trials of other depths. The
output of an exact verifier does not depend on the depth, so feedback across cycles cannot change it.
"""

from __future__ import annotations

import attrs

from specdec.config import between
from specdec.contract import CycleRecord, DepthPolicy, DepthPolicySpec, PrepareEnv, Stats
from specdec.errors import UnsupportedError
from specdec.hookspecs import hookimpl
from specdec.policies.estimates import Rates
from specdec.policies.fixed import MAX_DEPTH
from specdec.records.cost_table import CostTable

STEP_GUESS = 0.2  # cost of a drafted token in plain cycles if nothing was measured: break-even at usual acceptance
LASTING = 32  # cycles of speculation after which trials are frequent again: .94 to .97 of the best fixed rate
TRIES = 8  # cycles that a trial waits for a draft: .72 to .99 where a drafter seldom has one
NEARER = 4  # while speculation is on, trials are this many times as frequent, because they cost less


@attrs.frozen(kw_only=True)
class AdaptiveConfig:
    """The deepest draft, how fast to forget, how rarely to try another depth, and an optional cost table."""

    max_depth: int = attrs.field(default=6, validator=between(1, MAX_DEPTH))
    window: int = attrs.field(default=48, validator=between(4, 4096))  # cycles that acceptance remembers
    min_gain: float = attrs.field(default=0.03, validator=between(0.0, 1.0))  # relative; below it the depth stays
    first_probe: int = attrs.field(default=64, validator=between(1, 65536))  # tokens until a trial, doubled each time
    last_probe: int = attrs.field(default=1024, validator=between(1, 65536))  # tokens between trials at most
    costs: str | None = None  # a file with this machine's costs; measured at load and kept if None


@attrs.define
class Learnt:
    """What the generations of one language model share: the cost table and the last policy.

    A policy reads ``last`` only when it is made. Generations in several threads may set it in turn; the values are
    plain floats, so the worst outcome is an estimate mixed from two generations.
    """

    table: CostTable | None = None
    last: AdaptivePolicy | None = None


class AdaptivePolicy(DepthPolicy):
    """Follows the best rate and rarely tries other depths; trials become frequent again after lasting speculation.

    While speculation is off, a trial is one cycle of depth 1. While it is on, a trial is one cycle of plain decoding,
    of a neighbouring depth or of half the depth, in turn.
    """

    def __init__(self, config: AdaptiveConfig, learnt: Learnt | None = None) -> None:
        self._learnt = learnt if learnt is not None else Learnt()
        self._config = config
        table, last = self._learnt.table, self._learnt.last
        depths = range(config.max_depth + 1)
        guesses = [table.cycle(k) if table is not None else 1.0 + STEP_GUESS * k for k in depths]
        self._rates = Rates(guesses, config.window)
        self._distance = config.first_probe  # tokens between trials
        self._tokens = 0  # since the last trial
        self._trials = 0  # of other depths so far
        self._tries = 0  # cycles that the running trial may still take; 0 when none runs
        self._lasted = 0  # cycles since speculation went on
        if last is not None:
            self._rates.adopt(last._rates)
            self._distance, self._tokens, self._trials = last._distance, last._tokens, last._trials
        self._depth = 0
        self._depth = self._best()
        if last is None and not self._depth:
            self._tokens = self._distance  # nothing was drafted yet, and the table may be wrong

    @property
    def reason(self) -> str:
        """Why the depth is 0, or an empty string."""
        if self._depth:
            return ""
        rates = self._rates.by_depth
        best = max(range(1, len(rates)), key=lambda depth: rates[depth])
        return (
            f"plain decoding is faster here: depth {best} would give {rates[best] / rates[0]:.2f} times "
            f"its rate (acceptance at position 0: {self._rates.first_acceptance:.2f})"
        )

    def next_depth(self, stats: Stats) -> int:
        depth = self._depth
        if not self._tries:
            if self._tokens < (self._distance // NEARER if depth else self._distance):
                return depth
            self._tries = TRIES
        if depth == 0:
            return 1
        others = (0, min(depth + 1, self._config.max_depth), depth - 1, depth // 2)
        return others[self._trials % len(others)]

    def record(self, cycle: CycleRecord) -> None:
        self._learnt.last = self
        self._tokens += len(cycle.emitted)
        trial = self._tries > 0
        changed = self._rates.observe(cycle, news=trial and not self._depth and cycle.accepted > 0)
        if trial:
            self._tries -= 1
            if not self._tries or cycle.offered or not cycle.depth:
                self._trials += self._depth > 0
                self._distance = min(2 * self._distance, self._config.last_probe)
                self._tokens = self._tries = 0
        if changed:
            self._move(self._best())

    def _best(self) -> int:
        """The depth with the best rate, or the current one if the gain is too small and it beats plain decoding."""
        rates, depth = self._rates.by_depth, self._depth
        best = rates.index(max(rates))
        enough = rates[best] > rates[depth] * (1.0 + self._config.min_gain) or rates[depth] < rates[0]
        return best if enough else depth

    def _move(self, depth: int) -> None:
        switched = bool(depth) != bool(self._depth)
        settled = self._lasted >= LASTING
        self._lasted = 0 if switched else self._lasted + (depth > 0)
        if settled if switched else depth != self._depth or self._lasted == LASTING:
            self._distance = self._config.first_probe  # what speculation costs and gains is known anew
        if switched:
            self._tokens = self._tries = 0
        self._depth = depth


def _prepare(config: AdaptiveConfig, env: PrepareEnv) -> Learnt:
    if env.costs is None:
        return Learnt()
    try:
        return Learnt(env.costs(config.costs))
    except UnsupportedError as error:
        env.notices.append(f"the depth policy 'adaptive' starts without measured costs: {error}")
        return Learnt()


@hookimpl
def specdec_depth_policies() -> list[DepthPolicySpec]:
    return [
        DepthPolicySpec(
            name="adaptive",
            factory=AdaptivePolicy,
            config=AdaptiveConfig,
            prepare=_prepare,
            help="the depth with the best measured rate; plain decoding if none beats it",
        )
    ]
