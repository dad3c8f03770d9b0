"""Two sets of kernels for the operations that mix elements: specdec's own, and MLX's stock kernels.

Own kernels are row-invariant, for a few rows. Stock kernels are for prompts; MLX chooses them by the number of rows.
The remaining work of an operation (norms, gates, rotation, residual connections) treats each row or element separately,
in MLX operations that both sets share.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import mlx.core as mx

from specdec.backends.metal.device import DeviceLength, Length, on_device
from specdec.backends.metal.kernels import attention, delta
from specdec.backends.metal.kernels.expert_matvec import expert_matvec
from specdec.backends.metal.kernels.greedy_head import greedy_head
from specdec.backends.metal.kernels.kernel import Executor
from specdec.backends.metal.kernels.matvec import matvec
from specdec.backends.metal.kernels.quantised_matvec import quantised_matvec
from specdec.backends.metal.quantised import Matrix, PackedMatrix


class Past(Protocol):
    """Rows of a delta-rule block that are not folded yet, until the number of kept rows is known."""

    def fold(self, base: mx.array, kept: mx.array) -> mx.array:
        """Return the matrix ``[Hv, Dv, Dk]`` float32 after ``base`` and the first ``kept`` (int32 ``[1]``) rows."""

    def arrays(self) -> list[mx.array]:
        """The arrays it holds."""


@attrs.frozen(kw_only=True)
class DeltaInputs:
    """A block of T rows of the delta rule, float32 except v; letters as in ``specdec.backends.ops.Ops.gated_delta``."""

    q: mx.array  # [T, Hk, Dk], normalised and scaled
    k: mx.array  # [T, Hk, Dk], normalised
    v: mx.array  # [T, Hv, Dv]
    g: mx.array  # [T, Hv], decay factors
    beta: mx.array  # [T, Hv]


class KernelSet(Protocol):
    """The kernels of the operations. Shapes and letters as in ``specdec.backends.ops.Ops``; all results are lazy."""

    def product(self, x: mx.array, weight: Matrix, residual: mx.array | None = None, *, dtype: mx.Dtype) -> mx.array:
        """``x [T, K] @ w.T``, plus ``residual`` (``[T, N]`` or ``[N]``): ``[T, N]``."""

    def expert_product(self, x: mx.array, stack: Matrix, ids: mx.array, *, dtype: mx.Dtype) -> mx.array:
        """``x[t, j] @ stack[ids[t, j]].T``: ``[T, k, N]``; x is ``[T, k, K]``, or ``[T, 1, K]`` for all slots."""

    def attend(
        self,
        q: mx.array,
        keys: mx.array,
        values: mx.array,
        length: Length,
        *,
        scale: float,
        dtype: mx.Dtype,
        value_dims: int | None = None,
    ) -> mx.array:
        """Causal attention of ``q [T, nq, D]`` over buckets ``[1, nkv, bucket, ...]``: ``[T, nq, Dv]``."""

    def delta(
        self, base: mx.array, past: Past | None, kept: mx.array, rows: DeltaInputs, *, dtype: mx.Dtype
    ) -> tuple[mx.array, mx.array, Past]:
        """Run a block after the kept rows of the last one; return its result, the matrix before it, and its rows."""

    def best(self, x: mx.array, parts: Sequence[Matrix], ids: Sequence[mx.array] | None = None) -> mx.array:
        """The greedy token of every row, -1 where the logits are not finite: int32 ``[T]``."""


@attrs.frozen(eq=False)
class OwnKernels:
    """specdec's kernels on an executor, or their references in MLX operations if it is None."""

    executor: Executor | None

    def product(self, x: mx.array, weight: Matrix, residual: mx.array | None = None, *, dtype: mx.Dtype) -> mx.array:
        if isinstance(weight, PackedMatrix):
            return quantised_matvec(x, weight, residual, dtype=dtype, executor=self.executor)
        return matvec(x, weight, residual, dtype=dtype, executor=self.executor)

    def expert_product(self, x: mx.array, stack: Matrix, ids: mx.array, *, dtype: mx.Dtype) -> mx.array:
        return expert_matvec(x, stack, ids, dtype=dtype, executor=self.executor)

    def attend(
        self,
        q: mx.array,
        keys: mx.array,
        values: mx.array,
        length: Length,
        *,
        scale: float,
        dtype: mx.Dtype,
        value_dims: int | None = None,
    ) -> mx.array:
        return attention.attend(
            q, keys, values, on_device(length), scale=scale, dtype=dtype, value_dims=value_dims, executor=self.executor
        )

    def delta(
        self, base: mx.array, past: Past | None, kept: mx.array, rows: DeltaInputs, *, dtype: mx.Dtype
    ) -> tuple[mx.array, mx.array, Past]:
        heads, value_dim, _ = base.shape
        before = past.rows if isinstance(past, OwnPast) else _no_rows(*rows.k.shape[1:], heads, value_dim)
        y, state, block = delta.gated_delta(
            base, before, kept, rows.q, rows.k, rows.v, rows.g, rows.beta, dtype=dtype, executor=self.executor
        )
        return y, state, OwnPast(block, self.executor)

    def best(self, x: mx.array, parts: Sequence[Matrix], ids: Sequence[mx.array] | None = None) -> mx.array:
        return greedy_head(x, parts, ids, executor=self.executor)


