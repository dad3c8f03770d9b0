"""The block formats of GGUF: how each stores its values, and how they become codes with scales.

Every format is ``value = number(code) * scale + bias``, one scale per group of columns. Both are products of at most 24
significant bits, so they are exact in float32, and so is ``number * scale``; only adding a bias rounds.

Source: the block structures of ggml (``ggml-common.h``) and their ``dequantize_row_*`` functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import attrs
import torch
from torch import Tensor

Parts = dict[str, Tensor]
"""Blocks in the form that packed kernels take, by name:

* codes: uint8 ``[n, V]``, or ``[n, V / 2]`` with two codes of four bits per byte, the even column low;
* scale, and perhaps bias: ``[n, V / group]``, float32, or int8 if there is a unit;
* scale_unit, bias_unit: float32 ``[n, 1]``, what a scale or bias of 1 stands for.
"""


def _whole(raw: Tensor) -> Parts:
    raise AssertionError("plain numbers have no parts")


@attrs.frozen
class Block:
    """A format.

    Attributes:
        name: as ggml spells it.
        values: values per block.
        bytes: bytes per block.
        group: columns per scale; 0 for plain numbers.
        numbers: what each code stands for: float32 ``[2 ** bits]``.
        unpack: turns blocks, uint8 ``[n, bytes]``, into codes and scales.
    """

    name: str
    values: int
    bytes: int
    group: int = 0
    numbers: Tensor = attrs.field(default=torch.empty(0), eq=False, repr=False)
    unpack: Callable[[Tensor], Parts] = attrs.field(default=_whole, eq=False, repr=False)
    floats: tuple[int, ...] = (0,)  # where its float16 numbers are

    @property
    def type(self) -> int:
        """ggml's number of the format."""
        return next(number for number, block in BLOCKS.items() if block is self)

    @property
    def bits(self) -> int:
        """Bits per code as unpacked: 4 or 8."""
        return 4 if len(self.numbers) == 16 else 8


def whole_numbers(bits: int) -> Tensor:
    """What codes that are numbers stand for."""
    return torch.arange(2**bits, dtype=torch.float32)


def _f16(raw: Tensor) -> Tensor:
    """float16 numbers, as float32 ``[n, bytes / 2]``."""
    return raw.contiguous().view(torch.float16).to(torch.float32)


def _pairs(codes: Tensor) -> Tensor:
    """Codes of four bits ``[n, V]`` as bytes ``[n, V / 2]``."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def _halves(raw: Tensor, width: int) -> Tensor:
    """``[n, B]`` bytes whose low nibbles are the first half of every ``width`` codes, uint8 ``[n, 2 B]``."""
    groups = raw.reshape(len(raw), -1, width // 2)
    codes = torch.empty(*groups.shape[:2], 2, width // 2, dtype=torch.uint8)
    torch.bitwise_and(groups, 15, out=codes[:, :, 0])
    torch.bitwise_right_shift(groups, 4, out=codes[:, :, 1])
    return codes.view(len(raw), -1)


def _fifth_bits(raw: Tensor) -> Tensor:
    """Bit i of four bytes as 0 or 16: uint8 ``[n, 32]``."""
    return _FIFTHS.index_select(0, raw.int().view(-1)).view(torch.uint8).view(len(raw), -1)


def _two_bits(raw: Tensor) -> Tensor:
    """Byte 32 h + i, bits 2 k and 2 k + 1, are element 128 h + 32 k + i: uint8 ``[n, 4 B]``."""
    groups = raw.reshape(len(raw), -1, 1, 32) >> 2 * torch.arange(4, dtype=torch.uint8).view(4, 1) & 3
    return groups.view(len(raw), -1)


def _of_units(codes: Tensor, scale: Tensor, scale_unit: Tensor) -> Parts:
    """With small scales, int8 as bytes: bytes wrap around, which is two's complement."""
    return {"codes": codes, "scale": scale.contiguous().view(torch.int8), "scale_unit": scale_unit}


def _of_two_units(codes: Tensor, scale: Tensor, bias: Tensor, units: Tensor) -> Parts:
    """With small scales and biases; a bias is what is subtracted."""
    parts = _of_units(codes, scale, units[:, :1])
    return parts | {"bias": bias.contiguous().view(torch.int8), "bias_unit": -units[:, 1:]}


def _q8_0(raw: Tensor) -> Parts:
    return {"codes": raw[:, 2:], "scale": _f16(raw[:, :2])}


def _of_32(bits: int, *floats: str) -> Callable[[Tensor], Parts]:
    """Unpacks 32 codes of four or five bits behind a scale, and perhaps a bias, in float16."""
    at, rest = 2 * len(floats), 2 * len(floats) + 4 * (bits == 5)

    def unpack(raw: Tensor) -> Parts:
        codes = _halves(raw[:, rest:], 32)
        codes = codes | _fifth_bits(raw[:, at:rest]) if bits == 5 else _pairs(codes)
        return {"codes": codes, **dict(zip(floats, torch.split(_f16(raw[:, :at]), 1, 1), strict=True))}

    return unpack


