"""A quantised matrix as stored, for backends that compute with packed weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import torch

if TYPE_CHECKING:
    from specdec.checkpoints.gguf.blocks import Block

_SLAB = 2**20  # values decoded per step: 4 MB of float32, which fits the CPU cache


def row_slabs(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows, one per decoding step."""
    step = max(1, _SLAB // max(columns, 1))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def numbers(codes: torch.Tensor, values: torch.Tensor, bits: int) -> torch.Tensor:
    """The number of each code: float32 ``[..., n]`` of rows of bits ``[..., W]``, lowest bits first, in any dtype.

    ``values``: what each code stands for. Looking bytes up is ten times as fast as torch's conversion of e4m3.
    """
    shape = (*codes.shape[:-1], codes.shape[-1] * codes.itemsize * 8 // bits)
    octets = codes.reshape(-1).view(torch.uint8)
    if bits == 8:
        return values.index_select(0, octets.int()).view(shape)
    if 8 % bits:  # eight codes fill `bits` bytes
        stream = (octets.view(-1, bits).to(torch.int64) << 8 * torch.arange(bits)).sum(-1, keepdim=True)
        return values[stream >> bits * torch.arange(8) & (2**bits - 1)].view(shape)
    table = values[torch.arange(256).unsqueeze(1) >> torch.arange(0, 8, bits) & (2**bits - 1)]  # of each byte's codes
    if bits == 4:  # copy both values as one word; torch would copy them one by one
        table = table.view(torch.int64).view(-1)
    return table.index_select(0, octets.int()).view(torch.float32).view(shape)


def decoded(
    codes: torch.Tensor,
    values: torch.Tensor,
    bits: int,
    columns: int,
    grids: Mapping[str, torch.Tensor],
    width: int,
    order: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows ``(code - offset) * scale + bias``, float32 ``[R, columns]``.

    Args:
        codes, values, bits: as for ``numbers``.
        grids: "offset", "scale" and "bias", as far as there are any: float32 ``[R, B]``, each for ``width`` columns.
        order: the entry of every column, int64 ``[columns]``, if not consecutive.
    """
    out = numbers(codes, values, bits)[:, :columns]
    whole = columns // width
    edge = whole * width
    for part, apply in (("offset", torch.Tensor.sub_), ("scale", torch.Tensor.mul_), ("bias", torch.Tensor.add_)):
        if (grid := grids.get(part)) is None:
            continue
        if order is not None or grid.shape[1] == 1:
            apply(out, grid if order is None else grid[:, order])
            continue
        apply(out[:, :edge].view(len(out), whole, width), grid[:, :whole, None])  # a view, also of a part of each row
        if edge < columns:
            apply(out[:, edge:], grid[:, whole:])
    return out


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
    files store a divisor per tensor (compressed-tensors' NVFP4), that is the part ``divisor``, and ``global_scale``
    its reciprocal rounded to float32; ``decode`` divides.

    "gguf" has codes of 4 or 8 bits, and scales and biases in float32 or int8. In int8 they are multiples of
    ``scale_unit`` and ``bias_unit``, float32 ``[N, K / 256]``.

    "fp8-block" has blocks of several rows; "fp8" one scale per matrix, row, or group of columns. A row of codes is a
    stream of bits in every format, and ``values`` gives the number that each code stands for.

    Attributes:
        format: one of those in the table.
        shape: shape of the decoded matrix, ``(N, K)``.
        parts: the parts in the table. Codes, and scales except float32 ones, are views of the memory map. Of "gguf":
            ``RowParts``.
        meta: "block_rows", "block_columns" (that share a scale) and "bits" (per code).
        dtype: dtype that ``decode`` returns.
        values: float32 ``[2 ** bits]``.
        on_decode: called by ``decode``, for the record of what is not kept packed.
    """

    format: str
    shape: tuple[int, int]
    parts: Mapping[str, torch.Tensor]
    meta: Mapping[str, int]
    dtype: torch.dtype
    values: torch.Tensor = attrs.field(repr=False)
    on_decode: Callable[[], None] | None = attrs.field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())

    def decode(self) -> torch.Tensor:
        """The matrix in ``dtype``, bit-identical to what ``Weights`` returns."""
        if self.on_decode is not None:
            self.on_decode()
        out = torch.empty(self.shape, dtype=self.dtype)
        for start, stop in row_slabs(*self.shape):
            out[start:stop] = self.floats(start, stop)
        return out

    def floats(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop``, float32 ``[R, K]``."""
        grids = {name: self._rows(name, start, stop) for name in ("offset", "scale", "bias") if name in self.parts}
        codes, width = self.parts["codes"][start:stop], self.meta["block_columns"]
        return decoded(codes, self.values, self.meta["bits"], self.shape[1], grids, width)

    def _rows(self, part: str, start: int, stop: int) -> torch.Tensor:
        """The entries of rows start to stop, float32 ``[R, B]``."""
        rows = torch.arange(start, stop) // self.meta["block_rows"]
        first = int(rows[0])
        blocks = self.parts[part][first : int(rows[-1]) + 1].to(torch.float32)
        if (unit := self.parts.get(f"{part}_unit")) is not None:
            units = unit[first : first + len(blocks)]
            blocks = blocks * units.repeat_interleave(blocks.shape[1] // units.shape[1], dim=1)
        if part == "scale" and "divisor" in self.parts:
            blocks = blocks / self.parts["divisor"]
        elif part == "scale" and "global_scale" in self.parts:
            blocks = blocks * self.parts["global_scale"]
        return blocks[rows - first]

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
            name: part if name in ("global_scale", "divisor") else _taken(part, rows if name == "codes" else blocks)
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
