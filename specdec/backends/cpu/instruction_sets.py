"""The instruction sets that the CPU kernels are compiled for, and which of them this processor has.

The build of the package reads this file alone (``hatch_build.py``), so it imports the standard library only.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from typing import NamedTuple


class InstructionSet(NamedTuple):
    """What a library of kernels may use.

    Attributes:
        name: as in ``target.instruction_set``.
        flags: of GCC and Clang.
        needs: what the processor must have, in the words of ``torch.cpu.get_capabilities``.
        packaged: whether wheels carry its library; any other is compiled on first use.
    """

    name: str
    flags: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()
    packaged: bool = True


_AVX2 = InstructionSet(
    "avx2", ("-march=x86-64-v3",), frozenset({"avx2", "fma3", "f16c", "bmi", "bmi2", "lzcnt", "popcnt"})
)
_AVX_VNNI = InstructionSet(  # Alder Lake, and later processors without AVX-512
    "avx-vnni", (*_AVX2.flags, "-mavxvnni"), _AVX2.needs | {"avx_vnni"}
)
_AVX512 = InstructionSet(
    "avx512", ("-march=x86-64-v4",), _AVX2.needs | {"avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl"}
)
_AVX512_BF16 = InstructionSet(  # Zen 4; Cooper Lake, which has no VBMI, takes avx512
    "avx512-bf16",
    (*_AVX512.flags, "-mavx512vnni", "-mavx512bf16", "-mavx512vbmi"),
    _AVX512.needs | {"avx512_vnni", "avx512_bf16", "avx512_vbmi"},
)
_AMX = InstructionSet(  # Sapphire Rapids
    "amx",
    (*_AVX512_BF16.flags, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    _AVX512_BF16.needs | {"amx_tile", "amx_bf16", "amx_int8"},
)
_NEON = InstructionSet("neon", ("-march=armv8-a",))
_NEON_DOTPROD = InstructionSet(  # Apple M1, Neoverse N1
    "neon-dotprod", ("-march=armv8.2-a+fp16+dotprod",), frozenset({"fp16_arith", "dot"})
)
_NEON_BF16 = InstructionSet(  # Apple M2, Neoverse V1 and N2
    "neon-bf16", ("-march=armv8.2-a+fp16+dotprod+bf16+i8mm",), _NEON_DOTPROD.needs | {"bf16", "i8mm"}
)
_BASELINE = InstructionSet("baseline", packaged=False)  # what the compiler takes by itself: SSE2 on x86-64

OF_ARCHITECTURE = {
    "x86_64": (_AMX, _AVX512_BF16, _AVX512, _AVX_VNNI, _AVX2, _BASELINE),
    "aarch64": (_NEON_BF16, _NEON_DOTPROD, _NEON),
}
"""Widest first."""

NAMES = tuple(dict.fromkeys(one.name for sets in (*OF_ARCHITECTURE.values(), (_BASELINE,)) for one in sets))


def of_this_architecture() -> tuple[InstructionSet, ...]:
    """The instruction sets of processors of this kind, widest first."""
    machine = platform.machine().lower()
    return OF_ARCHITECTURE.get({"arm64": "aarch64", "amd64": "x86_64"}.get(machine, machine), (_BASELINE,))


@functools.cache
def available() -> tuple[InstructionSet, ...]:
    """The instruction sets that this processor and its system can run, widest first."""
    import torch

    has = {name for name, value in torch.cpu.get_capabilities().items() if value is True}
    return tuple(one for one in of_this_architecture() if one.needs <= has and _granted(one))


def _granted(one: InstructionSet) -> bool:
    """Ask Linux for what it grants on request: the tiles of AMX (arch_prctl(2), ARCH_REQ_XCOMP_PERM)."""
    if "amx_tile" not in one.needs or sys.platform != "linux":
        return True
    arch_prctl, request, tiles = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request, tiles) == 0)
