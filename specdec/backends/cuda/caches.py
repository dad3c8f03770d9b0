"""Caches on the device. Kernels read all addresses and lengths from an address table, never from the host.

Every cache owns one row of the table (columns in ``kernels.launch``). Launches and copies change the row in stream
order; the host mirrors these changes and never reads the row back.
Memory grows in stages up to the capacity. Growing changes addresses but not graphs, which know only the table's row.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from specdec.backends.caches import Cache, MarkedCache
from specdec.backends.cuda.arrays import Convolved
from specdec.backends.cuda.device import CudaDevice
from specdec.backends.cuda.kernels.commit import ROWS, STATES
from specdec.backends.cuda.kernels.launch import COLUMNS, MAX_ROWS
from specdec.backends.cuda.memory import rows_for
from specdec.backends.ops import DeltaShape
from specdec.backends.placeholders import PlaceholderInteger
from specdec.errors import StateError

FIRST_SLOTS = 6  # states of a new delta cache, for passes of up to 5 rows; longer ones grow it to MAX_ROWS + 1
MORE_ROOM = "target.capacity below that, which ends sessions earlier; fewer open sessions; a quantised checkpoint"


class DeviceCache(Cache):
    """The base of the caches: the table row, its mirror, and memory growth."""

    kind: ClassVar[int]  # how a commit changes the row of the table: ``kernels.commit.ROWS`` or ``STATES``

    def __init__(self, device: CudaDevice, capacity: int) -> None:
        self.device = device
        self.capacity = capacity
        self.row = torch.empty(COLUMNS, dtype=torch.int64, device=device.place)
        self.length = 0
        self._pending: int | None = None  # rows of the uncommitted pass

    @property
    @abc.abstractmethod
    def bound(self) -> int:
        """The number of allocated rows; no pass reads beyond them."""

    @abc.abstractmethod
    def entries(self) -> list[int]:
        """The row of the table, from the host's mirror."""

    def adopt(self, row: Tensor) -> None:
        """Move the row into a table shared with other caches; ``write_rows`` fills it."""
        self.row = row

    def write(self) -> None:
        """Copy the host's mirror to the row on the device."""
        write_rows([self], self.row[None])

    def reserve(self, rows: int) -> None:
        """Make room for a pass of ``rows`` rows. Raises: StateError above the capacity, OutOfMemory."""
        self.make_room(self.length + rows, rows)
        self._pending = rows

    @abc.abstractmethod
    def make_room(self, end: int, rows: int) -> None:
        """Ensure memory for ``end`` rows in total and passes of ``rows`` rows.

        Raises: StateError above the capacity, OutOfMemory.
        """

    def commit(self, rows: int) -> None:
        """Keep the first ``rows`` rows of the last pass; 0 drops all."""
        if rows:
            self.advance(rows)
            self.write()
        self._pending = None

    def advance(self, rows: int) -> None:
        """Count ``rows`` rows that the table's row already includes."""
        self.length += rows
        self._pending = None

    def advances_alone(self) -> bool:
        """Whether the launch that commits passes of up to ``MAX_ROWS`` rows also commits the last pass correctly."""
        return self._pending is None or self._pending <= MAX_ROWS


