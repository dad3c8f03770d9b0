"""Logits and hidden states as torch tensors on the model's device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from specdec.backends.arrays import ArrayHidden, HostLogits
from specdec.contract import Hidden
from specdec.errors import ContractError
from torch import Tensor

if TYPE_CHECKING:
    from specdec.contract import Float32


class TorchHidden(ArrayHidden):
    """``[T, H]`` in the model's dtype, on its device."""

    __slots__ = ()

    @staticmethod
    def concatenate(arrays: list[Tensor]) -> Tensor:
        return torch.cat(arrays)

    def rows(self) -> Float32:
        rows: Float32 = self.array.float().cpu().numpy()
        return rows


def own_hidden(hidden: Hidden) -> Tensor:
    """The tensor of a hidden state. Raises: ContractError for one from another engine."""
    if not isinstance(hidden, TorchHidden):
        raise ContractError(f"hidden states of another engine: {type(hidden).__name__}")
    tensor: Tensor = hidden.array
    return tensor


class TorchLogits(HostLogits):
    """``[T, V]`` float32; moves to the host on the first call that needs all of it."""

    __slots__ = ()

    def __init__(self, array: Tensor) -> None:
        super().__init__(array.float())

    def argmax(self) -> list[int]:
        # torch.argmax does not guarantee the lowest index among ties on every device
        ids = torch.arange(self.array.shape[1], device=self.array.device)
        largest = self.array.max(dim=1, keepdim=True).values
        best: list[int] = torch.where(self.array == largest, ids, ids.numel()).min(dim=1).values.tolist()
        wrong = [row for row, token in enumerate(best) if token == ids.numel()]
        if wrong:
            raise ContractError(
                f"the model's logits of row {wrong[0]} are not numbers (NaN)",
                try_='another dtype: target.dtype = "float32"',
            )
        return best

    def rows(self) -> Float32:
        self.array = self.array.cpu()
        rows: Float32 = self.array.numpy()
        return rows
