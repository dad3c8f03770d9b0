"""The adaptive depth policy: picks the depth with the best rate, depth 0 (plain decoding) included.

``Rates`` estimates the rate of each depth, ``Trials`` schedules trials of other depths, ``Budget`` bounds what drafting
may lose, and ``AdaptivePolicy`` decides.
The output of an exact verifier does not depend on the depth, so feedback across cycles cannot change it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import attrs

from specdec.config import between
from specdec.contract import CycleRecord, DepthPolicy, DepthPolicySpec, PrepareEnv, Stats
from specdec.errors import UnsupportedError
from specdec.hookspecs import hookimpl
from specdec.policies.fixed import MAX_DEPTH
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
# acceptance
PRIOR_WEIGHT = 2.0  # observations that a prior counts as
FIRST_GUESS = 0.6  # prior of position 0
CARRIED = 8.0  # most observations per position that one generation hands to the next
# costs
CLOCK_STEP = 1e-9  # seconds; a coarse clock may read 0, and no cycle is free
SLOWER = 0.3  # nats; anything slower is clipped as an outlier, such as a burst of other work on the machine
FASTER = 1.5  # nats; the limit is wider here because no outlier makes a cycle faster
NOISE = 0.02  # initial variance of a cycle's log seconds, a deviation of 14 %
NOISES = 16  # pairs of equal cycles over which the noise is averaged
DOUBT = 0.08  # variance of a table entry, relative to the other entries, before the first visit
DRIFT = 0.02  # variance per cycle of the load that all depths share
UNKNOWN = 1.0  # variance of the load before it is measured: the first cycles may be unlike all later ones
TRUSTED = 100  # visits after which confidence in an entry stops growing
FIRST = 3  # cycles whose median is the first load: the very first one runs on cold caches
CONTRAST = 4  # cycles after a change of depth that compare the two depths
LEARNING = 10  # visits during which an entry also moves its unvisited neighbours
# rates
STALE = 4  # plain cycles after which a drafter must catch up, so that its next cycle takes unusually long
DRAFTS = 16  # drafts over which their seconds are averaged
# the budget
SHARE = 0.03  # of the decoding time so far that drafting may lose against plain decoding
GRANT = 6.0  # plain cycles that it may lose in any case


class Counts:
    """Decayed counts by lookahead position: cycles that got to it, and those of them that got past it."""

    def __init__(self, positions: int, window: int) -> None:
        self._keep = 1.0 - 1.0 / window
        self.seen = [0.0] * positions
        self.passed = [0.0] * positions

    def observe(self, asked: int, passed: int) -> None:
        """Count a cycle that asked for so many tokens and got past the first ``passed`` positions."""
        for position in range(min(asked, passed + 1, len(self.seen))):
            self.seen[position] = self.seen[position] * self._keep + 1.0
            self.passed[position] = self.passed[position] * self._keep + (position < passed)

    def forget(self) -> None:
        """Discard all counts."""
        self.seen, self.passed = [0.0] * len(self.seen), [0.0] * len(self.seen)

    def adopt(self, other: Counts) -> None:
        """Start from another generation's counts, weighted as at most ``CARRIED`` observations."""
        for position in range(min(len(self.seen), len(other.seen))):
            share = min(1.0, CARRIED / max(other.seen[position], CARRIED))
            self.seen[position], self.passed[position] = share * other.seen[position], share * other.passed[position]

    def ratio(self, position: int, prior: float) -> float:
        """The share that got past a position; the prior counts as ``PRIOR_WEIGHT`` observations."""
        return (self.passed[position] + PRIOR_WEIGHT * prior) / (self.seen[position] + PRIOR_WEIGHT)


