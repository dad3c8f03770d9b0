"""Small kernels between the passes of a greedy cycle."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.backends.cuda.kernels.accept import FIELDS, HALTED, KEPT, PENDING, WAITING
from specdec.backends.cuda.kernels.launch import MAX_ROWS, launch
from specdec.errors import ShapeError

COUNT = tl.constexpr(0)  # waiting MTP pairs
FED = tl.constexpr(1)  # pairs that the head's pass keeps: COUNT, or 0 after the end
COUNTERS = 2
_BLOCK = 1024  # values of a row that one program moves


@triton.jit
def _settle(
    control, fresh, waiting, waiting_ids, counters, verified_ids, hidden, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    kept, before = tl.load(control + KEPT), tl.load(control + WAITING)
    row = tl.arange(0, ROWS)[:, None]
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < kept) & (before + row < ROWS) & (at < hidden)
    rows = tl.load(fresh + row * hidden + at, mask=inside)
    tl.store(waiting + (before + row) * hidden + at, rows, mask=inside)
    if tl.program_id(0) == 0:
        i = tl.arange(0, ROWS)
        joins = (i < kept) & (before + i < ROWS)
        tl.store(waiting_ids + before + i, tl.load(control + FIELDS + i, mask=joins, other=0), mask=joins)
        count = before + kept
        tl.store(counters + COUNT, count)
        tl.store(counters + FED, tl.where(tl.load(control + HALTED) == 0, count, 0))
        tl.store(verified_ids, tl.load(control + PENDING))


def settle(
    control: Tensor, fresh: Tensor, waiting: Tensor, waiting_ids: Tensor, counters: Tensor, verified_ids: Tensor
) -> None:
    """Begin a cycle: add the rows that the last cycle kept to the waiting MTP pairs.

    Args:
        control: a control block (``kernels.accept``) with room for 16 emitted tokens; WAITING + KEPT is at most 16.
        fresh, waiting: ``[16, H]`` act, the hidden states of the last verification and of the pairs.
        waiting_ids: int32 ``[16]``, the tokens of the pairs.
        counters: int32 ``[2]``, written: COUNT and FED.
        verified_ids: int32 ``[17]``; the first is set to the pending token.

    Raises: ShapeError.
    """
    if fresh.shape != waiting.shape or len(fresh) != MAX_ROWS or len(control) < FIELDS.value + MAX_ROWS:
        raise ShapeError(f"{MAX_ROWS} rows wait at most: {list(fresh.shape)}, {list(waiting.shape)}, {len(control)}")
    hidden = fresh.shape[1]
    block = min(_BLOCK // MAX_ROWS * 2, triton.next_power_of_2(hidden))
    launch(
        _settle,
        (triton.cdiv(hidden, block),),
        control,
        fresh,
        waiting,
        waiting_ids,
        counters,
        verified_ids,
        hidden,
        ROWS=MAX_ROWS,
        BLOCK=block,
    )


def settle_reference(
    control: Tensor, fresh: Tensor, waiting: Tensor, waiting_ids: Tensor, counters: Tensor, verified_ids: Tensor
) -> None:
    """``settle`` on the host."""
    before, kept = int(control[WAITING.value]), int(control[KEPT.value])
    count = before + kept
    waiting[before:count] = fresh[:kept]
    waiting_ids[before:count] = control[FIELDS.value : FIELDS.value + kept]
    counters[COUNT.value] = count
    counters[FED.value] = 0 if int(control[HALTED.value]) else count
    verified_ids[0] = control[PENDING.value]


@triton.jit
def _last_row(x, counters, out, hidden, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.maximum(tl.load(counters + COUNT) - 1, 0)
    tl.store(out + at, tl.load(x + row * hidden + at, mask=at < hidden), mask=at < hidden)


def last_row(x: Tensor, counters: Tensor) -> Tensor:
    """Copy row COUNT - 1 of ``x [T, H]``, the last pair's: ``[1, H]``; row 0 if no pair waits."""
    hidden = x.shape[1]
    out = torch.empty(1, hidden, dtype=x.dtype, device=x.device)
    block = min(_BLOCK, triton.next_power_of_2(hidden))
    launch(_last_row, (triton.cdiv(hidden, block),), x, counters, out, hidden, BLOCK=block)
    return out


def last_row_reference(x: Tensor, counters: Tensor) -> Tensor:
    """``last_row`` in torch."""
    row = max(int(counters[COUNT.value]) - 1, 0)
    return x[row : row + 1].clone()


@triton.jit
def _winner(ids, values, other_ids, other_values, out):
    first, second = tl.load(ids), tl.load(other_ids)
    a, b = tl.load(values), tl.load(other_values)
    second_wins = (b > a) | ((b == a) & (second < first))
    best = tl.where(second_wins, b, a)
    finite = tl.abs(best) < float("inf")  # false for a NaN too
    known = (first >= 0) & (second >= 0) & finite
    tl.store(out, tl.where(known, tl.where(second_wins, second, first), -1))


def winner(ids: Tensor, values: Tensor, other_ids: Tensor, other_values: Tensor, out: Tensor) -> None:
    """Write the better of two tokens, from two parts of a head, to ``out`` (int32 ``[1]``); ties go to the lower id.

    All are ``[1]``, ids int32 and values float32. -1 if one part found none, or the best value is not finite.
    """
    launch(_winner, (1,), ids, values, other_ids, other_values, out, num_warps=1)


def winner_reference(ids: Tensor, values: Tensor, other_ids: Tensor, other_values: Tensor, out: Tensor) -> None:
    """``winner`` on the host."""
    found = [(float(values), int(ids)), (float(other_values), int(other_ids))]
    value, token = max(found, key=lambda pair: (pair[0], -pair[1]))
    known = min(token for _, token in found) >= 0 and abs(value) < float("inf") and value == value
    out[0] = token if known else -1