class CudaKVCache(DeviceCache):
    """Keys and values ``[bound, nkv, D]`` in act dtype; rows from ``length`` on are stale or provisional."""

    kind = ROWS
    attributes: ClassVar[dict[str, str]] = {"keys": "keys", "values": "values"}  # of the arrays, by their saved names
    keys: Tensor
    values: Tensor

    def __init__(self, device: CudaDevice, capacity: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__(device, capacity)
        self.kv_heads, self.head_dim = kv_heads, head_dim
        vars(self).update(self._allocated(rows_for(0, 0, capacity), dtype))
        self.write()

    def _allocated(self, rows: int, dtype: torch.dtype) -> dict[str, Tensor]:
        size, names = (rows, self.kv_heads, self.head_dim), self.attributes.values()
        nbytes = len(names) * rows * self.kv_heads * self.head_dim * dtype.itemsize
        with self.device.guarded(f"keys and values of {rows} tokens in one layer", nbytes, MORE_ROOM):
            return {name: torch.empty(size, dtype=dtype, device=self.device.place) for name in names}

    @property
    def _arrays(self) -> dict[str, Tensor]:
        return {name: getattr(self, attribute) for name, attribute in self.attributes.items()}

    @property
    def bound(self) -> int:
        return self.keys.shape[0]

    def entries(self) -> list[int]:
        first, second = ([*(array.data_ptr() for array in self._arrays.values()), 0])[:2]
        return [self.length, first, second, self.bound, 0, 0, 0, 0]

    def make_room(self, end: int, rows: int) -> None:
        if end > self.capacity:
            raise StateError(f"the cache holds {self.capacity} tokens, {end} are needed")
        size = rows_for(end, self.bound, self.capacity)
        if size != self.bound:
            for name, longer in self._allocated(size, self.keys.dtype).items():
                before = getattr(self, name)
                longer[: len(before)] = before
                setattr(self, name, longer)
            self.write()

    def truncate(self, length: int) -> bool:
        self.length, self._pending = length, None
        self.write()
        return True

    def save(self) -> dict[str, Tensor]:
        return {name: array[: self.length].clone() for name, array in self._arrays.items()}

    def load(self, arrays: Mapping[str, Tensor], length: int) -> None:
        self.length, self._pending = 0, None
        self.make_room(length, 0)
        for name, array in self._arrays.items():
            array[:length] = arrays[name]
        self.length = length
        self.write()

    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values())


class CudaLatentCache(CudaKVCache):
    """Rows of latent attention ``[bound, 1, D]``, named as keys; a value is the first entries of a row."""

    attributes: ClassVar[dict[str, str]] = {"rows": "keys"}

    def __init__(self, device: CudaDevice, capacity: int, dims: int, dtype: torch.dtype) -> None:
        super().__init__(device, capacity, 1, dims, dtype)


