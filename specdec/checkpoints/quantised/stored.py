"""A quantised matrix as stored, for backends that compute with packed weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import torch

_SLAB = 2**20  # values decoded per step


@attrs.frozen(kw_only=True, eq=False)
class StoredMatrix:
    """One matrix ``[N, K]``: ``value[n, k] = code[n, k] * scale (* global_scale) (+ bias)``, one scale per block.

    ======================  ==============================  =============================  ===========================
    part                    "fp8-block"                     "nvfp4"                        "mlx-affine"
    ======================  ==============================  =============================  ===========================
    ``codes``               uint8 ``[N, K]``, e4m3          uint8 ``[N, K/2]``, pairs of   uint32 ``[N, K*bits/32]``,
                                                            e2m1, the even column low      lowest bits first
    ``scale``               float32                         e4m3                           F16, BF16 or F32
    ``global_scale``        none                            float32 ``[1]``                none
    ``bias``                none                            none                           as ``scale``
    ======================  ==============================  =============================  ===========================

    Scales and biases are ``[ceil(N / block_rows), ceil(K / block_columns)]``. All scales multiply. If the files store a
    divisor per tensor (compressed-tensors' NVFP4), ``global_scale`` is its reciprocal rounded to float32; ``decode``
    divides, as for a weight that is not kept packed.

    Attributes:
        format: "fp8-block", "nvfp4" or "mlx-affine".
        shape: shape of the decoded matrix, ``(N, K)``.
        parts: the parts in the table. Codes, and scales except "fp8-block" ones, are views of the memory map.
        meta: "block_rows", "block_columns", "group" (columns per scale) and "bits" (per code).
        dtype: dtype that ``decode`` returns.
        numbers: converts rows of ``codes`` to float32 ``[R, K]``.
        divisor: float32 ``[1]``, divides the scales; only if the files have one.
    """

    format: str
    shape: tuple[int, int]
    parts: Mapping[str, torch.Tensor]
    meta: Mapping[str, int]
    dtype: torch.dtype
    numbers: Callable[[torch.Tensor], torch.Tensor] = attrs.field(repr=False)
    divisor: torch.Tensor | None = attrs.field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())

    def decode(self) -> torch.Tensor:
        """The matrix in ``dtype``, bit-identical to what ``Weights`` returns."""
        count, columns = self.shape
        out = torch.empty(self.shape, dtype=self.dtype)
        step = max(1, _SLAB // max(columns, 1))
        for start in range(0, count, step):
            stop = min(start + step, count)
            values = self.numbers(self.parts["codes"][start:stop])
            values.mul_(self._spread("scale", start, stop))
            if "bias" in self.parts:
                values.add_(self._spread("bias", start, stop))
            out[start:stop] = values
        return out

    def _spread(self, part: str, start: int, stop: int) -> torch.Tensor:
        """One float32 entry per element of rows start to stop."""
        rows = torch.arange(start, stop) // self.meta["block_rows"]
        first = int(rows[0])
        blocks = self.parts[part][first : int(rows[-1]) + 1].to(torch.float32)
        if part == "scale" and self.divisor is not None:
            blocks = blocks / self.divisor
        elif part == "scale" and "global_scale" in self.parts:
            blocks = blocks * self.parts["global_scale"]
        wide = blocks.repeat_interleave(self.meta["block_columns"], dim=1)[:, : self.shape[1]]
        return wide[rows - first]

    def __getitem__(self, rows: slice | torch.Tensor) -> StoredMatrix | torch.Tensor:
        """Select rows by a slice (step 1) or an index, int64 ``[R]``.

        Whole blocks of rows stay packed (a slice is a view); other rows are decoded.
        """
        block = self.meta["block_rows"]
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(self.shape[0])
            if start % block or (stop % block and stop != self.shape[0]):
                return self.decode()[rows].clone()
            blocks: slice | torch.Tensor = slice(start // block, -(-stop // block))
            count = stop - start
        elif block > 1:
            return self.decode()[rows]
        else:
            blocks, count = rows, len(rows)
        parts = {
            name: part if name == "global_scale" else _taken(part, rows if name == "codes" else blocks)
            for name, part in self.parts.items()
        }
        return attrs.evolve(self, shape=(count, self.shape[1]), parts=parts)


def _taken(part: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    if isinstance(rows, slice):
        return part[rows]
    return part.view(torch.uint8)[rows].view(part.dtype)  # torch cannot gather uint32 or e4m3


def alike(matrices: Sequence[StoredMatrix | torch.Tensor]) -> list[StoredMatrix] | list[torch.Tensor]:
    """The matrices of a stack: packed if all have one format and size, else all decoded."""
    packed = [matrix for matrix in matrices if isinstance(matrix, StoredMatrix)]
    if len(packed) == len(matrices) and len({_layout(one) for one in packed}) == 1:
        return packed
    return [one.decode() if isinstance(one, StoredMatrix) else one for one in matrices]


def _layout(one: StoredMatrix) -> tuple[object, ...]:
    dtypes = tuple((name, part.dtype) for name, part in sorted(one.parts.items()))
    return (one.format, one.shape, dtypes, *sorted(one.meta.items()))
