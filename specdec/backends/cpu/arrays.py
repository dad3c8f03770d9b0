"""Logits and hidden states as torch tensors on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specdec.backends.arrays import ArrayHidden, HostLogits

if TYPE_CHECKING:
    from specdec.contract import Float32

CPU = torch.device("cpu")  # named wherever memory is allocated: a program may have set another default device
SERIAL = 32768  # elements from which torch copies with threads of its own, which then spin beside the kernels'


class CpuHidden(ArrayHidden):
    """``[T, H]`` in act dtype."""

    __slots__ = ()

    @staticmethod
    def concatenate(arrays: list[Any]) -> Any:
        rows = [array.shape[0] for array in arrays]  # len() of a tensor is slow
        first, whole = arrays[0], sum(rows)
        if whole * first[0].numel() < SERIAL:
            return torch.cat(arrays)
        joined = torch.empty(whole, *first.shape[1:], dtype=first.dtype, device=CPU)
        write_serially(arrays, rows, joined)
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


def write_serially(arrays: list[Any], rows: list[int], to: torch.Tensor) -> None:
    """Write arrays of so many rows one after another to ``to``, without threads of torch's own."""
    if to.numel() < SERIAL:
        torch.cat(arrays, out=to)
    elif len(arrays) == 1:
        np.copyto(_bytes(to), _bytes(arrays[0]))
    else:
        middle = len(arrays) // 2
        before = sum(rows[:middle])
        write_serially(arrays[:middle], rows[:middle], to[:before])
        write_serially(arrays[middle:], rows[middle:], to[before:])


def _bytes(array: torch.Tensor) -> Any:
    """The same memory for numpy, which has no bfloat16."""
    return array.view(torch.uint8).numpy()
