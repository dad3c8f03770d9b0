"""Acceptance and commit on the device, without the host.

The control block is an int32 device tensor of ``FIELDS + depth + 1`` values, one block per sequence:

| field | value |
|---|---|
| HALTED | RUNNING, or why generation ended: STOP (a stop id), LIMIT (no token remains), FAULT (logits not finite), or |
|   | UNDECIDED (the host has to choose the next token) |
| REMAINING | tokens that may still be emitted |
| PENDING | the last emitted token: row 0 of the next pass |
| POSITION | position of the pending token: rows in every cache once KEPT rows are committed |
| KEPT | rows of the last pass to commit, which is also the number of tokens that its cycle emitted |
| ACCEPTED | draft tokens that the last pass accepted, before any cut |
| CYCLES | cycles decided while running, so that a host that reads late knows what is new |
| WAITING | MTP pairs that wait for the head, without those of the KEPT rows, which are added at their commit |
| FIELDS.. | the tokens that the last cycle emitted, padded with -1 |

Further cycles do not affect a halted sequence: they keep 0 rows, emit nothing and change nothing else.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.backends.cuda.kernels.launch import COLUMNS, LENGTH, SLOT, SLOTS, launch
from specdec.errors import ShapeError

HALTED = tl.constexpr(0)
REMAINING = tl.constexpr(1)
PENDING = tl.constexpr(2)
POSITION = tl.constexpr(3)
KEPT = tl.constexpr(4)
ACCEPTED = tl.constexpr(5)
CYCLES = tl.constexpr(6)
WAITING = tl.constexpr(7)
FIELDS = tl.constexpr(8)

RUNNING = tl.constexpr(0)
STOP = tl.constexpr(1)
LIMIT = tl.constexpr(2)
FAULT = tl.constexpr(3)
UNDECIDED = tl.constexpr(4)

OPEN = tl.constexpr(-2)  # in place of a token: only the host can say which it is

ROWS, STATES = 0, 1  # kinds of caches: only rows (keys and values, latent rows), or rows and state slots (delta rule)


@attrs.frozen(kw_only=True)
class Decision:
    """A control block on the host."""

    halted: int
    remaining: int
    pending: int
    position: int
    kept: int
    accepted: int
    cycles: int
    waiting: int
    emitted: tuple[int, ...]

    @classmethod
    def of(cls, values: Sequence[int]) -> Decision:
        """Read the values of a control block."""
        kept, first = values[KEPT.value], FIELDS.value
        return cls(
            halted=values[HALTED.value],
            remaining=values[REMAINING.value],
            pending=values[PENDING.value],
            position=values[POSITION.value],
            kept=kept,
            accepted=values[ACCEPTED.value],
            cycles=values[CYCLES.value],
            waiting=values[WAITING.value],
            emitted=tuple(values[first : first + kept]),
        )


def new_control(*, remaining: int, pending: int, position: int, depth: int, device: torch.device) -> Tensor:
    """Make the control block of a new sequence, for drafts of up to ``depth`` tokens."""
    values = [0] * FIELDS.value + [-1] * (depth + 1)
    values[HALTED.value] = RUNNING.value if remaining > 0 else LIMIT.value
    values[REMAINING.value], values[PENDING.value], values[POSITION.value] = remaining, pending, position
    return torch.tensor(values, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["K", "stops"])
def _accept(
    drafted, best, stop_ids, control, K, stops, FED: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr
):
    i = tl.arange(0, BLOCK_K)
    draft = tl.load(drafted + i, mask=i < K, other=-1)
    target = tl.load(best + i, mask=i <= K, other=-1)
    confirmed = (draft == target) & (draft >= 0)  # an id below 0 is no token
    accepted = tl.min(tl.where(confirmed, BLOCK_K, i), 0)  # at most K: row K has no draft
    decided = i <= accepted  # target[:accepted] equal the accepted drafts, target[accepted] follows them
    open_end = tl.max(tl.where(decided & (target == OPEN), 1, 0), 0)  # only the last of them can be
    running = tl.load(control + HALTED) == 0
    waiting = tl.load(control + WAITING) + tl.load(control + KEPT)
    if FED:
        waiting = tl.where(running, 0, waiting)
    fault = tl.max(tl.where(decided & (target < 0) & (target != OPEN), 1, 0), 0) > 0

    s = tl.arange(0, BLOCK_S)
    stop = tl.load(stop_ids + s, mask=s < stops, other=-1)
    stopping = tl.max(((target[:, None] == stop[None, :]) & (target[:, None] >= 0)).to(tl.int32), 1) > 0
    stopped_at = tl.min(tl.where(stopping & decided, i, BLOCK_K), 0)
    remaining = tl.load(control + REMAINING)
    kept = tl.minimum(tl.minimum(accepted - open_end, stopped_at) + 1, remaining)
    kept = tl.where(running & (fault == 0), kept, 0)

    last = tl.max(tl.where(i == kept - 1, target, -1), 0)
    ended = tl.where(stopped_at < kept, 1, tl.where(remaining == kept, 2, open_end * 4))
    halted = tl.where(fault, 3, ended)
    tl.store(control + FIELDS + i, tl.where(i < kept, target, -1), mask=i <= K)
    tl.store(control + WAITING, waiting)
    tl.store(control + KEPT, kept)
    tl.store(control + ACCEPTED, tl.where(running, accepted, 0))
    if running:
        tl.store(control + HALTED, halted)
        tl.store(control + REMAINING, remaining - kept)
        tl.store(control + PENDING, last, mask=kept > 0)
        tl.store(control + POSITION, tl.load(control + POSITION) + kept)
        tl.store(control + CYCLES, tl.load(control + CYCLES) + 1)


def accept(drafted: Tensor, best: Tensor, stop_ids: Tensor, control: Tensor, *, fed: bool = True) -> None:
    """Decide a cycle and write the decision into ``control`` (its fields: the module's docstring).

    The longest prefix of the draft that equals the target's choices is accepted, followed by the target's next choice.
    The emitted tokens are cut after the first stop id and at the number of tokens that remain. As many rows are kept as
    tokens are emitted; the last emitted token becomes the pending token.

    Args:
        drafted: int32 ``[K]``, K >= 0.
        best: int32 ``[K + 1]``, the target's choices; below 0 where its logits are not finite. If this happens in a
            row that decides, the cycle is a FAULT and nothing is kept, as when the host rejects such logits. OPEN where
            the host has to choose: the tokens before it are kept, and if they do not end generation it is UNDECIDED.
        stop_ids: int32 ``[n]``, n >= 0.
        control: the sequence's control block.
        fed: whether the cycle began with a pass of the MTP head over all pairs that waited.

    With choices that are argmaxes this is the greedy case of Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1; with
    those of position-keyed noise, draft and decision share the noise.
    Raises: ShapeError.
    """
    K = drafted.shape[0]
    if best.shape[0] != K + 1 or control.shape[0] < FIELDS.value + K + 1:
        raise ShapeError(f"{K} drafted tokens, {best.shape[0]} rows and a control block of {control.shape[0]} values")
    if {drafted.dtype, best.dtype, stop_ids.dtype, control.dtype} != {torch.int32}:
        raise ShapeError("acceptance takes int32 tensors")
    launch(
        _accept,
        (1,),
        drafted,
        best,
        stop_ids,
        control,
        K,
        stop_ids.shape[0],
        FED=fed,
        BLOCK_K=max(32, triton.next_power_of_2(K + 1)),
        BLOCK_S=max(16, triton.next_power_of_2(stop_ids.shape[0])),
        num_warps=1,
    )


def accept_reference(drafted: Tensor, best: Tensor, stop_ids: Tensor, control: Tensor, *, fed: bool = True) -> None:
    """``accept``, token by token on the host."""
    drafts, choices, stops = drafted.tolist(), best.tolist(), set(stop_ids.tolist())
    values = control.tolist()
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == choices[accepted] >= 0:
        accepted += 1
    kept: list[int] = []
    running = values[HALTED.value] == RUNNING.value
    values[WAITING.value] = 0 if running and fed else values[WAITING.value] + values[KEPT.value]
    if running:
        is_open = choices[accepted] == OPEN.value
        if min(choices[: accepted + 1]) < 0 and not is_open:
            values[HALTED.value] = FAULT.value
        else:
            for token in choices[: min(accepted + (not is_open), values[REMAINING.value])]:
                kept.append(token)
                if token in stops:
                    break
            values[REMAINING.value] -= len(kept)
            if kept and kept[-1] in stops:
                values[HALTED.value] = STOP.value
            elif values[REMAINING.value] == 0:
                values[HALTED.value] = LIMIT.value
            elif is_open:
                values[HALTED.value] = UNDECIDED.value
            if kept:
                values[PENDING.value] = kept[-1]
        values[POSITION.value] += len(kept)
        values[CYCLES.value] += 1
    values[KEPT.value], values[ACCEPTED.value] = len(kept), accepted if running else 0
    values[FIELDS.value : FIELDS.value + len(choices)] = kept + [-1] * (len(choices) - len(kept))
    control.copy_(torch.tensor(values, dtype=torch.int32))


@triton.jit(do_not_specialize=["caches", "count"])
def _commit_rows(
    table,
    kinds,
    kept,
    count,
    caches,
    FROM_DEVICE: tl.constexpr,
    WHOLE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    cache = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = cache < caches
    at = table + cache.to(tl.int64) * COLUMNS
    rows = count
    if FROM_DEVICE:
        rows = tl.load(kept)
    rows = rows.to(tl.int64)
    tl.store(at + LENGTH, tl.load(at + LENGTH, mask=known, other=0) + rows, mask=known)
    stateful = known & (tl.load(kinds + cache, mask=known, other=0) == 1)
    slots = tl.load(at + SLOTS, mask=stateful, other=1)
    steps = rows
    if WHOLE:
        steps = tl.minimum(tl.maximum(rows, -1), 1)
    slot = (tl.load(at + SLOT, mask=stateful, other=0) + steps) % slots
    tl.store(at + SLOT, (slot + slots) % slots, mask=stateful)  # the remainder of a negative number is negative here


def commit_rows(table: Tensor, kinds: Tensor, kept: Tensor | int, *, whole: bool = False) -> None:
    """Commit the first ``kept`` rows of the last pass in every cache of ``table``, in one launch.

    LENGTH grows by ``kept``. In delta caches, SLOT also grows by ``kept``, modulo their slots, so that the state after
    the last kept row becomes the base of the next pass.

    Args:
        table: int64 ``[caches, 8]``, rows of the address table.
        kinds: int32 ``[caches]``: ROWS or STATES.
        kept: an int32 device scalar (``control[KEPT:KEPT + 1]``), or a number. A negative number removes rows. The
            states before them are still in their slots if the removed rows, plus the rows of any pass since, are fewer
            than S, and at most W - kc + 1 with a ring of W rows.
        whole: the pass was a prompt's, committed whole, which wrote one state: SLOT moves by one.

    Raises: ShapeError.
    """
    caches = table.shape[0]
    if table.dtype != torch.int64 or table.dim() != 2 or table.shape[1] != COLUMNS or not table.is_contiguous():
        raise ShapeError(f"an address table is int64 [caches, {COLUMNS}], got {table.dtype} {tuple(table.shape)}")
    if kinds.dtype != torch.int32 or kinds.shape != (caches,):
        raise ShapeError(f"kinds of {caches} caches are int32 [{caches}], got {kinds.dtype} {tuple(kinds.shape)}")
    from_device = isinstance(kept, Tensor)
    if isinstance(kept, Tensor) and kept.dtype != torch.int32:
        raise ShapeError(f"rows to keep are an int32 scalar, got {kept.dtype}")
    launch(
        _commit_rows,
        (triton.cdiv(caches, 128),),
        table,
        kinds,
        kept if from_device else None,
        0 if from_device else kept,
        caches,
        FROM_DEVICE=from_device,
        WHOLE=whole,
        COLUMNS=COLUMNS,
        BLOCK=128,
        num_warps=1,
    )


def commit_rows_reference(table: Tensor, kinds: Tensor, kept: Tensor | int, *, whole: bool = False) -> None:
    """``commit_rows``, cache by cache on the host."""
    rows = int(kept)
    steps = max(-1, min(1, rows)) if whole else rows
    for cache, kind in enumerate(kinds.tolist()):
        table[cache, LENGTH.value] += rows
        if kind == STATES:
            table[cache, SLOT.value] = (int(table[cache, SLOT.value]) + steps) % int(table[cache, SLOTS.value])