class PassCosts:
    """Seconds of a cycle without its draft, by drafted tokens.

    ``log seconds = log table[tokens] + load + own[tokens]``. All depths share the load (other work, clock rate); it
    changes fast and does not affect comparisons of depths. A depth's own correction is learnt from visits and changes
    slowly; an unvisited depth is interpolated from its nearest visited neighbours. Both are estimated by a filter of
    two scalars that ignores their covariance.
    """

    def __init__(self, table: Sequence[float]) -> None:
        self._table = [math.log(max(seconds, CLOCK_STEP)) for seconds in table]
        self._own = [0.0] * len(table)
        self._visits = [0] * len(table)
        self._first: list[float] = []
        self._load = 0.0  # of this generation, first measured after FIRST cycles
        self._load_doubt = UNKNOWN  # its variance
        self._noise = NOISE
        self._contrast = 0  # cycles for which the load is still that of another depth
        self._before = (-1, 0.0)  # drafted tokens and log seconds of the previous cycle
        self.seconds = [math.exp(value) for value in self._table]
        """By drafted tokens, at the table's load; depths are compared by these."""

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn that a cycle with ``tokens`` drafted tokens took ``seconds``; ignores drafts beyond the table."""
        if tokens >= len(self._own):
            return
        logged = math.log(max(seconds, CLOCK_STEP))
        measured = logged - self._table[tokens] - self._own[tokens]
        same, earlier = self._before[0] == tokens, self._before[1]
        self._contrast = CONTRAST if not same and len(self._first) == FIRST else max(self._contrast - 1, 0)
        self._before = tokens, logged
        if same:  # the difference of two equal cycles depends on neither table nor load
            self._noise += (min(abs(logged - earlier), SLOWER) ** 2 / 2 - self._noise) / NOISES
        if len(self._first) < FIRST:
            self._first.append(measured)
            self._load = statistics.median(self._first)
            return
        surprise = min(max(measured - self._load, -FASTER), SLOWER)
        # Cycles of a single depth say nothing about its cost relative to others: attribute all of it to the load.
        doubt = DOUBT / (1 + self._visits[tokens]) if self._contrast else 0.0
        total = doubt + self._load_doubt + self._noise
        self._load += surprise * self._load_doubt / total
        self._own[tokens] += surprise * doubt / total
        self._load_doubt = max(DRIFT, self._load_doubt * (1 - self._load_doubt / total))
        if not self._contrast:
            return
        self._visits[tokens] = min(self._visits[tokens] + 1, TRUSTED)
        if self._visits[tokens] <= LEARNING:
            self._price_all()
        else:
            self._price(tokens)

    @property
    def load(self) -> float:
        """What the present load multiplies every time with."""
        return math.exp(self._load)

    def now(self, tokens: int) -> float:
        """The seconds of a cycle at the present load."""
        return self.seconds[tokens] * self.load

    def adopt(self, other: PassCosts) -> None:
        """Start from what another generation with the same table learnt; the load is measured again."""
        self._own, self._visits = list(other._own), list(other._visits)
        self._price_all()

    def _price(self, tokens: int) -> None:
        self.seconds[tokens] = math.exp(self._table[tokens] + self._own[tokens])

    def _price_all(self) -> None:
        visited = [tokens for tokens, count in enumerate(self._visits) if count]
        for tokens, count in enumerate(self._visits):
            if not count:
                self._own[tokens] = self._between(tokens, visited)
            self._price(tokens)

    def _between(self, tokens: int, visited: list[int]) -> float:
        """The estimate for an unvisited entry. Plain decoding says nothing about the cost of drafts."""
        visited = [v for v in visited if v > 0]
        low = max((v for v in visited if v < tokens), default=None)
        high = min((v for v in visited if v > tokens), default=None)
        if low is None or high is None:
            nearest = low if low is not None else high
            return 0.0 if nearest is None else self._own[nearest]
        share = (tokens - low) / (high - low)
        return self._own[low] + share * (self._own[high] - self._own[low])


class DraftCosts:
    """Seconds of a draft by its tokens, at the table's load.

    A line through decayed observations and through the table's costs of the shortest and the deepest draft, which count
    as one observation each: drafters take their time per draft or per token, and a chain of drafters mixes the two.
    """

    def __init__(self, table: Sequence[float]) -> None:
        self._table = table
        deepest = len(table) - 1
        self._prior = [(1, table[1]), (deepest, table[deepest])]
        self._sums = [0.0] * 5  # of 1, x, x x, y and x y, for x tokens and y seconds
        self._fit()

    def observe(self, tokens: int, seconds: float, plain: float) -> None:
        """Learn that a draft took ``seconds``; one of more than twice the expected and a ``plain`` cycle is clipped."""
        seconds = min(seconds, 2.0 * self(tokens) + plain)
        terms = (1.0, tokens, tokens * tokens, seconds, tokens * seconds)
        self._sums = [held * (1.0 - 1.0 / DRAFTS) + term for held, term in zip(self._sums, terms, strict=True)]
        self._fit()

    def __call__(self, tokens: int) -> float:
        """The expected seconds of a draft."""
        return max(self._first + self._step * tokens, 0.0)

    def adopt(self, other: DraftCosts) -> None:
        """Continue with what another generation with the same table learnt."""
        self._sums = other._sums
        self._fit()

    def _fit(self) -> None:
        count, x, xx, y, xy = self._sums
        for tokens, seconds in self._prior:
            count, x, xx = count + 1, x + tokens, xx + tokens * tokens
            y, xy = y + seconds, xy + tokens * seconds
        spread = count * xx - x * x
        self._step = max((count * xy - x * y) / spread, 0.0) if spread > 0.0 else 0.0
        self._first = (y - self._step * x) / count


class Rates:
    """The rate ``E(k) / t(k)`` of every depth k, learnt from cycles.

    Cycles are renewals, so this is the long-run rate of tokens at depth k. t comes from ``PassCosts`` and
    ``DraftCosts``, E from two decayed ratios by lookahead position; neither assumes that drafter and target are
    independent.

    *Gain* of position i: of the cycles that asked for more than i tokens and accepted the first i, the share that also
    accepted token i. The product of gains is the survival A_i; a cycle of depth k gives ``E(k) = 1 + A_1 + ... + A_k``
    tokens. *Offer* of position i: of the cycles that asked for more than i tokens and got at least i, the share that
    got one more. A drafter may give fewer tokens than asked for, and a shorter draft costs less.

    Args:
        passes: seconds of a cycle without its draft, by drafted tokens from 0 to the deepest; only ratios matter.
        drafts: seconds of a draft by its tokens, in the same unit.
        window: cycles that acceptance remembers.

    Attributes:
        by_depth: tokens per second, from depth 0 to the deepest draft; computed by ``update``.
        plain_cycles: consecutive cycles without a draft.
    """

    def __init__(self, passes: Sequence[float], drafts: Sequence[float], window: int) -> None:
        self._passes, self._drafts = PassCosts(passes), DraftCosts(drafts)
        self._gains, self._offers = Counts(len(passes) - 1, window), Counts(len(passes) - 1, window)
        self._slowness = 1.0  # seconds of the last draft / expected
        self.plain_cycles = 0
        self.by_depth: list[float] = []
        self.update()

    @property
    def first_acceptance(self) -> float:
        """The estimated acceptance at position 0."""
        return self._gains.ratio(0, FIRST_GUESS)

    @property
    def drafts(self) -> float:
        """Decayed count of the cycles that observed position 0."""
        return self._gains.seen[0]

    def adopt(self, other: Rates) -> None:
        """Start from what another generation learnt; its acceptance counts for less."""
        self._gains.adopt(other._gains)
        self._offers.adopt(other._offers)
        self._passes.adopt(other._passes)
        self._drafts.adopt(other._drafts)
        self._slowness = other._slowness

    def plain(self, cycle: CycleRecord) -> float:
        """The seconds of a plain cycle at the present load. No pass is cheaper than one of a single row."""
        return min(self._passes.now(0), cycle.verify_seconds + cycle.commit_seconds)

    def loss(self, cycle: CycleRecord) -> float:
        """Seconds that a cycle took longer than plain decoding of its tokens; negative if it was faster."""
        expected = self._passes.now(min(cycle.offered, len(self._gains.seen)))
        verified = min(cycle.verify_seconds + cycle.commit_seconds, math.exp(SLOWER) * expected)
        return cycle.draft_seconds + verified - self.plain(cycle) * len(cycle.emitted)

    def worst_loss(self, depth: int) -> float:
        """Seconds that a draft of so many tokens loses if none of them is accepted; it may be as slow as the last."""
        draft = self._drafts(depth) * max(self._slowness, 1.0)
        return (draft + self._passes.seconds[depth] - self._passes.seconds[0]) * self._passes.load

    def observe(self, cycle: CycleRecord) -> None:
        """Learn from a cycle; the time of a drafter that catches up after a pause is ignored."""
        self._count(cycle)
        seconds = cycle.verify_seconds + cycle.commit_seconds
        if not cycle.offered or self.plain_cycles < STALE:
            self._passes.observe(cycle.offered, seconds)
        if not cycle.depth:
            self.plain_cycles += 1
            return
        if self.plain_cycles < STALE:
            seconds = cycle.draft_seconds / self._passes.load
            self._drafts.observe(cycle.offered, seconds, self._passes.seconds[0])
            self._slowness = seconds / max(self._drafts(cycle.offered), CLOCK_STEP)
        if cycle.offered:
            self.plain_cycles = 0

    def _count(self, cycle: CycleRecord) -> None:
        self._gains.observe(cycle.depth, cycle.accepted)
        self._offers.observe(cycle.depth, cycle.offered)

    def restart(self, cycle: CycleRecord) -> None:
        """Discard what was learnt about acceptance and start again from this cycle."""
        self._gains.forget()
        self._offers.forget()
        self._count(cycle)

    def update(self) -> None:
        """Compute ``by_depth``. t(k) is the mean over the drafts returned for depth k.

        The prior of a gain is the acceptance of offered tokens at the position before it. A drafter is assumed to give
        as many tokens as asked for until it does not.
        """
        rates = []
        tokens = survival = reached = 1.0  # E(k); A_k; the probability of a draft of k tokens or more
        shorter = 0.0  # seconds of drafts of fewer than k tokens, weighted by probability
        guess = FIRST_GUESS
        for position, seconds in enumerate(self._passes.seconds):
            drafted = seconds + self._drafts(position)
            rates.append(tokens / (shorter + reached * (drafted if position else seconds)))
            if position == len(self._gains.seen):
                break
            gain, offer = self._gains.ratio(position, guess), self._offers.ratio(position, 1.0)
            guess = min(gain / offer, 1.0)
            survival *= gain
            tokens += survival
            shorter += reached * (1.0 - offer) * drafted
            reached *= offer
        self.by_depth = rates


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

    @property
    def running(self) -> bool:
        """Whether a trial is running."""
        return bool(self._opening or self._cycles)

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

    def depth(self, current: int, affordable: bool = True) -> int:
        """The depth of the next cycle: ``current``, or a trial depth; 0 if a draft is not ``affordable``."""
        if not affordable:  # a trial that is due waits until it is
            self._opening = []
            if self._cycles:
                self._end()
            elif current:
                self.cancel()
            return 0
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
        self._end()

    def _end(self) -> None:
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
    passes: Sequence[float] = attrs.field(init=False)  # seconds by drafted tokens; ratios only, without a table
    drafts: Sequence[float] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        table, depths = self.table, range(MAX_DEPTH + 1)
        self.passes = [table.pass_seconds(k + 1) + table.commit if table else 1.0 + STEP_GUESS * k for k in depths]
        self.drafts = [table.draft_seconds(k) if table else 0.0 for k in depths]


class AdaptivePolicy(DepthPolicy):
    """Follows the best rate and rarely tries other depths; trials become frequent again after lasting speculation."""

    def __init__(self, config: AdaptiveConfig, learnt: Learnt | None = None) -> None:
        self._learnt = learnt if learnt is not None else Learnt()
        self._min_gain = config.min_gain
        table, last = self._learnt.table, self._learnt.last
        passes, drafts = (row[: config.max_depth + 1] for row in (self._learnt.passes, self._learnt.drafts))
        self._rates = Rates(passes, drafts, config.window)
        self._budget = Budget(passes[0])
        self._trials = Trials(config.first_probe, config.last_probe, config.max_depth)
        if last is not None:
            self._rates.adopt(last._rates)
            self._trials.adopt(last._trials)
            self._budget = attrs.evolve(last._budget)
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
            return "" if self._affordable(1) else "drafting has lost what it may for now; it is tried again later"
        rates = self._rates.by_depth
        best = max(range(1, len(rates)), key=lambda depth: rates[depth])
        return (
            f"plain decoding is faster here: depth {best} would give {rates[best] / rates[0]:.2f} times "
            f"its rate (acceptance at position 0: {self._rates.first_acceptance:.2f})"
        )

    def next_depth(self, stats: Stats) -> int:
        depth = self._trials.depth(self._depth, self._affordable(1))
        while depth and not self._affordable(depth):
            depth -= 1
        return depth

    def _affordable(self, depth: int) -> bool:
        return self._budget.affords(self._rates.worst_loss(depth))

    def record(self, cycle: CycleRecord) -> None:
        rates, trials = self._rates, self._trials
        self._budget.passed(cycle.draft_seconds + cycle.verify_seconds + cycle.commit_seconds)
        if rates.plain_cycles > QUIET and not (cycle.depth or self._depth or trials.running):
            if rates.plain_cycles % SELDOM:  # overhead here slows plain decoding
                rates.plain_cycles += 1
                trials.passed(1)
                return
        self._learnt.last = self
        rates.observe(cycle)
        self._budget.plain = rates.plain(cycle)
        if cycle.depth:
            self._budget.charge(rates.loss(cycle))
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
