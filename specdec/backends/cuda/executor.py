"""The executor that runs each cycle as one CUDA graph: settle, draft, verify, decide.

    settle   commit the rows that the last cycle kept, and add their MTP pairs to the waiting ones
    draft    run the head's pass over all waiting pairs, choose its token, and run K - 1 chained steps
    verify   run the target's pass over the pending token and the draft, and choose the token of every row
    decide   ``kernels.accept``: determine the emitted, kept and pending tokens, and whether generation ends

A cycle of depth 0 drafts nothing, and its pairs keep waiting until there is no room for more. Without an MTP head there
are no pairs, and all cycles have depth 0.

Tokens are the best ones, or sampled with the noise of their positions: by the head itself, or from its logits where
top-k, top-p or min-p apply (``kernels.filters``). If rounding could decide a token, the device keeps those before it
and stops. The host then chooses that one token, and launches the cycles behind it again.

All inputs of a cycle are on the device, so the next cycle is launched before the host has read the last decision. The
host reads a copy of the decision in pinned memory.

The graphs' buffers serve one sequence at a time (``_Buffers``); their contents are swapped when another sequence runs.
Only the device knows how many pairs wait. The head's pass has room for the maximum; its unused rows hold garbage that
is never read and that the chained steps overwrite.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from specdec.backends.cuda.arrays import CudaHeadRows, checked
from specdec.backends.cuda.caches import CapturedCache, CudaDeltaCache, DeviceCache, Kind, write_rows
from specdec.backends.cuda.device import Graph, Marker
from specdec.backends.cuda.kernels import accept, cycle, filters, head
from specdec.backends.cuda.kernels.accept import FAULT, FIELDS, KEPT, LIMIT, PENDING, RUNNING, STOP, UNDECIDED, Decision
from specdec.backends.cuda.kernels.launch import COLUMNS, MAX_ROWS
from specdec.backends.cuda.memory import stage
from specdec.backends.cuda.passes import CudaPass
from specdec.backends.cuda.weights import DenseWeight, Weight
from specdec.backends.passes import ExecutorSetup, Pass
from specdec.contract import Executor, Outcome, Sampling
from specdec.errors import StateError
from specdec.sampling import is_plain

STOPS = 64  # stop tokens that the device can look for
_CONTROL = FIELDS.value + MAX_ROWS
_FED_ROWS = (2, 4, 8, MAX_ROWS)  # allowed row counts of the head's pass: few graphs, little waste
_ADDED_ROWS = (256, 1024, 4096)  # allowed numbers of rows added to a pruned head, likewise
_HEADS = 4  # sets of heads whose graphs are kept
_IN_FLIGHT = 2  # one cycle runs while the host processes another


class Choice(enum.Enum):
    """How the tokens of a cycle are chosen."""

    BEST = enum.auto()  # temperature 0
    NOISE = enum.auto()  # temperature alone
    FILTERS = enum.auto()  # top-k, top-p and min-p

    @classmethod
    def under(cls, sampling: Sampling | None) -> Choice:
        """The choice under these settings; None: greedy."""
        if sampling is None:
            return cls.BEST
        return cls.NOISE if is_plain(sampling) else cls.FILTERS


@attrs.frozen(kw_only=True)
class _Buffers:
    """State that a cycle leaves for the next cycle of its sequence."""

    table: Tensor  # [caches, 8] int64, the target's and then the head's
    control: Tensor  # [24] int32, kernels.accept
    waiting: Tensor  # [16, H]
    waiting_ids: Tensor  # [16] int32
    fresh: Tensor  # [16, H]: hidden states of the last verification
    stops: Tensor  # [64] int32, padded with -1
    seed: Tensor  # [1] int64
    scale: Tensor  # [1] float32, 1 / temperature
    settings: Tensor  # [4] float64, kernels.filters
    row: Tensor  # [1, H]: the last verification's first row, for a token that the host has to choose

    def fill(self, other: _Buffers) -> None:
        """Copy the contents of ``other``."""
        for ours, theirs in zip(attrs.astuple(self, recurse=False), attrs.astuple(other, recurse=False), strict=True):
            ours.copy_(theirs)

    def copy(self) -> _Buffers:
        return _Buffers(**{name: held.clone() for name, held in attrs.asdict(self, recurse=False).items()})


@attrs.frozen
class _Captured:
    """The graphs of one set of heads, which they know by address only."""

    heads: tuple[Any, ...]
    graphs: dict[tuple[Any, ...], Graph] = attrs.field(factory=dict)


class CycleGraphs:
    """The graphs of one model's cycles, with or without its MTP head, and their buffers."""

    def __init__(self, target: CudaPass, mtp: CudaPass | None, width: int) -> None:
        """Args: ``width``: H of the target."""
        self.device, dtype = target.passes.device, target.passes.dtype
        place = self.device.place
        self._target, self._kinds = target.passes, target.kinds
        self._mtp = mtp.passes if mtp else None
        self._mtp_kinds = mtp.kinds if mtp else self._kinds[:0]
        self._caches = len(target.caches)
        caches = self._caches + len(mtp.caches if mtp else ())
        hidden_size = mtp.passes.hidden_size if mtp else 0
        # the control block, the pending token and the draft together, for one copy to the host
        self.report = torch.zeros(_CONTROL + 1 + MAX_ROWS, dtype=torch.int32, device=place)
        self._verified = self.report[_CONTROL:]
        self._drafted = self._verified[1:]
        self._counters = torch.zeros(cycle.COUNTERS, dtype=torch.int32, device=place)
        self.buffers = _Buffers(
            table=torch.zeros(caches, COLUMNS, dtype=torch.int64, device=place),
            control=self.report[:_CONTROL],
            waiting=torch.zeros(MAX_ROWS, hidden_size, dtype=dtype, device=place),
            waiting_ids=torch.zeros(MAX_ROWS, dtype=torch.int32, device=place),
            fresh=torch.zeros(MAX_ROWS, hidden_size, dtype=dtype, device=place),
            stops=torch.full((STOPS,), -1, dtype=torch.int32, device=place),
            seed=torch.zeros(1, dtype=torch.int64, device=place),
            scale=torch.zeros(1, dtype=torch.float32, device=place),
            settings=torch.zeros(filters.SETTINGS, dtype=torch.float64, device=place),
            row=torch.zeros(1, width, dtype=dtype, device=place),
        )
        self._keys = torch.zeros(MAX_ROWS, 2, dtype=torch.int64, device=place)  # of the noise of a cycle's rows
        self._graphs: dict[tuple[int, ...], _Captured] = {}  # by the identities of the heads, the last used one last
        self._added: dict[int, tuple[DenseWeight, Tensor]] = {}  # for rows added to a pruned head, by their number
        self.owner: CudaExecutor | None = None  # the sequence whose state is in the buffers

    @contextlib.contextmanager
    def turn_of(self, executor: CudaExecutor) -> Iterator[_Buffers]:
        """Provide the buffers with this sequence's state; the previous owner keeps a copy of its own."""
        with self._target.lock, contextlib.nullcontext() if self._mtp is None else self._mtp.lock:
            if self.owner is not executor:
                if self.owner is not None:
                    self.owner.kept.fill(self.buffers)
                    self.owner = None  # before the buffers change, so that an interruption cannot spoil its state
                self.buffers.fill(executor.kept)
                self._take_added(executor.added)
                self.owner = executor
            yield self.buffers

    def tables(self, buffers: _Buffers) -> tuple[Tensor, Tensor]:
        """Return the address table's rows of the target and of the head."""
        return buffers.table[: self._caches], buffers.table[self._caches :]

    def _take_added(self, added: tuple[Tensor, Tensor] | None) -> None:
        """Copy a sequence's added rows to the graphs' buffer, padded with copies of the first row."""
        if added is None:
            return
        (rows, ids), (held, held_ids) = added, self._room_for_added(added)
        held.tensor[: len(ids)] = rows
        held.tensor[len(ids) :] = rows[:1]
        held_ids[: len(ids)] = ids
        held_ids[len(ids) :] = ids[:1]

    def _room_for_added(self, added: tuple[Tensor, Tensor]) -> tuple[DenseWeight, Tensor]:
        """The graphs' buffers for so many added rows and their ids."""
        rows, ids = added
        size = next(size for size in _ADDED_ROWS if size >= len(ids))
        if size not in self._added:
            made = torch.empty(size, rows.shape[1], dtype=rows.dtype, device=rows.device)
            self._added[size] = DenseWeight(made), torch.empty(size, dtype=torch.int32, device=rows.device)
        return self._added[size]

    def _captured(self, executor: CudaExecutor) -> dict[tuple[Any, ...], Graph]:
        """The graphs of this sequence's heads. Those of other heads are kept, for sequences that take turns."""
        added = None if executor.added is None else self._room_for_added(executor.added)[0]
        heads = (executor.lm_head, executor.draft_head, executor.draft_ids, added)
        key = tuple(map(id, heads))
        found = self._graphs.pop(key, None) or _Captured(heads)
        self._graphs[key] = found
        while len(self._graphs) > _HEADS:
            del self._graphs[next(iter(self._graphs))]
        return found.graphs

    def settle(self) -> None:
        """Launch only the settle step of a cycle."""
        b = self.buffers
        accept.commit_rows(self.tables(b)[0], self._kinds, b.control[KEPT.value : KEPT.value + 1])
        if self._mtp is None:
            self._verified[:1].copy_(b.control[PENDING.value : PENDING.value + 1])
        else:
            cycle.settle(b.control, b.fresh, b.waiting, b.waiting_ids, self._counters, self._verified)

    def graph(self, executor: CudaExecutor, fed: int, depth: int) -> Graph:
        """Return the graph of a cycle of ``depth`` draft tokens, whose head pass takes up to ``fed`` pairs."""
        graphs = self._captured(executor)
        key = (fed, depth, *executor.bounds, executor.choice)
        if key not in graphs:
            caches = executor.target.caches, executor.mtp.caches if executor.mtp else []
            of_target, of_mtp = (
                [CapturedCache(held, row, bound) for held, row in zip(of, table, strict=True)]
                for of, table, bound in zip(caches, self.tables(self.buffers), executor.bounds, strict=True)
            )
            before = self.buffers.copy()  # capturing runs the cycle for real first
            with self.device.guarded(f"the CUDA graph of a cycle of {depth} draft tokens", None, "SPECDEC_EAGER=1"):
                graphs[key] = self.device.capture(lambda: self._cycle(executor, of_target, of_mtp, fed, depth))
            self.buffers.fill(before)
        return graphs[key]

    def _cycle(
        self, executor: CudaExecutor, target: list[CapturedCache], mtp: list[CapturedCache], fed: int, depth: int
    ) -> None:
        b, rows = self.buffers, depth + 1
        self.settle()
        if executor.choice is not Choice.BEST:
            filters.keys(b.control, b.seed, self._keys)
        if fed:
            self._draft(executor, mtp, fed, depth)
        x = self._target.launched(target, self._verified[:rows], None)
        if self._mtp is not None:
            b.fresh[:rows].copy_(x)
        chosen = self._chosen(executor, x)
        accept.accept(self._drafted[:depth], chosen, b.stops, b.control, fed=fed > 0 or self._mtp is None)

    def _chosen(self, executor: CudaExecutor, x: Tensor) -> Tensor:
        """The target's choice for every row, or OPEN."""
        b = self.buffers
        if executor.choice is Choice.BEST:
            return head.best(x, executor.lm_head).ids
        if executor.choice is Choice.NOISE:
            return head.sample(x, executor.lm_head, noise=head.Noise(self._keys[0], b.scale)).ids
        b.row.copy_(x[:1])
        out = torch.empty(len(x), dtype=torch.int32, device=x.device)
        filters.choose(head.logits(x, executor.lm_head), self._keys[0], b.settings, out)
        return out

    def _draft(self, executor: CudaExecutor, mtp: list[CapturedCache], fed: int, depth: int) -> None:
        """Feed the waiting pairs to the head, and draft."""
        assert self._mtp is not None
        b, table = self.buffers, self.tables(self.buffers)[1]
        x = self._mtp.launched(mtp, b.waiting_ids[:fed], b.waiting[:fed])
        accept.commit_rows(table, self._mtp_kinds, self._counters[cycle.FED.value : cycle.FED.value + 1])
        if depth:
            x = cycle.last_row(x, self._counters)
        for step in range(depth):
            if step:
                x = self._mtp.launched(mtp, self._drafted[step - 1 : step], x)
                accept.commit_rows(table, self._mtp_kinds, 1)
            self._choose(executor, x, step)
        if depth > 1:
            accept.commit_rows(table, self._mtp_kinds, 1 - depth)  # chained rows are provisional

    def _choose(self, executor: CudaExecutor, x: Tensor, step: int) -> None:
        """Draft the token of ``step``, with the noise that will decide it."""
        assert executor.draft_head is not None
        out, key = self._drafted[step : step + 1], self._keys[step]
        if executor.choice is Choice.FILTERS:
            logits = head.logits(x, executor.draft_head)
            filters.choose(logits, key, self.buffers.settings, out, ids=executor.draft_ids, guess=True)
            return
        if executor.choice is Choice.NOISE:
            noise = head.Noise(key, self.buffers.scale)
            first = second = head.sample(x, executor.draft_head, noise=noise, ids=executor.draft_ids)
        else:
            first = second = head.best(x, executor.draft_head, ids=executor.draft_ids)
        if executor.added is not None:
            rows, ids = self._room_for_added(executor.added)
            second = head.best(x, rows, ids=ids)
        cycle.winner(first.ids, first.values, second.ids, second.values, out)


