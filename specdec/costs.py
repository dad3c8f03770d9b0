"""What a cycle costs on this machine: seconds of a verification pass by rows, of a draft by tokens, and of the rest.

Costs are wall-clock and belong to one target, drafter and machine. Acceptance is not in here: expected tokens over
these seconds is what a depth is worth (``specdec.policies.adaptive``).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import attrs

from specdec import engine
from specdec.telemetry import RunStats

if TYPE_CHECKING:
    from specdec.pipeline import LanguageModel

DEPTHS = (0, 1, 2, 3, 4, 6, 8)  # measured; depths between are read off a line
REPEATS = 3
BUDGET_S = 2.0  # measuring stops after this long, with what it has
CONTEXT = 32  # tokens before the measured passes


@attrs.frozen(kw_only=True)
class CostTable:
    """Seconds by what was measured; lines through the neighbours in between, the last slope beyond."""

    verify: Mapping[int, float]  # rows of a pass -> seconds of decode and the decision
    draft: Mapping[int, float]  # drafted tokens -> seconds of propose; 0 -> 0.0
    commit: float  # seconds of commit, observe and bookkeeping per cycle

    def cycle(self, depth: int) -> float:
        """t(depth): expected seconds of a cycle that drafts ``depth`` tokens."""
        return _on_line(self.verify, depth + 1) + _on_line(self.draft, depth) + self.commit

    def draft_step(self) -> float:
        """Seconds per drafted token, averaged over the deepest draft measured; 0 where none was."""
        deepest = max(self.draft)
        return self.draft[deepest] / deepest if deepest else 0.0


def _on_line(known: Mapping[int, float], at: int) -> float:
    if at in known:
        return known[at]
    points = sorted(known)
    if len(points) == 1:
        return known[points[0]]
    low = max((p for p in points[:-1] if p < at), default=points[0])
    high = next(p for p in points if p > low)
    slope = max(0.0, (known[high] - known[low]) / (high - low))
    return known[low] + slope * (at - low)


def measure_costs(
    lm: LanguageModel, depths: Sequence[int] = DEPTHS, *, repeats: int = REPEATS, budget_s: float = BUDGET_S
) -> CostTable:
    """Measure on a session of its own, on tokens of no meaning; medians of ``repeats``.

    Passes are timed by row count whatever the drafter does. A draft is timed at the lengths that the drafter really
    gave: one that has no opinion on these tokens leaves ``draft`` at 0 seconds, and its cycles will tell.
    """
    began = perf_counter()
    session = lm.session()
    context = min(CONTEXT, lm.capacity - max(depths) - 2)
    session.feed([(7 * i + 3) % min(lm.info.vocab_size, 1000) for i in range(max(context, 1))])
    stats = RunStats()
    session.prefill(stats)
    sequence = session.sequence
    allowed = [depth for depth in depths if depth < lm.info.max_rows]
    verify: dict[int, list[float]] = {}
    draft: dict[int, list[float]] = {0: [0.0]}
    commit: list[float] = []
    pending = sequence.tokens[-1]
    for turn in range(repeats + 1):  # the first turn warms up
        for depth in allowed:
            if turn > 0 and perf_counter() - began > budget_s and verify.get(1):
                break
            started = perf_counter()
            output = sequence.target.decode(sequence.state, [pending] * (depth + 1))
            output.need_logits().argmax()
            seconds = perf_counter() - started
            sequence.target.commit(sequence.state, 0)
            if turn:
                verify.setdefault(depth + 1, []).append(seconds)
            if depth and len(sequence.tokens) + depth + 2 < lm.capacity:
                record = engine.run_cycle(sequence, depth, lambda emitted: 1, stats)
                pending = sequence.tokens[-1]
                if turn and record.offered:
                    draft.setdefault(record.offered, []).append(record.draft_seconds)
                if turn:
                    commit.append(record.commit_seconds)
    return CostTable(
        verify={rows: statistics.median(seconds) for rows, seconds in verify.items()},
        draft={tokens: statistics.median(seconds) for tokens, seconds in draft.items()},
        commit=statistics.median(commit) if commit else 0.0,
    )
