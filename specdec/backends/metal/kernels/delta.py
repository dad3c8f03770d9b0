"""The gated delta rule with lazy commit: the launch of a block first folds the previous block's accepted rows.

A launch reads the matrix before the previous block, that block's rows (key, decay, delta) and the number of accepted
rows, which only the device needs to know. It folds those rows into the matrix, writes it, and computes its own rows
from it. So a rejected row costs nothing, no matrix is kept per row, and the memory traffic equals plain decoding: one
matrix read, one written.

Per value head (letters of ``specdec.backends.ops.Ops.gated_delta``; one row of the matrix is one value dimension):

    delta = beta (v - (g S) k);   S = g S + k delta^T;   y = S q

Source: Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464, equation 10. S is transposed here, ``[Dv, Dk]``.

The bits after any row equal those of one-row launches: one function computes ``g S + k delta`` in the loops over the
old and the new rows, every product in a sum is an explicit ``fma``, and the number of rows is a runtime loop bound.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from specdec.backends.metal.kernels.kernel import Executor, MslKernel
from specdec.backends.metal.kernels.lanes import LANES, OVER_LANES, groups

_HEADER = (
    OVER_LANES
    + """
inline float folded(float state, float decay, float key, float delta) {
  return fma(key, delta, state * decay);
}
"""
)

_FOLD = """
  const int lane = int(thread_index_in_simdgroup);
  const int row = int(thread_position_in_grid.y);
  const int head = int(thread_position_in_grid.z);
  const int key_head = head / (HV / HK);
  constexpr int PER = (DK + 31) / 32;
  const size_t home = (size_t(head) * DV + row) * DK;
  float matrix[PER];
  UNROLLED for (int j = 0; j < PER; ++j) {
    const int at = 32 * j + lane;
    matrix[j] = (DK % 32 == 0 || at < DK) ? base[home + at] : 0.0f;
  }
  const int count = kept[0];
  for (int r = 0; r < count; ++r) {
    const float decay = past_g[r * HV + head];
    const float delta = past_delta[(r * HV + head) * DV + row];
    UNROLLED for (int j = 0; j < PER; ++j) {
      const int at = 32 * j + lane;
      const float key = (DK % 32 == 0 || at < DK) ? past_k[(r * HK + key_head) * DK + at] : 0.0f;
      matrix[j] = folded(matrix[j], decay, key, delta);
    }
  }
  UNROLLED for (int j = 0; j < PER; ++j) {
    const int at = 32 * j + lane;
    if (DK % 32 == 0 || at < DK) {
      state[home + at] = matrix[j];
    }
  }
"""

_ROWS = """
  const int rows = q_shape[0];
  for (int t = 0; t < rows; ++t) {
    const float decay = g[t * HV + head];
    float keys[PER];
    float known = 0.0f;
    UNROLLED for (int j = 0; j < PER; ++j) {
      const int at = 32 * j + lane;
      keys[j] = (DK % 32 == 0 || at < DK) ? k[(t * HK + key_head) * DK + at] : 0.0f;
      known = fma(matrix[j] * decay, keys[j], known);
    }
    known = over_lanes(known);
    const int place = (t * HV + head) * DV + row;
    const float delta = (float(v[place]) - known) * beta[t * HV + head];
    float sum = 0.0f;
    UNROLLED for (int j = 0; j < PER; ++j) {
      const int at = 32 * j + lane;
      matrix[j] = folded(matrix[j], decay, keys[j], delta);
      sum = fma(matrix[j], (DK % 32 == 0 || at < DK) ? q[(t * HK + key_head) * DK + at] : 0.0f, sum);
    }
    sum = over_lanes(sum);
    if (lane == 0) {
      delta_rows[place] = delta;
      y[place] = Y(sum);
    }
  }
