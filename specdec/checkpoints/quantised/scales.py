"""Scales: the rows and columns each one covers, and validation of their values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch

from specdec.checkpoints.gguf.blocks import E8M0
from specdec.checkpoints.quantised.parts import FLOATS, Parts
from specdec.checkpoints.reader import Checkpoint
from specdec.errors import CheckpointError

AGAIN = "download the file again; if that does not help, the checkpoint is broken"
EXPONENTS = ("U8", "F8_E8M0")  # one byte e encodes 2 ** (e - 127)


@attrs.frozen
class Grid:
    """The layout of scales over the matrices of a weight.

    Attributes:
        rows: rows that share a scale.
        columns: columns that share a scale. The last block of rows or columns may be cut off at the weight's edge.
        shape: shape of the scales, ``[M, A, B]`` for M matrices of A x B blocks; M is 1 if all matrices share them.
    """

    rows: int
    columns: int
    shape: tuple[int, int, int]


def matrices(shape: Sequence[int]) -> tuple[int, int, int]:
    """``[..., N, K]`` as ``(M, N, K)``: a vector is one row, a stack has M matrices."""
    padded = (1, 1, *shape)
    return math.prod(shape[:-2]), padded[-2], padded[-1]


def blocks(shape: Sequence[int], rows: int, columns: int) -> tuple[int, int]:
    """The number of blocks of that size along the last two axes."""
    _, n, k = matrices(shape)
    return -(-n // rows), -(-k // columns)


def whole(shape: Sequence[int], given: tuple[int, ...]) -> Grid | None:
    """The grid of scales per tensor, per matrix of a stack, or per row; None if ``given`` fits none of these."""
    m, n, k = matrices(shape)
    lead = tuple(shape[:-2])
    if math.prod(given) == 1 and len(given) <= max(2, len(shape)):
        return Grid(n, k, (1, 1, 1))
    if lead and given in (lead, (*lead, 1), (*lead, 1, 1)):
        return Grid(n, k, (m, 1, 1))
    if len(shape) > 1 and given in ((*lead, n), (*lead, n, 1)):
        return Grid(1, k, (m, n, 1))
    return None


def tiled(shape: Sequence[int], given: tuple[int, ...], rows: int, columns: int) -> Grid | None:
    """The grid of one scale per block of that size; None if ``given`` does not fit."""
    m, _, _ = matrices(shape)
    count = blocks(shape, rows, columns)
    return Grid(rows, columns, (m, *count)) if given == (*shape[:-2], *count) else None


def label(grid: Grid, shape: Sequence[int]) -> str:
    """Display text: "per tensor", "per channel", "g128", "128x128"."""
    _, n, k = matrices(shape)
    if grid.shape[1:] == (1, 1) and (grid.rows, grid.columns) == (n, k):
        return "per tensor"
    if grid.rows > 1:
        return f"{grid.rows}x{grid.columns}"
    return "per channel" if grid.columns == k else f"g{grid.columns}"


def load_scales(parts: Parts, role: str, *, zero: bool = True, signed: bool = False) -> torch.Tensor:
    """Read a scale tensor as float32, in its stored shape, and check its values.

    Args:
        parts: the weight's parts.
        role: "scale", "scale_2", "global_scale", "mlx_scale" or "mlx_bias".
        zero: a scale of 0 is allowed (it makes a block of zeros).
        signed: a negative scale is allowed.

    Raises: CheckpointError naming the tensor for NaN, infinity, a negative value, or a divisor of 0.
    """
    name = parts.original(role)
    dtype = parts.checkpoint.tensors[name].dtype
    stored = read(parts.checkpoint, name)
    if dtype in EXPONENTS:
        scales = E8M0[stored.view(torch.uint8).int().flatten()].view(stored.shape)
        if bool(scales.isnan().any()):
            raise parts.error(f"the scale {name} holds the E8M0 code 255, which is NaN", try_=AGAIN)
        return scales
    scales = stored.to(torch.float32)
    finite, negative = bool(torch.isfinite(scales).all()), not signed and bool((scales < 0).any())
    if not finite or negative:
        what = "NaN or infinity" if not finite else "a negative value, and scales are magnitudes"
        raise parts.error(f"the scale {name} holds {what}", try_=AGAIN)
    if not zero and bool((scales == 0).any()):
        raise parts.error(f"the scale {name} is 0, and the weight {parts.codes} is divided by it", try_=AGAIN)
    return scales


def check_dtype(parts: Parts, role: str, allowed: Sequence[str] = (*FLOATS, *EXPONENTS)) -> None:
    """Refuse a scale of the wrong dtype. Raises: CheckpointError."""
    name = parts.original(role)
    dtype = parts.checkpoint.tensors[name].dtype
    if dtype not in allowed:
        raise parts.error(
            f"the scale {name} is stored as {dtype}; with {parts.codes} ({parts.dtype}) it takes {' or '.join(allowed)}"
        )


def misfit(parts: Parts, role: str, wanted: str) -> CheckpointError:
    """An error for a scale (or zero point) whose shape does not fit the weight's."""
    name = parts.original(role)
    return parts.error(
        f"the tensor {name} has the shape {list(parts.checkpoint.tensors[name].shape)}; "
        f"{parts.codes} ({parts.dtype} {list(parts.shape)}) takes {wanted}",
        try_="config.json and weights of one and the same checkpoint",
    )


def read(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Read a whole small tensor, without mapping it."""
    return checkpoint.rows(name, 0, 1, axes=0)[0]
