"""Repack quantised weights for the CPU kernels: every file format becomes one layout (``kernels/packed.h``).

A weight is ``(value(code) + centre + inner) * scale * factor + outer``. Codes of up to four bits index 16 values. Codes
of five and six bits that count up keep their width. Others become a sign bit and one of 128 magnitudes: integers,
integers plus one half, or those of e4m3. Scales and offsets keep the narrowest dtype that holds them.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Set
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from specdec.backends.cpu.arrays import CPU
from specdec.backends.cpu.tape import Kernel
from specdec.checkpoints.quantised.stored import RowParts

if TYPE_CHECKING:
    from specdec.backends.cpu.library import Kernels
    from specdec.backends.cpu.threads import Threads
    from specdec.checkpoints.quantised import StoredMatrix

FORMATS = frozenset({"fp8-block", "fp8", "nvfp4", "mxfp4", "mlx-affine", "int", "gguf"})
# By target.activations: formats whose products take activations in int8. "auto": as those who made the format do.
INT8 = {"float": frozenset[str](), "auto": frozenset({"gguf"}), "int8": FORMATS}
HEADER, MAX_GROUP, COLUMNS = 512, 128, 8  # kernels/packed.h; columns of a word, of which groups and rows are multiples
_INNER, _OUTER = 1, 2
_NIBBLES, _INTEGERS, _HALVES, _E4M3, _FIVES, _SIXES = range(6)
_SPLIT = {32: (_FIVES, 32), 64: (_SIXES, 16)}  # by number of values: the kind, and its columns per step
_SIDES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
_MAGNITUDES = {
    _INTEGERS: torch.arange(128, dtype=torch.float32),
    _HALVES: torch.arange(128, dtype=torch.float32) + 0.5,
    _E4M3: torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32),
}


class Header(ctypes.Structure):
    """``Packed`` of kernels/packed.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("n", "k", "group", "kind", "sides", "shift", "offsets", "int8")),
        ("factor", ctypes.c_float),
        ("centre", ctypes.c_float),
        ("values", ctypes.c_uint16 * 128),
        ("unit", ctypes.c_float),
        ("zero", ctypes.c_int32),
        ("linear", ctypes.c_int32),
        ("numbers", ctypes.c_uint8 * 16),
    )


@attrs.frozen
class _Codes:
    """How codes are translated: their kind, its 16 values or 128 magnitudes, and the internal code of each.

    A value less ``centre`` is ``(2 * number - zero) * unit``. The number is the code, or that of ``numbers``.
    """

    kind: int
    values: Tensor
    internal: Tensor  # uint8 [256]
    centre: float = 0.0
    unit: float = 0.5  # 0 of e4m3
    zero: int = 256
    numbers: tuple[int, ...] = ()


def takes_int8(matrix: StoredMatrix) -> bool:
    """Whether a product with this matrix can take activations in int8: its codes are evenly spaced."""
    return not matrix.format.startswith("fp8") and matrix.shape[1] % COLUMNS == 0


