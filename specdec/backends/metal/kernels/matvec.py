"""Row-invariant products of a few rows with a matrix, dense or in MLX's affine format, or with selected matrices.

A simdgroup computes C features of R rows, in an accumulator per feature and row; then its lanes are summed in a fixed
tree. The order of every sum is independent of R and C.

Dense: lane i sums the columns 4 i to 4 i + 3 of every 128, in ascending order with one ``fma`` each.

Packed: a weight is ``level * scale + bias``, with a scale and a bias for each group of 32, 64 or 128 columns of a row.
A run is the smallest number of levels that fills whole words: 8 of 4 bits in one word, 16 of 6 bits in three. A lane
processes every 32nd run of the packed row, in ascending order. The levels of a run share a group, so

    sum_j x_j (level_j scale + bias) = scale (sum_j x_j level_j) + bias (sum_j x_j)

costs two ``fma`` per run in addition to those of the levels.

Selected matrices are experts of a router, or one matrix per head. Every row and slot is computed like a single row,
with the same sums and so the same bits. Rows that use the same matrix each read it, through the cache.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

from specdec.backends.metal.kernels.kernel import Executor, MslKernel
from specdec.backends.metal.kernels.lanes import LANES, tiles, whole
from specdec.backends.metal.quantised import Matrix, PackedMatrix

FEATURES = 4  # C; not tuned, as no Mac was available
_SIMDGROUPS = 4  # of a threadgroup; likewise

# Every kernel reads lane, first (feature), first_row, rows, features, length, and matrix, the row of w for feature 0.
_SETUP = """
  const int lane = int(thread_index_in_simdgroup);
  const int first_row = int(thread_position_in_grid.z) * R;
  const int rows = x_shape[0];
  const int length = x_shape[1];
  const int features = w_shape[0];
  const size_t matrix = 0;
"""
_EXPERT_SETUP = """
  const int lane = int(thread_index_in_simdgroup);
  const int slot = int(thread_position_in_grid.z);
  const int rows = x_shape[0] * x_shape[1];
  const int first_row = x_shape[1] == 1 ? slot / ids_shape[1] : slot;
  const int length = x_shape[2];
  const int features = w_shape[1];
  const size_t matrix = size_t(ids[slot]) * features;
"""

# A block of C features for a simdgroup. Past the end, the last feature or row is computed again and not stored.
_BEGIN = """
  const int first = int(thread_position_in_grid.y) * C;
  if (first >= features) {
    return;
  }
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
"""
_DENSE = """
  for (int at = 4 * lane; at < length; at += 128) {
    float weights[C][4];
    UNROLLED for (int c = 0; c < C; ++c) {
      UNROLLED for (int i = 0; i < 4; ++i) {
        weights[c][i] = (WHOLE || at + i < length) ? float(w[feature[c] * length + at + i]) : 0.0f;
      }
    }
    UNROLLED for (int r = 0; r < R; ++r) {
      UNROLLED for (int i = 0; i < 4; ++i) {
        const float value = (WHOLE || at + i < length) ? float(x[at_row[r] + at + i]) : 0.0f;
        UNROLLED for (int c = 0; c < C; ++c) {
          sums[c][r] = fma(weights[c][i], value, sums[c][r]);
        }
      }
    }
  }
"""
_PACKED = """
  const int words = length / LEVELS * WORDS;
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
      const size_t group = feature[c] * (length / GROUP) + at / GROUP;
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
"""

# Leaves sums[C][R] in every lane.
_END = """
  UNROLLED for (int c = 0; c < C; ++c) {
    UNROLLED for (int r = 0; r < R; ++r) {
      sums[c][r] = over_lanes(sums[c][r]);
    }
  }
"""


def _storing(value: str) -> str:
    """Source of a kernel's end: lane 0 writes ``value`` for every feature and row, rounded once."""
    return f"""
  if (lane == 0) {{
    UNROLLED for (int r = 0; r < R; ++r) {{
      UNROLLED for (int c = 0; c < C; ++c) {{
        if (first_row + r < rows && first + c < features) {{
          const size_t place = size_t(first_row + r) * features + first + c;
          y[place] = Y({value});
        }}
      }}
    }}
  }}
"""


_EXPERT_STORE = """
  if (lane == 0) {
    UNROLLED for (int c = 0; c < C; ++c) {
      if (first + c < features) {
        y[size_t(slot) * features + first + c] = Y(sums[c][0]);
      }
    }
  }
"""


