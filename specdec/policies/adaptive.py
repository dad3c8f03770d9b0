"""Choose the depth by measured cost and measured acceptance; depth 0, plain decoding, is always a candidate.

Cycles are renewals, so the long-run rate of depth k is ``E(k) / t(k)``: expected tokens over expected seconds of a
cycle. E comes from the acceptance of each lookahead position, t from the cycles' own wall-clock times. Feedback across
cycles never touches the output: given the committed tokens and k, the next cycle is exact.
"""

from __future__ import annotations

import statistics
from collections import deque

import attrs

from specdec.config import between
from specdec.contract import CycleRecord, DepthPolicy, DepthPolicySpec, Stats
from specdec.hookspecs import hookimpl
from specdec.policies.fixed import MAX_DEPTH

REMEMBERED = 9  # cycles of one depth whose median is its cost: a neighbour's load moves a mean, hardly a median
CLOCK_STEP = 1e-9  # seconds; a coarse clock may read 0, and no cycle is free
TRIALS = 2  # cycles of each trial depth at the start


@attrs.frozen(kw_only=True)
class AdaptiveConfig:
    """How far to look, how fast to forget, and how rarely to probe once speculation is off."""

    max_depth: int = attrs.field(default=6, validator=between(1, MAX_DEPTH))
    window: int = attrs.field(default=48, validator=between(4, 4096))  # cycles that acceptance remembers
    min_gain: float = attrs.field(default=0.03, validator=between(0.0, 1.0))  # below it the depth stays
    patience: int = attrs.field(default=8, validator=between(1, 1024))  # cycles at 0 before speculation counts as off
    first_probe: int = attrs.field(default=64, validator=between(1, 65536))  # tokens until a probe, doubled each time
    last_probe: int = attrs.field(default=1024, validator=between(1, 65536))  # tokens between probes at most


class AdaptivePolicy(DepthPolicy):
    """Tries a few depths, then follows the best rate; switches off where none beats plain decoding, and probes rarely.

    A probe is one cycle of depth 1, so its price is bounded by ``(t(1) - t(0)) / (first_probe * t(0))``.
    """

    def __init__(self, config: AdaptiveConfig) -> None:
        self._config = config
        self._forget = 1.0 - 1.0 / config.window
        self._accepted = [0.0] * config.max_depth  # decayed counts by lookahead position
        self._reached = [0.0] * config.max_depth
        self._times: dict[int, deque[float]] = {}  # seconds of the last cycles, by drafted tokens
        deep = sorted({1, min(3, config.max_depth), config.max_depth})
        self._trials = [0, *(depth for depth in deep for _ in range(TRIALS)), 0]
        self._depth = 0
        self._plain_cycles = 0  # in a row
        self._tokens_off = 0  # since speculation went off, or since the last probe
        self._probe_every = config.first_probe
        self._probing = False

    @property
    def reason(self) -> str:
        """Why the depth is 0, or an empty string."""
        if self._depth or self._trials or not self._times:
            return ""
        rates = {depth: self._expected(depth) / self._cost(depth) for depth in range(self._config.max_depth + 1)}
        best = max(list(rates)[1:], key=lambda depth: rates[depth])
        return (
            f"plain decoding is faster here: depth {best} would give {rates[best] / rates[0]:.2f} times its rate "
            f"(acceptance at position 0: {self._acceptance(0):.2f})"
        )

    def next_depth(self, stats: Stats) -> int:
        if self._trials:
            return self._trials[0]
        if self._depth == 0 and self._plain_cycles >= self._config.patience:
            self._probing = self._tokens_off >= self._probe_every
            return 1 if self._probing else 0
        return self._depth

    def record(self, cycle: CycleRecord) -> None:
        seconds = max(cycle.draft_seconds + cycle.verify_seconds + cycle.commit_seconds, CLOCK_STEP)
        self._times.setdefault(cycle.offered, deque(maxlen=REMEMBERED)).append(seconds)
        if self._probing:
            self._finish_probe(cycle)
        else:
            self._count(cycle)
        if self._trials:
            self._trials.pop(0)
        if not self._trials:
            self._choose()
        if cycle.offered:
            self._plain_cycles = self._tokens_off = 0
        else:
            self._plain_cycles += 1
            self._tokens_off += len(cycle.emitted)

    def _count(self, cycle: CycleRecord) -> None:
        for position in range(min(cycle.offered, cycle.accepted + 1, self._config.max_depth)):
            self._reached[position] = self._reached[position] * self._forget + 1.0
            self._accepted[position] = self._accepted[position] * self._forget + (position < cycle.accepted)

    def _finish_probe(self, cycle: CycleRecord) -> None:
        """A probe that was accepted is news: what was known before counts no more."""
        self._probing = False
        if cycle.offered and cycle.accepted:
            self._reached = [1.0] + [0.0] * (self._config.max_depth - 1)
            self._accepted = [1.0] + [0.0] * (self._config.max_depth - 1)
            self._probe_every = self._config.first_probe
        else:
            self._probe_every = min(2 * self._probe_every, self._config.last_probe)

    def _choose(self) -> None:
        rates = {depth: self._expected(depth) / self._cost(depth) for depth in range(self._config.max_depth + 1)}
        best = max(rates, key=lambda depth: (rates[depth], -depth))
        if rates[best] > rates[self._depth] * (1.0 + self._config.min_gain) or rates[self._depth] < rates[0]:
            self._depth = best

    def _acceptance(self, position: int) -> float:
        """Estimated conditional acceptance; one unseen position counts as two observations of the one before it."""
        before = 0.5 if position == 0 else self._acceptance(position - 1)
        return (self._accepted[position] + 2.0 * before) / (self._reached[position] + 2.0)

    def _expected(self, depth: int) -> float:
        """E(k) = 1 + a_0 + a_0 a_1 + ...: tokens of a cycle of depth k."""
        total = survival = 1.0
        for position in range(depth):
            survival *= self._acceptance(position)
            total += survival
        return total

    def _cost(self, depth: int) -> float:
        """t(k): the median of measured cycles, a line through the neighbours where depth k was not run yet."""
        known = {seen: statistics.median(times) for seen, times in self._times.items()}
        if depth in known:
            return known[depth]
        below = max((seen for seen in known if seen < depth), default=None)
        above = min((seen for seen in known if seen > depth), default=None)
        if below is not None and above is not None:
            share = (depth - below) / (above - below)
            return known[below] + share * (known[above] - known[below])
        if below is None:
            return known[above] if above is not None else 1.0
        lower = max((seen for seen in known if seen < below), default=None)
        slope = 0.0 if lower is None else max(0.0, (known[below] - known[lower]) / (below - lower))
        return known[below] + slope * (depth - below)


@hookimpl
def specdec_depth_policies() -> list[DepthPolicySpec]:
    return [
        DepthPolicySpec(
            name="adaptive",
            factory=AdaptivePolicy,
            config=AdaptiveConfig,
            help="the depth with the best measured rate; plain decoding where none beats it",
        )
    ]
