"""Causal attention of a few rows over a bucket of keys and values, split at fixed positions.

Positions 0 to 127 are the first part, 128 to 255 the second, and so on, for any row count, length and bucket. One
simdgroup computes one part for one query head and row, position by position in ascending order, with a running maximum
(Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3). A second kernel joins the parts of a row in ascending
order. So the bits of a row depend only on its query and on the rows that it sees.

Rows after those that a query sees are never read and may hold anything.
"""

from __future__ import annotations

import functools

import mlx.core as mx

from specdec.backends.metal.kernels.kernel import Executor, MslKernel
from specdec.backends.metal.kernels.lanes import LANES, groups

PART = 128  # positions of a part; affects the bits

# The running maximum begins at the lowest finite float, so that no infinity is subtracted from another.
ATTEND_PARTS = MslKernel(
    name="specdec_attend_parts",
    inputs=("q", "keys", "values", "length", "scale"),
    outputs=("tops", "masses", "mixes"),
    source="""
  const int lane = int(thread_index_in_simdgroup);
  const int rows = q_shape[0];
  const int head = int(thread_position_in_grid.y) / rows;
  const int t = int(thread_position_in_grid.y) % rows;
  const int part = int(thread_position_in_grid.z);
  const int seen = length[0] + t + 1;
  const int start = part * PART;
  if (start >= seen) {
    return;
  }
  const int stop = min(start + PART, seen);
  const int bucket = keys_shape[2];
  const int parts = (bucket + PART - 1) / PART;
  const size_t home = size_t(head / (NQ / NKV)) * bucket;
  const int value_width = values_shape[3];
  constexpr int PER_KEY = (DK + 31) / 32;
  constexpr int PER_VALUE = (DV + 31) / 32;
  float query[PER_KEY];
  UNROLLED for (int j = 0; j < PER_KEY; ++j) {
    const int dim = 32 * j + lane;
    query[j] = (DK % 32 == 0 || dim < DK) ? float(q[(size_t(t) * NQ + head) * DK + dim]) * scale[0] : 0.0f;
  }
  float mixed[PER_VALUE];
  UNROLLED for (int j = 0; j < PER_VALUE; ++j) {
    mixed[j] = 0.0f;
  }
  float top = -3.4028234663852886e38f;
  float mass = 0.0f;
  for (int at = start; at < stop; ++at) {
    const size_t key = (home + at) * DK;
    const size_t value = (home + at) * value_width;
    float score = 0.0f;
    UNROLLED for (int j = 0; j < PER_KEY; ++j) {
      const int dim = 32 * j + lane;
      score = fma(query[j], (DK % 32 == 0 || dim < DK) ? float(keys[key + dim]) : 0.0f, score);
    }
    score = over_lanes(score);
    const float higher = max(top, score);
    const float shrink = metal::exp(top - higher);
    const float weight = metal::exp(score - higher);
    top = higher;
    mass = fma(mass, shrink, weight);
    UNROLLED for (int j = 0; j < PER_VALUE; ++j) {
      const int dim = 32 * j + lane;
      const float entry = (DV % 32 == 0 || dim < DV) ? float(values[value + dim]) : 0.0f;
      mixed[j] = fma(mixed[j], shrink, weight * entry);
    }
  }
  const size_t place = (size_t(t) * NQ + head) * parts + part;
  if (lane == 0) {
    tops[place] = top;
    masses[place] = mass;
  }
  UNROLLED for (int j = 0; j < PER_VALUE; ++j) {
    const int dim = 32 * j + lane;
    if (DV % 32 == 0 || dim < DV) {
      mixes[place * DV + dim] = mixed[j];
    }
  }
""",
)

