"""The adaptive depth policy: picks the depth with the best rate, depth 0 (plain decoding) included.

``Rates`` estimates the rate of each depth, ``Trials`` schedules trials of other depths, and ``AdaptivePolicy`` decides.
The output of an exact verifier does not depend on the depth, so feedback across cycles cannot change it.
"""

from __future__ import annotations

import attrs

from specdec.config import between
from specdec.contract import CycleRecord, DepthPolicy, DepthPolicySpec, PrepareEnv, Stats
from specdec.errors import UnsupportedError
from specdec.hookspecs import hookimpl
from specdec.policies.fixed import MAX_DEPTH
from specdec.policies.rates import Rates
from specdec.policies.trials import Trials
from specdec.records.cost_table import CostTable

STEP_GUESS = 0.2  # cost of a drafted token in plain cycles if nothing was measured: break-even at usual acceptance
QUIET = 16  # plain cycles after which their cost is updated only now and then
SELDOM = 64  # plain cycles between two such updates
PATIENCE = 6.0  # drafts before speculation goes off for the first time, the last of them of depth 1
LASTING = 32  # cycles after which speculation counts as lasting


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
    """Follows the best rate and rarely tries other depths; trials become frequent again after lasting speculation."""

    def __init__(self, config: AdaptiveConfig, learnt: Learnt | None = None) -> None:
        self._learnt = learnt if learnt is not None else Learnt()
        self._min_gain = config.min_gain
        table, last = self._learnt.table, self._learnt.last
        depths = range(config.max_depth + 1)
        seconds = [table.cycle(k) if table is not None else 1.0 + STEP_GUESS * k for k in depths]
        self._rates = Rates(seconds, config.window)
        self._trials = Trials(config.first_probe, config.last_probe, config.max_depth)
        if last is not None:
            self._rates.adopt(last._rates)
            self._trials.adopt(last._trials)
            self._rates.update()
        elif table is None:
            self._trials.open()
        self._lasted = 0  # cycles since speculation went on
        self._patient = False  # whether speculation is on for the first time
        self._depth = 0
        self._depth = self._best()
        if last is None:
            self._patient = self._depth > 0
            if self._depth == 0 and not self._trials.opening:
                self._trials.due()  # nothing was drafted yet, and the table may be wrong

    @property
    def reason(self) -> str:
        """Why the depth is 0, or an empty string."""
        if self._depth or self._trials.opening:
            return ""
        rates = self._rates.by_depth
        best = max(range(1, len(rates)), key=lambda depth: rates[depth])
        return (
            f"plain decoding is faster here: depth {best} would give {rates[best] / rates[0]:.2f} times "
            f"its rate (acceptance at position 0: {self._rates.first_acceptance:.2f})"
        )

    def next_depth(self, stats: Stats) -> int:
        return self._trials.depth(self._depth)

    def record(self, cycle: CycleRecord) -> None:
        rates, trials = self._rates, self._trials
        if rates.plain_cycles > QUIET and not (cycle.depth or self._depth or trials.opening):
            if rates.plain_cycles % SELDOM:  # overhead here slows plain decoding
                rates.plain_cycles += 1
                trials.passed(1)
                return
        self._learnt.last = self
        rates.observe(cycle)
        trials.passed(len(cycle.emitted))
        if trials.is_news(cycle, self._depth):
            rates.restart(cycle)
        trials.observe(cycle, self._depth, rates.first_acceptance)
        rates.update()
        self._move(self._best())

    def _best(self) -> int:
        """The depth with the best rate, or the current one if the gain is too small and it beats plain decoding."""
        rates, depth = self._rates.by_depth, self._depth
        best = rates.index(max(rates))
        enough = rates[best] > rates[depth] * (1.0 + self._min_gain) or rates[depth] < rates[0]
        chosen = best if enough else depth
        if chosen == 0 and depth and self._patient and self._rates.drafts < PATIENCE:
            return 1  # a few wrong drafts at the start are more often bad luck than a bad drafter
        return chosen

    def _move(self, depth: int) -> None:
        if bool(depth) != bool(self._depth):
            if self._lasted >= LASTING:
                self._trials.reset()
            self._lasted = 0
            self._trials.cancel()
            self._patient = self._patient and depth > 0
        self._depth = depth
        if depth:
            self._lasted += 1
            if self._lasted == LASTING:
                self._trials.reset()


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