def _kernels(name: str, more: tuple[str, ...], setup: str, store: str) -> tuple[MslKernel, MslKernel]:
    """The kernels for dense and for packed matrices, with ``more`` inputs."""

    def kernel(prefix: str, weight: tuple[str, ...], products: str) -> MslKernel:
        source = setup + _BEGIN + products + _END + store
        return MslKernel(name=f"specdec_{prefix}{name}", inputs=("x", *weight, *more), outputs=("y",), source=source)

    return kernel("", ("w",), _DENSE), kernel("quantised_", ("w", "scales", "biases"), _PACKED)


MATVEC = _kernels("matvec", (), _SETUP, _storing("sums[c][r]"))
MATVEC_ADD = _kernels(
    "matvec_add", ("residual",), _SETUP, _storing("sums[c][r] + float(residual[SHARED ? size_t(first + c) : place])")
)
EXPERT_MATVEC = _kernels("expert_matvec", ("ids",), _EXPERT_SETUP, _EXPERT_STORE)


def matvec(
    x: mx.array, w: Matrix, residual: mx.array | None = None, *, dtype: mx.Dtype, executor: Executor | None = None
) -> mx.array:
    """``x @ w.T``, plus ``residual``: ``[T, N]`` in ``dtype``, summed in float32 and rounded once. Lazy.

    Args:
        x: ``[T, K]``, any float dtype and any T; ``w`` is read once per 8 rows.
        w: ``[N, K]``, any float dtype, or packed.
        residual: ``[T, N]``, or ``[N]`` for all rows.
        dtype: dtype of the result.
        executor: runs the kernel; None uses the reference in MLX operations.
    """
    if executor is None:
        wide = x.astype(mx.float32)  # MLX's CPU device would sum in a narrower dtype
        y = w.wide().product(wide) if isinstance(w, PackedMatrix) else wide @ w.astype(mx.float32).T
        return (y if residual is None else y + residual.astype(mx.float32)).astype(dtype)
    rows, count = tiles(x.shape[0])
    template: list[tuple[str, Any]] = [("R", rows)]
    kernels, more = MATVEC, []
    if residual is not None:
        kernels, more = MATVEC_ADD, [residual]
        template.append(("SHARED", residual.ndim == 1))
    return _launched(executor, kernels, x, w, more, template, count, (x.shape[0], w.shape[0]), dtype)


def expert_matvec(
    x: mx.array, w: Matrix, ids: mx.array, *, dtype: mx.Dtype, executor: Executor | None = None
) -> mx.array:
    """``x[t, j] @ w[ids[t, j]].T``: ``[T, k, N]`` in ``dtype``, summed in float32 and rounded once. Lazy.

    Args:
        x: ``[T, k, K]``, or ``[T, 1, K]`` if all slots of a row share it; any float dtype.
        w: ``[E, N, K]``, any float dtype; or packed, each array with E as the first axis.
        ids: int32 ``[T, k]``, below E, unchecked.
        dtype: dtype of the result.
        executor: runs the kernel; None uses the reference in MLX operations.
    """
    if executor is None:
        each = x.astype(mx.float32)[:, :, None]  # [T, k or 1, 1, K]; MLX's CPU device has all of this in float32 only
        if isinstance(w, PackedMatrix):
            y = w.wide().product(each, ids)
        else:
            y = mx.gather_mm(each, w.astype(mx.float32).swapaxes(-1, -2), rhs_indices=ids)
        return y[:, :, 0].astype(dtype)
    return _launched(executor, EXPERT_MATVEC, x, w, [ids], [("R", 1)], ids.size, (*ids.shape, w.shape[1]), dtype)


def _launched(
    executor: Executor,
    kernels: tuple[MslKernel, MslKernel],
    x: mx.array,
    w: Matrix,
    more: list[mx.array],
    template: list[tuple[str, Any]],
    tiles: int,
    shape: tuple[int, ...],
    dtype: mx.Dtype,
) -> mx.array:
    """Run the one of ``kernels`` that fits ``w``, over so many tiles of R rows: ``shape``, which ends with N."""
    if isinstance(w, PackedMatrix):
        kernel, arrays = kernels[1], [*w.parts()]
        shared = math.gcd(32, w.bits)
        levels = 32 // shared
        features = FEATURES if levels <= 8 else 32 // levels  # the levels of a lane stay in registers
        template += [("BITS", w.bits), ("LEVELS", levels), ("WORDS", w.bits // shared), ("GROUP", w.group)]
    else:
        kernel, arrays, features = kernels[0], [w], FEATURES
        template.append(("WHOLE", x.shape[-1] % 4 == 0))
    (y,) = executor.run(
        kernel,
        [x, *arrays, *more],
        template=(("C", features), *template, ("Y", dtype)),
        grid=(LANES, whole(-(-shape[-1] // features), _SIMDGROUPS), tiles),
        threadgroup=(LANES, _SIMDGROUPS, 1),
        output_shapes=(shape,),
        output_dtypes=(dtype,),
    )
    return y