@attrs.frozen
class _Flight:
    """A cycle that the host has not collected.

    Without a report it is not launched: generation has ended, or a token before it is undecided.
    """

    depth: int
    fed: bool
    report: Tensor | None = None  # pinned
    done: Marker | None = None


class CudaExecutor(Executor):
    """Cycles of one sequence. See ``specdec.backends.passes.ExecutorSetup``.

    At most two are in flight, so a cycle is launched only when the last decision but one is known and was not the end.
    A cycle begins by settling the one before, so from ``_last``, the decision collected last, the host knows the
    contents of the caches after the last launched cycle.

    Attributes:
        target, mtp: the passes over the sequence's caches; without ``mtp`` nothing is drafted.
        kept: this sequence's copy of the graphs' buffers while another sequence runs.
        lm_head, draft_head, draft_ids, added: heads; ``added`` are the sequence's own rows of a pruned head, with ids.
        bounds: the stages of cache growth that the graphs are captured for.
        choice: how tokens are chosen.
    """

    def __init__(self, graphs: CycleGraphs, target: CudaPass, mtp: CudaPass | None, setup: ExecutorSetup) -> None:
        self._graphs, self._setup = graphs, setup
        self.target, self.mtp = target, mtp
        self.lm_head: Weight = setup.lm_head
        drafting: Any = None if setup.waiting is None else setup.waiting.head
        self.draft_ids: Tensor | None = None
        self.added: tuple[Tensor, Tensor] | None = None
        if isinstance(drafting, CudaHeadRows):
            self.draft_ids = drafting.part_ids[0]
            if len(drafting.parts) > 1:
                self.added = (drafting.parts[1].tensor, drafting.part_ids[1])
            drafting = drafting.parts[0]
        self.draft_head: Weight | None = drafting
        self.bounds: tuple[int, int] = (0, 0)
        self.choice = Choice.under(None if setup.sampling is None else setup.sampling.settings)
        self._rows = self._slots = 0  # positions and states known to fit; the first cycle makes room
        self._flights: list[_Flight] = []
        device = graphs.device
        self._reports = itertools.cycle(
            [device.pinned(len(graphs.report), dtype=torch.int32) for _ in range(_IN_FLIGHT)]
        )
        self._last = Decision(
            halted=0,
            remaining=setup.limit,
            pending=setup.pending,
            position=int(target.caches[0].length),
            kept=0,
            accepted=0,
            cycles=0,
            waiting=0 if setup.waiting is None else len(setup.waiting.tokens),
            emitted=(),
        )
        self.kept = graphs.buffers.copy()
        target_table, mtp_table = graphs.tables(self.kept)
        target_table.copy_(target.table)
        self._write(self.kept.control)
        device.upload([*setup.stop_tokens, *[-1] * (STOPS - len(setup.stop_tokens))], torch.int32, self.kept.stops)
        if setup.sampling is not None:
            sampling, place = setup.sampling.settings, device.place
            signed = (sampling.seed + 2**63) % 2**64 - 2**63
            self.kept.seed.copy_(torch.tensor([signed], dtype=torch.int64))
            self.kept.scale.copy_(torch.tensor([1.0 / sampling.temperature], dtype=torch.float32))
            self.kept.settings.copy_(torch.tensor(filters.settings_of(sampling), dtype=torch.float64, device=place))
        if mtp is not None and setup.waiting is not None:
            mtp_table.copy_(mtp.table)
            rows = len(setup.waiting.tokens)
            self.kept.waiting[:rows].copy_(setup.waiting.hidden)
            device.upload(setup.waiting.tokens, torch.int32, self.kept.waiting_ids[:rows])

    def _write(self, control: Tensor) -> None:
        d = self._last
        values = [d.halted, d.remaining, d.pending, d.position, d.kept, d.accepted, d.cycles, d.waiting, *d.emitted]
        self._graphs.device.upload(values, torch.int32, control[: len(values)])

    def submit(self, depth: int) -> None:
        if self.mtp is None:
            depth = 0
        if not 0 <= depth < MAX_ROWS:
            raise StateError(f"a cycle on the device drafts 0 to {MAX_ROWS - 1} tokens, got {depth}")
        if len(self._flights) == _IN_FLIGHT:
            raise StateError(f"{_IN_FLIGHT} cycles are already in flight")
        undecided = self._last.halted == UNDECIDED.value
        if (self._last.halted and not undecided) or (undecided and self._flights):
            self._flights.append(_Flight(depth, fed=False))
            return
        waiting = self._last.waiting + self._last.kept  # an upper bound while a cycle is in flight
        for flight in self._flights:
            waiting = (0 if flight.fed else waiting) + flight.depth + 1
        fed = 0
        if self.mtp is not None and (depth or waiting == MAX_ROWS):
            fed = next(rows for rows in _FED_ROWS if rows >= waiting)
        graphs, report = self._graphs, next(self._reports)
        with graphs.turn_of(self) as buffers:
            self._make_room(depth, buffers)
            graphs.graph(self, fed, depth).replay()
            report.copy_(graphs.report, non_blocking=True)
            self._flights.append(_Flight(depth, fed > 0, report, graphs.device.marker()))

    def collect(self) -> Outcome:
        if not self._flights:
            raise StateError("no cycle is in flight")
        flight = self._flights.pop(0)
        if flight.report is None or flight.done is None:
            return Outcome((), 0, ())
        flight.done.wait()
        values = flight.report.tolist()
        self._last = last = Decision.of(values)
        if last.halted == FAULT.value:
            checked([-1])
        drafted = tuple(values[_CONTROL + 1 :][: flight.depth])
        if last.halted == UNDECIDED.value:
            if not last.kept:
                return Outcome((), 0, (self._decide(),))
            # the last token before the open one ends the cycle, as if the draft had been so much shorter
            return Outcome(drafted[: last.kept - 1], last.kept - 1, last.emitted)
        if not last.kept:
            return Outcome((), 0, ())
        return Outcome(drafted, last.accepted, last.emitted)

    def _decide(self) -> int:
        """Choose the next token on the host, and launch the cycles in flight again, which have kept nothing.

        All of them had this token's row as their first: of the last pass that ran, it is the row to keep.
        """
        last, setup = self._last, self._setup
        assert setup.sampling is not None
        behind, self._flights = self._flights, []
        with self._graphs.turn_of(self) as buffers:
            token = setup.sampling.choose(buffers.row.clone())
            ended = STOP if token in setup.stop_tokens else LIMIT if last.remaining == 1 else RUNNING
            self._last = attrs.evolve(
                last,
                halted=ended.value,
                remaining=last.remaining - 1,
                pending=token,
                position=last.position + 1,
                kept=1,
                accepted=0,
                emitted=(token,),
            )
            self._write(buffers.control)
            for flight in behind:
                self.submit(flight.depth)
        return token

    def keep(self, tokens: int) -> None:
        last = self._last
        if not 1 <= tokens <= last.kept or (self._flights and tokens < last.kept):
            raise StateError(f"cannot keep {tokens} of {last.kept} tokens; fewer than all only with no cycle in flight")
        back = last.kept - tokens
        if not back:
            return
        self._last = attrs.evolve(
            last,
            halted=0,
            remaining=last.remaining + back,
            pending=last.emitted[tokens - 1],
            position=last.position - back,
            kept=tokens,
            emitted=last.emitted[:tokens],
        )
        with self._graphs.turn_of(self) as buffers:
            self._write(buffers.control)

    def close(self) -> None:
        if self._flights:
            raise StateError("an executor is closed while a cycle is in flight")
        graphs, last, left = self._graphs, self._last, None
        with graphs.turn_of(self) as buffers:
            self._count()
            graphs.settle()
            for held in self.target.caches:
                held.advance(last.kept)
            target_table, mtp_table = graphs.tables(buffers)
            self.target.table.copy_(target_table)
            if self.mtp is not None:
                self.mtp.table.copy_(mtp_table)
                left = buffers.waiting[: last.waiting + last.kept].clone()
            graphs.owner = None
        self._setup.closed(left)

    # --- the host's mirrors ----------------------------------------------------------------------------------------

    def _count(self) -> None:
        """Update the mirrors of all caches to their state after the last launched cycle."""
        last, launched = self._last, self._flights[-1:]
        for held in self.target.caches:
            held.advance(last.position - (0 if launched else last.kept) - held.length)
        if self.mtp is not None:
            fed = last.position if launched and launched[0].fed else last.position - last.kept - last.waiting
            for held in self.mtp.caches:
                held.advance(fed - held.length)

    def _make_room(self, depth: int, buffers: _Buffers) -> None:
        """Ensure that every cache has memory for one more cycle, whatever the cycles in flight decide."""
        end = self._last.position + sum(flight.depth + 1 for flight in self._flights) + depth + 1
        if end <= self._rows and depth + 2 <= self._slots:
            return
        self._count()
        target, mtp = self.target.caches, self.mtp.caches if self.mtp else []
        moved = [held.make_room(end, depth + 1) for held in target]
        moved += [held.make_room(min(end + MAX_ROWS, held.capacity), MAX_ROWS) for held in mtp]
        if any(moved):
            write_rows([*target, *mtp], buffers.table)
        rows = [held.bound for held in target if held.kind is Kind.ROWS] + [held.bound - MAX_ROWS for held in mtp]
        self._rows = min(rows, default=2**62)
        self._slots = min((held.slots for held in target if isinstance(held, CudaDeltaCache)), default=2**62)
        self.bounds = _bound(target), _bound(mtp)


