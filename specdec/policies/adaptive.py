"""Choose the depth by measured cost and measured acceptance; depth 0, plain decoding, is always a candidate.

Cycles are renewals, so the long-run rate of depth k is ``E(k) / t(k)``: expected tokens over expected seconds of a
cycle. E comes from ``Acceptance``, t from a cost table measured at load and corrected by ``CycleCosts``. Feedback
across cycles never touches the output of an exact verifier: given the committed tokens and k, the next cycle is exact.
"""

from __future__ import annotations

import attrs

from specdec.config import between
from specdec.contract import CycleRecord, DepthPolicy, DepthPolicySpec, PrepareEnv, Stats
from specdec.errors import UnsupportedError
from specdec.hookspecs import hookimpl
from specdec.policies.acceptance import Acceptance
from specdec.policies.cycle_costs import CycleCosts
from specdec.policies.fixed import MAX_DEPTH
from specdec.records.cost_table import CostTable

STEP_GUESS = 0.2  # plain cycles that a drafted token costs, where nothing was measured: break-even at usual acceptance
TRIALS = 2  # cycles of each trial depth at the start, where nothing was measured
TRIES = 8  # cycles that a probe waits for a draft: a drafter without an opinion tells nothing
STALE = 4  # plain cycles after which a drafter has catching up to do, and its next cycle's time is not a usual one
NEARER = 4  # speculation compares depths so many times as often as plain decoding probes: it loses less by that
HOPELESS = 0.3  # acceptance at position 0 below which a rejected probe has no second cycle
QUIET = 16  # plain cycles between two looks at their price, in a run of them
PATIENCE = 6.0  # drafts before speculation goes off for the first time, the last of them of depth 1
LASTING = 32  # cycles after which speculation has lasted
MISSES = 8  # empty drafts whose mean is the price of one


@attrs.frozen(kw_only=True)
class AdaptiveConfig:
    """How far to look, how fast to forget, how rarely to try another depth, and a cost table of one's own."""

    max_depth: int = attrs.field(default=6, validator=between(1, MAX_DEPTH))
    window: int = attrs.field(default=48, validator=between(4, 4096))  # cycles that acceptance remembers
    min_gain: float = attrs.field(default=0.03, validator=between(0.0, 1.0))  # below it the depth stays
    first_probe: int = attrs.field(default=64, validator=between(1, 65536))  # tokens until a probe, doubled each time
    last_probe: int = attrs.field(default=1024, validator=between(1, 65536))  # tokens between probes at most
    costs: str | None = None  # a file with this machine's costs; measured at load, and kept, where there is none


@attrs.define
class Learnt:
    """What the generations of one language model share: the table, and the policy that ran last.

    A policy reads ``last`` when it is made and never again. Generations in several threads may take turns in setting
    it; what is read meanwhile are plain floats, so the worst outcome is an estimate mixed from two generations.
    """

    table: CostTable | None = None
    last: AdaptivePolicy | None = None


