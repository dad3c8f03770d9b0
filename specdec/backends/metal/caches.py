"""Per-layer state as MLX arrays. Arrays are values here: a reference to one is a snapshot, and it costs nothing.

The exception are keys and values: writing rows into them happens in place only while nobody else holds the array or a
view of it, and copies all of it otherwise. So the caches hand out whole buckets for one pass, and nobody keeps a view.

Whatever a cache holds between passes is computed, or on its way (``arrays``): what MLX has only promised to compute
belongs to the thread that asked for it, and a session may go on in another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx
import torch

from specdec.backends.caches import Cache
from specdec.backends.metal.arrays import from_host, to_host
from specdec.backends.metal.device import DeviceLength, number, rows_from
from specdec.backends.metal.kernel_sets import Past
from specdec.backends.ops import DeltaShape
from specdec.errors import StateError

BUCKET = 256  # keys and values grow by a quarter, in whole buckets of rows: a capacity is not paid for before its use
MARKS = 4  # points that a recurrent state can return to; each holds one state


class RowCache(Cache):
    """What caches of one row per token share. Rows at and behind ``length`` are stale or provisional.

    Attributes:
        length: committed rows.
        capacity: rows that it may hold.
        buckets: arrays ``[1, n, bucket, D]`` in act dtype, all of the same size.
    """

    names: tuple[str, ...]  # of the buckets, in ``save``

    def __init__(self, capacity: int, buckets: list[mx.array]) -> None:
        self.length = 0
        self.capacity = capacity
        self.buckets = buckets

    def reserve(self, end: int) -> None:
        """Grow the buckets to ``end`` rows. Raises: StateError above the capacity."""
        if end > self.capacity:
            raise StateError(f"the cache holds {self.capacity} tokens, {end} are needed")
        size = self.buckets[0].shape[2]
        if end > size:
            more = min(self.capacity, -(-max(end, size + size // 4) // BUCKET) * BUCKET) - size
            added = (_rows(held.shape[1], more, held.shape[3], held.dtype) for held in self.buckets)
            self.buckets = [mx.concatenate(pair, axis=2) for pair in zip(self.buckets, added, strict=True)]

    def write(self, rows: tuple[mx.array, ...], at: mx.array) -> None:
        """Put rows ``[T, n, D]`` at the place ``at``, int32 ``[1]``; the buckets are large enough."""
        for i, new in enumerate(rows):
            self.buckets[i] = mx.slice_update(self.buckets[i], new.transpose(1, 0, 2)[None], at, axes=[2])

    def _append(self, *rows: mx.array) -> None:
        self.reserve(self.length + rows[0].shape[0])
        self.write(rows, number(self.length))

    def arrays(self) -> list[mx.array]:
        """What a pass has to compute, besides its result."""
        return self.buckets

    def commit(self, rows: int) -> None:
        self.length += rows

    def truncate(self, length: int) -> bool:
        self.length = length
        return True

    def save(self) -> dict[str, torch.Tensor]:
        return {
            name: to_host(held[0, :, : self.length].transpose(1, 0, 2))
            for name, held in zip(self.names, self.buckets, strict=True)
        }

    def load(self, arrays: Mapping[str, torch.Tensor], length: int) -> None:
        self.length = 0
        self._append(*(from_host(arrays[name], self.buckets[0].dtype) for name in self.names))
        mx.eval(self.buckets)
        self.length = length

    def nbytes(self) -> int:
        return sum(int(held.nbytes) for held in self.buckets)


class MetalKVCache(RowCache):
    """Keys and values of ``nkv`` heads."""

    names = ("keys", "values")

    def __init__(self, capacity: int, kv_heads: int, head_dim: int, dtype: mx.Dtype) -> None:
        size = min(capacity, BUCKET)
        super().__init__(capacity, [_rows(kv_heads, size, head_dim, dtype) for _ in self.names])

    @property
    def keys(self) -> mx.array:
        """``[1, nkv, bucket, D]``."""
        return self.buckets[0]

    @property
    def values(self) -> mx.array:
        """``[1, nkv, bucket, D]``."""
        return self.buckets[1]

    def append(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """Write rows ``[T, nkv, D]`` behind the committed ones; the buckets, not to be kept."""
        self._append(k, v)
        return self.keys, self.values


class MetalLatentCache(RowCache):
    """Rows of latent attention, as one head; the values of a row are its first entries."""

    names = ("rows",)

    def __init__(self, capacity: int, dims: int, dtype: mx.Dtype) -> None:
        super().__init__(capacity, [_rows(1, min(capacity, BUCKET), dims, dtype)])

    @property
    def rows(self) -> mx.array:
        """``[1, 1, bucket, D]``."""
        return self.buckets[0]

    def append(self, rows: mx.array) -> mx.array:
        """Write rows ``[T, D]`` behind the committed ones; the bucket, not to be kept."""
        self._append(rows[:, None])
        return self.rows

    def load(self, arrays: Mapping[str, torch.Tensor], length: int) -> None:
        super().load({"rows": arrays["rows"]}, length)


class Placed:
    """Stands for a cache of rows while a pass runs whose length only the device knows. Room was made before."""

    def __init__(self, cache: RowCache, length: DeviceLength) -> None:
        self._cache = cache
        self.length = length

    def append(self, *rows: mx.array) -> Any:
        """As the cache's own."""
        shaped = tuple(new if new.ndim == 3 else new[:, None] for new in rows)
        self._cache.write(shaped, self.length.array)
        return tuple(self._cache.buckets) if len(rows) > 1 else self._cache.buckets[0]


