"""Row-invariant products of a few rows with a dense matrix.

A simdgroup computes C features of R rows. Lane i sums the columns 4 i to 4 i + 3 of every 128, in ascending order with
one ``fma`` each, in an accumulator per feature and row; then the lanes are summed in a fixed tree. The order of every
sum is independent of R and C.
"""

from __future__ import annotations

import mlx.core as mx

from specdec.backends.metal.kernels.kernel import Executor, Launch, MslKernel
from specdec.backends.metal.kernels.lanes import LANES, OVER_LANES, tiles, whole

FEATURES = 4  # C; not tuned, as no Mac was available
_SIMDGROUPS = 4  # of a threadgroup; likewise

SETUP = """
  const int lane = int(thread_index_in_simdgroup);
  const int block = int(thread_position_in_grid.y);
  const int first_row = int(thread_position_in_grid.z) * R;
  const int rows = x_shape[0];
  const int length = x_shape[1];
  const int features = w_shape[0];
  const size_t matrix = 0;
"""

# Reads lane, first (feature), first_row, rows, features, length, and matrix, the row of w for feature 0; leaves
# sums[C][R] in every lane. Past the end, the last feature or row is computed again and not stored.
PRODUCTS = """
    float sums[C][R];
    size_t at_weight[C];
    size_t at_row[R];
    UNROLLED for (int c = 0; c < C; ++c) {
      at_weight[c] = (matrix + min(first + c, features - 1)) * length;
      UNROLLED for (int r = 0; r < R; ++r) {
        sums[c][r] = 0.0f;
      }
    }
    UNROLLED for (int r = 0; r < R; ++r) {
      at_row[r] = size_t(min(first_row + r, rows - 1)) * length;
    }
    for (int at = 4 * lane; at < length; at += 128) {
      float weights[C][4];
      UNROLLED for (int c = 0; c < C; ++c) {
        UNROLLED for (int i = 0; i < 4; ++i) {
          weights[c][i] = (WHOLE || at + i < length) ? float(w[at_weight[c] + at + i]) : 0.0f;
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
    UNROLLED for (int c = 0; c < C; ++c) {
      UNROLLED for (int r = 0; r < R; ++r) {
        sums[c][r] = over_lanes(sums[c][r]);
      }
    }
"""

# A block of C features for a simdgroup.
FIRST = """
  const int first = block * C;
  if (first >= features) {
    return;
  }
"""


def storing(value: str) -> str:
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


PLAIN = storing("sums[c][r]")
ADDING = storing("sums[c][r] + float(residual[SHARED ? size_t(first + c) : place])")

MATVEC = MslKernel(
    name="specdec_matvec", inputs=("x", "w"), outputs=("y",), source=SETUP + FIRST + PRODUCTS + PLAIN, header=OVER_LANES
)
MATVEC_ADD = MslKernel(
    name="specdec_matvec_add",
    inputs=("x", "w", "residual"),
    outputs=("y",),
    source=SETUP + FIRST + PRODUCTS + ADDING,
    header=OVER_LANES,
)


def matvec(
    x: mx.array, w: mx.array, residual: mx.array | None = None, *, dtype: mx.Dtype, executor: Executor | None = None
) -> mx.array:
    """``x @ w.T``, plus ``residual``: ``[T, N]`` in ``dtype``, summed in float32 and rounded once. Lazy.

    Args:
        x: ``[T, K]``, any float dtype and any T; ``w`` is read once per 8 rows.
        w: ``[N, K]``, any float dtype.
        residual: ``[T, N]``, or ``[N]`` for all rows.
        dtype: dtype of the result.
        executor: runs the kernel; None uses the reference in MLX operations.
    """
    if executor is None:
        return matvec_reference(x, w, residual, dtype=dtype)
    whole_rows = ("WHOLE", x.shape[1] % 4 == 0)
    return launched(executor, MATVEC, MATVEC_ADD, [x, w], residual, w.shape[0], dtype, (("C", FEATURES), whole_rows))


def launched(
    executor: Executor,
    plain: MslKernel,
    adding: MslKernel,
    inputs: list[mx.array],
    residual: mx.array | None,
    features: int,
    dtype: mx.Dtype,
    template: tuple[tuple[str, int], ...],
) -> mx.array:
    """Run one of two kernels on ``inputs``, of which the first is x: ``[T, N]``."""
    rows = inputs[0].shape[0]
    height, count = tiles(rows)
    template = (*template, ("R", height))
    kernel = plain
    if residual is not None:
        kernel, inputs = adding, [*inputs, residual]
        template = (*template, ("SHARED", residual.ndim == 1))
    blocks = -(-features // dict(template)["C"])
    (y,) = executor.run(
        kernel,
        inputs,
        Launch(
            template=(*template, ("Y", dtype)),
            grid=(LANES, whole(blocks, _SIMDGROUPS), count),
            threadgroup=(LANES, _SIMDGROUPS, 1),
            output_shapes=((rows, features),),
            output_dtypes=(dtype,),
        ),
    )
    return y


def matvec_reference(x: mx.array, w: mx.array, residual: mx.array | None = None, *, dtype: mx.Dtype) -> mx.array:
    """``matvec`` in MLX operations."""
    y = x.astype(mx.float32) @ w.astype(mx.float32).T
    return (y if residual is None else y + residual.astype(mx.float32)).astype(dtype)
