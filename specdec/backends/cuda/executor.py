"""Whole greedy cycles as one CUDA graph each: settle, draft, verify, decide.

    settle   the rows that the last cycle kept are committed, and become the pairs that wait for the head
    draft    the head's pass over those pairs, its first token, and K - 1 chained steps
    verify   the target's pass over the pending token and the draft, and the best token of every row
    decide   ``kernels.accept``: what is emitted, kept and pending, and whether generation ends

Everything that a cycle starts from lies on the device, so the next one can be launched before the host has seen what
the last one decided. The host reads a copy of the decision, through pinned memory, as late as it likes.

The buffers that the graphs know serve one sequence at a time (``_Buffers``); they move in and out when another sequence
takes its turn. The number of pairs that wait is known to the device alone: the head's pass has room for as many as
there can be, and what it computes behind them is garbage that nobody reads and the chained steps overwrite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from specdec.backends.cuda.arrays import CudaHeadRows, checked
from specdec.backends.cuda.caches import CapturedCache, CudaDeltaCache, DeviceCache, Kind, write_rows
from specdec.backends.cuda.device import Graph, Marker
from specdec.backends.cuda.kernels import accept, cycle, head
from specdec.backends.cuda.kernels.accept import FAULT, FIELDS, KEPT, Decision
from specdec.backends.cuda.kernels.launch import COLUMNS, MAX_ROWS
from specdec.backends.cuda.memory import stage
from specdec.backends.cuda.weights import DenseWeight, Weight
from specdec.backends.passes import CycleSetup
from specdec.contract import GreedyCycle
from specdec.errors import StateError

if TYPE_CHECKING:
    from specdec.backends.cuda.ops import CudaOps
    from specdec.backends.cuda.passes import CudaPass

STOPS = 64  # stop tokens that the device can look for
_FED_ROWS = (2, 4, 8, MAX_ROWS)  # rows that the head's pass may have: few graphs, and no pass much too wide
_ADDED_ROWS = (256, 1024, 4096)  # rows that a sequence may have added to a pruned head, likewise
_SLOTS = 2  # decisions that the host has not read: one cycle runs while it looks at another


@attrs.define(kw_only=True)
class _Buffers:
    """What a cycle reads and writes between launches."""

    table: Tensor  # [caches, 8] int64, the target's and then the head's
    control: Tensor  # kernels.accept
    drafted: Tensor  # [16] int32, behind the control block so that both are read in one copy
    waiting: Tensor  # [16, H]
    waiting_ids: Tensor  # [16] int32
    counters: Tensor  # [2] int32, kernels.cycle
    fresh: Tensor  # [16, H]: hidden states of the last verification
    stops: Tensor  # [64] int32, -1 behind them

    @classmethod
    def empty(cls, caches: int, hidden: int, dtype: torch.dtype, place: torch.device) -> tuple[_Buffers, Tensor]:
        """Buffers of zeros, and the memory that control block and draft share."""
        report = torch.zeros(FIELDS.value + MAX_ROWS + MAX_ROWS, dtype=torch.int32, device=place)
        made = cls(
            table=torch.zeros(caches, COLUMNS, dtype=torch.int64, device=place),
            control=report[: FIELDS.value + MAX_ROWS],
            drafted=report[FIELDS.value + MAX_ROWS :],
            waiting=torch.zeros(MAX_ROWS, hidden, dtype=dtype, device=place),
            waiting_ids=torch.zeros(MAX_ROWS, dtype=torch.int32, device=place),
            counters=torch.zeros(cycle.COUNTERS, dtype=torch.int32, device=place),
            fresh=torch.zeros(MAX_ROWS, hidden, dtype=dtype, device=place),
            stops=torch.full((STOPS,), -1, dtype=torch.int32, device=place),
        )
        return made, report

    def fill(self, other: _Buffers) -> None:
        """Become a copy of ``other``."""
        for field in attrs.fields(_Buffers):
            getattr(self, field.name).copy_(getattr(other, field.name))


class CycleGraphs:
    """The graphs of one model's cycles and the buffers that they know, for any sequence."""

    def __init__(self, ops: CudaOps, target: CudaPass, mtp: CudaPass) -> None:
        self.ops = ops
        self.target, self.mtp = target.passes, mtp.passes
        self.caches = len(target.caches)
        place = ops.device.place
        self.hidden_size = self.mtp.hidden_size
        total = self.caches + len(mtp.caches)
        self.buffers, self.report = _Buffers.empty(total, self.hidden_size, ops.dtype, place)
        self.kinds, self.mtp_kinds = target.kinds, mtp.kinds
        self._verified = torch.zeros(MAX_ROWS + 1, dtype=torch.int32, device=place)  # pending token, then the draft
        self._graphs: dict[tuple[Any, ...], Graph] = {}
        self._heads: tuple[Any, ...] = ()
        self._added: DenseWeight | None = None  # rows that the present sequence added to a pruned head
        self._added_ids: Tensor | None = None
        self.owner: CudaCycles | None = None

    def own(self, cycles: CudaCycles) -> None:
        """Give the buffers to ``cycles``; whoever had them keeps a copy."""
        if self.owner is cycles:
            return
        if self.owner is not None:
            self.owner.kept.fill(self.buffers)
        self.buffers.fill(cycles.kept)
        self._take_added(cycles.added)
        self.owner = cycles

    def _take_added(self, added: tuple[Tensor, Tensor] | None) -> None:
        """Copy the rows that a sequence added where graphs know them, the first one again in the places left."""
        if added is None:
            return
        rows, ids = added
        size = next(size for size in _ADDED_ROWS if size >= len(ids))
        if self._added is None or self._added_ids is None or len(self._added_ids) != size:
            self._added = DenseWeight(torch.empty(size, rows.shape[1], dtype=rows.dtype, device=rows.device))
            self._added_ids = torch.empty(size, dtype=torch.int32, device=rows.device)
        self._added.tensor[: len(ids)] = rows
        self._added.tensor[len(ids) :] = rows[:1]
        self._added_ids[: len(ids)] = ids
        self._added_ids[len(ids) :] = ids[:1]

    def settle(self) -> None:
        """Launch the beginning of a cycle by itself."""
        b = self.buffers
        accept.commit_rows(b.table[: self.caches], self.kinds, b.control[KEPT.value : KEPT.value + 1])
        cycle.settle(b.control, b.fresh, b.waiting, b.waiting_ids, b.counters, self._verified)

    def graph(self, cycles: CudaCycles, fed: int, depth: int) -> Graph:
        """The graph of a cycle of ``depth`` draft tokens whose head has room for ``fed`` pairs."""
        added = None if cycles.added is None else self._added
        heads = (cycles.lm_head, cycles.draft_head, cycles.draft_ids, added)  # kept: graphs know their addresses alone
        if len(heads) != len(self._heads) or any(a is not b for a, b in zip(heads, self._heads, strict=True)):
            self._graphs.clear()
            self._heads = heads
        bounds = (_bound(cycles.target.caches), _bound(cycles.mtp.caches))
        key = (fed, depth, *bounds)
        if key not in self._graphs:
            target = self._stand_ins(cycles.target.caches, self.buffers.table[: self.caches], bounds[0])
            mtp = self._stand_ins(cycles.mtp.caches, self.buffers.table[self.caches :], bounds[1])
            before = _copy(self.buffers)  # it runs for real before it is captured
            with self.ops.device.guarded(f"the CUDA graph of a cycle of {depth} draft tokens", None, "SPECDEC_EAGER=1"):
                self._graphs[key] = self.ops.device.capture(lambda: self._cycle(cycles, target, mtp, fed, depth))
            self.buffers.fill(before)
        return self._graphs[key]

    def _stand_ins(self, caches: Sequence[DeviceCache], table: Tensor, bound: int) -> list[CapturedCache]:
        return [CapturedCache(cache, row, bound) for cache, row in zip(caches, table, strict=True)]

    def _cycle(
        self, cycles: CudaCycles, target: list[CapturedCache], mtp: list[CapturedCache], fed: int, depth: int
    ) -> None:
        b = self.buffers
        table = b.table[self.caches :]
        self.settle()
        x = self.mtp.launched(mtp, b.waiting_ids[:fed], b.waiting[:fed])
        accept.commit_rows(table, self.mtp_kinds, b.counters[cycle.FED.value : cycle.FED.value + 1])
        x = cycle.last_row(x, b.counters)
        self._draft(cycles, x, 0)
        for step in range(1, depth):
            x = self.mtp.launched(mtp, b.drafted[step - 1 : step], x)
            accept.commit_rows(table, self.mtp_kinds, 1)
            self._draft(cycles, x, step)
        if depth > 1:
            accept.commit_rows(table, self.mtp_kinds, 1 - depth)  # chained rows are provisional
        drafted = b.drafted[:depth]
        self._verified[1 : depth + 1].copy_(drafted)
        x = self.target.launched(target, self._verified[: depth + 1], None)
        b.fresh[: depth + 1].copy_(x)
        best = head.best(x, cycles.lm_head)
        accept.accept(drafted, best.ids, b.stops, b.control)

    def _draft(self, cycles: CudaCycles, x: Tensor, place: int) -> None:
        first = head.best(x, cycles.draft_head, ids=cycles.draft_ids)
        second = first
        if cycles.added is not None:
            assert self._added is not None
            second = head.best(x, self._added, ids=self._added_ids)
        out = self.buffers.drafted[place : place + 1]
        cycle.winner(first.ids, first.values, second.ids, second.values, out)


