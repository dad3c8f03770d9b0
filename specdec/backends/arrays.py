"""Hidden states and logits that backends share: handles of device arrays, and logits in host memory."""

from __future__ import annotations

import abc
import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from specdec.backends.caches import Array
from specdec.contract import Hidden, Logits
from specdec.errors import ContractError

if TYPE_CHECKING:
    from specdec.contract import Float32


class ArrayHidden(Hidden):
    """Hidden states as an array ``[T, H]`` in act dtype. Each backend has a subclass."""

    __slots__ = ("array",)

    @staticmethod
    @abc.abstractmethod
    def concatenate(arrays: list[Any]) -> Any:
        """Concatenate arrays ``[T_i, H]`` along the rows."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __len__(self) -> int:
        return int(self.array.shape[0])

    def __getitem__(self, rows: slice) -> Self:
        return type(self)(self.array[rows])

    def join(self, others: Sequence[Hidden]) -> Self:
        parts = [self.array]
        for other in others:
            if not isinstance(other, type(self)):
                raise ContractError(f"hidden states of another backend ({type(other).__name__}) cannot be joined")
            parts.append(other.array)
        return type(self)(self.concatenate(parts))


def not_finite(row: int, detail: str = "") -> ContractError:
    """Return the error for a row of logits without a finite best token."""
    return ContractError(
        f"the target's logits of row {row} are not finite{detail}",
        try_="specdec info MODEL (the weight check), or dtype = float32",
    )


def read_tokens(best: Array) -> list[int]:
    """Read the best token of each row, integers ``[T]`` on a device, and wait for them.

    Raises: ContractError if one is -1, which stands for logits that are not finite.
    """
    tokens: list[int] = best.tolist()
    if -1 in tokens:
        raise not_finite(tokens.index(-1))
    return tokens


class HostLogits(Logits):
    """Logits ``[T, V]`` float32, searched in numpy."""

    __slots__ = ("array",)

    def __init__(self, array: Array) -> None:
        self.array = array

    def __len__(self) -> int:
        return int(self.array.shape[0])

    def argmax(self) -> list[int]:
        rows = self.rows()
        best: list[int] = rows.argmax(axis=1).tolist()  # numpy: the first of equal values, and NaN wins
        for row, token in enumerate(best):
            if not np.isfinite(rows[row, token]):
                raise not_finite(row, f" (token {token}: {rows[row, token]})")
        return best

    def topk(self, k: int) -> tuple[list[list[int]], list[list[float]]]:
        ids: list[list[int]] = []
        values: list[list[float]] = []
        for row in self.rows():
            candidates = np.flatnonzero(row >= np.partition(row, -min(k, len(row)))[-min(k, len(row))])
            order = candidates[np.lexsort((candidates, -row[candidates]))[:k]]
            ids.append(order.tolist())
            values.append(row[order].tolist())
        return ids, values

    def rows(self) -> Float32:
        rows: Float32 = self.array
        return rows

    def __getitem__(self, rows: slice) -> Self:
        """Some of the rows; they share memory."""
        part = copy.copy(self)
        part.array = self.array[rows]
        return part