"""

GATED_DELTA = MslKernel(
    name="specdec_gated_delta",
    inputs=("base", "past_k", "past_g", "past_delta", "kept", "q", "k", "v", "g", "beta"),
    outputs=("y", "state", "delta_rows"),
    source=_FOLD + _ROWS,
    header=_HEADER,
)
FLUSH = MslKernel(
    name="specdec_flush_delta",
    inputs=("base", "past_k", "past_g", "past_delta", "kept"),
    outputs=("state",),
    source=_FOLD,
    header=_HEADER,
)


class DeltaRows(NamedTuple):
    """The rows of a block of T rows, from which the matrix is updated; all float32.

    Attributes:
        k: normalised keys ``[T, Hk, Dk]``.
        g: decay factors ``[T, Hv]``, in (0, 1].
        delta: ``beta (v - (g S) k)``, ``[T, Hv, Dv]``.
    """

    k: mx.array
    g: mx.array
    delta: mx.array

    @classmethod
    def none(cls, key_heads: int, key_dim: int, value_heads: int, value_dim: int) -> DeltaRows:
        """Rows for use before the first block: one row of zeros, with 0 rows kept."""
        return cls(
            k=mx.zeros((1, key_heads, key_dim)),
            g=mx.zeros((1, value_heads)),
            delta=mx.zeros((1, value_heads, value_dim)),
        )


class DeltaInputs(NamedTuple):
    """A block of T rows of the delta rule, float32 except v; letters as in ``specdec.backends.ops.Ops.gated_delta``."""

    q: mx.array  # [T, Hk, Dk], normalised and scaled by Dk^-0.5
    k: mx.array  # [T, Hk, Dk], normalised
    v: mx.array  # [T, Hv, Dv]
    g: mx.array  # [T, Hv], decay factors
    beta: mx.array  # [T, Hv], step sizes


def gated_delta(
    base: mx.array,
    past: DeltaRows,
    kept: mx.array,
    rows: DeltaInputs,
    *,
    dtype: mx.Dtype,
    executor: Executor | None = None,
) -> tuple[mx.array, mx.array, DeltaRows]:
    """Compute T rows after the accepted rows of the previous block. Lazy.

    Args:
        base: the matrix before the previous block, ``[Hv, Dv, Dk]`` float32.
        past: rows of the previous block.
        kept: the number of them to keep, int32 ``[1]``, from 0 to all, unchecked. The first row of a block is a token
            that was already decided, so this is one more than the number of accepted drafts.
        rows: the inputs.
        dtype: dtype of the result.
        executor: runs the kernel; None uses the reference in MLX operations.

    Returns:
        y ``[T, Hv, Dv]`` in ``dtype``; the matrix with the accepted rows ``[Hv, Dv, Dk]`` float32, the base of the
        next block; and this block's rows.
    """
    if executor is None:
        state = matrix = flush(base, past, kept)
        share = rows.v.shape[1] // rows.k.shape[1]
        outs, deltas = [], []
        for q, k, v, g, beta in zip(*rows, strict=True):
            key, query = (mx.repeat(array, share, axis=0)[:, None] for array in (k, q))  # [Hv, 1, Dk]
            known = (matrix * g[:, None, None] * key).sum(axis=-1)
            delta = (v.astype(mx.float32) - known) * beta[:, None]
            matrix = _folded(matrix, g, k, delta)
            outs.append((matrix * query).sum(axis=-1))
            deltas.append(delta)
        return mx.stack(outs).astype(dtype), state, DeltaRows(k=rows.k, g=rows.g, delta=mx.stack(deltas))
    heads, value_dim, _ = base.shape
    y, state, delta = executor.run(
        GATED_DELTA,
        [base, *past, kept, *rows],
        template=(*_sizes(base, rows.k), ("Y", dtype)),
        grid=(LANES, value_dim, heads),
        threadgroup=(LANES, groups(value_dim), 1),
        output_shapes=(rows.v.shape, base.shape, rows.v.shape),
        output_dtypes=(dtype, mx.float32, mx.float32),
    )
    return y, state, DeltaRows(k=rows.k, g=rows.g, delta=delta)


def flush(base: mx.array, past: DeltaRows, kept: mx.array, *, executor: Executor | None = None) -> mx.array:
    """The matrix after the accepted rows, ``[Hv, Dv, Dk]`` float32. Arguments as in ``gated_delta``. Lazy."""
    if executor is None:
        state = base
        for row in range(past.k.shape[0]):  # those that are not kept are computed too, and then ignored
            state = mx.where(row < kept[0], _folded(state, past.g[row], past.k[row], past.delta[row]), state)
        return state
    heads, value_dim, _ = base.shape
    (state,) = executor.run(
        FLUSH,
        [base, *past, kept],
        template=_sizes(base, past.k),
        grid=(LANES, value_dim, heads),
        threadgroup=(LANES, groups(value_dim), 1),
        output_shapes=(base.shape,),
        output_dtypes=(mx.float32,),
    )
    return state


def _folded(state: mx.array, g: mx.array, k: mx.array, delta: mx.array) -> mx.array:
    key = mx.repeat(k, delta.shape[0] // k.shape[0], axis=0)
    return state * g[:, None, None] + delta[:, :, None] * key[:, None]


def _sizes(base: mx.array, k: mx.array) -> tuple[tuple[str, int], ...]:
    heads, value_dim, key_dim = base.shape
    return ("HV", heads), ("HK", k.shape[1]), ("DV", value_dim), ("DK", key_dim)