# Parts that no row has reached were not written, and are not read.
JOIN_PARTS = MslKernel(
    name="specdec_join_parts",
    inputs=("tops", "masses", "mixes", "length"),
    outputs=("y",),
    source="""
  const int lane = int(thread_index_in_simdgroup);
  const int row = int(thread_position_in_grid.y);
  const int t = row / NQ;
  const int parts = tops_shape[2];
  const int reached = (length[0] + t) / PART + 1;
  constexpr int PER_VALUE = (DV + 31) / 32;
  float mixed[PER_VALUE];
  UNROLLED for (int j = 0; j < PER_VALUE; ++j) {
    mixed[j] = 0.0f;
  }
  float top = -3.4028234663852886e38f;
  float mass = 0.0f;
  for (int part = 0; part < reached; ++part) {
    const size_t place = size_t(row) * parts + part;
    const float higher = max(top, tops[place]);
    const float shrink = metal::exp(top - higher);
    const float weight = metal::exp(tops[place] - higher);
    top = higher;
    mass = fma(mass, shrink, weight * masses[place]);
    UNROLLED for (int j = 0; j < PER_VALUE; ++j) {
      const int dim = 32 * j + lane;
      mixed[j] = fma(mixed[j], shrink, weight * ((DV % 32 == 0 || dim < DV) ? mixes[place * DV + dim] : 0.0f));
    }
  }
  UNROLLED for (int j = 0; j < PER_VALUE; ++j) {
    const int dim = 32 * j + lane;
    if (DV % 32 == 0 || dim < DV) {
      y[size_t(row) * DV + dim] = Y(mixed[j] / mass);
    }
  }
""",
)


def attend(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    length: mx.array,
    *,
    scale: float,
    dtype: mx.Dtype,
    value_dims: int | None = None,
    part: int = PART,
    executor: Executor | None = None,
) -> mx.array:
    """Attention of T query rows; row t sees the first ``length + t + 1`` positions: ``[T, nq, Dv]``. Lazy.

    Args:
        q: ``[T, nq, Dk]``, any float dtype; query head h reads KV head ``h // (nq / nkv)``.
        keys: ``[1, nkv, bucket, Dk]``, those of the T rows at positions ``length`` to ``length + T - 1``.
        values: ``[1, nkv, bucket, Dv]``; with ``value_dims`` rows may be wider (latent rows: the keys themselves).
        length: int32 ``[1]``, positions before the first row; the caller ensures ``length + T <= bucket``.
        scale: scale of the scores.
        dtype: dtype of the result; everything before it is float32.
        value_dims: Dv, if it is less than the width of ``values``.
        part: positions of a part; constant within a session.
        executor: runs the kernels; None uses the reference in MLX operations.
    """
    rows, heads, key_dim = q.shape
    if executor is None:
        # over the whole bucket; positions that a row does not see have weight 0
        at = mx.arange(keys.shape[2])
        seen = at[None] < length + 1 + mx.arange(rows)[:, None]  # [T, bucket]
        held = (at < length + rows)[:, None]  # a stale value times a weight of 0 could still be a NaN
        k = mx.where(held, keys[0].astype(mx.float32), 0.0)
        v = mx.where(held, values[0, ..., :value_dims].astype(mx.float32), 0.0)
        share = heads // keys.shape[1]
        k, v = (mx.repeat(array, share, axis=0) for array in (k, v))  # [nq, bucket, D]
        scores = (q.astype(mx.float32) * scale).transpose(1, 0, 2) @ k.swapaxes(1, 2)
        weights = mx.softmax(mx.where(seen, scores, -mx.inf), axis=-1, precise=True)
        return (weights @ v).transpose(1, 0, 2).astype(dtype)
    value_dim = values.shape[3] if value_dims is None else value_dims
    parts = -(-keys.shape[2] // part)
    sizes = (("NQ", heads), ("DV", value_dim), ("PART", part))
    mixes = (rows, heads, parts, value_dim)
    partial = executor.run(
        ATTEND_PARTS,
        [q, keys, values, length, _scale(scale)],
        template=(*sizes, ("NKV", keys.shape[1]), ("DK", key_dim)),
        grid=(LANES, rows * heads, parts),
        threadgroup=(LANES, groups(rows * heads, 8), 1),
        output_shapes=(mixes[:3], mixes[:3], mixes),
        output_dtypes=(mx.float32, mx.float32, mx.float32),
    )
    (y,) = executor.run(
        JOIN_PARTS,
        [*partial, length],
        template=(*sizes, ("Y", dtype)),
        grid=(LANES, rows * heads, 1),
        threadgroup=(LANES, groups(rows * heads), 1),
        output_shapes=((rows, heads, value_dim),),
        output_dtypes=(dtype,),
    )
    return y


@functools.lru_cache(maxsize=8)
def _scale(scale: float) -> mx.array:
    made = mx.array([scale], mx.float32)
    mx.eval(made)
    return made
