"""Logits, hidden states and gathered head rows as MLX arrays, and conversion between torch and MLX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import torch

from specdec.backends.arrays import ArrayHidden, HostLogits, read_tokens
from specdec.backends.metal.quantised import Matrix, joined, take

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specdec.contract import Float32

_TORCH = {mx.bfloat16: torch.bfloat16, mx.float16: torch.float16, mx.float32: torch.float32}


def from_host(tensor: Any, dtype: mx.Dtype | None = None) -> mx.array:
    """Copy a torch tensor on the host (or an MLX array) once, to an MLX array in ``dtype``."""
    if isinstance(tensor, mx.array):
        return tensor if dtype is None else tensor.astype(dtype)
    host = tensor.detach().to(None if dtype is None else _TORCH[dtype]).contiguous()
    if host.dtype is torch.bfloat16:  # numpy has no bfloat16: pass the bits as integers
        made = mx.array(host.view(torch.uint16).numpy()).view(mx.bfloat16)
    else:
        made = mx.array(host.numpy())
    mx.eval(made)
    return made


def to_host(array: mx.array) -> torch.Tensor:
    """Copy an array to a torch tensor of the same dtype on the host."""
    array = mx.contiguous(array)
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.view(mx.uint16))).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


class MetalHidden(ArrayHidden):
    """Rows of an array ``[T, H]`` in act dtype.

    It is always computed or being computed: an array that MLX has not started to compute belongs to the thread that
    made it, and a session may continue in another one.
    """

    __slots__ = ()

    @staticmethod
    def concatenate(arrays: list[Any]) -> Any:
        return mx.concatenate(arrays)

    def __init__(self, array: mx.array) -> None:
        mx.async_eval(array)
        super().__init__(array)

    def rows(self) -> Float32:
        return np.array(self.array.astype(mx.float32))


class MetalLogits(HostLogits):
    """Logits ``[T, V]`` float32, computed when read."""

    __slots__ = ()

    def argmax(self) -> list[int]:
        return read_tokens(lowest_best(self.array, mx.arange(self.array.shape[1])))

    def rows(self) -> Float32:
        rows: Float32 = np.asarray(self.array)  # shared memory: nothing is copied
        return rows


def lowest_best(logits: mx.array, ids: mx.array) -> mx.array:
    """The id of the largest of ``logits [T, n]``, -1 where some logit is not finite: int32 ``[T]``. Lazy.

    Ties go to the lowest id by definition of the operations, for any order of reduction on the device.
    """
    best = logits.max(axis=-1, keepdims=True)
    winners = mx.where(logits == best, ids, 2**31 - 1).min(axis=-1)
    broken = mx.isnan(logits).any(axis=-1) | ~mx.isfinite(best[:, 0])
    return mx.where(broken, -1, winners).astype(mx.int32)


class MetalHeadRows:
    """Gathered rows of a head: rows shared with other heads, then added ones.

    Attributes:
        parts: one or two weights ``[n, H]``, packed if the head is.
        ids: token id of every row ``[n]`` int32, in the order of the parts.
        device_ids: the same ids on the device.
        vocab_size: V.
    """

    __slots__ = ("device_ids", "ids", "parts", "tokens", "vocab_size")

    def __init__(self, parts: tuple[Matrix, ...], ids: NDArray[np.int32], vocab_size: int) -> None:
        self.parts = parts
        self.ids = ids
        self.device_ids = mx.array(ids)
        self.vocab_size = vocab_size
        self.tokens: tuple[int, ...] = tuple(np.sort(ids).tolist())

    @classmethod
    def of(cls, weight: Matrix, tokens: Sequence[int]) -> MetalHeadRows:
        """Gather the rows of ``weight [V, H]`` for these ids."""
        ids = np.unique(np.array(list(tokens), dtype=np.int32))
        return cls((joined([take(weight, mx.array(ids))]),), ids, int(weight.shape[0]))

    def extended(self, weight: Matrix, tokens: Sequence[int]) -> MetalHeadRows:
        """Return these rows plus those for missing ids; the first part is shared, not copied."""
        missing = np.setdiff1d(np.array(list(tokens), dtype=np.int32), self.ids)
        if not len(missing):
            return self
        added = joined([*self.parts[1:], take(weight, mx.array(missing))])
        return MetalHeadRows((self.parts[0], added), np.concatenate([self.ids, missing]), self.vocab_size)

    def spread(self, values: mx.array) -> MetalLogits:
        """Expand ``values [T, n]`` of these rows, float32, to logits over the vocabulary, with -inf elsewhere."""
        full = mx.full((values.shape[0], self.vocab_size), -mx.inf, dtype=mx.float32)
        full[:, self.device_ids] = values
        return MetalLogits(full)
