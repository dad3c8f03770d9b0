"""The greedy token of a few rows: the head's product and its argmax together, so that no logit is written to memory.

A simdgroup computes the logits of 32 consecutive features of R rows, with the sums and so the bits of ``matvec`` or
``quantised_matvec``, and keeps the best. A second kernel takes the best of all simdgroups. The larger logit wins; ties
go to the lower token id. This order is total, so the order of comparisons does not matter.

A row with a NaN or a positive infinity among its logits, or without a finite one, has the token -1.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from specdec.backends.metal.kernels import matvec, quantised_matvec
from specdec.backends.metal.kernels.kernel import Executor, Launch, MslKernel
from specdec.backends.metal.kernels.lanes import LANES, OVER_LANES, tiles, whole
from specdec.backends.metal.kernels.quantised_matvec import layout
from specdec.backends.metal.quantised import PackedMatrix

SPAN = 32  # features of a simdgroup
_SIMDGROUPS = 4  # of a threadgroup; not tuned
_NO_TOKEN = 2**31 - 1  # the initial token, with the lowest float as its logit: no finite logit is below it

_OPEN = """
  if (block * SPAN >= features) {
    return;
  }
  float best[R];
  int token[R];
  UNROLLED for (int r = 0; r < R; ++r) {
    best[r] = -3.4028234663852886e38f;
    token[r] = 2147483647;
  }
  const int stop = min((block + 1) * SPAN, features);
  for (int first = block * SPAN; first < stop; first += C) {
"""
_CLOSE = """
    UNROLLED for (int c = 0; c < C; ++c) {
      const int feature = min(first + c, features - 1);
      const int id = ID;
      UNROLLED for (int r = 0; r < R; ++r) {
        const float logit = sums[c][r];
        if (token[r] >= 0) {
          if (!(logit <= 3.4028234663852886e38f)) {
            token[r] = -1;
          } else if (logit > best[r] || (logit == best[r] && id < token[r])) {
            best[r] = logit;
            token[r] = id;
          }
        }
      }
    }
  }
  if (lane == 0) {
    const int blocks = (features + SPAN - 1) / SPAN;
    UNROLLED for (int r = 0; r < R; ++r) {
      if (first_row + r < rows) {
        const size_t place = size_t(first_row + r) * blocks + block;
        logits[place] = best[r];
        tokens[place] = token[r];
      }
    }
  }
"""


def _candidates(name: str, inputs: tuple[str, ...], setup: str, products: str) -> tuple[MslKernel, MslKernel]:
    """Two kernels: one whose tokens are the feature indices, and one that looks tokens up in a map."""
    plain, mapped = (setup + _OPEN + products + _CLOSE.replace("ID", id_) for id_ in ("feature", "ids[feature]"))
    outputs = ("logits", "tokens")
    return (
        MslKernel(name=name, inputs=inputs, outputs=outputs, source=plain, header=OVER_LANES),
        MslKernel(name=f"{name}_map", inputs=(*inputs, "ids"), outputs=outputs, source=mapped, header=OVER_LANES),
    )


DENSE = _candidates("specdec_greedy", ("x", "w"), matvec.SETUP, matvec.PRODUCTS)
QUANTISED = _candidates(
    "specdec_quantised_greedy", ("x", "w", "scales", "biases"), quantised_matvec.SETUP, quantised_matvec.PRODUCTS
)

BEST_CANDIDATE = MslKernel(
    name="specdec_best_candidate",
    inputs=("logits", "tokens"),
    outputs=("winners",),
    source="""
  const int lane = int(thread_index_in_simdgroup);
  const int row = int(thread_position_in_grid.y);
  const int blocks = logits_shape[1];
  float best = -3.4028234663852886e38f;
  int token = 2147483647;
  for (int block = lane; block < blocks; block += 32) {
    better(best, token, logits[size_t(row) * blocks + block], tokens[size_t(row) * blocks + block]);
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    const float logit = simd_shuffle_xor(best, ushort(distance));
    const int other = simd_shuffle_xor(token, ushort(distance));
    better(best, token, logit, other);
  }
  if (lane == 0) {
    winners[row] = token == 2147483647 ? -1 : token;
  }
