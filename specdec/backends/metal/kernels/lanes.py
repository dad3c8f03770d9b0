"""What all kernel texts share: a sum over the 32 lanes of a simdgroup in one fixed order.

The order is written out, because ``simd_sum`` promises none. Floating addition commutes, so every lane ends with the
same bits.
"""

from __future__ import annotations

LANES = 32  # threads of a simdgroup on every Apple GPU
MAX_ROWS = 8  # rows that one launch computes side by side

# UNROLLED stands before loops whose bounds are template arguments: their arrays then lie in registers
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
    """How many simdgroups share a threadgroup: the largest power of two that divides ``items``, up to ``at_most``."""
    size = 1
    while size < at_most and items % (2 * size) == 0:
        size *= 2
    return size


def whole(items: int, size: int) -> int:
    """``items`` rounded up to a multiple of ``size``."""
    return -(-items // size) * size


def tiles(rows: int) -> tuple[int, int]:
    """``(R, tiles)``: rows in equal tiles of R <= MAX_ROWS; the last one may hold fewer."""
    count = -(-rows // MAX_ROWS)
    return -(-rows // count), count