@attrs.frozen(eq=False)
class OwnPast:
    """Rows from the own kernel, which are folded without being recomputed."""

    rows: delta.DeltaRows
    executor: Executor | None

    def fold(self, base: mx.array, kept: mx.array) -> mx.array:
        return delta.flush(base, self.rows, kept, executor=self.executor)

    def arrays(self) -> list[mx.array]:
        return [self.rows.k, self.rows.g, self.rows.delta]


@functools.lru_cache(maxsize=8)
def _no_rows(key_heads: int, key_dim: int, value_heads: int, value_dim: int) -> delta.DeltaRows:
    made = delta.DeltaRows.none(key_heads, key_dim, value_heads, value_dim)
    mx.eval(made.k, made.g, made.delta)
    return made


@attrs.frozen(eq=False)
class StockKernels:
    """MLX's kernels.

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
        length: Length,
        *,
        scale: float,
        dtype: mx.Dtype,
        value_dims: int | None = None,
    ) -> mx.array:
        rows = q.shape[0]
        mask: Any = "causal" if rows > 1 else None
        if isinstance(length, DeviceLength):  # unknown on the host: read the whole bucket and mask the rest
            mask = mx.arange(keys.shape[2])[None] < length.array + 1 + mx.arange(rows)[:, None]
        else:
            keys, values = keys[:, :, : length + rows], values[:, :, : length + rows]
        values = values[..., :value_dims]
        if self.wide:
            q, keys, values = (array.astype(mx.float32) for array in (q, keys, values))
        heads = q.transpose(1, 0, 2)[None]
        out = mx.fast.scaled_dot_product_attention(heads, keys, values, scale=scale, mask=mask)
        return out[0].transpose(1, 0, 2).astype(dtype)

    def delta(
        self, base: mx.array, past: Past | None, kept: mx.array, rows: DeltaInputs, *, dtype: mx.Dtype
    ) -> tuple[mx.array, mx.array, Past]:
        state = base if past is None else past.fold(base, kept)
        y, _ = updated(state, rows)
        return y.astype(dtype), state, StockPast(rows)

    def best(self, x: mx.array, parts: Sequence[Matrix], ids: Sequence[mx.array] | None = None) -> mx.array:
        logits = [self.product(x, part, dtype=mx.float32) for part in parts]
        joined = mx.concatenate(logits, axis=1) if len(logits) > 1 else logits[0]
        tokens = mx.arange(joined.shape[1], dtype=mx.int32) if ids is None else mx.concatenate(list(ids))
        return lowest_best(joined, tokens)


@attrs.frozen(eq=False)
class StockPast:
    """Rows that are recomputed. A row that is not kept has no effect: its decay is 1 and it adds nothing."""

    rows: DeltaInputs

    def fold(self, base: mx.array, kept: mx.array) -> mx.array:
        stays = (mx.arange(self.rows.g.shape[0]) < kept)[:, None]
        g, beta = mx.where(stays, self.rows.g, 1.0), mx.where(stays, self.rows.beta, 0.0)
        return updated(base, attrs.evolve(self.rows, g=g, beta=beta))[1]

    def arrays(self) -> list[mx.array]:
        rows = self.rows
        return [rows.q, rows.k, rows.v, rows.g, rows.beta]


def updated(state: mx.array, rows: DeltaInputs) -> tuple[mx.array, mx.array]:
    """Run MLX's delta rule; return the result ``[T, Hv, Dv]`` float32 and the matrix after all rows."""
    inputs = (array.astype(mx.float32)[None] for array in (rows.q, rows.k, rows.v, rows.g, rows.beta))
    y, after = mx.fast.gated_delta_update(*inputs, state[None])
    return y[0], after[0]


def lowest_best(logits: mx.array, tokens: mx.array) -> mx.array:
    """The token of the largest of ``logits [T, N]``; ties go to the lowest; -1 where some logit is not finite."""
    best = logits.max(axis=-1, keepdims=True)
    winners = mx.where(logits == best, tokens, 2**31 - 1).min(axis=-1)
    broken = mx.isnan(logits).any(axis=-1) | ~mx.isfinite(best[:, 0])
    return mx.where(broken, -1, winners).astype(mx.int32)
