"""Compare the bits of arrays with their expected values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specdec.backends.ops import Ops
from specdec.contract import ForwardPass, Logits
from specdec.records.probes import Finding, Kind, finite

if TYPE_CHECKING:
    from numpy.typing import NDArray


def on_host(owner: Ops | ForwardPass, array: Any) -> NDArray[Any]:
    """Copy an array of ``owner`` to the host; floats become float32, which represents bfloat16 exactly."""
    if isinstance(array, Logits):
        return np.array(array.rows())
    host = torch.as_tensor(owner.to_host(array)).cpu()
    return np.array((host.float() if host.is_floating_point() else host).numpy())


def arrays_on_host(ops: Ops, result: Any) -> list[NDArray[Any]]:
    """Copy the result of an operation, one array or several, to the host."""
    return [on_host(ops, part) for part in (result if isinstance(result, tuple) else (result,))]


class Comparison:
    """Compares blocks of rows with single rows and collects the differences for a Finding."""

    def __init__(self, kind: Kind, subject: str, rows: int) -> None:
        self._kind: Kind = kind
        self._subject = subject
        self._rows = rows
        self._differing: set[int] = set()
        self._first: tuple[int, int | None, str] | None = None  # of the shortest block: length, row, array
        self._largest = 0.0

    def rows(self, got: Sequence[NDArray[Any]], wanted: Sequence[NDArray[Any]], names: Sequence[str] = ()) -> None:
        """Compare a block's arrays ``[n, ...]`` with those of single rows. ``wanted`` may have more rows."""
        for number, (block, alone) in enumerate(zip(got, wanted, strict=True)):
            self._compare(block, alone[: len(block)], len(block), names[number] if names else "", by_row=True)

    def state(self, block: int, got: dict[str, NDArray[Any]], wanted: dict[str, NDArray[Any]]) -> None:
        """Compare the state after a block of ``block`` rows with the state after single rows, by array name."""
        if got.keys() != wanted.keys():
            self._note(block, None, f"arrays {sorted(got.keys() ^ wanted.keys())}", float("inf"))
            return
        for name, array in got.items():
            self._compare(array, wanted[name], block, name, by_row=False)

    def _compare(self, got: NDArray[Any], wanted: NDArray[Any], block: int, name: str, *, by_row: bool) -> None:
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            self._note(block, None, name or f"shape {got.shape} in place of {wanted.shape}", float("inf"))
            return
        other = _bits(got) != _bits(wanted)
        if not other.any():
            return
        with np.errstate(invalid="ignore"):
            off = np.abs(got.astype(np.float64) - wanted.astype(np.float64))[other]
        row = int(np.argwhere(other)[0][0]) if by_row else None
        self._note(block, row, name, float(off.max()))

    def _note(self, block: int, row: int | None, name: str, difference: float) -> None:
        self._differing.add(block)
        if self._first is None or block < self._first[0]:
            self._first = (block, row, name)
        self._largest = difference if np.isnan(difference) else max(self._largest, difference)

    def finding(self) -> Finding:
        """Return the result of all comparisons."""
        _, row, name = self._first or (0, None, "")
        return Finding(
            kind=self._kind,
            subject=self._subject,
            rows=self._rows,
            differing=tuple(sorted(self._differing)),
            first_row=row,
            difference=finite(self._largest) if self._differing else None,
            where=name,
        )


def _bits(array: NDArray[Any]) -> NDArray[Any]:
    """View an array as integers: 0 and -0 differ, a NaN equals itself."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def one_by_one(results: Iterable[list[NDArray[Any]]]) -> list[NDArray[Any]]:
    """Concatenate the results of single rows, lists of arrays ``[1, ...]``, to one list of arrays ``[T, ...]``."""
    return [np.concatenate(parts) for parts in zip(*results, strict=True)]
