"""Passes as CUDA graphs, captured once per number of rows and replayed for every sequence.

A graph is independent of sequences: it reads token ids, hidden states and the address table from static buffers, and
before a replay the sequence's table is copied into the static one. Lengths, addresses and slots are never part of a
graph, so growing caches and other sessions need no new graph, as long as their rows fit the graph's bound. A commit
updates the sequence's own table, in one launch.

A greedy draft is two graphs, replayed one after the other: the pass over the true pairs with the first token, and all
further steps. (One graph for both would be captured for every pair of a number of rows and a depth.) Its tokens stay on
the device, the static table counts the rows between the steps, and the host reads all tokens at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from specdec.backends.arrays import not_finite
from specdec.backends.cuda import choosing, products
from specdec.backends.cuda.arrays import CudaHeadRows, materialised
from specdec.backends.cuda.caches import CapturedCache, DeviceCache, write_rows
from specdec.backends.cuda.device import CudaDevice
from specdec.backends.cuda.kernels.commit import STATES, commit_rows
from specdec.backends.cuda.kernels.launch import COLUMNS, MAX_ROWS
from specdec.backends.cuda.memory import stage
from specdec.backends.cuda.weights import DenseWeight, Weight
from specdec.backends.passes import Body, Pass, fitting
from specdec.backends.placeholders import DeviceTokens
from specdec.contract import Choosing
from specdec.errors import SpecdecError, UnsupportedError

if TYPE_CHECKING:
    from specdec.backends.ops import Array, Cache

_ADDED_ROWS = (256, 1024, 4096)  # allowed numbers of rows added to a pruned head: few graphs
_HEADS = 4  # heads whose captured drafts are kept


@attrs.frozen(eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    out: Tensor  # [T, H], overwritten by every replay
    body: object  # keeps alive the memory that the graph uses by address


class _Drafts:
    """The captured drafts with one head, which they know by address only.

    The rows that a sequence adds to a pruned head are copied to a buffer of the graphs, padded with copies of the first
    one; its products have other sizes than those of a single step, so that rounding may decide another draft token.
    """

    def __init__(self, head: Weight | CudaHeadRows, added: int) -> None:
        """``added``: room for added rows, 0 if ``head`` has none."""
        self.firsts: dict[tuple[int, int], _Captured] = {}  # by rows and bound
        self.rests: dict[tuple[int, int], _Captured] = {}  # by further tokens and bound
        self._head: Weight | CudaHeadRows | None = None  # whose added rows are in the buffer
        if not isinstance(head, CudaHeadRows):
            self._parts: tuple[Weight, ...] = (head,)
            self._ids: Tensor | None = None
            return
        base, ids = head.parts[0], head.part_ids[0]
        self._count = len(ids)
        self._parts, self._ids = (base,), ids
        if added:
            rows = torch.empty(added, base.shape[1], dtype=base.tensor.dtype, device=ids.device)
            self._parts = (base, DenseWeight(rows))
            self._ids = torch.cat([ids, torch.empty(added, dtype=ids.dtype, device=ids.device)])

    def use(self, head: Weight | CudaHeadRows) -> None:
        """Copy the added rows of ``head`` for the next replays."""
        if head is self._head or not isinstance(head, CudaHeadRows) or len(head.parts) == 1:
            return
        self._head, (_, rows), (_, ids) = head, head.parts, head.part_ids
        room, places = self._parts[1].decode(), self._ids
        assert places is not None
        places = places[self._count :]
        for buffer, values in ((room, rows.tensor), (places, ids)):
            buffer[: len(ids)] = values
            buffer[len(ids) :] = values[:1]

    def token(self, x: Tensor) -> Tensor:
        """The best token of every row of ``x``, -1 if no logit is finite."""
        return choosing.best(products.logits(x, self._parts), self._ids)


def _added_room(head: Weight | CudaHeadRows) -> int | None:
    """The room for added rows in captured drafts, 0 without any; None if there are too many."""
    if not isinstance(head, CudaHeadRows) or len(head.parts) == 1:
        return 0
    return next((size for size in _ADDED_ROWS if size >= len(head.part_ids[1])), None)


class CudaPasses:
    """One kind of pass, for any sequence."""

    def __init__(
        self, device: CudaDevice, dtype: torch.dtype, body: Body, caches: int, hidden_size: int, eager_reason: str = ""
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.body = body
        self.hidden_size = hidden_size
        self.eager_reason = eager_reason
        self.lock = threading.RLock()  # the static buffers serve one pass at a time
        place, rows = device.place, MAX_ROWS
        self.current = torch.zeros(caches, COLUMNS, dtype=torch.int64, device=place)  # the static table
        self._ids = torch.zeros(rows, dtype=torch.int32, device=place)
        self._hidden = torch.zeros(rows, hidden_size, dtype=dtype, device=place)
        self._fed = torch.zeros(1, hidden_size, dtype=dtype, device=place)  # the row that a draft continues from
        self.drafted = torch.zeros(rows, dtype=torch.int32, device=place)  # -1 where no logit is finite
        self.graphs: dict[tuple[int, int], _Captured] = {}  # by rows and bound
        self._drafts: dict[tuple[int, int], _Drafts] = {}  # by head and room for added rows, the last used one last

    def bind(self, caches: Sequence[Cache]) -> CudaPass:
        return CudaPass(self, caches)

    def load(self, table: Tensor, tokens: Sequence[int], hidden: Tensor | None) -> None:
        """Fill the static buffers for a replay."""
        rows = len(tokens)
        self.current.copy_(table)
        self.device.upload(tokens, torch.int32, self._ids[:rows])
        if hidden is not None:
            self._hidden[:rows].copy_(hidden)

    def draft(
        self, rows: int, depth: int, of: CudaPass, head: Weight | CudaHeadRows, room: int
    ) -> Iterator[torch.cuda.CUDAGraph]:
        """The graphs of a greedy draft, each to be replayed before the next one: a capture runs it for real."""
        base = head.parts[0] if isinstance(head, CudaHeadRows) else head
        drafts = self._drafts.pop((id(base), room), None) or _Drafts(head, room)
        self._drafts[id(base), room] = drafts
        while len(self._drafts) > _HEADS:
            del self._drafts[next(iter(self._drafts))]
        drafts.use(head)
        yield self.first(rows, of.caches, of.kinds, drafts).graph
        if depth > 1:
            yield self.rest(depth - 1, of.caches, of.kinds, drafts).graph

    def checked(self, hidden: Array | None, rows: int) -> Tensor | None:
        """The hidden states that the body takes, if any. Raises: ShapeError for other shapes and dtypes."""
        if not self.hidden_size:
            return None
        found: Tensor = materialised(fitting(hidden, (rows, self.hidden_size), self.dtype))
        return found

    # --- capturing -------------------------------------------------------------------------------------------------
    #
    # The static buffers must be filled first, because the body runs for real before it is captured. It writes rows to
    # the sequence's caches that the replay writes again; the static table is put back.

    def captured(self, rows: int, caches: Sequence[DeviceCache]) -> _Captured:
        """The graph of a pass of ``rows`` rows."""

        def run(stand_ins: Sequence[CapturedCache]) -> Tensor:
            return self.launched(stand_ins, self._ids[:rows], self._given(rows))

        return self._capture(self.graphs, rows, caches, f"a pass of {rows} rows", run)

    def first(self, rows: int, caches: Sequence[DeviceCache], kinds: Tensor, drafts: _Drafts) -> _Captured:
        """The graph of a draft's first pass: its last row goes to ``_fed``, its token to ``drafted[0]``."""

        def run(stand_ins: Sequence[CapturedCache]) -> Tensor:
            x = self.launched(stand_ins, self._ids[:rows], self._given(rows))
            commit_rows(self.current, kinds, rows)
            self._fed.copy_(x[-1:])
            self.drafted[:1].copy_(drafts.token(self._fed))
            return x

        return self._capture(drafts.firsts, rows, caches, f"a draft over {rows} rows", run)

    def rest(self, steps: int, caches: Sequence[DeviceCache], kinds: Tensor, drafts: _Drafts) -> _Captured:
        """The graph of a draft's further steps, each over the token before it and that token's hidden state."""

        def run(stand_ins: Sequence[CapturedCache]) -> Tensor:
            x = self._fed
            for step in range(1, steps + 1):
                x = self.launched(stand_ins, self.drafted[step - 1 : step], x)
                commit_rows(self.current, kinds, 1)
                self.drafted[step : step + 1].copy_(drafts.token(x))
            return x

        return self._capture(drafts.rests, steps, caches, f"{steps} steps of a draft", run)

    def _given(self, rows: int) -> Tensor | None:
        return self._hidden[:rows] if self.hidden_size else None

    def launched(self, stand_ins: Sequence[CapturedCache], ids: Tensor, hidden: Tensor | None) -> Tensor:
        """Run the body on ids and hidden states on the device, with stand-ins for the caches."""
        return materialised(self.body(stand_ins, DeviceTokens(ids), hidden))

    def _capture(
        self,
        held: dict[tuple[int, int], _Captured],
        size: int,
        caches: Sequence[DeviceCache],
        what: str,
        run: Callable[[Sequence[CapturedCache]], Tensor],
    ) -> _Captured:
        """The graph in ``held`` of this size and the bound of ``caches``; at first captured from ``run(stand-ins)``."""
        key = size, _bound(caches)
        if key in held:
            return held[key]
        stand_ins = [CapturedCache(cache, row, key[1]) for cache, row in zip(caches, self.current, strict=True)]
        out: Tensor | None = None
        table = self.current.clone()

        def body() -> None:
            nonlocal out
            out = run(stand_ins)

        device = self.device
        try:
            with device.guarded(f"the CUDA graph of {what}", None, "fewer open sessions, or SPECDEC_EAGER=1"):
                graph = device.capture(body)
        except SpecdecError:
            raise
        except Exception as error:
            raise UnsupportedError(
                f"{what} cannot be captured as a CUDA graph: {type(error).__name__}: {error}", try_="SPECDEC_EAGER=1"
            ) from error
        assert out is not None
        self.current.copy_(table)
        held[key] = _Captured(graph, out, run)
        return held[key]


