"""What drafting is worth: the rate of every depth, from acceptance by position and the seconds of passes and drafts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from specdec.contract import CycleRecord

# acceptance
PRIOR_WEIGHT = 2.0  # observations that a prior counts as
FIRST_GUESS = 0.6  # prior of position 0
CARRIED = 8.0  # most observations per position that one generation hands to the next
# costs
CLOCK_STEP = 1e-9  # seconds; a coarse clock may read 0, and no cycle is free
SLOWER = 0.3  # nats; anything slower is clipped as an outlier, such as a burst of other work on the machine
SLOWEST = math.exp(SLOWER)  # times the expected seconds
FASTER = 1.5  # nats; the limit is wider here because no outlier makes a cycle faster
FOLLOWED = 0.6  # share of a cycle's surprise that the load follows
DOUBT = 4.0  # what an entry takes of a surprise: DOUBT of DOUBT + 1 + its visits
TRUSTED = 100  # visits after which an entry moves no slower
FIRST = 3  # cycles whose median is the first load: the very first one runs on cold caches
CONTRAST = 4  # cycles after a change of depth that compare the two depths
LEARNING = 10  # visits during which an entry also moves its unvisited neighbours
# rates
STALE = 4  # plain cycles after which a drafter must catch up, so that its next cycle takes unusually long
CATCHING_UP = 0.05  # of a plain cycle: most that catching up with a token may take without counting as a loss
DRAFTS = 16  # drafts over which their seconds are averaged


class Counts:
    """Decayed counts by lookahead position: cycles that got to it, and those of them that got past it."""

    def __init__(self, positions: int, window: int) -> None:
        self._keep = 1.0 - 1.0 / window
        self.seen = [0.0] * positions
        self.passed = [0.0] * positions

    def observe(self, asked: int, passed: int) -> None:
        """Count a cycle that asked for so many tokens and got past the first ``passed`` positions."""
        seen, got, keep = self.seen, self.passed, self._keep
        for position in range(min(asked, passed + 1, len(seen))):
            seen[position] = seen[position] * keep + 1.0
            got[position] = got[position] * keep + (position < passed)

    def forget(self) -> None:
        """Discard all counts."""
        self.seen, self.passed = [0.0] * len(self.seen), [0.0] * len(self.seen)

    def fade(self) -> None:
        """Let the counts weigh as at most ``CARRIED`` observations."""
        for position, seen in enumerate(self.seen):
            share = CARRIED / max(seen, CARRIED)
            self.seen[position], self.passed[position] = share * seen, share * self.passed[position]

    def ratio(self, position: int, prior: float) -> float:
        """The share that got past a position; the prior counts as ``PRIOR_WEIGHT`` observations."""
        return (self.passed[position] + PRIOR_WEIGHT * prior) / (self.seen[position] + PRIOR_WEIGHT)


class PassCosts:
    """Seconds of a cycle without its draft, by drafted tokens.

    ``log seconds = log table[tokens] + load + own[tokens]``. All depths share the load (other work, clock rate); it
    changes fast and does not affect comparisons of depths. A depth's own correction is learnt from visits and changes
    slowly; an unvisited depth is interpolated from its nearest visited neighbours. Both are running averages.

    Attributes:
        seconds: by drafted tokens, at the table's load; depths are compared by these.
        load: what the present load multiplies every time with.
    """

    def __init__(self, table: Sequence[float]) -> None:
        self._table = [math.log(max(seconds, CLOCK_STEP)) for seconds in table]
        self._own = [0.0] * len(table)
        self._visits = [0] * len(table)
        self._first: list[float] = []
        self._load = 0.0  # of this generation, in nats, first measured after FIRST cycles
        self._contrast = 0  # cycles for which the load is still that of another depth
        self._last = -1  # drafted tokens of the previous cycle
        self.seconds, self.load = [math.exp(value) for value in self._table], 1.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn that a cycle with ``tokens`` drafted tokens took ``seconds``; ignores drafts beyond the table."""
        if tokens >= len(self._own):
            return
        measured = math.log(max(seconds, CLOCK_STEP)) - self._table[tokens] - self._own[tokens]
        changed, self._last = tokens != self._last, tokens
        if len(self._first) < FIRST:
            self._first.append(measured)
            self._load = statistics.median(self._first)
            self.load = math.exp(self._load)
            return
        self._contrast = CONTRAST if changed else max(self._contrast - 1, 0)
        surprise = min(max(measured - self._load, -FASTER), SLOWER)
        # Cycles of a single depth say nothing about its cost relative to others: attribute all of it to the load.
        share = DOUBT / (DOUBT + 1 + self._visits[tokens]) if self._contrast else 0.0
        self._load += FOLLOWED * (1 - share) * surprise
        self.load = math.exp(self._load)
        self._own[tokens] += share * surprise
        if not self._contrast:
            return
        self._visits[tokens] = min(self._visits[tokens] + 1, TRUSTED)
        if self._visits[tokens] <= LEARNING:
            self._price_all()
        else:
            self._price(tokens)

    def now(self, tokens: int) -> float:
        """The seconds of a cycle at the present load."""
        return self.seconds[tokens] * self.load

    def plain(self, cycle: CycleRecord) -> float:
        """The seconds of a plain cycle at the present load. No pass is cheaper than one of a single row."""
        return min(self.now(0), cycle.verify_seconds + cycle.commit_seconds)

    def loss(self, cycle: CycleRecord, plain: float) -> float:
        """Seconds that a cycle took longer than its tokens in ``plain`` cycles; negative if it was faster."""
        expected = self.now(min(cycle.offered, len(self.seconds) - 1))
        verified = min(cycle.verify_seconds + cycle.commit_seconds, SLOWEST * expected)
        return cycle.draft_seconds + verified - plain * len(cycle.emitted)

    def begin(self) -> None:
        """Begin another generation: the load is measured again."""
        self._first, self._load, self.load, self._contrast, self._last = [], 0.0, 1.0, 0, -1

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

    A line through decayed observations and through the table's costs of the shortest and the deepest draft, scaled to
    the observations, which count as one observation each: drafters take their time per draft or per token. Without
    costs in the table, drafts of twice the tokens are assumed to take twice as long.

    Attributes:
        line: seconds of a draft of no tokens, and of each token.
    """

    def __init__(self, table: Sequence[float]) -> None:
        self._table = table if any(table) else [tokens * CLOCK_STEP for tokens in range(len(table))]
        deepest = len(table) - 1
        self._ends = (1, deepest, self._table[1], self._table[deepest])
        self._count = self._x = self._xx = self._y = self._xy = self._expected = 0.0  # decayed sums, y in seconds
        self._fit()

    def observe(self, tokens: int, seconds: float, plain: float) -> None:
        """Learn that a draft took ``seconds``; but for the first, twice the expected and a ``plain`` cycle at most."""
        if tokens >= len(self._table):
            return
        if self._count:
            seconds = min(seconds, 2.0 * self(tokens) + plain)
        keep = 1.0 - 1.0 / DRAFTS
        self._count = keep * self._count + 1.0
        self._x = keep * self._x + tokens
        self._xx = keep * self._xx + tokens * tokens
        self._y = keep * self._y + seconds
        self._xy = keep * self._xy + tokens * seconds
        self._expected = keep * self._expected + self._table[tokens]
        self._fit()

    def __call__(self, tokens: int) -> float:
        """The expected seconds of a draft."""
        first, step = self.line
        return max(first + step * tokens, 0.0)

    def _fit(self) -> None:
        near, far, low, high = self._ends
        scale = self._y / self._expected if self._expected else 1.0
        low, high = scale * low, scale * high
        count, x, xx = self._count + 2.0, self._x + near + far, self._xx + near * near + far * far
        y, xy = self._y + low + high, self._xy + near * low + far * high
        spread = count * xx - x * x
        step = (count * xy - x * y) / spread if spread > 0.0 else 0.0
        step = step if step > 0.0 else 0.0
        self.line = (y - step * x) / count, step


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
        passes: what cycles cost without their drafts; shared by the drafters of a chain, and learnt elsewhere.
        drafts: seconds of a draft by its tokens, from 0 to the deepest, in the same unit.
        window: cycles that acceptance remembers.

    Attributes:
        tokens, seconds, by_depth: E(k), t(k) and their ratio, from depth 0 to the deepest; computed by ``update``.
        plain_cycles: consecutive cycles without a draft of this drafter.
    """

    def __init__(self, passes: PassCosts, drafts: Sequence[float], window: int) -> None:
        self._passes, self._drafts = passes, DraftCosts(drafts)
        self._gains, self._offers = Counts(len(drafts) - 1, window), Counts(len(drafts) - 1, window)
        self._expected = self._late = 0.0  # of the last draft: its expected seconds, and those beyond them
        self._begun = False  # whether this generation has had a draft: the first one also reads the prompt
        self.plain_cycles = 0
        self.tokens: list[float] = []
        self.seconds: list[float] = []
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

    def fade(self) -> None:
        """Begin another generation: what the last one accepted counts for less, and the drafter is not idle."""
        self._gains.fade()
        self._offers.fade()
        self._begun, self.plain_cycles = False, 0
        self.update()

    @property
    def catching_up(self) -> bool:
        """Whether the drafter has been idle for so long that its next draft takes unusually long."""
        return self.plain_cycles >= STALE

    @property
    def plain_seconds(self) -> float:
        """Seconds of a plain cycle at the present load."""
        return self._passes.now(0)

    def worst_loss(self, depth: int) -> float:
        """Seconds that a draft of so many tokens loses if none of them is accepted; it may be as late as the last."""
        draft = self._drafts(depth)
        late = self._late * min(draft / max(self._expected, CLOCK_STEP), 1.0)
        return (draft + late + self._passes.seconds[depth] - self._passes.seconds[0]) * self._passes.load

    def spent_catching_up(self, cycle: CycleRecord) -> float:
        """Seconds of a draft beyond the usual that the tokens since the last one explain.

        A drafter catches up with every token once, however rarely it is tried: no trial is to blame for it.
        """
        if not self.plain_cycles:
            return 0.0
        usual = self._drafts(cycle.offered) * self._passes.load
        explained = CATCHING_UP * self.plain_cycles * self.plain_seconds
        return max(min(cycle.draft_seconds - usual, explained), 0.0)

    def observe(self, cycle: CycleRecord) -> None:
        """Learn acceptance and the seconds of a draft; those of a drafter that catches up, or of a generation's first
        draft, are no measure of the next."""
        self._count(cycle)
        if not cycle.depth:
            self.plain_cycles += 1
            return
        if not self.catching_up:
            seconds = cycle.draft_seconds / self._passes.load
            if self._begun:
                self._drafts.observe(cycle.offered, seconds, self._passes.seconds[0])
            self._expected = self._drafts(cycle.offered)
            self._late = max(seconds - self._expected, 0.0)
        self._begun = True
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
        """Compute E(k), t(k) and the rates. t(k) is the mean over the drafts returned for depth k.

        The prior of a gain is the acceptance of offered tokens at the position before it. A drafter is assumed to give
        as many tokens as asked for until it does not.
        """
        passes, (first, step) = self._passes.seconds, self._drafts.line
        tokens = survival = reached = 1.0  # E(k); A_k; the probability of a draft of k tokens or more
        shorter = 0.0  # seconds of drafts of fewer than k tokens, weighted by probability
        drafted = passes[0] + max(first, 0.0)
        rates, all_tokens, all_seconds = [tokens / passes[0]], [tokens], [passes[0]]
        guess, gains, offers = FIRST_GUESS, self._gains, self._offers
        counts = zip(gains.seen, gains.passed, offers.seen, offers.passed, passes[1:], strict=True)
        for depth, (seen, passed, asked, got, seconds) in enumerate(counts, start=1):
            gain = (passed + PRIOR_WEIGHT * guess) / (seen + PRIOR_WEIGHT)
            offer = (got + PRIOR_WEIGHT) / (asked + PRIOR_WEIGHT)
            guess = gain / offer if gain < offer else 1.0
            survival *= gain
            tokens += survival
            shorter += reached * (1.0 - offer) * drafted
            reached *= offer
            draft = first + step * depth
            drafted = seconds + draft if draft > 0.0 else seconds
            spent = shorter + reached * drafted
            all_tokens.append(tokens)
            all_seconds.append(spent)
            rates.append(tokens / spent)
        self.tokens, self.seconds, self.by_depth = all_tokens, all_seconds, rates
