"""What a cycle costs on this machine: seconds of a verification pass by rows, of a draft by tokens, and of the rest.

Costs are wall-clock and belong to one target, drafter and machine. Acceptance is not in here: expected tokens over
these seconds is what a depth is worth (``specdec.policies.adaptive``). ``specdec.records.cost_file`` keeps tables
between processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter

import attrs

from specdec.contract import Needs
from specdec.decoding.loop import run_cycle
from specdec.decoding.parts import Parts
from specdec.decoding.prefill import prefill
from specdec.decoding.result import RunStats
from specdec.decoding.session import Session
from specdec.errors import UnsupportedError

DEPTHS = (0, 1, 2, 3, 4, 6)  # measured; depths between are read off a line
REPEATS = 5
BUDGET_S = 1.0  # no further depth is started after this long, once the first and the last were measured twice
STEADY = 1.25  # the second smallest time over the smallest, at most
CONTEXT = 32  # tokens before the measured passes


@attrs.frozen(kw_only=True)
class CostTable:
    """Seconds by what was measured; lines through the neighbours in between, the last slope beyond."""

    verify: Mapping[int, float]  # rows of a pass -> seconds of decode and the decision
    draft: Mapping[int, float]  # drafted tokens -> seconds of propose; 0 -> 0.0
    commit: float  # seconds of commit, observe and bookkeeping per cycle
    steady: bool = attrs.field(default=True, eq=False)  # whether repeats agreed; else it is not kept

    def cycle(self, depth: int) -> float:
        """t(depth): expected seconds of a cycle that drafts ``depth`` tokens."""
        return self.pass_seconds(depth + 1) + self.draft_seconds(depth) + self.commit

    def pass_seconds(self, rows: int) -> float:
        """Seconds of a verification pass of so many rows."""
        return _on_line(self.verify, rows)

    def draft_seconds(self, tokens: int) -> float:
        """Seconds of a draft of so many tokens."""
        return _on_line(self.draft, tokens)

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


def depths_that_fit(lm: Parts, depths: Sequence[int] = DEPTHS) -> list[int]:
    """Those of ``depths`` that a session has room for. Raises: UnsupportedError where fewer than two are left."""
    allowed = [depth for depth in depths if depth < min(lm.info.max_rows, lm.capacity - 2)]
    if len(allowed) < 2:
        raise UnsupportedError(
            f"costs cannot be measured: passes of {lm.info.max_rows} rows in a session of {lm.capacity} tokens"
        )
    return allowed


def measure_costs(
    lm: Parts, depths: Sequence[int] = DEPTHS, *, repeats: int = REPEATS, budget_s: float = BUDGET_S
) -> CostTable:
    """Measure on a session of its own, on tokens of no meaning; the smallest of ``repeats``, as noise only adds.

    Passes are timed by row count whatever the drafter does. A draft is timed at the lengths that the drafter really
    gave: one that has no opinion on these tokens leaves ``draft`` at 0 seconds, and its cycles will tell.

    Raises: UnsupportedError where a session is too short for a cycle of depth 1.
    """
    began = perf_counter()
    allowed = depths_that_fit(lm, depths)
    measured = _Measured(lm, max(1, min(CONTEXT, lm.capacity - max(allowed) - 2)))
    order = [allowed[0], allowed[-1], *allowed[1:-1]]
    for repeat in range(repeats):
        for number, depth in enumerate(order):
            if max(repeat, number) > 1 and perf_counter() - began > budget_s:
                return measured.table()
            if not repeat:
                measured.cycle(depth, keep=False)  # the first pass of so many rows is no usual one
            measured.cycle(depth)
    return measured.table()


def warm_up(lm: Parts, depths: Iterable[int]) -> None:
    """Run a cycle of every depth, and an MTP pass of every length that may follow it, on a session of its own.

    The first pass of so many rows is no usual one: a backend may record it, and its weights may still lie on the disk.
    No generation should pay for that, and no policy should take it for the price of the depth.
    """
    allowed = [depth for depth in depths if depth < min(lm.info.max_rows, lm.capacity - 2)]
    if not allowed:
        return
    measured = _Measured(lm, max(1, min(CONTEXT, lm.capacity - max(allowed) - 2)))
    for depth in allowed:
        measured.cycle(depth, keep=False)
    if lm.drafter.needs.mtp:
        target, rows = lm.target, max(allowed) + 1
        room = min(rows * (rows + 1) // 2, target.info.max_positions)  # chained entries stay
        state = target.new_state(room, Needs(mtp=True, final_hidden=True))
        hidden = target.decode(state, [0] * rows).need_hidden()
        for count in range(1, rows + 1):
            target.decode_mtp(state, [0] * count, hidden[:count], provisional=True)


class _Measured:
    """Cycles over one prompt, which is taken up again where the room ends."""

    def __init__(self, lm: Parts, context: int) -> None:
        self._session = Session(lm)
        self._session.feed([(7 * i + 3) % min(lm.info.vocab_size, 1000) for i in range(context)])
        self._stats = RunStats()
        prefill(self._session.sequence, self._stats)
        self._context, self._capacity = context, lm.capacity
        self._verify: dict[int, list[float]] = {}
        self._draft: dict[int, list[float]] = {}
        self._commit: list[float] = []

    def cycle(self, depth: int, *, keep: bool = True) -> None:
        """Run one cycle, and a pass of its own where the drafter gave fewer tokens than asked for."""
        session, stats = self._session, self._stats
        if len(session.tokens) + depth + 1 > self._capacity:
            session.rewind(self._context)
            prefill(session.sequence, stats)
        sequence = session.sequence
        record = run_cycle(sequence, depth, lambda emitted: 1, stats)
        seconds = record.verify_seconds
        if record.offered < depth:
            started = perf_counter()
            output = sequence.target.decode(sequence.state, [sequence.tokens[-1]] * (depth + 1))
            output.need_logits().argmax()
            seconds = perf_counter() - started
            sequence.target.commit(sequence.state, 0)
        if keep:
            self._verify.setdefault(depth + 1, []).append(seconds)
            if record.offered:
                self._draft.setdefault(record.offered, []).append(record.draft_seconds)
            self._commit.append(record.commit_seconds)

    def table(self) -> CostTable:
        """What was measured so far."""
        times = [sorted(seconds) for seconds in self._verify.values()]
        return CostTable(
            verify={rows: min(seconds) for rows, seconds in self._verify.items()},
            draft={0: 0.0, **{tokens: min(seconds) for tokens, seconds in self._draft.items()}},
            commit=min(self._commit),
            steady=all(seconds[1] < STEADY * seconds[0] for seconds in times if len(seconds) > 1),
        )
