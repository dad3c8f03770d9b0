"""Workspace: where slices of a split product leave their partial sums, one per device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from specdec.backends.cuda.kernels.launch import MAX_ROWS
from specdec.errors import ShapeError

COLUMNS = 2**17  # of partial sums: slices times columns, gate and up counted apart; ``tiles`` stays below
TILES = 2**13  # of one launch


class Workspace:
    """Partial sums and arrival counters of one device. Allocated once, so that graphs can hold the addresses.

    Kernels that use it must run one after another: everything on one device goes through one stream at a time. Every
    kernel leaves the counters at zero.

    Attributes:
        partials: float32 ``[COLUMNS * 16]``.
        counters: int32 ``[TILES]``, zero between launches.
    """

    def __init__(self, device: torch.device) -> None:
        self.partials: Tensor = torch.empty(COLUMNS * MAX_ROWS, dtype=torch.float32, device=device)
        self.counters: Tensor = torch.zeros(TILES, dtype=torch.int32, device=device)

    @staticmethod
    @functools.cache
    def of(device: torch.device) -> Workspace:
        """The workspace of ``device``; made at its first use, which must not be inside a graph's capture."""
        return Workspace(device)

    def check(self, columns: int, tiles: int) -> None:
        """Raises: ShapeError when a launch needs more than there is."""
        if columns > COLUMNS or tiles > TILES:
            raise ShapeError(
                f"a split product needs {columns} columns and {tiles} tiles of workspace, "
                f"there are {COLUMNS} and {TILES}"
            )
