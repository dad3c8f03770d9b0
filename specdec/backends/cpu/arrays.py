"""Logits and hidden states as torch tensors on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specdec.contract import Hidden, Logits
from specdec.errors import ContractError

if TYPE_CHECKING:
    from specdec.contract import Float32


class CpuHidden(Hidden):
    """``[T, H]`` in act dtype."""

    __slots__ = ("array",)

    def __init__(self, array: Tensor) -> None:
        self.array = array

    def __len__(self) -> int:
        return self.array.shape[0]

    def __getitem__(self, rows: slice) -> CpuHidden:
        return CpuHidden(self.array[rows])

    def join(self, others: Sequence[Hidden]) -> CpuHidden:
        parts = [self.array]
        for other in others:
            if not isinstance(other, CpuHidden):
                raise ContractError(f"hidden states of another backend ({type(other).__name__}) cannot be joined")
            parts.append(other.array)
        return CpuHidden(torch.cat(parts))

    def rows(self) -> Float32:
        rows: Float32 = self.array.float().numpy()
        return rows


class CpuLogits(Logits):
    """``[T, V]`` float32."""

    __slots__ = ("array",)

    def __init__(self, array: Tensor) -> None:
        self.array = array

    def __len__(self) -> int:
        return self.array.shape[0]

    @property
    def _rows(self) -> Float32:
        rows: Float32 = self.array.numpy()
        return rows

    def argmax(self) -> list[int]:
        rows = self._rows
        best: list[int] = rows.argmax(axis=1).tolist()  # numpy: first of equals, and a NaN wins
        for row, token in enumerate(best):
            if not np.isfinite(rows[row, token]):
                raise ContractError(
                    f"the target's logits of row {row} are not finite (token {token}: {rows[row, token]})",
                    try_="specdec info MODEL (the weight audit), or dtype = float32",
                )
        return best

    def topk(self, k: int) -> tuple[list[list[int]], list[list[float]]]:
        ids: list[list[int]] = []
        values: list[list[float]] = []
        rows = self._rows
        k = min(k, rows.shape[1])
        for row in rows:
            bound = np.partition(row, -k)[-k]
            candidates = np.flatnonzero(row >= bound)
            order = np.lexsort((candidates, -row[candidates]))[:k]
            ids.append(candidates[order].tolist())
            values.append(row[candidates[order]].tolist())
        return ids, values

    def gather(self, tokens: Sequence[int]) -> list[float]:
        rows = self._rows
        return [float(rows[row, token]) for row, token in enumerate(tokens)]

    def rows(self) -> Float32:
        return self._rows