class CudaDeltaCache(MarkedCache, DeviceCache):
    """Recurrent matrices ``[S, Hv, Dk, Dv]`` float32, one per slot, and a ring ``[W, C]`` of raw convolution rows.

    A pass of T rows writes the matrix after row t to slot ``SLOT + 1 + t``, and the raw row of position p to ring row
    ``p % W``, so a commit only advances counters. A prompt writes only its last matrix, to the next slot, and must be
    committed whole.
    """

    kind = STATES

    def __init__(self, device: CudaDevice, shape: DeltaShape, dtype: torch.dtype) -> None:
        MarkedCache.__init__(self)
        DeviceCache.__init__(self, device, 2**62)  # a state has no length
        self.shape = shape
        self._slot = 0
        window = shape.kernel - 1
        self.ring_rows = 32
        while self.ring_rows < window + MAX_ROWS:
            self.ring_rows *= 2
        self.states = self._taken(FIRST_SLOTS)
        self.ring = torch.zeros(self.ring_rows, shape.channels, dtype=dtype, device=device.place)
        self._convolved: weakref.ref[Convolved] | None = None
        self._tail: Tensor | None = None
        self.write()

    def _taken(self, slots: int) -> Tensor:
        shape = self.shape
        size = (slots, shape.value_heads, shape.key_dim, shape.value_dim)
        nbytes = 4 * slots * shape.value_heads * shape.key_dim * shape.value_dim
        setting = "a smaller depth, fewer open sessions, or a quantised checkpoint"
        with self.device.guarded(f"the recurrent state of one layer ({slots} rows)", nbytes, setting):
            return torch.zeros(size, dtype=torch.float32, device=self.device.place)

    @property
    def bound(self) -> int:
        return 0

    @property
    def slots(self) -> int:
        """S."""
        return self.states.shape[0]

    @property
    def state(self) -> Tensor:
        """The committed matrices ``[Hv, Dk, Dv]``, not a copy."""
        return self.states[self._slot]

    def entries(self) -> list[int]:
        addresses = [self.states.data_ptr(), self.ring.data_ptr()]
        return [self.length, *addresses, self.slots, self._slot, self.ring_rows, 0, 0]

    def make_room(self, end: int, rows: int) -> None:
        self._tail = None
        needed = rows + 1 if rows <= MAX_ROWS else 2  # a prompt writes only its last state
        if needed <= self.slots:
            return
        before = self.states
        self.states = self._taken(MAX_ROWS + 1)
        order = [(self._slot + at) % len(before) for at in range(len(before))]  # the committed one first
        for to, at in zip(self.states, order, strict=False):
            to.copy_(before[at])
        self._slot = 0
        self.write()

    def commit(self, rows: int) -> None:
        if rows and self._pending is None:
            raise StateError("commit without a pass before it")
        if rows and not self.advances_alone() and rows != self._pending:
            raise StateError(f"a prompt of {self._pending} rows must be committed whole, got {rows}")
        waiting = None if self._convolved is None else self._convolved()
        if waiting is not None:  # it may still be read, and depends on the rows before this pass
            waiting.tensor()
        super().commit(rows)

    def convolved(self, waiting: Convolved) -> Convolved:
        """Remember a convolution that is still deferred."""
        self._convolved = weakref.ref(waiting)
        return waiting

    def advance(self, rows: int) -> None:
        if rows:
            self._slot = (self._slot + (rows if self.advances_alone() else 1)) % self.slots
        super().advance(rows)
        if rows and self._tail is not None:
            count = len(self._tail)
            at = torch.arange(self.length - count, self.length, device=self.ring.device) % self.ring_rows
            self.ring[at] = self._tail
        self._tail = None

    def window(self) -> Tensor:
        """Copy the last kc-1 raw rows, oldest first; zeros before the first token."""
        window = torch.zeros(self.shape.kernel - 1, self.shape.channels, dtype=self.ring.dtype, device=self.ring.device)
        for at, position in self._window_positions():
            window[at] = self.ring[position % self.ring_rows]
        return window

    def _window_positions(self) -> list[tuple[int, int]]:
        """Pairs of window row and position, for positions from 0 on."""
        taps = self.shape.kernel - 1
        return [(at, self.length - taps + at) for at in range(taps) if self.length - taps + at >= 0]

    def keep_tail(self, raw: Tensor) -> None:
        """Remember the raw rows ``[T, C]`` at a prompt's end, to be written when it is committed.

        Writing them earlier would overwrite rows that are needed if the prompt is dropped.
        """
        self._tail = raw[-self.ring_rows :]

    def _copied(self) -> tuple[Tensor, Tensor]:
        return self.state.clone(), self.window()

    def _become(self, length: int, state: tuple[Tensor, Tensor] | None) -> None:
        self._pending, self.length = None, length
        if state is None:
            self.state.zero_()
        else:
            self.state.copy_(state[0])
            for at, position in self._window_positions():
                self.ring[position % self.ring_rows] = state[1][at]
        self.write()

    def save(self) -> dict[str, Tensor]:
        return {"state": self.state.clone(), "window": self.window()}

    def load(self, arrays: Mapping[str, Tensor], length: int) -> None:
        self._marks = []
        self._become(length, (arrays["state"], arrays["window"].to(self.ring.device)))

    def nbytes(self) -> int:
        marks: int = sum(state.nbytes + window.nbytes for _, (state, window) in self._marks)
        return self.states.nbytes + self.ring.nbytes + marks


def write_rows(caches: Sequence[DeviceCache], table: Tensor) -> None:
    """Copy the host's mirrors of the caches to the rows ``[caches, 8]`` of a table, in one copy."""
    entries = [entry for cache in caches for entry in cache.entries()]
    caches[0].device.upload(entries, torch.int64, table.view(-1))


# --- stand-ins for caches during capture ------------------------------------------------------------------------------


class DeviceLength(PlaceholderInteger):
    """Placeholder of a length that only the device knows, in a row of the table."""

    __slots__ = ("row",)

    def __init__(self, row: Tensor) -> None:
        self.row = row


class CapturedCache:
    """Stand-in for a cache of any sequence: the common properties, and a row of the static table."""

    def __init__(self, cache: Any, row: Tensor, bound: int) -> None:
        self.row = row
        self.bound = bound  # at least the bound of every sequence that replays
        self.length = DeviceLength(row)
        if isinstance(cache, CudaDeltaCache):
            self.shape = cache.shape
        else:
            self.kv_heads, self.head_dim = cache.kv_heads, cache.head_dim

    def reserve(self, rows: int) -> None:
        """Does nothing: the replay makes room."""

    def convolved(self, waiting: Convolved) -> Convolved:
        """Not remembered, as it is not read after the pass."""
        return waiting