""",
    header="""
inline void better(thread float& best, thread int& token, float logit, int other) {
  if (token >= 0 && (other < 0 || logit > best || (logit == best && other < token))) {
    best = logit;
    token = other;
  }
}
""",
)


def greedy_head(
    x: mx.array,
    parts: Sequence[mx.array | PackedMatrix],
    ids: Sequence[mx.array] | None = None,
    *,
    executor: Executor | None = None,
) -> mx.array:
    """The token of the largest logit of every row (ties: the lowest), or -1: int32 ``[T]``. Lazy.

    Args:
        x: ``[T, K]``, any float dtype.
        parts: the head's rows ``[N, K]``, in one piece or several.
        ids: token ids of each part's rows, int32 ``[N]``, in any order; None for a single part whose row i is token i.
        executor: runs the kernels; None uses the reference in MLX operations.
    """
    if executor is None:
        return greedy_head_reference(x, parts, ids)
    found = [_best_of(x, part, None if ids is None else ids[i], executor) for i, part in enumerate(parts)]
    logits, tokens = (
        mx.concatenate(arrays, axis=1) if len(found) > 1 else arrays[0] for arrays in zip(*found, strict=True)
    )
    (winners,) = executor.run(
        BEST_CANDIDATE,
        [logits, tokens],
        Launch(
            template=(),
            grid=(LANES, x.shape[0], 1),
            threadgroup=(LANES, 1, 1),
            output_shapes=((x.shape[0],),),
            output_dtypes=(mx.int32,),
        ),
    )
    return winners


def _best_of(
    x: mx.array, part: mx.array | PackedMatrix, ids: mx.array | None, executor: Executor
) -> tuple[mx.array, mx.array]:
    """Candidates of every row: logits and tokens, ``[T, ceil(N / 32)]``."""
    if isinstance(part, PackedMatrix):
        kernels, arrays, template = QUANTISED, list(part.parts()), layout(part)
    else:
        kernels, arrays = DENSE, [part]
        template = (("C", matvec.FEATURES), ("WHOLE", x.shape[1] % 4 == 0))
    kernel = kernels[0]
    if ids is not None:
        kernel, arrays = kernels[1], [*arrays, ids]
    rows = x.shape[0]
    height, count = tiles(rows)
    blocks = -(-arrays[0].shape[0] // SPAN)
    logits, tokens = executor.run(
        kernel,
        [x, *arrays],
        Launch(
            template=(*template, ("R", height), ("SPAN", SPAN)),
            grid=(LANES, whole(blocks, _SIMDGROUPS), count),
            threadgroup=(LANES, _SIMDGROUPS, 1),
            output_shapes=((rows, blocks), (rows, blocks)),
            output_dtypes=(mx.float32, mx.int32),
        ),
    )
    return logits, tokens


def greedy_head_reference(
    x: mx.array, parts: Sequence[mx.array | PackedMatrix], ids: Sequence[mx.array] | None = None
) -> mx.array:
    """``greedy_head`` in MLX operations."""
    logits = mx.concatenate([_logits(x, part) for part in parts], axis=1)
    tokens = mx.arange(logits.shape[1]) if ids is None else mx.concatenate(list(ids))
    best = logits.max(axis=-1, keepdims=True)
    winners = mx.where(logits == best, tokens, _NO_TOKEN).min(axis=-1)
    broken = mx.isnan(logits).any(axis=-1) | ~mx.isfinite(best[:, 0])
    return mx.where(broken, -1, winners).astype(mx.int32)


def _logits(x: mx.array, part: mx.array | PackedMatrix) -> mx.array:
    if isinstance(part, PackedMatrix):
        return quantised_matvec.quantised_matvec_reference(x, part, dtype=mx.float32)
    return matvec.matvec_reference(x, part, dtype=mx.float32)
