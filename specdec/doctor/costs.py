"""Time passes of several row counts and a draft step, and derive the break-even acceptance of each depth."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

import attrs

from specdec.contract import ForwardPass, Needs
from specdec.decoding.cycle_timing import STEADY
from specdec.measuring.speed_model import break_even, expected_tokens
from specdec.records.cost_table import CostTable

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
CONTEXT = 40  # tokens before the timed passes
REPEATS = 7
AT_LEAST = 3  # minimum number of repeats
BUDGET_S = 8.0  # no repeat starts after this long
MAX_DEPTH = 7  # the largest depth evaluated: its pass has 8 rows
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)  # conditional, the same at every position


@attrs.frozen(kw_only=True)
class RowCost:
    """The cost of a pass by its number of rows."""

    rows: int
    seconds: float  # median
    ratio: float  # to a pass of one row, the median of ratios taken milliseconds apart


@attrs.frozen(kw_only=True)
class DepthPrice:
    """Cost and benefit of drafting ``depth`` tokens per cycle."""

    depth: int
    cost: float  # t(depth) / t(0): the cost of a cycle in plain decoding steps
    break_even: float | None  # conditional acceptance at which it pays; None if it never does
    speedups: Mapping[str, float]  # by conditional acceptance, "0.7"


@attrs.frozen(kw_only=True)
class RowCosts:
    """Median times of passes by row count, and of a step of the MTP head."""

    rows: tuple[RowCost, ...]
    draft_step: float | None  # seconds of an MTP pass over one pair and its argmax; None without an MTP head
    context: int
    repeats: int
    steady: bool  # whether the repeats with one row agreed; if not, the machine was busy

    def depths(self) -> list[DepthPrice]:
        """Evaluate every depth up to ``MAX_DEPTH`` that the timed passes allow, including draft steps of the head."""
        table = CostTable(
            verify={row.rows: row.ratio for row in self.rows},
            draft={0: 0.0, 1: (self.draft_step or 0.0) / self.rows[0].seconds},
            commit=0.0,
        )
        deepest = min(MAX_DEPTH, max(row.rows for row in self.rows) - 1)
        return [
            DepthPrice(
                depth=depth,
                cost=table.cycle(depth),
                break_even=break_even(table.cycle(depth), depth),
                speedups={f"{a}": expected_tokens([a] * depth) / table.cycle(depth) for a in ACCEPTANCES},
            )
            for depth in range(1, deepest + 1)
        ]

    def best_depth(self, acceptance: float) -> tuple[int, float]:
        """Return the depth with the largest expected speed-up at this conditional acceptance, and the speed-up.

        0 and 1.0 if no depth pays.
        """
        priced = [(price.speedups[f"{acceptance}"], -price.depth) for price in self.depths()]
        speedup, depth = max([(1.0, 0), *priced])
        return -depth, speedup


def measure_row_costs(
    target: ForwardPass,
    *,
    context: int = CONTEXT,
    repeats: int = REPEATS,
    budget_s: float = BUDGET_S,
    rows: Sequence[int] = ROWS,
) -> RowCosts:
    """Time passes of 1 to 8 and 16 rows with their argmax, and a draft step, interleaved.

    A ratio is the median of the ratios within each repeat, whose measurements are only milliseconds apart.
    """
    counts = [count for count in rows if count <= min(target.info.max_rows, target.info.max_positions - 2)]
    context = max(1, min(context, target.info.max_positions - max(counts)))
    tokens = [(37 * i + 11) % target.info.vocab_size for i in range(context + max(counts))]
    head = bool(target.info.mtp_layers)
    state = target.new_state(len(tokens), Needs(mtp=head, final_hidden=head))
    hidden = target.prefill(state, tokens[:context]).hidden

    def run_pass(count: int) -> None:
        target.decode(state, tokens[context : context + count]).need_logits().argmax()
        target.commit(state, 0)

    def draft() -> None:
        output = target.decode_mtp(state, tokens[:1], last, provisional=True)
        output.need_logits().argmax()

    arms: dict[int, Callable[[], None]] = {count: functools.partial(run_pass, count) for count in counts}
    if head and hidden is not None:
        last = hidden[-1:]
        arms[0] = draft
    for arm in arms.values():  # warm up: the first pass of a length compiles or records
        arm()
    times: dict[int, list[float]] = {arm: [] for arm in arms}
    began = perf_counter()
    for repeat in range(repeats):
        if repeat >= AT_LEAST and perf_counter() - began > budget_s:
            break
        for name, arm in arms.items():
            started = perf_counter()
            arm()
            times[name].append(perf_counter() - started)
            if not name:  # a true pair replaces the provisional entry
                target.prefill_mtp(state, tokens[:1], last)
    return RowCosts(
        rows=tuple(
            RowCost(
                rows=count,
                seconds=statistics.median(times[count]),
                ratio=statistics.median(many / one for many, one in zip(times[count], times[1], strict=True)),
            )
            for count in counts
        ),
        draft_step=statistics.median(times[0]) if 0 in times else None,
        context=context,
        repeats=len(times[1]),
        steady=statistics.median(times[1]) < STEADY * min(times[1]),
    )
