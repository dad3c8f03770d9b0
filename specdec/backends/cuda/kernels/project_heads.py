"""Products of every head with its own matrix: the absorbed up-projections of latent attention.

One program sums a tile of one head's output over the whole length in a fixed order, so it is row-invariant.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.backends.cuda.kernels.launch import MAX_ROWS, dtype_of, interpreting, launch, raised, rounded
from specdec.errors import ShapeError

_BLOCK_O = 64  # outputs of a program
_BLOCK_BYTES = 128  # bytes of a row read at a time


@triton.jit(do_not_specialize=["rows", "x_row"])
def _project_heads(
    x,
    weights,
    out,
    rows,
    heads,
    length,
    features,
    x_row,
    x_head,
    x_value,
    weight_head,
    dtype: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    h = tl.program_id(0)
    t = tl.arange(0, ROWS)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    weight = weights + h.to(tl.int64) * weight_head
    total = tl.zeros([ROWS, BLOCK_O], tl.float32)
    for start in range(0, length, BLOCK_I):
        i = start + tl.arange(0, BLOCK_I)
        part = tl.load(
            x + t[:, None] * x_row + h * x_head + i[None, :] * x_value,
            (t[:, None] < rows) & (i[None, :] < length),
            other=0.0,
        )
        tile = tl.load(
            weight + o[None, :] * length + i[:, None], (o[None, :] < features) & (i[:, None] < length), other=0.0
        )
        total = tl.dot(raised(part), raised(tile), total, input_precision="ieee")
    place = out + (t[:, None] * heads + h) * features + o[None, :]
    tl.store(place, rounded(total, dtype), (t[:, None] < rows) & (o[None, :] < features))


def project_heads(x: Tensor, weights: Tensor) -> Tensor:
    """``x[:, h] @ weights[h].T``: x ``[T, n, I]`` with any strides, weights ``[n, O, I]``: ``[T, n, O]``; T <= 16."""
    rows, heads, length = x.shape
    fits = weights.shape[0] == heads and weights.shape[2] == length and weights.stride()[1:] == (length, 1)
    if rows > MAX_ROWS or not fits:
        raise ShapeError(
            "project_heads got heads and matrices that do not fit",
            got=f"{list(x.shape)} and {list(weights.shape)}",
            takes=f"[T, n, I] of up to {MAX_ROWS} rows, and [n, O, I] of contiguous matrices",
        )
    features = weights.shape[1]
    out = torch.empty(rows, heads, features, dtype=x.dtype, device=x.device)
    block_o = max(16, min(256, triton.next_power_of_2(features))) if interpreting() else _BLOCK_O
    launch(
        _project_heads,
        (heads, triton.cdiv(features, block_o)),
        x,
        weights,
        out,
        rows,
        heads,
        length,
        features,
        *x.stride(),
        weights.stride(0),
        dtype=dtype_of(x.dtype),
        ROWS=MAX_ROWS,
        BLOCK_O=block_o,
        BLOCK_I=_BLOCK_BYTES // x.element_size(),
    )
    return out


def project_heads_reference(x: Tensor, weights: Tensor) -> Tensor:
    """``project_heads`` in torch, for any number of rows."""
    return torch.einsum("tni,noi->tno", x, weights)