class AdaptivePolicy(DepthPolicy):
    """Follows the best rate; probes rarely.

    Off, a probe is one cycle of depth 1, and a second one, to be timed, unless drafts are hopeless. On, it is one cycle
    of another depth, to see whether its price still holds. Probes come after ``first_probe`` tokens, then at doubled
    distances up to ``last_probe``; speculation that lasted sets the distance back.
    """

    def __init__(self, config: AdaptiveConfig, learnt: Learnt | None = None) -> None:
        self._config = config
        self._learnt = learnt if learnt is not None else Learnt()
        depths, table = range(config.max_depth + 1), self._learnt.table
        self._costs = CycleCosts([table.cycle(k) if table is not None else 1.0 + STEP_GUESS * k for k in depths])
        self._miss = 0.0  # seconds that the drafter takes to give nothing
        self._acceptance = Acceptance(config.max_depth, config.window)
        self._trials: list[int] = []
        self._distance = config.first_probe  # tokens until the next probe
        self._tokens = 0  # of those, passed
        self._probe = 0  # cycles that the present probe may still take
        self._second = False  # whether this is a probe's second cycle
        self._others = 0  # probes of other depths so far
        self._plain = 0  # plain cycles in a row
        self._lasted = 0  # cycles since speculation went on
        self._patient = False  # whether speculation is on for the first time
        if self._learnt.last is not None:
            self._adopt(self._learnt.last)
        elif table is None:
            deep = sorted({1, min(3, config.max_depth), config.max_depth})
            self._trials = [0, *(depth for depth in deep for _ in range(TRIALS)), 0]
        self._depth = 0
        self._rates = self._priced()
        self._depth = self._best()
        self._patient = self._learnt.last is None and self._depth > 0
        if self._depth == 0 and not self._trials and self._learnt.last is None:
            self._tokens = self._distance  # nothing was drafted yet, and a table may be wrong: probe at once

    def _adopt(self, last: AdaptivePolicy) -> None:
        """Go on with what an earlier generation learnt; acceptance of another text counts for less."""
        self._acceptance.adopt(last._acceptance)
        self._costs.adopt(last._costs)
        self._miss, self._others = last._miss, last._others
        self._distance, self._tokens = last._distance, last._tokens

    @property
    def reason(self) -> str:
        """Why the depth is 0, or an empty string."""
        if self._depth or self._trials:
            return ""
        best = max(range(1, len(self._rates)), key=lambda depth: self._rates[depth])
        return (
            f"plain decoding is faster here: depth {best} would give {self._rates[best] / self._rates[0]:.2f} times "
            f"its rate (acceptance at position 0: {self._acceptance.gains[0]:.2f})"
        )

    def next_depth(self, stats: Stats) -> int:
        if self._trials:
            return self._trials[0]
        if not self._probe:
            if self._tokens < (self._distance // NEARER if self._depth else self._distance):
                return self._depth
            self._probe = TRIES
        if self._depth == 0:
            return 1
        others = (0, min(self._depth + 1, self._config.max_depth), self._depth - 1)
        return others[self._others % len(others)]

    def record(self, cycle: CycleRecord) -> None:
        if not (cycle.depth or self._depth or self._trials) and self._plain > QUIET:
            if self._plain % QUIET:  # every microsecond here is one that plain decoding would not have lost
                self._plain += 1
                self._tokens += 1
                return
        self._learnt.last = self
        self._time(cycle)
        if cycle.depth:
            self._acceptance.observe(cycle)
        if self._trials:
            self._trials.pop(0)
        else:
            self._tokens += len(cycle.emitted)
        if self._probe:
            self._continue_probe(cycle)
        self._rates = self._priced()
        self._move(self._best())

    def _time(self, cycle: CycleRecord) -> None:
        """Learn from a cycle's time. A drafter that sat idle first takes in what it missed: no usual time."""
        if cycle.offered:
            if self._plain < STALE:
                seconds = cycle.draft_seconds + cycle.verify_seconds + cycle.commit_seconds
                self._costs.observe(cycle.offered, seconds)
            self._plain = 0
            return
        if cycle.depth and self._plain < STALE:
            self._miss += (cycle.draft_seconds - self._miss) / MISSES
        self._costs.observe(0, cycle.verify_seconds + cycle.commit_seconds)
        if not cycle.depth:
            self._plain += 1

    def _continue_probe(self, cycle: CycleRecord) -> None:
        """An accepted probe is news: what was known of acceptance counts no more."""
        self._probe -= 1
        if cycle.depth and not cycle.offered and self._probe:
            return  # nothing was drafted, so nothing was learnt
        if self._depth == 0 and not self._second:
            if cycle.accepted:
                self._acceptance.forget()
                self._acceptance.observe(cycle)
            if self._acceptance.gains[0] > HOPELESS:
                self._second, self._probe = True, 1
                return
        self._others += self._depth > 0
        self._second, self._probe = False, 0
        self._distance, self._tokens = min(2 * self._distance, self._config.last_probe), 0

    def _move(self, depth: int) -> None:
        if bool(depth) != bool(self._depth):
            if self._lasted >= LASTING:
                self._distance = self._config.first_probe
            self._lasted = self._tokens = self._probe = 0
            self._second = False
            self._patient = self._patient and depth > 0
        self._depth = depth
        if depth:
            self._lasted += 1
            if self._lasted == LASTING:
                self._distance = self._config.first_probe

    def _priced(self) -> list[float]:
        """``E(k) / t(k)`` of every depth k. t(k) is a mean over the drafts that the drafter gives when asked for k."""
        rates = []
        tokens = survival = given = 1.0  # E(k); A_k; the probability of a draft of k tokens or more
        shorter = 0.0  # seconds of the drafts of fewer than k tokens, each with its probability
        extra = self._miss
        for seconds, gain, offer in zip(
            self._costs.seconds, (*self._acceptance.gains, 0.0), (*self._acceptance.offers, 0.0), strict=True
        ):
            rates.append(tokens / (shorter + given * seconds))
            survival *= gain
            tokens += survival
            shorter += given * (1.0 - offer) * (seconds + extra)
            given *= offer
            extra = 0.0
        return rates

    def _best(self) -> int:
        """The depth with the best rate; the present one where that gains too little. A depth below plain goes."""
        rates, depth = self._rates, self._depth
        best = rates.index(max(rates))
        enough = rates[best] > rates[depth] * (1.0 + self._config.min_gain) or rates[depth] < rates[0]
        chosen = best if enough else depth
        if chosen == 0 and depth and self._patient and self._acceptance.drafts < PATIENCE:
            return 1  # two wrong drafts at the start are bad luck more often than a bad drafter
        return chosen


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
            help="the depth with the best measured rate; plain decoding where none beats it",
        )
    ]