class CudaPass(Pass):
    """Passes over the caches of one sequence, which share one contiguous address table.

    Attributes:
        passes: the passes of the body, shared by all sequences.
        caches: the sequence's caches.
        table: their rows of the address table ``[caches, 8]`` int64.
        kinds: ``kernels.commit.ROWS`` or ``STATES`` for each, int32 ``[caches]``.
    """

    def __init__(self, passes: CudaPasses, caches: Sequence[Any]) -> None:
        self.passes = passes
        self.caches: Sequence[DeviceCache] = caches
        place = passes.device.place
        self.table = torch.empty(len(caches), COLUMNS, dtype=torch.int64, device=place)
        for cache, row in zip(self.caches, self.table, strict=True):
            cache.adopt(row)
        write_rows(self.caches, self.table)
        kinds = [cache.kind for cache in self.caches]
        self.kinds = torch.tensor(kinds, dtype=torch.int32, device=place)
        self._recurrent = STATES in kinds
        self._rows = 0  # the last run's

    def run(self, tokens: Sequence[int], hidden: Array | None = None) -> Array:
        rows, passes = len(tokens), self.passes
        given = passes.checked(hidden, rows)
        self._rows = rows
        if passes.eager_reason or rows > MAX_ROWS:
            return materialised(passes.body(self.caches, tokens, given))
        for cache in self.caches:
            cache.reserve(rows)
        with passes.lock:
            passes.load(self.table, tokens, given)
            captured = passes.captured(rows, self.caches)
            captured.graph.replay()
            return captured.out.clone()  # the next replay overwrites it

    def commit(self, rows: int) -> None:
        if rows:
            commit_rows(self.table, self.kinds, rows, whole=self._rows > MAX_ROWS)
        for cache in self.caches:
            cache.advance(rows)

    def chain(
        self, tokens: Sequence[int], hidden: Array, depth: int, head: Any, choosing: Choosing | None = None
    ) -> tuple[int, ...] | None:
        room = _added_room(head)
        if choosing is not None or room is None:
            return None
        rows, passes = len(tokens), self.passes
        most = rows + depth - 1
        if passes.eager_reason or self._recurrent or rows > MAX_ROWS or depth > MAX_ROWS or not passes.hidden_size:
            return None
        if any(cache.length + most > cache.capacity for cache in self.caches):
            return None  # the pass that does not fit raises the error
        given = passes.checked(hidden, rows)
        for cache in self.caches:
            cache.reserve(most)
        self._rows = 0
        with passes.lock:
            passes.load(self.table, tokens, given)
            for graph in passes.draft(rows, depth, self, head, room):
                graph.replay()
            found: list[int] = passes.drafted[:depth].tolist()  # waits for the device
        ran = found.index(-1) + 1 if -1 in found else depth  # passes that single steps would have run
        self.commit(rows + ran - 1)
        if -1 in found:
            raise not_finite(0)  # as a single step, whose logits have one row
        return tuple(found)


def _bound(caches: Sequence[DeviceCache]) -> int:
    """The bound that a graph is captured for: the stage of growth that holds the longest of these caches."""
    return stage(max(cache.bound for cache in caches))
