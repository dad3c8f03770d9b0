"""Logits and hidden states as torch tensors on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from specdec.backends.arrays import ArrayHidden, HostLogits

if TYPE_CHECKING:
    from specdec.contract import Float32

CPU = torch.device("cpu")  # named wherever memory is allocated: a program may have set another default device


class CpuHidden(ArrayHidden):
    """``[T, H]`` in act dtype."""

    __slots__ = ()

    @staticmethod
    def concatenate(arrays: list[Any]) -> Any:
        return torch.cat(arrays)

    def rows(self) -> Float32:
        rows: Float32 = self.array.float().numpy()
        return rows


class CpuLogits(HostLogits):
    """``[T, V]`` float32, a tensor."""

    __slots__ = ()

    def rows(self) -> Float32:
        rows: Float32 = self.array.numpy()
        return rows