def device_executor(target: Pass, mtp: Pass | None, setup: ExecutorSetup) -> CudaExecutor | None:
    """Return an executor over CUDA passes; None if they run eagerly or the cycles do not fit."""
    if not isinstance(target, CudaPass) or not isinstance(mtp, CudaPass | None):
        return None
    if target.passes.eager_reason or len(setup.stop_tokens) > STOPS:
        return None
    if mtp is not None:
        if mtp.passes.eager_reason or any(held.kind is Kind.STATES for held in mtp.caches) or setup.waiting is None:
            return None
        rows = setup.waiting.head
        if isinstance(rows, CudaHeadRows) and len(rows.parts) > 1 and setup.sampling is not None:
            return None  # the noise would have to be compared across two products
        if isinstance(rows, CudaHeadRows) and any(len(ids) > _ADDED_ROWS[-1] for ids in rows.part_ids[1:]):
            return None
        if len(setup.waiting.tokens) > MAX_ROWS:
            return None
    graphs = target.passes.cycle_graphs
    key = None if mtp is None else mtp.passes
    if key not in graphs:
        graphs[key] = CycleGraphs(target, mtp, setup.lm_head.shape[1])
    return CudaExecutor(graphs[key], target, mtp, setup)


def _bound(caches: Sequence[DeviceCache]) -> int:
    """The bound that a graph is captured for, as in ``passes``."""
    return stage(max((held.bound for held in caches), default=0))
