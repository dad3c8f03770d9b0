"""Row-invariant products of a few rows with a matrix in MLX's affine format.

A weight is ``level * scale + bias``, with a scale and a bias for each group of 32, 64 or 128 columns of a row. A run is
the smallest number of levels that fills whole words: 8 of 4 bits in one word, 16 of 6 bits in three. A lane processes
every 32nd run of the packed row, in ascending order. The levels of a run share a group, so

    sum_j x_j (level_j scale + bias) = scale (sum_j x_j level_j) + bias (sum_j x_j)

costs two ``fma`` per run in addition to those of the levels. Then the lanes are summed in a fixed tree.
"""

from __future__ import annotations

import math

import mlx.core as mx

from specdec.backends.metal.kernels import matvec
from specdec.backends.metal.kernels.kernel import Executor, MslKernel
from specdec.backends.metal.kernels.lanes import OVER_LANES
from specdec.backends.metal.kernels.matvec import ADDING, FEATURES, FIRST, PLAIN, launched
from specdec.backends.metal.quantised import PackedMatrix

SETUP = (
    matvec.SETUP
    + """
  const int words = w_shape[1];
  const int groups = scales_shape[1];
"""
)

# Reads the variables of SETUP and first (feature); leaves sums[C][R] in every lane.
PRODUCTS = """
    float sums[C][R];
    size_t feature[C];
    size_t at_row[R];
    UNROLLED for (int c = 0; c < C; ++c) {
      feature[c] = matrix + min(first + c, features - 1);
      UNROLLED for (int r = 0; r < R; ++r) {
        sums[c][r] = 0.0f;
      }
    }
    UNROLLED for (int r = 0; r < R; ++r) {
      at_row[r] = size_t(min(first_row + r, rows - 1)) * length;
    }
    for (int run = lane; run * WORDS < words; run += 32) {
      const int at = run * LEVELS;
      float levels[C][LEVELS];
      float scale[C];
      float bias[C];
      UNROLLED for (int c = 0; c < C; ++c) {
        uint stored[WORDS];
        UNROLLED for (int i = 0; i < WORDS; ++i) {
          stored[i] = w[feature[c] * words + run * WORDS + i];
        }
        const size_t group = feature[c] * groups + at / GROUP;
        scale[c] = float(scales[group]);
        bias[c] = float(biases[group]);
        UNROLLED for (int i = 0; i < LEVELS; ++i) {
          const int word = BITS * i / 32;
          const int bit = BITS * i % 32;
          uint level = stored[word] >> uint(bit);
          if (bit + BITS > 32) {
            level |= stored[word + 1] << uint(32 - bit);
          }
          levels[c][i] = float(level & uint((1 << BITS) - 1));
        }
      }
      UNROLLED for (int r = 0; r < R; ++r) {
        float parts[C];
        UNROLLED for (int c = 0; c < C; ++c) {
          parts[c] = 0.0f;
        }
        float total = 0.0f;
        UNROLLED for (int i = 0; i < LEVELS; ++i) {
          const float value = float(x[at_row[r] + at + i]);
          total += value;
          UNROLLED for (int c = 0; c < C; ++c) {
            parts[c] = fma(value, levels[c][i], parts[c]);
          }
        }
        UNROLLED for (int c = 0; c < C; ++c) {
          sums[c][r] = fma(scale[c], parts[c], fma(bias[c], total, sums[c][r]));
        }
      }
    }
    UNROLLED for (int c = 0; c < C; ++c) {
      UNROLLED for (int r = 0; r < R; ++r) {
        sums[c][r] = over_lanes(sums[c][r]);
      }
    }
"""

QUANTISED_MATVEC = MslKernel(
    name="specdec_quantised_matvec",
    inputs=("x", "w", "scales", "biases"),
    outputs=("y",),
    source=SETUP + FIRST + PRODUCTS + PLAIN,
    header=OVER_LANES,
)
QUANTISED_MATVEC_ADD = MslKernel(
    name="specdec_quantised_matvec_add",
    inputs=("x", "w", "scales", "biases", "residual"),
    outputs=("y",),
    source=SETUP + FIRST + PRODUCTS + ADDING,
    header=OVER_LANES,
)


def layout(w: PackedMatrix) -> tuple[tuple[str, int], ...]:
    """Template arguments for a matrix or a stack."""
    shared = math.gcd(32, w.bits)
    levels = 32 // shared
    features = FEATURES if levels <= 8 else 32 // levels  # the levels of a lane stay in registers
    return ("C", features), ("BITS", w.bits), ("LEVELS", levels), ("WORDS", w.bits // shared), ("GROUP", w.group)


def quantised_matvec(
    x: mx.array, w: PackedMatrix, residual: mx.array | None = None, *, dtype: mx.Dtype, executor: Executor | None = None
) -> mx.array:
    """``matvec`` with a quantised matrix: ``x @ w.T``, plus ``residual``, ``[T, N]`` in ``dtype``. Lazy."""
    if executor is None:
        return quantised_matvec_reference(x, w, residual, dtype=dtype)
    return launched(
        executor, QUANTISED_MATVEC, QUANTISED_MATVEC_ADD, [x, *w.parts()], residual, w.codes.shape[0], dtype, layout(w)
    )


def quantised_matvec_reference(
    x: mx.array, w: PackedMatrix, residual: mx.array | None = None, *, dtype: mx.Dtype
) -> mx.array:
    """``quantised_matvec`` in MLX operations, in float32, since MLX's CPU device would sum in a narrower dtype."""
    scales, biases = w.scales.astype(mx.float32), w.biases.astype(mx.float32)
    y = mx.quantized_matmul(
        x.astype(mx.float32), w.codes, scales, biases, transpose=True, group_size=w.group, bits=w.bits
    )
    return (y if residual is None else y + residual.astype(mx.float32)).astype(dtype)
