"""The small kernels between the passes of a greedy cycle: what the last cycle left, one row, one token."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.backends.cuda.kernels.accept import FIELDS, HALTED, KEPT, PENDING
from specdec.backends.cuda.kernels.launch import MAX_ROWS, launch
from specdec.errors import ShapeError

COUNT = tl.constexpr(0)  # pairs that wait for the head
FED = tl.constexpr(1)  # those of them that the next pass of the head keeps
COUNTERS = 2
_BLOCK = 1024  # values of a row that one program moves


@triton.jit
def _settle(
    control, fresh, waiting, waiting_ids, counters, verified_ids, hidden, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    kept = tl.load(control + KEPT)
    row = tl.arange(0, ROWS)[:, None]
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < kept) & (at < hidden)
    place = row * hidden + at
    tl.store(waiting + place, tl.load(fresh + place, mask=inside), mask=inside)
    if tl.program_id(0) == 0:
        i = tl.arange(0, ROWS)
        tl.store(waiting_ids + i, tl.load(control + FIELDS + i, mask=i < kept, other=0), mask=i < kept)
        count = tl.where(kept > 0, kept, tl.load(counters + COUNT))
        tl.store(counters + COUNT, count)
        tl.store(counters + FED, tl.where(tl.load(control + HALTED) == 0, count, 0))
        tl.store(verified_ids, tl.load(control + PENDING))


def settle(
    control: Tensor, fresh: Tensor, waiting: Tensor, waiting_ids: Tensor, counters: Tensor, verified_ids: Tensor
) -> None:
    """Begin a cycle with what the one before decided: the rows that it kept become the pairs that wait.

    A cycle that kept nothing (the first one, and all behind the end) leaves the pairs as they are; behind the end none
    of them is fed.

    Args:
        control: a control block (``kernels.accept``) with room for 16 emitted tokens, whose KEPT nobody settled yet.
        fresh, waiting: ``[16, H]`` act: hidden states of the last verification, and of the pairs.
        waiting_ids: int32 ``[16]``, the tokens behind them.
        counters: int32 ``[2]``: COUNT and FED.
        verified_ids: int32 ``[17]``: its first becomes the pending token.

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
    kept = int(control[KEPT.value])
    if kept:
        waiting[:kept] = fresh[:kept]
        waiting_ids[:kept] = control[FIELDS.value : FIELDS.value + kept]
        counters[COUNT.value] = kept
    counters[FED.value] = 0 if int(control[HALTED.value]) else counters[COUNT.value]
    verified_ids[0] = control[PENDING.value]


@triton.jit
def _last_row(x, counters, out, hidden, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(counters + COUNT) - 1
    tl.store(out + at, tl.load(x + row * hidden + at, mask=at < hidden), mask=at < hidden)


def last_row(x: Tensor, counters: Tensor) -> Tensor:
    """Row COUNT - 1 of ``x [T, H]``, the last one that belongs to a pair: ``[1, H]``."""
    hidden = x.shape[1]
    out = torch.empty(1, hidden, dtype=x.dtype, device=x.device)
    block = min(_BLOCK, triton.next_power_of_2(hidden))
    launch(_last_row, (triton.cdiv(hidden, block),), x, counters, out, hidden, BLOCK=block)
    return out


def last_row_reference(x: Tensor, counters: Tensor) -> Tensor:
    """``last_row`` in torch."""
    row = int(counters[COUNT.value]) - 1
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
    """The better of two tokens, from two parts of a head, into ``out`` (int32 ``[1]``); the lower id of equal ones.

    All are ``[1]``, ids int32 and values float32. -1 where one part found none, or the best value is not finite.
    """
    launch(_winner, (1,), ids, values, other_ids, other_values, out, num_warps=1)


def winner_reference(ids: Tensor, values: Tensor, other_ids: Tensor, other_values: Tensor, out: Tensor) -> None:
    """``winner`` on the host."""
    found = [(float(values), int(ids)), (float(other_values), int(other_ids))]
    value, token = max(found, key=lambda pair: (pair[0], -pair[1]))
    known = min(token for _, token in found) >= 0 and abs(value) < float("inf") and value == value
    out[0] = token if known else -1