@attrs.frozen(kw_only=True, eq=False)
class DeltaState:
    """The state of a delta layer behind some block, without being computed: see ``kernels.delta``.

    Attributes:
        base: the matrix before the block, ``[Hv, Dv, Dk]`` float32 (MLX's order, S transposed).
        past: the block's rows; None where the matrix stands alone.
        raw: raw convolution rows ``[n, C]``, the kc - 1 before the block and the block's.
        kept: how many rows of the block stay, int32 ``[1]``; 0 where there are none.
    """

    base: mx.array
    past: Past | None
    raw: mx.array
    kept: mx.array

    def matrix(self) -> mx.array:
        """The matrix behind the kept rows. Lazy."""
        return self.base if self.past is None else self.past.fold(self.base, self.kept)

    def window(self, taps: int) -> mx.array:
        """The last ``taps`` raw rows ``[taps, C]``, oldest first. Lazy."""
        return rows_from(self.raw, self.kept, taps)

    def arrays(self) -> list[mx.array]:
        return [self.base, self.raw, self.kept, *([] if self.past is None else self.past.arrays())]


class MetalDeltaCache(Cache):
    """Recurrent matrix and convolution window, committed lazily: the next launch folds the rows that stay.

    A pass leaves ``state`` alone and puts what it would become, all of its rows waiting, into ``following``.
    """

    def __init__(self, shape: DeltaShape, dtype: mx.Dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self._forget()

    def _forget(self) -> None:
        shape = self.shape
        matrix = mx.zeros((shape.value_heads, shape.value_dim, shape.key_dim), dtype=mx.float32)
        window = mx.zeros((shape.kernel - 1, shape.channels), dtype=self.dtype)
        mx.eval(matrix, window)
        self._become(0, matrix, window)

    def _become(self, length: int, matrix: mx.array, window: mx.array) -> None:
        self.length = length
        self.state = DeltaState(base=matrix, past=None, raw=window, kept=number(0))
        self._marks: list[tuple[int, DeltaState]] = []
        self._drop()

    def _drop(self) -> None:
        self.following: DeltaState | None = None
        self._rows = 0  # of the last pass
        self._raw: mx.array | None = None

    # --- a pass ----------------------------------------------------------------------------------------------------

    def convolve(self, x: mx.array) -> mx.array:
        """Begin a pass over the raw rows ``x [T, C]``: they behind the window, ``[kc-1+T, C]``."""
        self._raw = mx.concatenate([self.state.window(self.shape.kernel - 1), x])
        return self._raw

    def follow(self, base: mx.array, past: Past) -> None:
        """End a pass: what ``kernel_sets.KernelSet.delta`` gave."""
        assert self._raw is not None
        self._rows = self._raw.shape[0] - (self.shape.kernel - 1)
        self.following = DeltaState(base=base, past=past, raw=self._raw, kept=number(0))

    def follow_whole(self, matrix: mx.array) -> None:
        """End a prompt's pass, which is committed whole or not at all: the matrix after it."""
        assert self._raw is not None
        self._rows = self._raw.shape[0] - (self.shape.kernel - 1)
        window = self._raw[self._rows :] * 1  # a view would keep all rows of a prompt alive
        self.following = DeltaState(base=matrix, past=None, raw=window, kept=number(0))

    def arrays(self) -> list[mx.array]:
        """What a pass has to compute, besides its result."""
        return [] if self.following is None else self.following.arrays()

    def commit(self, rows: int) -> None:
        if rows:
            following = self.following
            if following is None:
                raise StateError("commit without a pass before it")
            if following.past is None and rows != self._rows:
                raise StateError(f"a prompt of {self._rows} rows is committed whole, asked for {rows}")
            self.settle(number(rows if following.past is not None else 0))
            self.length += rows
        self._drop()

    def settle(self, kept: mx.array) -> None:
        """Commit the first ``kept`` rows, int32 ``[1]``; whoever knows how many that are counts ``length``."""
        assert self.following is not None
        self.state = attrs.evolve(self.following, kept=kept)
        self._drop()

    # --- between passes --------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """Keep the committed state as a point that ``truncate`` can return to."""
        if not self._marks or self._marks[-1][0] != self.length:
            self._marks = [*self._marks[-MARKS + 1 :], (self.length, self.state)]

    def marks(self) -> list[int]:
        """Lengths that ``truncate`` can return to: the marks, the present length and 0."""
        return [0, *(length for length, _ in self._marks), self.length]

    def truncate(self, length: int) -> bool:
        self._drop()
        if length == self.length:
            return True
        if length == 0:
            self._forget()
            return True
        self._marks = [mark for mark in self._marks if mark[0] <= length]
        if not self._marks or self._marks[-1][0] != length:
            return False
        self.length, self.state = self._marks[-1]
        return True

    def save(self) -> dict[str, torch.Tensor]:
        window = self.state.window(self.shape.kernel - 1)
        return {"state": to_host(self.state.matrix()), "window": to_host(window)}

    def load(self, arrays: Mapping[str, torch.Tensor], length: int) -> None:
        self._become(length, from_host(arrays["state"], mx.float32), from_host(arrays["window"], self.dtype))

    def nbytes(self) -> int:
        states = [self.state, *(state for _, state in self._marks)]
        held = [*self.arrays(), *(array for state in states for array in state.arrays())]
        return sum({id(array): int(array.nbytes) for array in held}.values())


def _rows(heads: int, rows: int, dims: int, dtype: mx.Dtype) -> mx.array:
    made = mx.zeros((1, heads, rows, dims), dtype=dtype)
    mx.eval(made)
    return made