def _q2_k(raw: Tensor) -> Parts:
    small = raw[:, :16]
    return _of_two_units(_pairs(_two_bits(raw[:, 16:80])), small & 15, small >> 4, _f16(raw[:, 80:84]))


def _q3_k(raw: Tensor) -> Parts:
    shifts = torch.arange(8, dtype=torch.uint8).view(8, 1)
    high = (raw[:, None, :32] >> shifts & 1).view(len(raw), 256)
    codes = _two_bits(raw[:, 32:96]) | (high << 2)  # as numbers, minus 4
    low, upper = _halves(raw[:, 96:104], 16), raw[:, 104:108]
    upper = (upper[:, None] >> 2 * torch.arange(4, dtype=torch.uint8).view(4, 1) & 3).view(len(raw), 16)
    return _of_units(_pairs(codes), (low | (upper << 4)) - 32, _f16(raw[:, 108:110]))


def _with_k_scales(codes: Tensor, raw: Tensor) -> Parts:
    """With d and dmin, then eight scales and eight minima of six bits in twelve bytes."""
    small = raw[:, 4:16]
    first, second, third = small[:, :4], small[:, 4:8], small[:, 8:]
    scale = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], 1)
    minimum = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], 1)
    return _of_two_units(codes, scale, minimum, _f16(raw[:, :4]))


def _q4_k(raw: Tensor) -> Parts:
    return _with_k_scales(_pairs(_halves(raw[:, 16:], 64)), raw)


def _q5_k(raw: Tensor) -> Parts:
    fifth = raw[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8).view(8, 1) & 1
    return _with_k_scales(_halves(raw[:, 48:], 64) | (fifth.view(len(raw), 256) << 4), raw)


def _q6_k(raw: Tensor) -> Parts:
    low = raw[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat([low & 15, low >> 4], 2).view(-1, 256)
    codes = low | (_two_bits(raw[:, 128:192]) << 4)
    return _of_units(codes, raw[:, 192:208], _f16(raw[:, 208:]))


def _iq4_xs(raw: Tensor) -> Parts:
    upper = raw[:, 2:4, None] >> 2 * torch.arange(4, dtype=torch.uint8) & 3  # two bits per group
    lower = torch.stack([raw[:, 4:8] & 15, raw[:, 4:8] >> 4], 2).view(-1, 8)
    return _of_units(_pairs(_halves(raw[:, 8:], 32)), (lower | (upper.view(-1, 8) << 4)) - 32, _f16(raw[:, :2]))


def _mxfp4(raw: Tensor) -> Parts:
    return {"codes": _pairs(_halves(raw[:, 1:], 32)), "scale": E8M0[raw[:, :1].int()]}


_FIFTHS = ((torch.arange(256)[:, None] >> torch.arange(8) & 1) << 4).to(torch.uint8).view(torch.int64).view(-1)
BYTES = torch.arange(256, dtype=torch.uint8).view(torch.int8).to(torch.float32)  # two's complement
_IQ4 = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float32)
# OCP Microscaling Formats v1.0, section 5.4.1: 255 is NaN; 0 is 2^-127, a float32 subnormal.
E8M0 = torch.tensor([math.ldexp(1.0, code - 127) for code in range(255)] + [math.nan], dtype=torch.float32)

BLOCKS: Mapping[int, Block] = {
    0: Block("F32", 1, 4),
    1: Block("F16", 1, 2),
    2: Block("Q4_0", 32, 18, 32, whole_numbers(4) - 8, _of_32(4, "scale")),
    3: Block("Q4_1", 32, 20, 32, whole_numbers(4), _of_32(4, "scale", "bias"), (0, 2)),
    6: Block("Q5_0", 32, 22, 32, whole_numbers(5) - 16, _of_32(5, "scale")),
    7: Block("Q5_1", 32, 24, 32, whole_numbers(5), _of_32(5, "scale", "bias"), (0, 2)),
    8: Block("Q8_0", 32, 34, 32, BYTES, _q8_0),
    10: Block("Q2_K", 256, 84, 16, whole_numbers(4), _q2_k, (80, 82)),
    11: Block("Q3_K", 256, 110, 16, whole_numbers(4) - 4, _q3_k, (108,)),
    12: Block("Q4_K", 256, 144, 32, whole_numbers(4), _q4_k, (0, 2)),
    13: Block("Q5_K", 256, 176, 32, whole_numbers(5), _q5_k, (0, 2)),
    14: Block("Q6_K", 256, 210, 16, whole_numbers(6) - 32, _q6_k, (208,)),
    20: Block("IQ4_NL", 32, 18, 32, _IQ4, _of_32(4, "scale")),
    23: Block("IQ4_XS", 256, 136, 32, _IQ4, _iq4_xs),
    30: Block("BF16", 1, 2),
    39: Block("MXFP4", 32, 17, 32, E2M1, _mxfp4, ()),
    # whole numbers, of which no weight is made
    24: Block("I8", 1, 1),
    25: Block("I16", 1, 2),
    26: Block("I32", 1, 4),
    27: Block("I64", 1, 8),
    28: Block("F64", 1, 8),
}
BY_NAME: Mapping[str, Block] = {block.name: block for block in BLOCKS.values()}
