"""The workspace for the partial sums of split products, one per device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from specdec.backends.cuda.kernels.launch import MAX_ROWS
from specdec.errors import ShapeError

COLUMNS = 2**17  # columns of partial sums: slices times columns, gate and up counted separately; ``tiles`` stays below
TILES = 2**13  # tiles of one launch


class Workspace:
    """Partial sums and arrival counters of one device, allocated once so that graphs can hold the addresses.

    Kernels that use it must run one after another, so a device uses one stream at a time. Every kernel leaves the
    counters at zero.

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
        """Return the workspace of ``device``, allocated on first use, which must not be during a graph's capture."""
        return Workspace(device)

    def check(self, columns: int, tiles: int) -> None:
        """Check the needs of a launch. Raises: ShapeError if they exceed the workspace."""
        if columns > COLUMNS or tiles > TILES:
            raise ShapeError(
                f"a split product needs {columns} columns and {tiles} tiles of workspace, "
                f"there are {COLUMNS} and {TILES}"
            )
