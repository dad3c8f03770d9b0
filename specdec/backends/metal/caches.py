"""Caches as MLX arrays. MLX arrays are immutable values, so a reference to one is a free snapshot.

Keys and values are an exception. MLX writes rows in place only if there is no other reference to the array or to a view
of it; otherwise it copies the whole array. So the caches return whole buckets for one pass, and no view is kept.

Between passes, the contents of a cache are always computed or being computed (``arrays``): an array that MLX has not
started to compute belongs to the thread that made it, and a session may continue in another one.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import mlx.core as mx
import torch

from specdec.backends.caches import Cache, MarkedCache
from specdec.backends.metal.arrays import from_host, to_host
from specdec.backends.metal.device import number
from specdec.backends.metal.kernel_sets import KernelSet, Past
from specdec.backends.ops import DeltaShape
from specdec.errors import StateError

BUCKET = 256  # keys and values grow by a quarter, in multiples of this; the full capacity is not allocated up front


class MetalRowCache(Cache):
    """A cache with one row per token: keys and values, or rows of latent attention, which are stored as one head.

    Rows from ``length`` on are stale or provisional.

    Args:
        capacity: the maximum number of rows.
        kinds: heads and their size, by the name in ``save``.
        dtype: act.

    Attributes:
        length: committed rows.
        buckets: arrays ``[1, heads, bucket, D]``, all of the same bucket.
    """

    def __init__(self, capacity: int, kinds: Mapping[str, tuple[int, int]], dtype: mx.Dtype) -> None:
        self.length = 0
        self.capacity = capacity
        self.names = tuple(kinds)
        self.buckets = [_rows(heads, min(capacity, BUCKET), dims, dtype) for heads, dims in kinds.values()]

    def reserve(self, end: int) -> None:
        """Grow the buckets to ``end`` rows. Raises: StateError above the capacity."""
        if end > self.capacity:
            raise StateError(f"the cache holds {self.capacity} tokens, {end} are needed")
        size = self.buckets[0].shape[2]
        if end > size:
            more = min(self.capacity, -(-max(end, size + size // 4) // BUCKET) * BUCKET) - size
            added = (_rows(held.shape[1], more, held.shape[3], held.dtype) for held in self.buckets)
            self.buckets = [mx.concatenate(pair, axis=2) for pair in zip(self.buckets, added, strict=True)]

    def append(self, *rows: mx.array) -> list[mx.array]:
        """Write rows ``[T, heads, D]`` of each kind after the committed ones. Returns the buckets, not to be kept."""
        self.reserve(self.length + rows[0].shape[0])
        at = number(self.length)
        for i, new in enumerate(rows):
            self.buckets[i] = mx.slice_update(self.buckets[i], new.transpose(1, 0, 2)[None], at, axes=[2])
        return self.buckets

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
        self.append(*(from_host(arrays[name], self.buckets[0].dtype) for name in self.names))
        mx.eval(self.buckets)
        self.length = length

    def nbytes(self) -> int:
        return sum(int(held.nbytes) for held in self.buckets)


@attrs.frozen(kw_only=True, eq=False)
class DeltaState:
    """The lazy state of a delta layer after a block of rows (see ``kernels.delta``).

    Attributes:
        base: the matrix before the block, ``[Hv, Dv, Dk]`` float32 (MLX's order, S transposed).
        past: the block's rows; None if there is no block.
        raw: raw convolution rows ``[n, C]``: the kc - 1 before the block, then the block's.
        kept: the number of committed rows of the block; 0 without a block.
    """

    base: mx.array
    past: Past | None = None
    raw: mx.array
    kept: int = 0

    def window(self, taps: int) -> mx.array:
        """The last ``taps`` raw rows ``[taps, C]``, oldest first. Lazy."""
        return self.raw[self.kept : self.kept + taps]

    def arrays(self) -> list[mx.array]:
        return [self.base, self.raw, *(self.past or ())]


class MetalDeltaCache(MarkedCache):
    """Recurrent matrix and convolution window, committed lazily: the next launch folds in the kept rows.

    A pass does not change ``state``; it puts the next state, with all of its rows unfolded, into ``following``.
    """

    def __init__(self, shape: DeltaShape, dtype: mx.Dtype, kernels: KernelSet) -> None:
        super().__init__()
        self.shape = shape
        self.dtype = dtype
        self.kernels = kernels  # of passes that are not prompts
        self._become(0, None)

    def _copied(self) -> DeltaState:
        return self.state  # immutable

    def _become(self, length: int, state: DeltaState | None) -> None:
        if state is None:
            shape = self.shape
            matrix = mx.zeros((shape.value_heads, shape.value_dim, shape.key_dim), dtype=mx.float32)
            window = mx.zeros((shape.kernel - 1, shape.channels), dtype=self.dtype)
            mx.eval(matrix, window)
            state = DeltaState(base=matrix, raw=window)
        self.length, self.state = length, state
        self._drop()

    def _drop(self) -> None:
        self.following: DeltaState | None = None
        self._rows = 0  # the last pass's
        self._raw: mx.array | None = None

    def matrix(self) -> mx.array:
        """The matrix after the kept rows ``[Hv, Dv, Dk]`` float32. Lazy."""
        state = self.state
        return state.base if state.past is None else self.kernels.fold(state.base, state.past, state.kept)

    # --- a pass ----------------------------------------------------------------------------------------------------

    def convolve(self, x: mx.array) -> mx.array:
        """Begin a pass over the raw rows ``x [T, C]``. Returns the window followed by them, ``[kc-1+T, C]``."""
        self._raw = mx.concatenate([self.state.window(self.shape.kernel - 1), x])
        return self._raw

    def follow(self, base: mx.array, past: Past) -> None:
        """End a pass with the result of ``kernel_sets.KernelSet.delta``."""
        assert self._raw is not None
        self._rows = self._raw.shape[0] - (self.shape.kernel - 1)
        self.following = DeltaState(base=base, past=past, raw=self._raw)

    def follow_whole(self, matrix: mx.array) -> None:
        """End a prompt's pass, which is committed whole or not at all, with the matrix after it."""
        assert self._raw is not None
        self._rows = self._raw.shape[0] - (self.shape.kernel - 1)
        window = self._raw[self._rows :] * 1  # a copy: a view would keep all rows of a prompt alive
        self.following = DeltaState(base=matrix, raw=window)

    def arrays(self) -> list[mx.array]:
        """What a pass has to compute, besides its result."""
        return [] if self.following is None else self.following.arrays()

    def commit(self, rows: int) -> None:
        if rows:
            following = self.following
            if following is None:
                raise StateError("commit without a pass before it")
            if following.past is None and rows != self._rows:
                raise StateError(f"a prompt of {self._rows} rows must be committed whole, got {rows}")
            self.state = attrs.evolve(following, kept=rows if following.past is not None else 0)
            self.length += rows
        self._drop()

    # --- between passes --------------------------------------------------------------------------------------------

    def save(self) -> dict[str, torch.Tensor]:
        window = self.state.window(self.shape.kernel - 1)
        return {"state": to_host(self.matrix()), "window": to_host(window)}

    def load(self, arrays: Mapping[str, torch.Tensor], length: int) -> None:
        self._marks = []
        matrix, window = from_host(arrays["state"], mx.float32), from_host(arrays["window"], self.dtype)
        self._become(length, DeltaState(base=matrix, raw=window))

    def nbytes(self) -> int:
        states = [self.state, *(state for _, state in self._marks)]
        held = [*self.arrays(), *(array for state in states for array in state.arrays())]
        return sum({id(array): int(array.nbytes) for array in held}.values())


def _rows(heads: int, rows: int, dims: int, dtype: mx.Dtype) -> mx.array:
    made = mx.zeros((1, heads, rows, dims), dtype=dtype)
    mx.eval(made)
    return made
