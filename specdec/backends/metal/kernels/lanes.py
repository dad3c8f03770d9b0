"""Code shared by the Metal kernels: a sum over the 32 lanes of a simdgroup in a fixed order.

The order is explicit, because ``simd_sum`` guarantees none. Floating-point addition commutes, so every lane ends with
the same bits.
"""

from __future__ import annotations

LANES = 32  # threads of a simdgroup on every Apple GPU
MAX_ROWS = 8  # rows that one simdgroup computes together

# UNROLLED precedes loops whose bounds are template arguments, so that their arrays are kept in registers
OVER_LANES = """
#define UNROLLED _Pragma("clang loop unroll(full)")

inline float over_lanes(float part) {
  part += simd_shuffle_xor(part, 16);
  part += simd_shuffle_xor(part, 8);
  part += simd_shuffle_xor(part, 4);
  part += simd_shuffle_xor(part, 2);
  part += simd_shuffle_xor(part, 1);
  return part;
}
"""


def groups(items: int, at_most: int = 4) -> int:
    """The number of simdgroups per threadgroup: the largest power of two that divides ``items``, up to ``at_most``."""
    size = 1
    while size < at_most and items % (2 * size) == 0:
        size *= 2
    return size


def whole(items: int, size: int) -> int:
    """``items`` rounded up to a multiple of ``size``."""
    return -(-items // size) * size


def tiles(rows: int) -> tuple[int, int]:
    """Divide rows into equal tiles of R <= MAX_ROWS; the last may have fewer. Returns ``(R, tiles)``."""
    count = -(-rows // MAX_ROWS)
    return -(-rows // count), count
