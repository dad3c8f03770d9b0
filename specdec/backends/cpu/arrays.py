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
        first, middle = arrays[0], len(arrays) // 2
        if sum(array.numel() for array in arrays) < SERIAL:
            return torch.cat(arrays)
        if middle > 1:
            arrays = [CpuHidden.concatenate(arrays[:middle]), CpuHidden.concatenate(arrays[middle:])]
        joined = torch.empty(sum(map(len, arrays)), *first.shape[1:], dtype=first.dtype, device=CPU)
        np.concatenate([_bytes(array) for array in arrays], out=_bytes(joined))
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


def _bytes(array: torch.Tensor) -> Any:
    """The same memory for numpy, which has no bfloat16."""
    return array.contiguous().view(torch.uint8).numpy()
