"""Integer weights as compressed-tensors writes them: ``W = (q - zero_point) * scale``.

* ``pack-quantized``: ``X.weight_packed`` int32 ``[N, ceil(K * bits / 32)]``, lowest bits first, with ``2^(bits-1)``
  added to each value; ``X.weight_shape`` gives K. Zero points are packed the same way along the rows.
* ``int-quantized`` and ``naive-quantized``: ``X.weight`` is plain int8, and so are zero points.

``X.weight_scale`` is one value, ``[N]``, ``[N, 1]``, ``[N, K/g]``, or per block. ``X.weight_g_idx [K]`` gives the group
of each column if groups are not consecutive.
"""

from __future__ import annotations

import functools

import attrs
import torch

from specdec.checkpoints.gguf.blocks import BYTES
from specdec.checkpoints.quantised.coding import Coding, Format
from specdec.checkpoints.quantised.hints import Hints
from specdec.checkpoints.quantised.parts import FLOATS, Parts, only
from specdec.checkpoints.quantised.scales import (
    AGAIN,
    Grid,
    blocks,
    check_dtype,
    label,
    matrices,
    misfit,
    read,
    tiled,
    whole,
)
from specdec.checkpoints.quantised.stored import numbers

_INDEX = ("I32", "I64")
_BITS = (2, 4, 8)  # widths whose codes never cross a word


@attrs.frozen(kw_only=True, eq=False)
class IntCoding(Coding):
    """Signed integers, offsets and scales."""

    packed_offsets: bool

    @property
    def kept_as(self) -> str:
        return "int" if self.order() is None else ""

    def packed(self, index: int) -> dict[str, torch.Tensor]:
        parts = {"codes": self.matrix(self.parts.codes, index), "scale": self.of_matrix(self.scales(), index)}
        offsets = self.offsets()
        return parts if offsets is None else parts | {"offset": self.of_matrix(offsets, index)}

    def offsets(self) -> torch.Tensor | None:
        if "zero_point" not in self.parts.roles:
            return None
        stored = read(self.parts.checkpoint, self.parts.original("zero_point"))
        if self.packed_offsets:
            rows = self.shape[-2]
            turned = stored.transpose(-1, -2).contiguous()
            stored = numbers(turned, signed(self.bits), self.bits)[..., :rows].transpose(-1, -2)
        offsets: torch.Tensor = stored.to(torch.float32).reshape(self.grid.shape)
        low, high = -(2 ** (self.bits - 1)), 2**self.bits - 1  # range of signed or unsigned numbers
        if not bool(((offsets >= low) & (offsets <= high)).all()):  # also catches NaN
            raise self.parts.error(
                f"the tensor {self.parts.roles['zero_point']} holds values outside {low} to {high}, or NaN", try_=AGAIN
            )
        return offsets

    def order(self) -> torch.Tensor | None:
        if "g_idx" not in self.parts.roles:
            return None
        index = read(self.parts.checkpoint, self.parts.original("g_idx")).to(torch.int64)
        if bool((index == -1).all()):  # compressed-tensors' mark for consecutive groups
            return None
        groups = self.grid.shape[2]
        if bool(((index < 0) | (index >= groups)).any()):
            raise self.parts.error(f"the tensor {self.parts.roles['g_idx']} names groups outside 0 to {groups - 1}")
        return index


@functools.cache
def signed(bits: int) -> torch.Tensor:
    """What codes stand for that are stored plus ``2^(bits-1)``."""
    return torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1), dtype=torch.float32)


def _words(parts: Parts, hints: Hints) -> Coding:
    only(parts, "scale", "shape", "zero_point", "g_idx")
    shape = _stated_shape(parts)
    return _coding(parts, hints, shape, _bits(parts, shape[-1], hints), packed=True)


def _plain(parts: Parts, hints: Hints) -> Coding:
    only(parts, "scale", "zero_point", "g_idx")
    return _coding(parts, hints, parts.shape, 8, packed=False)


