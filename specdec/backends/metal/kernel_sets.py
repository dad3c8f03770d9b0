"""Two sets of kernels for the operations that mix elements: specdec's own, and MLX's stock kernels.

Own kernels are row-invariant, for a few rows. Stock kernels are for prompts; MLX chooses them by the number of rows.
The remaining work of an operation (norms, gates, rotation, residual connections) treats each row or element separately,
in MLX operations that both sets share.
"""

from __future__ import annotations

import functools
from typing import TypeAlias

import attrs
import mlx.core as mx

from specdec.backends.metal.device import number
from specdec.backends.metal.kernels import attention, delta
from specdec.backends.metal.kernels.delta import DeltaInputs, DeltaRows
from specdec.backends.metal.kernels.kernel import Executor
from specdec.backends.metal.kernels.matvec import expert_matvec, matvec
from specdec.backends.metal.quantised import Matrix, PackedMatrix

Past: TypeAlias = DeltaRows | DeltaInputs
"""Rows of a delta-rule block that are not folded yet, until the number of kept rows is known."""


@attrs.frozen(eq=False)
class OwnKernels:
    """specdec's kernels on an executor, or their references in MLX operations if it is None.

    Shapes and letters as in ``specdec.backends.ops.Ops``; all results are lazy.
    """

    executor: Executor | None

    def product(self, x: mx.array, weight: Matrix, residual: mx.array | None = None, *, dtype: mx.Dtype) -> mx.array:
        """``x [T, K] @ w.T``, plus ``residual`` (``[T, N]`` or ``[N]``): ``[T, N]``."""
        return matvec(x, weight, residual, dtype=dtype, executor=self.executor)

    def expert_product(self, x: mx.array, stack: Matrix, ids: mx.array, *, dtype: mx.Dtype) -> mx.array:
        """``x[t, j] @ stack[ids[t, j]].T``: ``[T, k, N]``; x is ``[T, k, K]``, or ``[T, 1, K]`` for all slots."""
        return expert_matvec(x, stack, ids, dtype=dtype, executor=self.executor)

    def attend(
        self,
        q: mx.array,
        keys: mx.array,
        values: mx.array,
        length: int,
        *,
        scale: float,
        dtype: mx.Dtype,
        value_dims: int | None = None,
    ) -> mx.array:
        """Causal attention of ``q [T, nq, D]`` over buckets ``[1, nkv, bucket, ...]``: ``[T, nq, Dv]``."""
        return attention.attend(
            q, keys, values, number(length), scale=scale, dtype=dtype, value_dims=value_dims, executor=self.executor
        )

    def delta(
        self, base: mx.array, past: Past | None, kept: int, rows: DeltaInputs, *, dtype: mx.Dtype
    ) -> tuple[mx.array, mx.array, Past]:
        """Run a block after the kept rows of the last one; return its result, the matrix before it, and its rows."""
        heads, value_dim, _ = base.shape
        before = past if isinstance(past, DeltaRows) else _no_rows(*rows.k.shape[1:], heads, value_dim)
        return delta.gated_delta(base, before, number(kept), rows, dtype=dtype, executor=self.executor)

    def fold(self, base: mx.array, past: Past, kept: int) -> mx.array:
        """The matrix ``[Hv, Dv, Dk]`` float32 after ``base`` and the first ``kept`` rows of ``past``."""
        assert isinstance(past, DeltaRows)
        return delta.flush(base, past, number(kept), executor=self.executor)


@functools.lru_cache(maxsize=8)
def _no_rows(key_heads: int, key_dim: int, value_heads: int, value_dim: int) -> DeltaRows:
    made = DeltaRows.none(key_heads, key_dim, value_heads, value_dim)
    mx.eval(*made)
    return made


@attrs.frozen(eq=False)
class StockKernels:
    """MLX's kernels, with the methods of ``OwnKernels``.

    Attributes:
        wide: compute in float32 the products that MLX's CPU device lacks in other dtypes or would round in between.
    """

    wide: bool

    def product(self, x: mx.array, weight: Matrix, residual: mx.array | None = None, *, dtype: mx.Dtype) -> mx.array:
        if isinstance(weight, PackedMatrix):
            y = weight.product(x)
        else:
            y = x @ weight.astype(x.dtype).swapaxes(-1, -2)
        return y.astype(dtype) if residual is None else (y + residual).astype(dtype)

    def expert_product(self, x: mx.array, stack: Matrix, ids: mx.array, *, dtype: mx.Dtype) -> mx.array:
        each = x[:, :, None]
        if isinstance(stack, PackedMatrix):
            return stack.product(each, ids)[:, :, 0].astype(dtype)
        if self.wide:
            each, stack = each.astype(mx.float32), stack.astype(mx.float32)
        return mx.gather_mm(each, stack.swapaxes(-1, -2), rhs_indices=ids)[:, :, 0].astype(dtype)

    def attend(
        self,
        q: mx.array,
        keys: mx.array,
        values: mx.array,
        length: int,
        *,
        scale: float,
        dtype: mx.Dtype,
        value_dims: int | None = None,
    ) -> mx.array:
        rows = q.shape[0]
        keys, values = keys[:, :, : length + rows], values[:, :, : length + rows, :value_dims]
        if self.wide:
            q, keys, values = (array.astype(mx.float32) for array in (q, keys, values))
        heads = q.transpose(1, 0, 2)[None]
        out = mx.fast.scaled_dot_product_attention(
            heads, keys, values, scale=scale, mask="causal" if rows > 1 else None
        )
        return out[0].transpose(1, 0, 2).astype(dtype)

    def delta(
        self, base: mx.array, past: Past | None, kept: int, rows: DeltaInputs, *, dtype: mx.Dtype
    ) -> tuple[mx.array, mx.array, Past]:
        state = base if past is None else self.fold(base, past, kept)
        y, _ = updated(state, rows)
        return y.astype(dtype), state, rows

    def fold(self, base: mx.array, past: Past, kept: int) -> mx.array:
        assert isinstance(past, DeltaInputs)
        return updated(base, DeltaInputs(*(array[:kept] for array in past)))[1] if kept else base


def updated(state: mx.array, rows: DeltaInputs) -> tuple[mx.array, mx.array]:
    """Run MLX's delta rule; return the result ``[T, Hv, Dv]`` float32 and the matrix after all rows."""
    inputs = (array.astype(mx.float32)[None] for array in rows)
    y, after = mx.fast.gated_delta_update(*inputs, state[None])
    return y[0], after[0]


KernelSet: TypeAlias = OwnKernels | StockKernels
