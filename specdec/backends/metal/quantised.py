"""Packed weights in MLX's affine format, and MLX's own products with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import attrs
import mlx.core as mx

from specdec.checkpoints.quantised import StoredMatrix

PACKED_FORMATS = frozenset({"mlx-affine"})
_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (32, 64, 128)


@attrs.frozen(kw_only=True, eq=False)
class PackedMatrix:
    """A matrix ``[N, K]``, or a stack of them ``[E, N, K]``: ``W = code * scale + bias`` per group of columns.

    Scales keep act dtype if they are stored in it. Otherwise they are float32, and so are the products, since MLX's CPU
    device would sum in a narrower dtype.
    """

    codes: mx.array  # uint32 [..., N, K * bits / 32]
    scales: mx.array  # [..., N, K / group]
    biases: mx.array
    group: int
    bits: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the decoded matrix or stack."""
        return (*self.scales.shape[:-1], self.scales.shape[-1] * self.group)

    def parts(self) -> tuple[mx.array, mx.array, mx.array]:
        """Codes, scales and biases."""
        return self.codes, self.scales, self.biases

    def first(self) -> PackedMatrix:
        """The first matrix of a stack."""
        codes, scales, biases = (part[0] for part in self.parts())
        mx.eval(codes, scales, biases)
        return attrs.evolve(self, codes=codes, scales=scales, biases=biases)

    def take(self, rows: mx.array) -> PackedMatrix:
        """Gather rows of a matrix, packed."""
        codes, scales, biases = (part[rows] for part in self.parts())
        return attrs.evolve(self, codes=codes, scales=scales, biases=biases)

    def wide(self) -> PackedMatrix:
        """The same with scales and biases in float32."""
        return attrs.evolve(self, scales=self.scales.astype(mx.float32), biases=self.biases.astype(mx.float32))

    def decoded(self, dtype: mx.Dtype) -> mx.array:
        """Decode to ``dtype``: computed in float32, rounded once."""
        return mx.dequantize(*self.wide().parts(), group_size=self.group, bits=self.bits).astype(dtype)

    def product(self, x: mx.array, experts: mx.array | None = None) -> mx.array:
        """``x @ w.T`` in the dtype of x; for a stack, with each matrix or with those that ``experts`` selects."""
        if experts is None:
            y = mx.quantized_matmul(x, *self.parts(), group_size=self.group, bits=self.bits)
        else:
            y = mx.gather_qmm(x, *self.parts(), rhs_indices=experts, group_size=self.group, bits=self.bits)
        return y.astype(x.dtype)


Matrix: TypeAlias = mx.array | PackedMatrix


def packed(matrices: Sequence[StoredMatrix], dtype: mx.Dtype, *, wide: bool) -> PackedMatrix | None:
    """Stack matrices of one layout, ``[E, N, K]``; None if MLX has no product for their sizes.

    ``wide``: products are float32, whatever the dtype of the stored scales.
    """
    meta = matrices[0].meta
    if meta["bits"] not in _BITS or meta["block_columns"] not in _GROUPS:
        return None
    codes = mx.stack([mx.array(one.parts["codes"].contiguous().numpy()) for one in matrices])
    stored = str(matrices[0].parts["scale"].dtype).removeprefix("torch.")
    kept = mx.float32 if wide or getattr(mx, stored, None) != dtype else dtype
    scales, biases = (
        mx.stack([mx.array(one.parts[part].float().numpy()).astype(kept) for one in matrices])
        for part in ("scale", "bias")
    )
    mx.eval(codes, scales, biases)
    return PackedMatrix(codes=codes, scales=scales, biases=biases, group=meta["block_columns"], bits=meta["bits"])


def joined(weights: Sequence[Matrix]) -> Matrix:
    """Concatenate the rows of matrices of one layout, and compute the result."""
    one = weights[0]
    if not isinstance(one, PackedMatrix):
        rows = mx.concatenate(list(weights))
        mx.eval(rows)
        return rows
    codes, scales, biases = (mx.concatenate(list(parts)) for parts in zip(*(w.parts() for w in weights), strict=True))
    mx.eval(codes, scales, biases)
    return attrs.evolve(one, codes=codes, scales=scales, biases=biases)


def take(weight: Matrix, rows: mx.array) -> Matrix:
    """Gather rows, packed if the weight is."""
    return weight.take(rows) if isinstance(weight, PackedMatrix) else weight[rows]
