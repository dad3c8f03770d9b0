"""Per-layer state as MLX arrays. Arrays are values here: a reference to one is a snapshot, and it costs nothing.

The exception are keys and values: writing rows into them happens in place only while nobody else holds the array or a
view of it, and copies all of it otherwise. So the caches hand out views for one pass and keep none.

Whatever a cache holds between passes is computed, or on its way (``arrays``): what MLX has only promised to compute
belongs to the thread that asked for it, and a session may go on in another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx
import torch

from specdec.backends.metal.arrays import from_host, to_host
from specdec.backends.ops import DeltaShape
from specdec.errors import StateError

BUCKET = 256  # keys and values grow by a quarter, in whole buckets of rows: a capacity is not paid for before its use
MARKS = 4  # points that a recurrent state can return to; each holds one state
_KEPT_ROWS = 64  # a window is cut out of so many rows at most without a copy of its own


class MetalKVCache:
    """Keys and values ``[1, nkv, bucket, D]`` in act dtype; rows at and behind ``length`` are stale or provisional."""

    def __init__(self, capacity: int, kv_heads: int, head_dim: int, dtype: mx.Dtype) -> None:
        self.length = 0
        self.capacity = capacity
        self.keys = _rows(kv_heads, min(capacity, BUCKET), head_dim, dtype)
        self.values = _rows(kv_heads, min(capacity, BUCKET), head_dim, dtype)

    def append(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """Write rows ``[T, nkv, D]`` behind the committed ones; all keys and values ``[1, nkv, length + T, D]``."""
        end = _reserved(self.length, k.shape[0], self.capacity)
        self.keys = _written(self.keys, k, self.length, self.capacity)
        self.values = _written(self.values, v, self.length, self.capacity)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def arrays(self) -> list[mx.array]:
        """What a pass or a commit has to compute, besides its result."""
        return [self.keys, self.values]

    def commit(self, rows: int) -> None:
        self.length += rows

    def truncate(self, length: int) -> bool:
        self.length = length
        return True

    def save(self) -> dict[str, torch.Tensor]:
        return {"keys": _saved(self.keys, self.length), "values": _saved(self.values, self.length)}

    def load(self, arrays: Mapping[str, torch.Tensor], length: int) -> None:
        dtype = self.keys.dtype
        self.keys = _written(self.keys, from_host(arrays["keys"], dtype), 0, self.capacity)
        self.values = _written(self.values, from_host(arrays["values"], dtype), 0, self.capacity)
        mx.eval(self.keys, self.values)
        self.length = length

    def nbytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes)


class MetalLatentCache:
    """Rows of latent attention ``[1, 1, bucket, D]``; the values of a row are its first entries."""

    def __init__(self, capacity: int, dims: int, dtype: mx.Dtype) -> None:
        self.length = 0
        self.capacity = capacity
        self.rows = _rows(1, min(capacity, BUCKET), dims, dtype)

    def append(self, rows: mx.array) -> mx.array:
        """Write rows ``[T, D]`` behind the committed ones; all rows ``[1, 1, length + T, D]``."""
        end = _reserved(self.length, rows.shape[0], self.capacity)
        self.rows = _written(self.rows, rows[:, None], self.length, self.capacity)
        return self.rows[:, :, :end]

    def arrays(self) -> list[mx.array]:
        """What a pass or a commit has to compute, besides its result."""
        return [self.rows]

    def commit(self, rows: int) -> None:
        self.length += rows

    def truncate(self, length: int) -> bool:
        self.length = length
        return True

    def save(self) -> dict[str, torch.Tensor]:
        return {"rows": _saved(self.rows, self.length)}

    def load(self, arrays: Mapping[str, torch.Tensor], length: int) -> None:
        self.rows = _written(self.rows, from_host(arrays["rows"], self.rows.dtype), 0, self.capacity)
        mx.eval(self.rows)
        self.length = length

    def nbytes(self) -> int:
        return int(self.rows.nbytes)


class MetalDeltaCache:
    """Recurrent matrix ``[Hv, Dv, Dk]`` float32 (MLX's order, S transposed) and the last kc-1 raw convolution rows.

    A pass leaves ``state`` alone and puts the matrix after all of its T rows into ``after``. Keeping only a < T rows
    computes the first a rows again from ``state``, with what ``replay`` remembers of the pass.
    """

    def __init__(self, shape: DeltaShape, dtype: mx.Dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self._forget()

    def _forget(self) -> None:
        shape = self.shape
        self.length = 0
        self.state = mx.zeros((shape.value_heads, shape.value_dim, shape.key_dim), dtype=mx.float32)
        self.window = mx.zeros((shape.kernel - 1, shape.channels), dtype=self.dtype)  # oldest first
        mx.eval(self.state, self.window)
        self._marks: list[tuple[int, mx.array, mx.array]] = []
        self._drop()

    def _drop(self) -> None:
        self.after: mx.array | None = None
        self.raw: mx.array | None = None  # window and the rows of the last pass, [kc-1+T, C]
        self.replay: Callable[[int], mx.array] | None = None  # replay(a): the matrix after a rows

    def arrays(self) -> list[mx.array]:
        """What a pass or a commit has to compute, besides its result."""
        return [array for array in (self.state, self.window, self.after, self.raw) if array is not None]

    def commit(self, rows: int) -> None:
        if rows:
            if self.raw is None or self.after is None or self.replay is None:
                raise StateError("commit without a pass before it")
            taps = self.shape.kernel - 1
            self.state = self.after if rows == self.raw.shape[0] - taps else self.replay(rows)
            self.window = self.raw[rows : rows + taps]
            if self.raw.shape[0] > _KEPT_ROWS:
                self.window = self.window * 1  # a view would keep all rows of a prompt alive
            self.length += rows
        self._drop()

    def mark(self) -> None:
        """Keep the committed state as a point that ``truncate`` can return to."""
        if not self._marks or self._marks[-1][0] != self.length:
            self._marks = [*self._marks[-MARKS + 1 :], (self.length, self.state, self.window)]

    def marks(self) -> list[int]:
        """Lengths that ``truncate`` can return to: the marks, the present length and 0."""
        return [0, *(length for length, _, _ in self._marks), self.length]

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
        self.length, self.state, self.window = self._marks[-1]
        return True

    def save(self) -> dict[str, torch.Tensor]:
        return {"state": to_host(self.state), "window": to_host(self.window)}

    def load(self, arrays: Mapping[str, torch.Tensor], length: int) -> None:
        self._forget()
        self.state = from_host(arrays["state"], mx.float32)
        self.window = from_host(arrays["window"], self.dtype)
        self.length = length

    def nbytes(self) -> int:
        held = [*self.arrays(), *(array for mark in self._marks for array in mark[1:])]
        return sum({id(array): int(array.nbytes) for array in held}.values())


def _rows(heads: int, rows: int, dims: int, dtype: mx.Dtype) -> mx.array:
    made = mx.zeros((1, heads, rows, dims), dtype=dtype)
    mx.eval(made)
    return made


def _reserved(length: int, rows: int, capacity: int) -> int:
    """Where a pass of ``rows`` rows ends. Raises: StateError when the cache is too small for it."""
    if length + rows > capacity:
        raise StateError(f"the cache holds {capacity} tokens, {length + rows} are needed")
    return length + rows


def _written(held: mx.array, rows: mx.array, at: int, capacity: int) -> mx.array:
    """``held [1, n, bucket, D]`` with ``rows [T, n, D]`` at ``at``, in a larger bucket where they need one."""
    end = at + rows.shape[0]
    size = held.shape[2]
    if end > size:
        wanted = max(end, size + size // 4)
        more = min(capacity, -(-wanted // BUCKET) * BUCKET) - size
        held = mx.concatenate([held, _rows(held.shape[1], more, held.shape[3], held.dtype)], axis=2)
    return mx.slice_update(held, rows.transpose(1, 0, 2)[None], mx.array([at]), axes=[2])


def _saved(held: mx.array, length: int) -> torch.Tensor:
    """The first ``length`` rows on the host, ``[length, n, D]``."""
    return to_host(held[0, :, :length].transpose(1, 0, 2))