@attrs.frozen
class _Flight:
    """A cycle whose decision the host has not read."""

    depth: int
    report: Tensor  # pinned
    done: Marker


class CudaCycles:
    """Cycles of one sequence.

    The host counts behind the device: cycle i begins by settling what cycle i - 1 kept, so that as soon as decision
    i - 1 is known, the lengths after that are. Decision 0 is the start, which kept nothing.
    """

    def __init__(self, graphs: CycleGraphs, target: CudaPass, mtp: CudaPass, setup: CycleSetup) -> None:
        self._graphs = graphs
        self.target, self.mtp = target, mtp
        self._device = graphs.ops.device
        self.lm_head: Weight = setup.lm_head
        drafting: Any = setup.draft_head
        self.draft_ids: Tensor | None = None
        self.added: tuple[Tensor, Tensor] | None = None
        if isinstance(drafting, CudaHeadRows):
            self.draft_ids = drafting.part_ids[0]
            if len(drafting.parts) > 1:
                self.added = (drafting.parts[1].tensor, drafting.part_ids[1])
            drafting = drafting.parts[0]
        self.draft_head: Weight = drafting
        tokens, length = setup.tokens, int(target.caches[0].length)
        start = Decision(
            halted=0,
            remaining=setup.limit,
            pending=tokens[-1],
            position=length,
            kept=0,
            accepted=0,
            cycles=0,
            emitted=(),
        )
        self._decisions = [start]  # those that the host knows
        self._depths = [0]  # of the cycles submitted
        self._flights: dict[int, _Flight] = {}
        self._collected = 0
        self._counted = 0  # cycles up to whose beginning the caches' mirrors count
        self._waiting = len(tokens)  # pairs that wait, there
        self._room: int | None = None  # rows that surely fit
        self.kept = self._first_buffers(setup)
        self._pinned = [self._device.pinned(len(graphs.report), dtype=torch.int32) for _ in range(_SLOTS)]

    def _first_buffers(self, setup: CycleSetup) -> _Buffers:
        graphs, upload = self._graphs, self._device.upload
        caches, tokens, stops = graphs.caches + len(self.mtp.caches), setup.tokens, setup.stop_tokens
        made, _ = _Buffers.empty(caches, graphs.hidden_size, graphs.ops.dtype, self._device.place)
        made.table[: graphs.caches].copy_(self.target.table)
        made.table[graphs.caches :].copy_(self.mtp.table)
        self._write(made.control, self._decisions[0])
        made.waiting[: len(tokens)].copy_(setup.hidden)
        upload(tokens, torch.int32, made.waiting_ids[: len(tokens)])
        upload([len(tokens), 0], torch.int32, made.counters)
        if stops:
            upload(stops, torch.int32, made.stops[: len(stops)])
        return made

    def _write(self, control: Tensor, d: Decision) -> None:
        values = [d.halted, d.remaining, d.pending, d.position, d.kept, d.accepted, d.cycles, 0, *d.emitted]
        self._device.upload(values, torch.int32, control[: len(values)])

    # --- cycles ----------------------------------------------------------------------------------------------------

    @property
    def _submitted(self) -> int:
        return len(self._depths) - 1

    def submit(self, depth: int) -> None:
        if not 1 <= depth < MAX_ROWS:
            raise StateError(f"a cycle on the device drafts 1 to {MAX_ROWS - 1} tokens, got {depth}")
        if self._submitted - self._collected >= _SLOTS:
            raise StateError(f"{_SLOTS} cycles are in flight already")
        graphs = self._graphs
        pairs = self._waiting if not self._submitted else max(self._waiting, self._depths[-1] + 1)
        fed = next(rows for rows in _FED_ROWS if rows >= pairs)
        with graphs.target.lock, graphs.mtp.lock:
            graphs.own(self)
            self._make_room(depth)
            graphs.graph(self, fed, depth).replay()
            self._depths.append(depth)
            report = self._pinned[self._submitted % _SLOTS]
            report.copy_(graphs.report, non_blocking=True)
            self._flights[self._submitted] = _Flight(depth, report, self._device.marker())

    def collect(self) -> GreedyCycle:
        if self._collected == self._submitted:
            raise StateError("no cycle is in flight")
        self._collected += 1
        self._see(self._collected)
        flight, decision = self._flights.pop(self._collected), self._decisions[self._collected]
        if decision.halted == FAULT.value:
            checked([-1])
        if not decision.kept:
            return GreedyCycle((), 0, ())
        first = FIELDS.value + MAX_ROWS
        drafted: list[int] = flight.report[first : first + flight.depth].tolist()
        return GreedyCycle(tuple(drafted), decision.accepted, decision.emitted)

    def keep(self, tokens: int) -> None:
        last = self._decisions[-1]
        if self._collected != self._submitted or not 1 <= tokens <= last.kept:
            raise StateError(f"{tokens} of {last.kept} tokens are kept of a cycle that was the last one, and collected")
        back = last.kept - tokens
        self._decisions[-1] = attrs.evolve(
            last,
            halted=0,
            remaining=last.remaining + back,
            pending=last.emitted[tokens - 1],
            position=last.position - back,
            kept=tokens,
            emitted=last.emitted[:tokens],
        )
        with self._graphs.target.lock, self._graphs.mtp.lock:
            self._graphs.own(self)
            self._write(self._graphs.buffers.control, self._decisions[-1])

    def close(self) -> Tensor:
        if self._collected != self._submitted:
            raise StateError("cycles are closed while one is in flight")
        graphs, last = self._graphs, self._decisions[-1]
        with graphs.target.lock, graphs.mtp.lock:
            graphs.own(self)
            self._catch_up()
            graphs.settle()
            self._count(last)
            self.target.table.copy_(graphs.buffers.table[: graphs.caches])
            self.mtp.table.copy_(graphs.buffers.table[graphs.caches :])
            graphs.owner = None
            return graphs.buffers.waiting[: self._waiting].clone()

    # --- what the host knows ---------------------------------------------------------------------------------------

    def _see(self, number: int) -> None:
        """Read decision ``number`` when it is there, and those before it."""
        for at in range(len(self._decisions), number + 1):
            flight = self._flights[at]
            flight.done.wait()
            self._decisions.append(Decision.of(flight.report.tolist()))

    def _count(self, decision: Decision) -> None:
        """Count what the settling of ``decision`` did to the target's caches and to the pairs that wait."""
        for held in self.target.caches:
            held.advance(decision.kept)
        self._waiting = decision.kept or self._waiting

    def _catch_up(self) -> None:
        """Bring the mirrors of all caches to where the device is after the last submitted cycle."""
        while self._counted < self._submitted:
            if len(self._decisions) <= self._counted:
                self._see(self._counted)
            decision = self._decisions[self._counted]
            self._count(decision)
            if not decision.halted:
                for held in self.mtp.caches:
                    held.advance(self._waiting)
            self._counted += 1

    def _make_room(self, depth: int) -> None:
        """See that every cache has the memory for one more cycle, whatever those in flight decide."""
        known = self._decisions[-1].position
        unseen = sum(depth + 1 for depth in self._depths[len(self._decisions) :])
        slots = min((held.slots for held in self.target.caches if isinstance(held, CudaDeltaCache)), default=depth + 2)
        if self._room is not None and known + unseen + depth + 1 <= self._room and depth + 2 <= slots:
            return
        self._catch_up()
        moved = False
        end = known + unseen + depth + 1
        for held in self.target.caches:
            moved |= held.make_room(end, depth + 1)
        for held in self.mtp.caches:
            moved |= held.make_room(min(end + MAX_ROWS, held.capacity), MAX_ROWS)
        if moved or self._room is None:
            table = self._graphs.buffers.table
            write_rows(self.target.caches, table[: self._graphs.caches])
            write_rows(self.mtp.caches, table[self._graphs.caches :])
        rows = [held.bound for held in self.target.caches if held.kind is Kind.ROWS]
        self._room = min([*rows, *(held.bound - MAX_ROWS for held in self.mtp.caches)])


def cycles_over(ops: CudaOps, target: Any, mtp: Any, setup: CycleSetup) -> CudaCycles | None:
    """Cycles over two passes of ``ops``; None where the passes run eagerly or these cycles do not fit."""
    if target.passes.eager_reason or mtp.passes.eager_reason or any(held.kind is Kind.STATES for held in mtp.caches):
        return None
    if len(setup.tokens) > MAX_ROWS or len(setup.stop_tokens) > STOPS:
        return None
    rows = setup.draft_head
    if isinstance(rows, CudaHeadRows) and any(len(ids) > _ADDED_ROWS[-1] for ids in rows.part_ids[1:]):
        return None
    if target.passes.cycles is None:
        target.passes.cycles = CycleGraphs(ops, target, mtp)
    graphs: CycleGraphs = target.passes.cycles
    return CudaCycles(graphs, target, mtp, setup)


def _bound(caches: Sequence[DeviceCache]) -> int:
    """What a graph is captured for, as in ``passes``."""
    return stage(max(held.bound for held in caches))


def _copy(buffers: _Buffers) -> _Buffers:
    return attrs.evolve(
        buffers, **{field.name: getattr(buffers, field.name).clone() for field in attrs.fields(_Buffers)}
    )
