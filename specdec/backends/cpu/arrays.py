"""Logits and hidden states as torch tensors on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specdec.backends.arrays import ArrayHidden, HostLogits

if TYPE_CHECKING:
    from specdec.contract import Float32

CPU = torch.device("cpu")  # named wherever memory is allocated: a program may have set another default device
SERIAL = 32768  # elements from which torch.cat starts threads of its own beside the kernels'


class CpuHidden(ArrayHidden):
    """``[T, H]`` in act dtype."""

    __slots__ = ()

    @staticmethod
    def concatenate(arrays: list[Any]) -> Any:
        if sum(array.numel() for array in arrays) < SERIAL:
            return torch.cat(arrays)
        first = arrays[0]
        joined = torch.empty(sum(map(len, arrays)), *first.shape[1:], dtype=first.dtype, device=CPU)
        _copy(arrays, joined)
        return joined

    def rows(self) -> Float32:
        rows: Float32 = self.array.float().numpy()
        return rows


class CpuLogits(HostLogits):
    """``[T, V]`` float32, a tensor."""

    __slots__ = ()

    def rows(self) -> Float32:
        rows: Float32 = self.array.numpy()
        return rows


def _copy(arrays: list[Any], to: torch.Tensor) -> None:
    """Write arrays one after another to ``to``, without threads of torch's own."""
    if to.numel() < SERIAL:
        torch.cat(arrays, out=to)
    elif len(arrays) == 1:
        np.copyto(_bytes(to), _bytes(arrays[0]))
    else:
        middle = len(arrays) // 2
        rows = sum(map(len, arrays[:middle]))
        _copy(arrays[:middle], to[:rows])
        _copy(arrays[middle:], to[rows:])


def _bytes(array: torch.Tensor) -> Any:
    """The same memory for numpy, which has no bfloat16."""
    return array.contiguous().view(torch.uint8).numpy()
