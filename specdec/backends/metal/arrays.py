"""Logits, hidden states and gathered head rows as MLX arrays, and the way between torch and MLX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import torch

from specdec.backends.arrays import ArrayHidden, HostLogits, not_finite
from specdec.backends.metal.quantised import Matrix, joined, take

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specdec.contract import Float32

_TORCH = {mx.bfloat16: torch.bfloat16, mx.float16: torch.float16, mx.float32: torch.float32}


def from_host(tensor: Any, dtype: mx.Dtype | None = None) -> mx.array:
    """A torch tensor on the host (or an MLX array) in ``dtype``: one copy, in memory that the device reads."""
    if isinstance(tensor, mx.array):
        return tensor if dtype is None else tensor.astype(dtype)
    host = tensor.detach().to(None if dtype is None else _TORCH[dtype]).contiguous()
    if host.dtype is torch.bfloat16:  # numpy has no bfloat16; the bits travel as integers
        made = mx.array(host.view(torch.uint16).numpy()).view(mx.bfloat16)
    else:
        made = mx.array(host.numpy())
    mx.eval(made)
    return made


def to_host(array: mx.array) -> torch.Tensor:
    """A copy as a torch tensor of the same dtype on the host."""
    array = mx.contiguous(array)
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.view(mx.uint16))).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


class MetalHidden(ArrayHidden):
    """Some rows of an array ``[T, H]`` in act dtype, cut out when they are used.

    Whatever is kept is computed or on its way: MLX leaves what it has only promised to the thread that asked for it,
    and a session may go on in another one.
    """

    __slots__ = ("_array", "_rows")

    @staticmethod
    def concatenate(arrays: list[Any]) -> Any:
        return _started(mx.concatenate(arrays))

    def __init__(self, array: mx.array, rows: range | None = None) -> None:
        self._array = array
        self._rows = range(array.shape[0]) if rows is None else rows

    @property
    def array(self) -> mx.array:
        """The rows ``[T, H]``."""
        if len(self._rows) == self._array.shape[0]:
            return self._array
        return _started(self._array[self._rows.start : self._rows.stop])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: slice) -> MetalHidden:
        return MetalHidden(self._array, self._rows[rows])

    def rows(self) -> Float32:
        return np.array(self.array.astype(mx.float32))


def _started(array: mx.array) -> mx.array:
    mx.async_eval(array)
    return array


class MetalLogits(HostLogits):
    """``[T, V]`` float32, computed when they are read."""

    __slots__ = ()

    def argmax(self) -> list[int]:
        best = self.array.max(axis=-1, keepdims=True)
        # the lowest of equal ids by what the operations mean, whatever order the device reduces in
        ids = mx.arange(self.array.shape[1])
        tokens = mx.where(self.array == best, ids, self.array.shape[1]).min(axis=-1)
        broken = mx.isnan(self.array).any(axis=-1) | ~mx.isfinite(best[:, 0])
        mx.eval(tokens, broken)
        for row, wrong in enumerate(broken.tolist()):
            if wrong:
                raise not_finite(row)
        found: list[int] = tokens.tolist()
        return found

    def gather(self, tokens: Sequence[int]) -> list[float]:
        at = mx.array(list(tokens), mx.int32)[:, None]
        values: list[float] = mx.take_along_axis(self.array[: len(tokens)], at, axis=1)[:, 0].tolist()
        return values

    def rows(self) -> Float32:
        rows: Float32 = np.asarray(self.array)  # the device's own memory: nothing is copied
        return rows


class MetalHeadRows:
    """Gathered rows of a head: those shared with other heads, then those that were added.

    Attributes:
        parts: weights ``[n, H]``, one or two, packed where the head is.
        ids: token id of every row ``[n]`` int32, in the order of the parts.
        part_ids: the same part by part, on the device.
        vocab_size: V.
    """

    __slots__ = ("ids", "part_ids", "parts", "tokens", "vocab_size")

    def __init__(self, parts: tuple[Matrix, ...], ids: NDArray[np.int32], vocab_size: int) -> None:
        self.parts = parts
        self.ids = ids
        ends = np.cumsum([part.shape[0] for part in parts])
        self.part_ids = tuple(mx.array(some) for some in np.split(ids, ends[:-1]))
        self.vocab_size = vocab_size
        self.tokens: tuple[int, ...] = tuple(np.sort(ids).tolist())

    @classmethod
    def of(cls, weight: Matrix, tokens: Sequence[int]) -> MetalHeadRows:
        """The rows of ``weight [V, H]`` for these ids."""
        ids = np.unique(np.array(list(tokens), dtype=np.int32))
        return cls((joined([take(weight, mx.array(ids))]),), ids, int(weight.shape[0]))

    def extended(self, weight: Matrix, tokens: Sequence[int]) -> MetalHeadRows:
        """These rows and those for ids that are not here; the first part is shared, not copied."""
        missing = np.setdiff1d(np.array(list(tokens), dtype=np.int32), self.ids)
        if not len(missing):
            return self
        added = joined([*self.parts[1:], take(weight, mx.array(missing))])
        return MetalHeadRows((self.parts[0], added), np.concatenate([self.ids, missing]), self.vocab_size)

    def spread(self, values: mx.array) -> MetalLogits:
        """Logits over the whole vocabulary from ``values [T, n]`` of these rows, float32; -inf where there is none."""
        full = mx.full((values.shape[0], self.vocab_size), -mx.inf, dtype=mx.float32)
        full[:, mx.array(self.ids)] = values
        return MetalLogits(full)
