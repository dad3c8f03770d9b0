"""Products of each row with selected matrices: experts of a router, or one matrix per head.

Every row and slot is computed like a single row in ``matvec``, with the same sums and so the same bits. Rows that use
the same matrix each read it, through the cache.
"""

from __future__ import annotations

import mlx.core as mx

from specdec.backends.metal.kernels import matvec, quantised_matvec
from specdec.backends.metal.kernels.kernel import Executor, Launch, MslKernel
from specdec.backends.metal.kernels.lanes import LANES, OVER_LANES, whole
from specdec.backends.metal.kernels.quantised_matvec import layout
from specdec.backends.metal.quantised import PackedMatrix

_SIMDGROUPS = 4  # of a threadgroup; not tuned

_SETUP = """
  const int lane = int(thread_index_in_simdgroup);
  const int block = int(thread_position_in_grid.y);
  const int slot = int(thread_position_in_grid.z);
  const int rows = x_shape[0] * x_shape[1];
  const int first_row = x_shape[1] == 1 ? slot / ids_shape[1] : slot;
  const int length = x_shape[2];
  const int features = w_shape[1];
  const size_t matrix = size_t(ids[slot]) * features;
"""
_QUANTISED_SETUP = """
  const int words = w_shape[2];
  const int groups = scales_shape[2];
"""
_STORE = """
    if (lane == 0) {
      UNROLLED for (int c = 0; c < C; ++c) {
        if (first + c < features) {
          y[size_t(slot) * features + first + c] = Y(sums[c][0]);
        }
      }
    }
"""

EXPERT_MATVEC = MslKernel(
    name="specdec_expert_matvec",
    inputs=("x", "w", "ids"),
    outputs=("y",),
    source=_SETUP + matvec.FIRST + matvec.PRODUCTS + _STORE,
    header=OVER_LANES,
)
QUANTISED_EXPERT_MATVEC = MslKernel(
    name="specdec_quantised_expert_matvec",
    inputs=("x", "w", "scales", "biases", "ids"),
    outputs=("y",),
    source=_SETUP + _QUANTISED_SETUP + matvec.FIRST + quantised_matvec.PRODUCTS + _STORE,
    header=OVER_LANES,
)


def expert_matvec(
    x: mx.array, w: mx.array | PackedMatrix, ids: mx.array, *, dtype: mx.Dtype, executor: Executor | None = None
) -> mx.array:
    """``x[t, j] @ w[ids[t, j]].T``: ``[T, k, N]`` in ``dtype``, summed in float32 and rounded once. Lazy.

    Args:
        x: ``[T, k, K]``, or ``[T, 1, K]`` if all slots of a row share it; any float dtype.
        w: ``[E, N, K]``, any float dtype; or quantised, each array with E as the first axis.
        ids: int32 ``[T, k]``, below E, unchecked.
        dtype: dtype of the result.
        executor: runs the kernel; None uses the reference in MLX operations.
    """
    if executor is None:
        return expert_matvec_reference(x, w, ids, dtype=dtype)
    if isinstance(w, PackedMatrix):
        kernel, arrays, template = QUANTISED_EXPERT_MATVEC, list(w.parts()), layout(w)
    else:
        kernel, arrays = EXPERT_MATVEC, [w]
        template = (("C", matvec.FEATURES), ("WHOLE", x.shape[2] % 4 == 0))
    rows, slots = ids.shape
    features = arrays[0].shape[1]
    blocks = -(-features // dict(template)["C"])
    (y,) = executor.run(
        kernel,
        [x, *arrays, ids],
        Launch(
            template=(*template, ("R", 1), ("Y", dtype)),
            grid=(LANES, whole(blocks, _SIMDGROUPS), rows * slots),
            threadgroup=(LANES, _SIMDGROUPS, 1),
            output_shapes=((rows, slots, features),),
            output_dtypes=(dtype,),
        ),
    )
    return y


def expert_matvec_reference(x: mx.array, w: mx.array | PackedMatrix, ids: mx.array, *, dtype: mx.Dtype) -> mx.array:
    """``expert_matvec`` in MLX operations, in float32, the only dtype for which MLX's CPU device has them all."""
    each = x.astype(mx.float32)[:, :, None]  # [T, k or 1, 1, K]
    if isinstance(w, PackedMatrix):
        y = mx.gather_qmm(
            each,
            w.codes,
            w.scales.astype(mx.float32),
            w.biases.astype(mx.float32),
            rhs_indices=ids,
            transpose=True,
            group_size=w.group,
            bits=w.bits,
        )
    else:
        y = mx.gather_mm(each, w.astype(mx.float32).swapaxes(-1, -2), rhs_indices=ids)
    return y[:, :, 0].astype(dtype)
