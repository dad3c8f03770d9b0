"""Logits and hidden states as torch tensors on the model's device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from specdec.contract import Hidden, Logits
from specdec.errors import ContractError
from torch import Tensor

if TYPE_CHECKING:
    from specdec.contract import Float32


class TorchHidden(Hidden):
    """``[T, H]`` in the model's dtype, on its device."""

    __slots__ = ("array",)

    def __init__(self, array: Tensor) -> None:
        self.array = array

    def __len__(self) -> int:
        return self.array.shape[0]

    def __getitem__(self, rows: slice) -> TorchHidden:
        return TorchHidden(self.array[rows])

    def join(self, others: Sequence[Hidden]) -> TorchHidden:
        return TorchHidden(torch.cat([self.array, *(own_hidden(other) for other in others)]))

    def rows(self) -> Float32:
        rows: Float32 = self.array.float().cpu().numpy()
        return rows


def own_hidden(hidden: Hidden) -> Tensor:
    """The tensor of a hidden state. Raises: ContractError for one from another engine."""
    if not isinstance(hidden, TorchHidden):
        raise ContractError(f"hidden states of another engine: {type(hidden).__name__}")
    return hidden.array


class TorchLogits(Logits):
    """``[T, V]`` float32; copied to the host on the first call that needs all of it."""

    __slots__ = ("_array", "_rows")

    def __init__(self, array: Tensor) -> None:
        self._array = array.float()
        self._rows: Float32 | None = None

    def __len__(self) -> int:
        return self._array.shape[0]

    def argmax(self) -> list[int]:
        # torch.argmax does not guarantee the lowest index among ties on every device
        ids = torch.arange(self._array.shape[1], device=self._array.device)
        largest = self._array.max(dim=1, keepdim=True).values
        best: list[int] = torch.where(self._array == largest, ids, ids.numel()).min(dim=1).values.tolist()
        wrong = [row for row, token in enumerate(best) if token == ids.numel()]
        if wrong:
            raise ContractError(
                f"the model's logits of row {wrong[0]} are not numbers (NaN)",
                try_='another dtype: target.dtype = "float32"',
            )
        return best

    def topk(self, k: int) -> tuple[list[list[int]], list[list[float]]]:
        ids: list[list[int]] = []
        values: list[list[float]] = []
        for row in self.rows():
            kept = min(k, row.shape[0])
            bound = np.partition(row, -kept)[-kept]
            candidates = np.flatnonzero(row >= bound)
            order = candidates[np.lexsort((candidates, -row[candidates]))[:kept]]
            ids.append(order.tolist())
            values.append(row[order].tolist())
        return ids, values

    def rows(self) -> Float32:
        if self._rows is None:
            self._rows = self._array.cpu().numpy()
        return self._rows
