"""Quantise plain weights when they are loaded: round to nearest, one bfloat16 scale per 64 columns of a row.

A group's scale is its largest magnitude over 7.5 (four bits) or 127 (eight), rounded to bfloat16; codes run from -8 to
7 or from -127 to 127. Rounding starts from the values as stored, so the result depends on the checkpoint alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own convention)

from specdec.checkpoints.quantised.packed import signed
from specdec.checkpoints.quantised.stored import StoredMatrix, row_slabs

BITS = {"int8": 8, "int4": 4}  # by the value of target.weights
GROUP = 64
COLUMNS = 8  # a matrix with another multiple of columns is not quantised: its rows would not be whole words


def rounds(shape: tuple[int, ...]) -> bool:
    """Whether a weight of this shape can be quantised: a matrix or a stack of matrices, with rows of whole words."""
    return len(shape) > 1 and shape[-1] % COLUMNS == 0 and all(shape)


def rounded(weight: torch.Tensor, bits: int, dtype: torch.dtype) -> StoredMatrix:
    """Quantise a matrix ``[N, K]`` to ``bits`` bits; ``dtype`` is that of its decoded form."""
    rows, columns = weight.shape
    codes = torch.empty(rows, columns * bits // 8, dtype=torch.uint8)
    scales = torch.empty(rows, -(-columns // GROUP), dtype=torch.bfloat16)
    for start, stop in row_slabs(rows, columns):
        codes[start:stop], scales[start:stop] = _round(weight[start:stop], bits)
    return StoredMatrix(
        format="int",
        shape=(rows, columns),
        parts={"codes": codes, "scale": scales},
        meta={"block_rows": 1, "block_columns": GROUP, "bits": bits},
        dtype=dtype,
        values=signed(bits),
    )


def _round(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of some rows as bytes, lowest bits first, and their scales."""
    rows, columns = weight.shape
    wide = F.pad(weight.to(torch.float32), (0, -columns % GROUP)).view(rows, -1, GROUP)
    lowest, highest, steps = (-8, 7, 7.5) if bits == 4 else (-127, 127, 127.0)
    scales = (wide.abs().amax(-1) / steps).to(torch.bfloat16)
    divisors = scales.to(torch.float32).masked_fill_(scales == 0, 1.0)
    codes = (wide / divisors[..., None]).round_().clamp_(lowest, highest).add_(2 ** (bits - 1)).to(torch.uint8)
    flat = codes.view(rows, -1)[:, :columns]
    return flat if bits == 8 else flat[:, ::2] | (flat[:, 1::2] << 4), scales
