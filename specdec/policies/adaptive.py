"""The adaptive depth policy: picks the depth with the best rate, depth 0 (plain decoding) included.

``Rates`` estimates the rate of each depth, ``Trials`` schedules trials of other depths, and ``AdaptivePolicy`` decides.
The output of an exact verifier does not depend on the depth, so feedback across cycles cannot change it.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from specdec.config import between
from specdec.contract import CycleRecord, DepthPolicy, DepthPolicySpec, PrepareEnv, Stats
from specdec.errors import UnsupportedError
from specdec.hookspecs import hookimpl
from specdec.policies.fixed import MAX_DEPTH
from specdec.policies.rates import Rates
from specdec.records.cost_table import CostTable

STEP_GUESS = 0.2  # cost of a drafted token in plain cycles if nothing was measured: break-even at usual acceptance
QUIET = 16  # plain cycles after which their cost is updated only now and then
SELDOM = 64  # plain cycles between two such updates
PATIENCE = 6.0  # drafts before speculation goes off for the first time, the last of them of depth 1
LASTING = 32  # cycles after which speculation counts as lasting
OPENING = 2  # cycles of each depth tried at the start if nothing was measured
TRIES = 8  # cycles that a trial waits for a draft: an empty draft carries no information
NEARER = 4  # while speculation is on, trials are this many times as frequent, because they cost less
HOPELESS = 0.3  # acceptance at position 0 below which a rejected trial gets no second cycle


class Trials:
    """A schedule of trial cycles.

    While speculation is off, a trial is one cycle of depth 1, plus a second one for timing unless drafts are hopeless.
    While it is on, a trial is one cycle of another depth. The first trial comes after ``first`` tokens; the distance
    then doubles up to ``last``.

    Args:
        first, last: shortest and longest distance between trials, in tokens.
        max_depth: the deepest draft.
    """

    def __init__(self, first: int, last: int, max_depth: int) -> None:
        self._first, self._last, self._max_depth = first, last, max_depth
        self._opening: list[int] = []
        self._distance = first  # tokens until the next trial
        self._tokens = 0  # tokens since the last trial
        self._cycles = 0  # cycles that the running trial may still take; 0 when none runs
        self._second = False  # whether this is a trial's second cycle
        self._others = 0  # trials of other depths so far

    @property
    def opening(self) -> bool:
        """Whether the trials at the start are still running."""
        return bool(self._opening)

    def open(self) -> None:
        """Begin with plain decoding, three depths and plain decoding again, because nothing is known yet."""
        depths = sorted({1, min(3, self._max_depth), self._max_depth})
        self._opening = [0, *(depth for depth in depths for _ in range(OPENING)), 0]

    def adopt(self, other: Trials) -> None:
        """Continue the schedule of an earlier generation."""
        self._others, self._distance, self._tokens = other._others, other._distance, other._tokens

    def due(self) -> None:
        """Make the next cycle a trial."""
        self._tokens = self._distance

    def reset(self) -> None:
        """Reset the distance to the shortest."""
        self._distance = self._first

    def cancel(self) -> None:
        """End the running trial and start counting tokens towards the next one."""
        self._tokens = self._cycles = 0
        self._second = False

    def depth(self, current: int) -> int:
        """The depth of the next cycle: ``current``, or a trial depth."""
        if self._opening:
            return self._opening[0]
        if not self._cycles:
            if self._tokens < (self._distance // NEARER if current else self._distance):
                return current
            self._cycles = TRIES
        if current == 0:
            return 1
        others = (0, min(current + 1, self._max_depth), current - 1)
        return others[self._others % len(others)]

    def passed(self, tokens: int) -> None:
        """Count a cycle's tokens."""
        if self._opening:
            self._opening.pop(0)
        else:
            self._tokens += tokens

    def is_news(self, cycle: CycleRecord, current: int) -> bool:
        """Whether a trial's first draft was accepted although speculation is off."""
        return bool(self._cycles and current == 0 and not self._second and cycle.accepted)

    def observe(self, cycle: CycleRecord, current: int, first_acceptance: float) -> None:
        """Continue or end the running trial, if any.

        Args:
            current: the depth in force, not the trial depth.
            first_acceptance: the estimate for position 0.
        """
        if not self._cycles:
            return
        self._cycles -= 1
        if cycle.depth and not cycle.offered and self._cycles:
            return  # nothing was drafted
        if current == 0 and not self._second and first_acceptance > HOPELESS:
            self._second, self._cycles = True, 1
            return
        self._others += current > 0
        self._distance = min(2 * self._distance, self._last)
        self.cancel()


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
    seconds: Sequence[float] = attrs.field(init=False)  # of a cycle by depth; ratios only, without a table

    def __attrs_post_init__(self) -> None:
        cost = (lambda depth: 1.0 + STEP_GUESS * depth) if self.table is None else self.table.cycle
        self.seconds = [cost(depth) for depth in range(MAX_DEPTH + 1)]


class AdaptivePolicy(DepthPolicy):
    """Follows the best rate and rarely tries other depths; trials become frequent again after lasting speculation."""

    def __init__(self, config: AdaptiveConfig, learnt: Learnt | None = None) -> None:
        self._learnt = learnt if learnt is not None else Learnt()
        self._min_gain = config.min_gain
        table, last = self._learnt.table, self._learnt.last
        self._rates = Rates(self._learnt.seconds[: config.max_depth + 1], config.window)
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
