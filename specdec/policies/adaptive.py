"""The adaptive depth policy: picks the depth with the best rate, depth 0 (plain decoding) included.

``Rates`` (``specdec.policies.rates``) estimates the rate of each depth, ``DrafterDepth`` chooses the depth of one
drafter and tries others, and ``Budget`` bounds what drafting may lose. ``AdaptivePolicy`` has one ``DrafterDepth``, or,
for a chain of drafters, one for each.
The output of an exact verifier does not depend on the depth, so feedback across cycles cannot change it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import attrs

from specdec.config import between
from specdec.contract import CycleRecord, DepthPolicy, DepthPolicySpec, PrepareEnv, Stats
from specdec.errors import UnsupportedError
from specdec.hookspecs import hookimpl
from specdec.policies.fixed import MAX_DEPTH
from specdec.policies.rates import PassCosts, Rates
from specdec.records.cost_table import CostTable

STEP_GUESS = 0.2  # cost of a drafted token in plain cycles if nothing was measured: break-even at usual acceptance
QUIET = 5  # plain cycles after which their cost is updated only now and then
SELDOM = 64  # plain cycles between two such updates
PATIENCE = 6.0  # drafts before speculation goes off for the first time, the last of them of depth 1
LASTING = 32  # cycles after which speculation counts as lasting
TRIES = 8  # cycles that a trial waits for a draft: an empty draft carries no information
HOPELESS = 0.3  # acceptance at position 0 below which a rejected trial gets no second cycle
# the budget
SHARE = 0.03  # of the decoding time so far that drafting may lose against plain decoding
GRANT = 6.0  # plain cycles that it may lose in any case
TRIAL = 0.005  # of the time since the last trial that the next one may lose while speculation is off
REST = 16  # tokens at least between two such trials


@attrs.define
class Budget:
    """The time that drafting may lose against plain decoding.

    It is ``SHARE`` of the decoding time so far or ``GRANT`` plain cycles, whichever is more. Drafts that pay make up
    for losses, and save up to ``GRANT`` plain cycles for later ones. The first draft is free: it may prepare the
    drafter, and nothing shows beforehand that a drafter is slow.

    Attributes:
        plain: seconds of a plain cycle.
    """

    plain: float
    _lost: float = 0.0
    _time: float = 0.0
    _used: bool = False

    def passed(self, seconds: float) -> None:
        """Count the time of a cycle."""
        self._time += seconds

    def charge(self, loss: float) -> None:
        """Count what a cycle with a draft lost, or gained if negative."""
        if self._used:
            self._lost = max(self._lost + loss, -GRANT * self.plain)
        self._used = True

    def affords(self, loss: float) -> bool:
        """Whether another draft stays within the budget if it loses so much."""
        return self._lost + loss <= max(SHARE * self._time, GRANT * self.plain)


@attrs.frozen(kw_only=True)
class AdaptiveConfig:
    """The deepest draft, how fast to forget, and how rarely to try another depth."""

    max_depth: int = attrs.field(default=8, validator=between(1, MAX_DEPTH))
    window: int = attrs.field(default=48, validator=between(4, 4096))  # cycles that acceptance remembers
    min_gain: float = attrs.field(default=0.03, validator=between(0.0, 1.0))  # relative; below it the depth stays
    first_probe: int = attrs.field(default=16, validator=between(1, 65536))  # tokens until another depth is tried
    last_probe: int = attrs.field(default=256, validator=between(1, 65536))  # tokens between those trials at most


@attrs.define
class Learnt:
    """What the generations of one language model share: the cost table and the last policy.

    A policy reads ``last`` only when it is made. Generations in several threads may set it in turn; the values are
    plain floats, so the worst outcome is an estimate mixed from two generations.
    """

    table: CostTable | None = None
    last: AdaptivePolicy | None = None
    passes: Sequence[float] = attrs.field(init=False)  # seconds by drafted tokens; ratios only, without a table
    drafts: Sequence[float] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        table, depths = self.table, range(MAX_DEPTH + 1)
        self.passes = [table.pass_seconds(k + 1) + table.commit if table else 1.0 + STEP_GUESS * k for k in depths]
        self.drafts = [table.draft_seconds(k) if table else 0.0 for k in depths]


class DrafterDepth:
    """The depth of one drafter: follows its best rate and rarely tries other depths.

    While speculation is off, a trial is one cycle of depth 1, plus a second one for timing unless drafts are hopeless;
    it comes when it is cheap beside the time since the last one. While speculation is on, a trial is one cycle of
    another depth. The first comes after ``first_probe`` tokens; the distance then doubles up to ``last_probe``, and is
    short again after lasting speculation.

    Args:
        passes, drafts: as for ``Rates``.
    """

    def __init__(self, config: AdaptiveConfig, passes: PassCosts, drafts: Sequence[float]) -> None:
        self._config, self._deepest = config, config.max_depth
        self.rates = Rates(passes, drafts, config.window)
        self._distance = config.first_probe  # tokens between trials while speculation is on
        self._tokens = 0  # since the last trial
        self._cycles = 0  # that the running trial may still take; 0 when none runs
        self._second = False  # whether this is a trial's second cycle
        self._others = 0  # trials of other depths so far
        self._lasted = 0  # cycles since speculation went on
        self._patient = False  # whether speculation is on for the first time
        self.depth = 0
        self.depth = self._best(0.0)
        self._patient = self.depth > 0

    def begin(self) -> None:
        """Begin another generation: what was accepted in the last one counts for less."""
        self.rates.fade()
        self._cycles, self._second = 0, False
        self._lasted, self._patient, self.depth = 0, False, 0
        self.depth = self._best(0.0)

    def quiet(self, budget: Budget) -> int:
        """The next plain cycles that need no attention: some while plain decoding is settled and no trial is due."""
        plain = self.rates.plain_cycles
        if plain <= QUIET or self.depth or self._cycles:
            return 0
        rest = math.ceil(self._wait() - self._tokens)
        if rest <= 0:
            rest = 0 if self.affordable(budget, 1) else REST
        return min(rest, -plain % SELDOM)

    @property
    def gain(self) -> float:
        """The best rate of a depth above 0, over that of plain decoding."""
        return max(self.rates.by_depth[1:]) / self.rates.by_depth[0]

    def next_depth(self, budget: Budget) -> int:
        """The depth of the next draft: as deep as the budget could pay if nothing of it were accepted."""
        if not self.affordable(budget, 1):
            if self.depth or self._cycles:
                self._end_trial()
            return 0
        if not self._cycles and self._tokens >= self._wait():
            self._cycles = TRIES
        depth = self._tried() if self._cycles else self.depth
        while depth > 1 and not self.affordable(budget, depth):  # a draft of one token is
            depth -= 1
        return depth

    def affordable(self, budget: Budget, depth: int) -> bool:
        return budget.affords(self.rates.worst_loss(depth))

    def _tried(self) -> int:
        """The depth of the running or next trial."""
        others = (0, min(self.depth + 1, self._deepest), self.depth - 1)
        return others[self._others % len(others)] if self.depth else 1

    def _wait(self) -> float:
        """Tokens between trials; none before the first draft while speculation is off, since the table may be wrong."""
        if self.depth:
            return self._distance
        rates = self.rates
        return max(rates.worst_loss(1) / (TRIAL * rates.plain_seconds), REST) if rates.drafts else 0.0

    def observe(self, cycle: CycleRecord, pace: float) -> None:
        """Learn from a cycle that asked this drafter, or that asked none.

        Args:
            pace: tokens per second of the chain, at the table's load; 0 for a drafter that is alone.
        """
        self.rates.observe(cycle)
        self._tokens += len(cycle.emitted)
        if self._cycles:
            self._try(cycle)
        self.rates.update()
        depth = self._best(pace)
        if bool(depth) != bool(self.depth):
            if self._lasted >= LASTING:
                self._distance = self._config.first_probe
            self._lasted = 0
            self._end_trial()
            self._patient = self._patient and depth > 0
        self.depth = depth
        if depth:
            self._lasted += 1
            if self._lasted == LASTING:
                self._distance = self._config.first_probe

    def idle(self, tokens: int, cycles: int = 1) -> None:
        """Count the tokens of cycles that did without this drafter."""
        self.rates.plain_cycles += cycles
        self._tokens += tokens

    def _try(self, cycle: CycleRecord) -> None:
        """Continue or end the running trial; an accepted first draft while speculation is off is news."""
        first = not (self.depth or self._second)
        if first and cycle.accepted:
            self.rates.restart(cycle)
        self._cycles -= 1
        if cycle.depth and not cycle.offered and self._cycles:
            return  # nothing was drafted
        if first and self.rates.first_acceptance > HOPELESS:
            self._second, self._cycles = True, 1
            return
        if self.depth:
            self._others += 1
            self._distance = min(2 * self._distance, self._config.last_probe)
        self._end_trial()

    def _end_trial(self) -> None:
        """Count the tokens until the next trial from here."""
        self._tokens = self._cycles = 0
        self._second = False

    def _best(self, pace: float) -> int:
        """The best depth, or the current one if the gain is too small and it beats plain decoding.

        Alone, a drafter's best depth is that of the best rate, r = E(k) / t(k), which is also that of the largest
        E(k) - r t(k). In a chain that is faster than that, time is worth the chain's pace: the largest
        E(k) - pace t(k) counts, and a slow drafter stays out of the way of a quick one.
        """
        rates, depth = self.rates.by_depth, self.depth
        fastest = max(rates)
        if pace > fastest:
            tokens, seconds = self.rates.tokens, self.rates.seconds
            worth = [count - pace * spent for count, spent in zip(tokens, seconds, strict=True)]
            best = worth.index(max(worth))
            enough = worth[best] - worth[depth] > self._config.min_gain * tokens[depth]
        else:
            best = rates.index(fastest)
            enough = fastest > rates[depth] * (1.0 + self._config.min_gain)
        chosen = best if enough or rates[depth] < rates[0] else depth
        if chosen == 0 and depth and self._patient and self.rates.drafts < PATIENCE:
            return 1  # a few wrong drafts at the start are more often bad luck than a bad drafter
        return chosen


class AdaptivePolicy(DepthPolicy):
    """The depth with the best rate, for every drafter of a chain its own, within a budget that they share."""

    def __init__(self, config: AdaptiveConfig, learnt: Learnt | None = None) -> None:
        self._config, self._learnt = config, learnt if learnt is not None else Learnt()
        self._quiet = 0  # plain cycles to come that are counted already: attention to each would slow plain decoding
        last = self._learnt.last
        if last is None:
            passes = self._learnt.passes[: config.max_depth + 1]
            self._passes, self._budget = PassCosts(passes), Budget(passes[0])
            self._drafters: dict[str, DrafterDepth] = {}
            self._of("")
        else:
            parts = last._passes, last._budget, dict(last._drafters)
            self._passes, self._budget, self._drafters = copy.deepcopy(parts)
            self._passes.begin()
            for one in self._drafters.values():
                one.idle(-last._quiet, -last._quiet)
                one.begin()
        self._tokens = self._seconds = 0.0  # of this generation, at the table's load
        self._asked: dict[str, int] = {}  # the depths that a chain asked for in this cycle

    def _of(self, drafter: str) -> DrafterDepth:
        """The depth of a drafter, by its name in a chain. It starts from the table, which has the costs of one."""
        if drafter not in self._drafters:
            table = self._learnt.table
            drafts = self._learnt.drafts[: self._config.max_depth + 1]
            if table is not None and drafter not in ("", table.drafter):
                drafts = [0.0] * len(drafts)
            self._drafters[drafter] = DrafterDepth(self._config, self._passes, drafts)
        return self._drafters[drafter]

    @property
    def reason(self) -> str:
        """Why the depth is 0, or an empty string."""
        drafters = self._drafters.values()
        if active := [one for one in drafters if one.depth]:
            if any(one.affordable(self._budget, 1) for one in active):
                return ""
            return "drafting has lost what it may for now; it is tried again later"
        best = max(drafters, key=lambda one: one.gain)
        rates = best.rates.by_depth
        depth = max(range(1, len(rates)), key=lambda depth: rates[depth])
        return (
            f"plain decoding is faster here: depth {depth} would give {best.gain:.2f} times "
            f"its rate (acceptance at position 0: {best.rates.first_acceptance:.2f})"
        )

    def next_depth(self, stats: Stats) -> int:
        return 0 if self._quiet else max(one.next_depth(self._budget) for one in self._drafters.values())

    def depth_of(self, drafter: str, depth: int) -> int:
        self._drafters.pop("", None)  # that of a drafter that is no chain
        self._asked[drafter] = min(self._of(drafter).next_depth(self._budget), depth)
        return self._asked[drafter]

    def record(self, cycle: CycleRecord) -> None:
        seconds = cycle.draft_seconds + cycle.verify_seconds + cycle.commit_seconds
        self._budget.passed(seconds)
        if self._quiet and not cycle.depth:  # a prediction may draft meanwhile
            self._quiet -= 1
            return
        self._learnt.last = self
        drafting = self._of(cycle.drafter) if cycle.offered else None
        if drafting is None or not drafting.rates.catching_up:
            self._passes.observe(cycle.offered, cycle.verify_seconds + cycle.commit_seconds)
        self._budget.plain = plain = self._passes.plain(cycle)
        if cycle.depth:
            excused = drafting.rates.spent_catching_up(cycle) if drafting is not None else 0.0
            self._budget.charge(self._passes.loss(cycle, plain) - excused)
        self._tokens += len(cycle.emitted)
        self._seconds += seconds / self._passes.load
        pace = self._tokens / self._seconds if len(self._drafters) > 1 and self._seconds else 0.0
        for name, one in self._drafters.items():
            if drafting is None or drafting is one:
                depth = min(self._asked.get(name, cycle.depth), cycle.depth)
                one.observe(cycle if depth == cycle.depth else attrs.evolve(cycle, depth=depth), pace)
            else:
                one.idle(len(cycle.emitted))
        self._asked.clear()
        more = min(one.quiet(self._budget) for one in self._drafters.values())
        self._quiet += more
        for one in self._drafters.values() if more else ():
            one.idle(more, more)


def _prepare(config: AdaptiveConfig, env: PrepareEnv) -> Learnt:
    if env.costs is None:
        return Learnt()
    try:
        return Learnt(env.costs())
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
