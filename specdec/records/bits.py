"""Compare bits, and report where those of a block of rows differ from those of single rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import torch

from specdec.contract import Logits


@attrs.frozen(kw_only=True)
class Finding:
    """The comparison of blocks of rows with the same rows computed one by one."""

    subject: str
    rows: int  # of the longest block
    differing: tuple[int, ...] = ()  # lengths of the blocks in which some bit differs
    first_row: int | None = None  # of the shortest such block; None: not in a row, in the state
    difference: float | None = None  # the largest absolute one; None if not finite

    @property
    def equal(self) -> bool:
        """Whether all bits agree."""
        return not self.differing

    def blocks(self) -> str:
        """The lengths of the blocks that differ: ``2, 4 to 8``."""
        runs = [
            [length for _, length in run]
            for _, run in itertools.groupby(enumerate(self.differing), lambda entry: entry[1] - entry[0])
        ]
        return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)

    def __str__(self) -> str:
        if self.equal:
            return f"{self.subject}: equal bits in blocks of up to {self.rows} rows"
        off = "no finite number" if self.difference is None else f"at most {self.difference:.3g}"
        row = "" if self.first_row is None else f", first in row {self.first_row}"
        return f"{self.subject}: different bits in blocks of {self.blocks()} rows{row}; off by {off}"


class Comparison:
    """Collects comparisons of one subject for a ``Finding``."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._longest = 0
        self._first: dict[int, int | None] = {}  # the first row that differs, by length of the block
        self._largest = 0.0

    def rows(self, count: int, got: Any, expected: Any) -> None:
        """Compare rows ``[T, ...]`` of blocks of ``count`` rows with those computed singly; both from ``on_host``."""
        different = self._compare(count, got, expected)
        if different is not None:
            self._first.setdefault(count, int(np.argwhere(different)[0][0]) % count)

    def arrays(self, count: int, got: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        """Compare the arrays of a state after a block of ``count`` rows with those after single rows."""
        names = got.keys() | expected.keys()
        if any(self._compare(count, got.get(name), expected.get(name)) is not None for name in names):
            self._first.setdefault(count, None)

    def _compare(self, count: int, got: Any, expected: Any) -> Any:
        """Where bits differ; None if nowhere. 0 is not -0, and a NaN equals itself."""
        self._longest = max(self._longest, count)
        if got is None or expected is None or (got.shape, got.dtype) != (expected.shape, expected.dtype):
            self._largest = math.inf
            return np.ones(1)
        bits = f"u{got.dtype.itemsize}"
        different = np.ascontiguousarray(got).view(bits) != np.ascontiguousarray(expected).view(bits)
        if not different.any():
            return None
        with np.errstate(invalid="ignore"):
            off = np.abs(got[different].astype(np.float64) - expected[different].astype(np.float64)).max()
        self._largest = float(np.maximum(self._largest, off))  # NaN if one is
        return different

    def finding(self) -> Finding:
        """The result of all comparisons."""
        lengths = tuple(sorted(self._first))
        return Finding(
            subject=self._subject,
            rows=self._longest,
            differing=lengths,
            first_row=self._first[lengths[0]] if lengths else None,
            difference=self._largest if lengths and math.isfinite(self._largest) else None,
        )


def on_host(owner: Any, array: Any) -> Any:
    """A copy in host memory of an array or logits of ``owner``, a target; bfloat16 as float32, which has its values."""
    if isinstance(array, Logits):
        return np.array(array.rows())
    host = owner.to_host(array)
    tensor = host.cpu() if isinstance(host, torch.Tensor) else torch.from_numpy(np.asarray(host))
    return np.array((tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy())