def _coding(parts: Parts, hints: Hints, shape: tuple[int, ...], bits: int, *, packed: bool) -> Coding:
    check_dtype(parts, "scale", FLOATS)
    if hints.asymmetric:
        parts.original("zero_point")  # raises without one
    grid = _grid(parts, hints, shape)
    size = label(grid, shape)
    if "g_idx" in parts.roles and (parts.shape_of("g_idx") != shape[-1:] or parts.dtype_of("g_idx") not in _INDEX):
        raise misfit(parts, "g_idx", f"int32 [{shape[-1]}], a group for every column")
    return IntCoding(
        parts=parts,
        label=f"int{bits}{'-block' if 'x' in size else ''} {size}",
        shape=shape,
        grid=grid,
        bits=bits,
        meanings=signed(bits) if packed else BYTES,
        packed_offsets=_packed_offsets(parts, shape, grid, bits if packed else 0),
    )


def _stated_shape(parts: Parts) -> tuple[int, ...]:
    """``weight_shape``, checked against the packed tensor."""
    name = parts.original("shape")
    if parts.dtype_of("shape") not in ("I64", "I32") or parts.shape_of("shape") != (len(parts.shape),):
        raise misfit(parts, "shape", f"{len(parts.shape)} integers")
    shape = tuple(int(size) for size in read(parts.checkpoint, name))
    if shape[:-1] != parts.shape[:-1] or shape[-1] < 1:
        raise parts.error(
            f"{name} says {list(shape)}, which does not fit {parts.codes} ({parts.dtype} {list(parts.shape)})"
        )
    return shape


def _bits(parts: Parts, columns: int, hints: Hints) -> int:
    """Bits per value, as the widths imply; the config decides between several."""
    words = parts.shape[-1]
    fitting = [bits for bits in _BITS if -(-columns * bits // 32) == words]
    declared = [bits for bits in fitting if bits in hints.bits]
    if len(declared) == 1 and len(fitting) > 1:
        return declared[0]
    if len(fitting) != 1 or (hints.bits and not declared):
        config = f"; config.json has num_bits {' or '.join(map(str, hints.bits))}" if hints.bits else ""
        implied = f"{' or '.join(map(str, fitting))} bits" if fitting else f"none of {', '.join(map(str, _BITS))} bits"
        raise parts.error(
            f"the tensor {parts.codes} has {words} words for {columns} columns: {implied} a value{config}"
        )
    return fitting[0]


def _grid(parts: Parts, hints: Hints, shape: tuple[int, ...]) -> Grid:
    given = parts.shape_of("scale")
    _, rows, columns = matrices(shape)
    grids = [tiled(shape, given, 1, size) for size in hints.groups]
    if hints.channels or not hints.groups:
        grids.append(whole(shape, given))
    grids += [tiled(shape, given, *size) for size in hints.blocks]
    if not hints.groups and len(given) == len(shape) and given[-1] and columns % given[-1] == 0:
        grids.append(tiled(shape, given, 1, columns // given[-1]))
    for grid in filter(None, grids):
        return grid
    if hints.groups:
        wanted = [*shape[:-2], *blocks(shape, 1, hints.groups[0])]
        raise misfit(parts, "scale", f"{wanted} for groups of {hints.groups[0]} columns of {list(shape)} (config.json)")
    raise misfit(parts, "scale", f"1, {rows}, or {rows} times a number of groups that divides {columns}")


def _packed_offsets(parts: Parts, shape: tuple[int, ...], grid: Grid, bits: int) -> bool:
    """Whether zero points are packed. Raises: CheckpointError if they fit the scales neither packed nor plain."""
    if "zero_point" not in parts.roles:
        return False
    given, scale = parts.shape_of("zero_point"), parts.shape_of("scale")
    words = -(-shape[-2] * bits // 32) if len(shape) > 1 else 0
    if bits and parts.dtype_of("zero_point") == "I32" and given == (*shape[:-2], words, grid.shape[2]):
        if grid.shape[1] != shape[-2]:
            raise misfit(parts, "zero_point", "no zero points along the rows: the scales have none either")
        return True
    if parts.dtype_of("zero_point") in ("I8", "U8", "I32", "I64", *FLOATS) and given == scale:
        return False
    raise misfit(
        parts,
        "zero_point",
        f"{list(scale)}, as {parts.original('scale')} has"
        if not bits
        else f"int32 {[*shape[:-2], words, grid.shape[2]]}, packed along the rows",
    )


PACKED = Format("packed int", lambda parts: parts.dtype == "I32" and parts.codes.endswith("_packed"), _words)
PLAIN = Format(
    "int8",
    lambda parts: parts.dtype == "I8" and parts.dtype_of("scale") in (*FLOATS, None) and len(parts.shape) > 0,
    _plain,
)