class Packer:
    """The functions of kernels/packed.cpp. A packed matrix is one uint8 tensor: a header and its panels.

    ``int8``: formats whose products take activations in int8, if their codes are integers.
    """

    def __init__(self, kernels: Kernels, threads: Threads, *, int8: Set[str] = frozenset()) -> None:
        self._int8 = int8
        self._bytes = kernels.function("packed_bytes", "p", ctypes.c_int64)
        self._pack_codes = Kernel(kernels, "pack_codes", "ppiipppppiiipi", threads=threads)
        self._pack_blocks = Kernel(kernels, "pack_blocks", "ppiippi", threads=threads)
        self._is_file = kernels.function("is_file", "pi", ctypes.c_int64)
        self._holds_byte = Kernel(kernels, "holds_byte", "piiii", threads=threads, result=ctypes.c_int64)
        self._pack_rows = Kernel(kernels, "pack_rows", "ppp", threads=threads)

    def pack(self, matrix: StoredMatrix) -> Tensor | None:
        """Repack a matrix; None if its sizes or values do not fit the layout."""
        rows, columns = matrix.shape
        width = matrix.meta["block_columns"]
        group = _group(min(width, columns) if width >= columns else width)
        if not rows or not columns or columns % COLUMNS or group is None:
            return None
        if isinstance(matrix.parts, RowParts):
            return self._packed_blocks(matrix, matrix.parts)
        codes = matrix.parts["codes"]
        translated = _translated(self._used(matrix.values, codes), group)
        if translated is None:
            return None
        scale, unit = matrix.parts["scale"], matrix.parts.get("scale_unit")
        offset, offset_unit, mode = matrix.parts.get("bias"), matrix.parts.get("bias_unit"), _OUTER
        if offset is None and "offset" in matrix.parts:
            offset, mode = -matrix.parts["offset"], _INNER
        elif "offset" in matrix.parts:
            return None
        sides = _sides([part for part in (scale, offset) if part is not None])
        scale, offset = scale.to(sides).contiguous(), None if offset is None else offset.to(sides).contiguous()
        factor = matrix.parts.get("global_scale")
        header = self._header(matrix, translated, group, sides)
        if unit is not None:
            header.shift = (scale.shape[1] // unit.shape[1]).bit_length() - 1
        if offset is not None:
            header.offsets = mode
        if factor is not None:
            header.factor = float(factor)
        packed = self._empty(header)
        self._pack_codes(
            ctypes.addressof(header),
            codes.data_ptr(),
            codes.stride(0) * codes.element_size(),
            matrix.meta["bits"],
            translated.internal.data_ptr(),
            *(0 if part is None else part.data_ptr() for part in (scale, offset, unit, offset_unit)),
            matrix.meta["block_rows"],
            width,
            scale.shape[1],
            packed.data_ptr(),
            self._in_file(codes),
        )
        return packed

    def _packed_blocks(self, matrix: StoredMatrix, parts: RowParts) -> Tensor | None:
        """Repack blocks as their file stores them, into what their parts would give."""
        block, rows = parts.block, parts.rows
        blocks, sides = rows.view(-1, block.bytes), torch.int8
        if block.values == block.group:
            sides = torch.float16 if block.floats else torch.bfloat16  # a power of two
        translated = _translated(self._used(matrix.values, blocks[:, 2:]), block.group)
        if translated is None:
            return None
        header = self._header(matrix, translated, block.group, sides)
        header.shift = (block.values // block.group).bit_length() - 1
        header.offsets = _OUTER if len(block.floats) > 1 else 0
        packed = self._empty(header)
        self._pack_blocks(
            ctypes.addressof(header),
            rows.data_ptr(),
            rows.stride(0),
            block.type,
            translated.internal.data_ptr(),
            packed.data_ptr(),
            self._in_file(rows),
        )
        return packed

    def _header(self, matrix: StoredMatrix, translated: _Codes, group: int, sides: torch.dtype) -> Header:
        header = Header(
            n=matrix.shape[0],
            k=matrix.shape[1],
            group=group,
            kind=translated.kind,
            sides=_SIDES.index(sides),
            int8=matrix.format in self._int8,
            factor=1.0,
            centre=translated.centre,
            unit=translated.unit,
            zero=translated.zero,
            linear=translated.numbers == tuple(range(len(translated.numbers))),
        )
        header.numbers[: len(translated.numbers)] = translated.numbers
        narrow = translated.values.to(torch.bfloat16).view(torch.uint16).tolist()
        header.values[: len(narrow)] = narrow
        return header

    def _used(self, values: Tensor, codes: Tensor) -> Tensor:
        """The values of the codes. Without -128, which symmetric quantisers avoid, int8 needs no offset."""
        at, stored = int(values.argmin()), codes.view(torch.uint8)
        if values[at] != -128 or self._holds_byte(stored.data_ptr(), *stored.shape, stored.stride(0), at):
            return values
        values = values.clone()
        values[at] = -127
        return values

    def _in_file(self, stored: Tensor) -> bool:
        """Whether its pages can be released, so that the weights are resident once."""
        return stored.is_contiguous() and bool(self._is_file(stored.data_ptr(), stored.nbytes))

    def rows(self, packed: Tensor, ids: Tensor) -> Tensor:
        """A packed matrix of some rows of another; ``ids`` int32 ``[n]``."""
        header = Header.from_buffer_copy(packed[:HEADER].numpy().tobytes())
        header.n = len(ids)
        found = self._empty(header)
        ctypes.memmove(found.data_ptr(), ctypes.addressof(header), ctypes.sizeof(header))
        self._pack_rows(packed.data_ptr(), ids.data_ptr(), found.data_ptr())
        return found

    def _empty(self, header: Header) -> Tensor:
        size = self._bytes(ctypes.addressof(header))
        whole = torch.empty(size + 63, dtype=torch.uint8, device=CPU)
        return whole[-whole.data_ptr() % 64 :][:size]  # panels are whole cache lines


def _group(width: int) -> int | None:
    """The widest group of whole words that divides a block of columns; None if there is none."""
    return next((size for size in range(MAX_GROUP, 0, -COLUMNS) if width % size == 0), None)


def _sides(parts: list[Tensor]) -> torch.dtype:
    """The narrowest dtype that holds all values; int8 if they are."""
    if all(part.dtype is torch.int8 for part in parts):
        return torch.int8
    return next(
        (dtype for dtype in (torch.bfloat16, torch.float16) if all(_fits(part, dtype) for part in parts)), torch.float32
    )


def _fits(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether all values are finite numbers of this dtype."""
    narrow = values.to(dtype).to(torch.float32)
    return bool(((narrow == values.to(torch.float32)) & narrow.isfinite()).all())


def _translated(values: Tensor, group: int) -> _Codes | None:
    """How codes with these values ``[2 ** bits]`` are kept; None for values that the kernels cannot express."""
    internal = torch.zeros(256, dtype=torch.uint8)
    if len(values) <= 16:
        values, order = values.sort(stable=True)  # two's complement becomes a code that counts up
        internal[order] = torch.arange(len(values), dtype=torch.uint8)
        found = _numbers(values)
        return None if found is None else _Codes(_NIBBLES, values, internal, 0.0, *found)
    kind, step = _SPLIT.get(len(values), (None, 1))
    if kind is not None and group % step == 0 and bool((values == values[0].round() + torch.arange(len(values))).all()):
        internal[: len(values)] = torch.arange(len(values), dtype=torch.uint8)
        return _Codes(kind, values, internal, zero=-2 * int(values[0]))
    finite = values[values.isfinite()]  # a checkpoint with NaN codes is refused before
    middle = float(finite.max() + finite.min()) / 2
    for kind, centre, unit, zero in ((_INTEGERS, 0.0, 0.5, 256), (_E4M3, 0.0, 0.0, 0), (_HALVES, middle, 0.5, 255)):
        magnitudes = _MAGNITUDES[kind].nan_to_num(torch.inf)
        centred = (values - centre).nan_to_num(0.0)
        at = torch.searchsorted(magnitudes, centred.abs()).clamp_(max=127)
        if bool((magnitudes[at] == centred.abs()).all()):
            internal[: len(values)] = (at | (centred.signbit().to(torch.int64) << 7)).to(torch.uint8)
            return _Codes(kind, _MAGNITUDES[kind].nan_to_num(0.0), internal, centre, unit, zero)
    return None


def _numbers(ascending: Tensor) -> tuple[float, int, tuple[int, ...]] | None:
    """Values as ``(2 * number - zero) * unit``: the unit, a power of two, zero, and the numbers, from 0 to 255.

    None if there is no such unit.
    """
    low, high = min(float(ascending[0]), 0.0), max(float(ascending[-1]), 0.0)

    def whole(step: float) -> bool:
        return bool(((ascending / step).round() * step == ascending).all())

    step = 2.0 ** math.ceil(math.log2((high - low) / 255)) if low < high < math.inf else 0.0
    if not step or not whole(step):
        return None
    while whole(2 * step):
        step *= 2
    return step / 2, int(-2 * low / step), tuple(((ascending - low) / step).int().tolist())
