"""A quantised matrix as stored, for backends that compute with packed weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import torch

if TYPE_CHECKING:
    from specdec.checkpoints.gguf.blocks import Block

_SLAB = 2**20  # values decoded per step


class RowParts(Mapping[str, torch.Tensor]):
    """The parts of rows of blocks, unpacked when one is asked for. A backend may read the blocks instead.

    Args:
        rows: uint8 ``[N, bytes]``, usually a view of the memory map.
        block: their format.
        unpack: turns rows into parts.
    """

    def __init__(
        self, rows: torch.Tensor, block: Block, unpack: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
    ) -> None:
        self.rows, self.block, self._unpack = rows, block, unpack

    @functools.cached_property
    def _unpacked(self) -> Mapping[str, torch.Tensor]:
        return self._unpack(self.rows)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._unpacked[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._unpacked)

    def __len__(self) -> int:
        return len(self._unpacked)

    def take(self, rows: slice | torch.Tensor) -> RowParts:
        """Those of some rows."""
        return RowParts(self.rows[rows], self.block, self._unpack)


@attrs.frozen(kw_only=True, eq=False)
class StoredMatrix:
    """One matrix ``[N, K]``: ``value = (code - offset) * scale (* global_scale) (+ bias)``, one scale per block.

    ======================  ==============================  =============================  ===========================
    part                    "fp8-block", "fp8"              "nvfp4", "mxfp4"               "mlx-affine", "int"
    ======================  ==============================  =============================  ===========================
    ``codes``               uint8 ``[N, K]``, e4m3          uint8 ``[N, K/2]``, pairs of   words of ``bits`` bits per
                                                            e2m1, the even column low      column, lowest bits first
    ``scale``               float32                         e4m3; float32 for "mxfp4"      F16, BF16 or F32
    ``global_scale``        none                            float32 ``[1]``; "mxfp4" none  none
    ``bias``                none                            none                           "mlx-affine": as ``scale``
    ``offset``              none                            none                           "int": float32, or none
    ======================  ==============================  =============================  ===========================

    Scales, biases and offsets are ``[ceil(N / block_rows), ceil(K / block_columns)]``. All scales multiply. If the
    files store a divisor per tensor (compressed-tensors' NVFP4), ``global_scale`` is its reciprocal rounded to float32;
    ``decode`` divides, as for a weight that is not kept packed.

    "gguf" has codes of 4 or 8 bits, and scales and biases in float32 or int8. In int8 they are multiples of
    ``scale_unit`` and ``bias_unit``, float32 ``[N, K / 256]``.

    "fp8-block" has blocks of several rows; "fp8" one scale per matrix, row, or group of columns. A row of codes is a
    stream of bits in every format, and ``values`` gives the meaning of each code.

    Attributes:
        format: one of those in the table.
        shape: shape of the decoded matrix, ``(N, K)``.
        parts: the parts in the table. Codes, and scales except float32 ones, are views of the memory map. Of "gguf":
            ``RowParts``.
        meta: "block_rows", "block_columns", "group" (columns per scale) and "bits" (per code).
        dtype: dtype that ``decode`` returns.
        values: the number that each code stands for, float32 ``[2 ** bits]``.
        numbers: converts rows of ``codes`` to float32 ``[R, K]``.
        divisor: float32 ``[1]``, divides the scales; only if the files have one.
        on_decode: called by ``decode``, for the record of what is not kept packed.
    """

    format: str
    shape: tuple[int, int]
    parts: Mapping[str, torch.Tensor]
    meta: Mapping[str, int]
    dtype: torch.dtype
    values: torch.Tensor = attrs.field(repr=False)
    numbers: Callable[[torch.Tensor], torch.Tensor] = attrs.field(repr=False)
    divisor: torch.Tensor | None = attrs.field(default=None, repr=False)
    on_decode: Callable[[], None] | None = attrs.field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())

    def decode(self) -> torch.Tensor:
        """The matrix in ``dtype``, bit-identical to what ``Weights`` returns."""
        if self.on_decode is not None:
            self.on_decode()
        count, columns = self.shape
        out = torch.empty(self.shape, dtype=self.dtype)
        step = max(1, _SLAB // max(columns, 1))
        for start in range(0, count, step):
            stop = min(start + step, count)
            values = self.numbers(self.parts["codes"][start:stop])
            if "offset" in self.parts:
                values.sub_(self._spread("offset", start, stop))
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
        if (unit := self.parts.get(f"{part}_unit")) is not None:
            units = unit[first : first + len(blocks)]
            blocks = blocks * units.repeat_interleave(blocks.shape[1] // units.shape[1], dim=1)
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
        if isinstance(self.parts, RowParts):
            taken = self.parts.take(rows)
            return attrs.evolve(self, shape=(len(taken.rows), self.shape[1]), parts=taken)
        block = self.meta["block_rows"]
        shared = len(self.parts["scale"]) == 1  # by all rows
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(self.shape[0])
            if not shared and (start % block or (stop % block and stop != self.shape[0])):
                return self.decode()[rows].clone()
            blocks: slice | torch.Tensor = slice(0, 1) if shared else slice(start // block, -(-stop // block))
            count = stop - start
        elif block > 1 and not shared:
            return self.decode()[rows]
        else:
            blocks, count = slice(0, 1) if shared else rows, len(rows)
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
    if isinstance(one.parts, RowParts):
        return one.format, one.shape, one.parts.block.name
    dtypes = tuple((name, part.dtype) for name, part in sorted(one.parts.items()))
    return (one.format, one.shape, dtypes, *sorted(one.meta.items()))
