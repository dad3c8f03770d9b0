"""Products with weights, for passes of up to 16 rows and for prompts.

**Dense weights** go through torch, with up to 16 rows padded to 16, at aligned addresses. A library chooses its kernel
by sizes, alignment and device, and all of these are then the same for every pass and every row; each row of a product
is computed from that row alone. Whether a library's rows are independent of their place is not documented: the probe at
load checks it on the loaded weights. **Packed weights** run in our kernel (``kernels.packed``), which serves every
number of rows.

More than 16 rows are a prompt: torch multiplies them as they are, by decoded weights. Their bits depend on how a prompt
is cut into chunks, as ``parity_reason`` says. Plain and speculative decoding both continue from the same prompt pass,
so this does not affect their parity.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own convention)
from torch import Tensor

from specdec.backends.cuda.kernels import packed, rows
from specdec.backends.cuda.kernels.launch import MAX_ROWS
from specdec.backends.cuda.weights import DenseWeight, Weight, joined, runs
from specdec.errors import ShapeError

_ALIGNED = 8  # values, at least 16 bytes


def padded(x: Tensor) -> Tensor:
    """``x [T, ..., K]`` in new memory of 16 rows, zeros from T on; longer ones as they are.

    Rows begin at multiples of 8 values: libraries sum the values before an aligned address apart from the others.
    """
    if len(x) > MAX_ROWS:
        return x
    columns = x.shape[-1]
    wide = F.pad(x, (0, -columns % _ALIGNED) + (0, 0) * (x.ndim - 2) + (0, MAX_ROWS - len(x)))
    return wide[..., :columns]


def linear(x: Tensor, weight: Weight, bias: DenseWeight | None = None) -> Tensor:
    """``x [T, K] @ w.T (+ bias)``: ``[T, N]`` in x's dtype."""
    (y,) = project(x, [weight], [bias])
    return y


def project(x: Tensor, weights: Sequence[Weight], biases: Sequence[DenseWeight | None] = ()) -> tuple[Tensor, ...]:
    """``x [T, K] @ w.T (+ bias)`` for several weights ``[N_i, K]``: ``[T, N_i]`` each, in x's dtype.

    Weights that ``fuse`` has made contiguous take one product. Their results are columns of one tensor.
    """
    biases = biases or [None] * len(weights)
    results: list[Tensor] = []
    for run in runs(weights):
        added = biases[len(results) : len(results) + len(run)]
        y = _product(x, run, x.dtype)
        for part, bias in zip(torch.split(y, [w.shape[0] for w in run], dim=1), added, strict=True):
            results.append(part if bias is None else rows.add(part, bias.tensor[None]))
    return tuple(results)


def float32_product(x: Tensor, weight: Weight) -> Tensor:
    """``x [T, K] @ w.T``, not rounded to x's dtype: float32 ``[T, N]``."""
    return _product(x, [weight], torch.float32)


def swiglu(x: Tensor, gate: Weight, up: Weight) -> Tensor:
    """``silu(x @ gate.T) * (x @ up.T)``, in float32 and rounded once: ``[T, N]`` in x's dtype."""
    size, products = gate.shape[0], [_product(x, run, torch.float32) for run in runs([gate, up])]
    left, right = (part for product in products for part in torch.split(product, size, dim=1))
    return rows.silu_product(left, right, x.dtype)


def logits(x: Tensor, heads: Sequence[Weight]) -> Tensor:
    """Logits of any number of rows ``x [T, K]``, 16 at a time, with heads ``[N_i, K]``: float32 ``[T, sum N_i]``."""
    pieces = [torch.cat([float32_product(part, head) for head in heads], dim=1) for part in torch.split(x, MAX_ROWS)]
    return torch.cat(pieces)


def project_heads(x: Tensor, weights: Tensor) -> Tensor:
    """``x[:, h] @ weights[h].T`` for ``x [T, n, I]`` and contiguous ``weights [n, O, I]``: ``[T, n, O]``."""
    y = torch.bmm(padded(x).transpose(0, 1), weights.transpose(1, 2))
    return y[:, : len(x)].transpose(0, 1).contiguous()


def _product(x: Tensor, run: Sequence[Weight], dtype: torch.dtype) -> Tensor:
    """The product with a run of weights: ``[T, sum N_i]`` in ``dtype``, x's or float32."""
    first, count = run[0], len(x)
    if x.shape[1] != first.shape[1]:
        raise ShapeError(f"rows of {x.shape[1]} values do not fit a weight of {first.shape[1]} columns")
    size = sum(w.shape[0] for w in run)
    if not isinstance(first, DenseWeight):
        if count <= MAX_ROWS:
            return packed.product(x, first, size, dtype)
        parts = [_multiply(x, w.decode().to(x.dtype), dtype) for w in run]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return _multiply(padded(x), joined(run), dtype)[:count]


def _multiply(x: Tensor, matrix: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype is x.dtype:
        return F.linear(x, matrix)
    if x.is_cuda:
        return torch.mm(x, matrix.T, out_dtype=dtype)
    return F.linear(padded(x.float()), matrix.float())  # torch has no such product on the host
