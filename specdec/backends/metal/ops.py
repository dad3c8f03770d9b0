"""The ops on MLX arrays, with MLX's stock kernels. Graphs are lazy: nothing here waits for the device."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from specdec.backends.metal.arrays import MetalHeadRows, MetalHidden, MetalLogits, from_host
from specdec.backends.metal.caches import MetalDeltaCache, MetalKVCache, MetalLatentCache
from specdec.backends.metal.passes import MetalPasses
from specdec.backends.metal.quantised import KEEPS, Matrix, PackedMatrix, packed, product, take
from specdec.backends.ops import Cache, DeltaShape, Rope, Routing
from specdec.backends.passes import Body
from specdec.checkpoints.quantised import StoredMatrix
from specdec.contract import Hidden, Parity
from specdec.errors import ContractError

MAX_ROWS = 16
_ON_LINUX = (
    "MLX's CPU device on Linux gives a row the same bits in any company; it promises nothing, so every load probes it"
)
_ELSEWHERE = (
    "MLX's stock kernels may sum a row alone in another order than among others; near-ties may fall differently"
)


class MetalOps:
    """Ops in plain MLX operations. See ``specdec.backends.ops.Ops`` for what each one computes."""

    max_rows = MAX_ROWS
    keeps = KEEPS

    def __init__(self, dtype: mx.Dtype) -> None:
        self.dtype = dtype
        on_gpu = mx.default_device().type == mx.DeviceType.gpu
        self.kernels = f"MLX {mx.__version__}, stock kernels of the {'GPU' if on_gpu else 'CPU'}"
        if sys.platform == "linux" and not on_gpu:
            self.parity, self.parity_reason = Parity.BITWISE, _ON_LINUX
        else:
            self.parity, self.parity_reason = Parity.NUMERIC, _ELSEWHERE
        # products that MLX's CPU device does not have in other dtypes, or whose parts it would round
        self._wide = not on_gpu and dtype != mx.float32

    def record_passes(self, body: Body, caches: Sequence[Cache], hidden_size: int) -> MetalPasses:
        """Nothing is recorded: MLX builds the graph anew. See ``specdec.backends.metal.passes``."""
        return MetalPasses(body)

    # --- weights and storage ---------------------------------------------------------------------------------------

    def weight(self, tensor: Any) -> Any:
        if not isinstance(tensor, StoredMatrix):
            return from_host(tensor, self.dtype)
        found = packed([tensor], self.dtype, wide=self._wide)
        return self.weight(tensor.decode()) if found is None else found.first()

    def stack(self, tensors: Sequence[Any]) -> Matrix:
        if isinstance(tensors[0], StoredMatrix):
            found = packed(tensors, self.dtype, wide=self._wide)
            return self.stack([tensor.decode() for tensor in tensors]) if found is None else found
        stacked = mx.stack([self.weight(tensor) for tensor in tensors])
        mx.eval(stacked)
        return stacked

    def vector(self, tensor: Any, *, plus: float = 0.0) -> mx.array:
        made = from_host(tensor, mx.float32) + plus
        mx.eval(made)
        return made

    def new_kv(self, capacity: int, kv_heads: int, head_dim: int) -> MetalKVCache:
        return MetalKVCache(capacity, kv_heads, head_dim, self.dtype)

    def new_latent(self, capacity: int, dims: int) -> MetalLatentCache:
        return MetalLatentCache(capacity, dims, self.dtype)

    def new_delta(self, shape: DeltaShape) -> MetalDeltaCache:
        return MetalDeltaCache(shape, self.dtype)

    # --- dense -----------------------------------------------------------------------------------------------------

    def embed(self, table: Matrix, tokens: Sequence[int]) -> mx.array:
        rows = take(table, mx.array(list(tokens), mx.int32))
        return rows.decoded(self.dtype) if isinstance(rows, PackedMatrix) else rows

    def project(
        self, x: mx.array, weights: Sequence[Matrix], biases: Sequence[mx.array | None] = ()
    ) -> tuple[mx.array, ...]:
        biases = biases or [None] * len(weights)
        return tuple(self.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    def project_heads(self, x: mx.array, weights: Matrix) -> mx.array:
        return product(x.transpose(1, 0, 2), weights).transpose(1, 0, 2)

    def linear(self, x: mx.array, weight: Matrix, residual: mx.array | None = None) -> mx.array:
        y = product(x, weight)
        return y if residual is None else y + residual

    def swiglu(self, x: mx.array, gate: Matrix, up: Matrix) -> mx.array:
        return self._gated(product(x, gate), product(x, up))

    def _gated(self, gate: mx.array, up: mx.array) -> mx.array:
        return (_silu(gate.astype(mx.float32)) * up.astype(mx.float32)).astype(self.dtype)

    def rms_norm(self, x: mx.array, weight: mx.array, eps: float) -> mx.array:
        return mx.fast.rms_norm(x.astype(mx.float32), weight, eps).astype(self.dtype)

    def concat(self, a: mx.array, b: mx.array) -> mx.array:
        return mx.concatenate([a, b], axis=-1)

    # --- experts ---------------------------------------------------------------------------------------------------

    def route(
        self, x: mx.array, weight: Matrix, routing: Routing, bias: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        logits = _float32_product(x, weight)
        sigmoid = routing.scores == "sigmoid"
        scores = mx.sigmoid(logits) if sigmoid else mx.softmax(logits, axis=-1, precise=True)
        choice = scores if bias is None else scores + bias
        if routing.groups > 1:
            grouped = choice.reshape(x.shape[0], routing.groups, -1)
            worth = mx.take_along_axis(grouped, _best(grouped, 2), axis=-1).sum(axis=-1)
            kept = _best(worth, routing.kept_groups)
            open_ = (kept[:, :, None] == mx.arange(routing.groups)).any(axis=1)
            choice = mx.where(open_[:, :, None], grouped, -mx.inf).reshape(choice.shape)
        ids = _best(choice, routing.top_k)
        weights = mx.take_along_axis(scores, ids, axis=-1)
        if routing.normalised:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return ids, weights * routing.scale

    def moe(
        self, x: mx.array, chosen: tuple[mx.array, mx.array], experts: tuple[Matrix, Matrix, Matrix],
        residual: mx.array, *, shared: tuple[Matrix, Matrix, Matrix] | None = None,
        shared_gate: Matrix | None = None,
    ) -> mx.array:  # fmt: skip
        ids, weights = chosen
        gates, ups, downs = experts
        each = x[:, None, None]  # [T, 1, 1, H], against [T, k] experts
        gated = self._gated(self._expert_product(each, gates, ids), self._expert_product(each, ups, ids))
        parts = self._expert_product(gated, downs, ids)[:, :, 0].astype(mx.float32)  # [T, k, H]
        total = weights[:, :1] * parts[:, 0]
        for slot in range(1, ids.shape[1]):
            total = total + weights[:, slot : slot + 1] * parts[:, slot]
        if shared is not None:
            gate, up, down = shared
            common = self.linear(self.swiglu(x, gate, up), down).astype(mx.float32)
            if shared_gate is not None:
                common = common * mx.sigmoid(_float32_product(x, shared_gate))
            total = total + common
        return (total + residual.astype(mx.float32)).astype(self.dtype)

    def _expert_product(self, x: mx.array, stack: Matrix, ids: mx.array) -> mx.array:
        """``x [T, 1 or k, 1, I]`` with the transposed matrices ``[O, I]`` of the experts ``ids [T, k]``."""
        if isinstance(stack, PackedMatrix):
            return stack.product(x, ids)
        if self._wide:
            x, stack = x.astype(mx.float32), stack.astype(mx.float32)
        return mx.gather_mm(x, stack.swapaxes(-1, -2), rhs_indices=ids).astype(self.dtype)

    # --- attention -------------------------------------------------------------------------------------------------

    def norm_rope(self, x: mx.array, weight: mx.array | None, eps: float, rope: Rope, position: int) -> mx.array:
        wide = x.astype(mx.float32)
        if weight is not None:
            wide = mx.fast.rms_norm(wide, weight, eps).astype(self.dtype).astype(mx.float32)
        half = len(rope.inv_freq)
        cos, sin = _turns(rope, position, x.shape[0])
        left, right, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
        turned = mx.concatenate([left * cos - right * sin, right * cos + left * sin, rest], axis=-1)
        return turned.astype(self.dtype)

    def attend(
        self, q: mx.array, k: mx.array, v: mx.array, cache: MetalKVCache, *, scale: float, gate: mx.array | None = None
    ) -> mx.array:
        out = self._mixed(q, *cache.append(k, v), scale)
        if gate is not None:
            out = out.astype(mx.float32) * mx.sigmoid(gate.astype(mx.float32))
        return out.astype(self.dtype).reshape(q.shape[0], -1)

    def attend_latent(
        self, q: mx.array, row: mx.array, cache: MetalLatentCache, *, scale: float, value_dims: int
    ) -> mx.array:
        rows = cache.append(row)
        return self._mixed(q, rows, rows[..., :value_dims], scale).astype(self.dtype)

    def _mixed(self, q: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        """Causal attention of ``q [T, nq, D]``, the last T of the S rows ``[1, nkv, S, ...]``: ``[T, nq, Dv]``."""
        if self._wide:
            q, keys, values = (array.astype(mx.float32) for array in (q, keys, values))
        mask = "causal" if q.shape[0] > 1 else None
        heads = q.transpose(1, 0, 2)[None]
        out = mx.fast.scaled_dot_product_attention(heads, keys, values, scale=scale, mask=mask)
        return out[0].transpose(1, 0, 2)

    # --- gated delta rule ------------------------------------------------------------------------------------------

    def conv_window(self, x: mx.array, weight: mx.array, cache: MetalDeltaCache) -> mx.array:
        cache.raw = mx.concatenate([cache.window, x])
        wide, rows = cache.raw.astype(mx.float32), x.shape[0]
        total = wide[:rows] * weight[:, 0]
        for tap in range(1, weight.shape[1]):
            total = total + wide[tap : tap + rows] * weight[:, tap]
        return _silu(total).astype(self.dtype)

    def gated_delta(
        self, u: mx.array, a: mx.array, b: mx.array, a_log: mx.array, dt_bias: mx.array, cache: MetalDeltaCache,
        shape: DeltaShape,
    ) -> mx.array:  # fmt: skip
        rows, keys = u.shape[0], shape.key_heads * shape.key_dim
        wide = u.astype(mx.float32)
        q = _unit(wide[:, :keys].reshape(rows, shape.key_heads, -1)) * shape.key_dim**-0.5
        k = _unit(wide[:, keys : 2 * keys].reshape(rows, shape.key_heads, -1))
        v = wide[:, 2 * keys :].reshape(rows, shape.value_heads, -1)
        decay = mx.exp(-mx.exp(a_log) * mx.logaddexp(a.astype(mx.float32) + dt_bias, 0.0))  # softplus
        beta = mx.sigmoid(b.astype(mx.float32))
        state = cache.state[None]

        def run(count: int) -> tuple[mx.array, mx.array]:
            inputs = (array[None, :count] for array in (q, k, v, decay, beta))
            out, after = mx.fast.gated_delta_update(*inputs, state)
            return out[0], after[0]

        out, cache.after = run(rows)
        cache.replay = lambda count: run(count)[1]
        return out.astype(self.dtype)

    def gated_rms_norm(self, x: mx.array, z: mx.array, weight: mx.array, eps: float) -> mx.array:
        normed = mx.fast.rms_norm(x.astype(mx.float32), weight, eps)
        return (normed * _silu(z.astype(mx.float32))).astype(self.dtype).reshape(x.shape[0], -1)

    # --- head and rows ---------------------------------------------------------------------------------------------

    def head(self, x: mx.array, weight: Matrix) -> MetalLogits:
        return MetalLogits(product(x, weight).astype(mx.float32))

    def head_rows(self, weight: Matrix, tokens: Sequence[int], base: Any = None) -> MetalHeadRows:
        if base is None:
            return MetalHeadRows.of(weight, tokens)
        return _own(base).extended(weight, tokens)

    def pruned_head(self, x: mx.array, rows: Any) -> MetalLogits:
        return _own(rows).logits(x)

    def hidden(self, x: Any) -> MetalHidden:
        return MetalHidden(from_host(x, self.dtype))

    def array(self, hidden: Hidden) -> mx.array:
        if not isinstance(hidden, MetalHidden):
            raise ContractError(f"hidden states of another backend: {type(hidden).__name__}")
        return hidden.array


def _own(rows: Any) -> MetalHeadRows:
    if not isinstance(rows, MetalHeadRows):
        raise ContractError(f"rows of a head of another backend: {type(rows).__name__}")
    return rows


def _silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


def _unit(x: mx.array) -> mx.array:
    return x * mx.rsqrt(x.square().sum(axis=-1, keepdims=True) + 1e-6)


def _float32_product(x: mx.array, weight: Matrix) -> mx.array:
    """``x @ w.T`` not rounded to act."""
    return product(x.astype(mx.float32), weight if isinstance(weight, PackedMatrix) else weight.astype(mx.float32))


def _best(values: mx.array, count: int) -> mx.array:
    """Indices of the ``count`` largest float32 of each last axis, largest first; of equal ones the lower index first.

    MLX's sort promises nothing about equals, so that value and index are sorted as one integer: the bits of a float,
    with all but the sign flipped where it is negative, are ordered as the floats are.
    """
    bits = (values + 0.0).view(mx.int32)  # -0 becomes 0
    ordered = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(mx.int64)
    keys = mx.arange(values.shape[-1], dtype=mx.int64) - ordered * 2**24
    return mx.argsort(keys, axis=-1)[..., :count].astype(mx.int32)


@functools.lru_cache(maxsize=8)
def _turns(rope: Rope, position: int, rows: int) -> tuple[mx.array, mx.array]:
    """Cosines and sines ``[T, 1, R/2]`` float32, the same for all layers of a pass.

    Computed on the host: a GPU's own functions lose digits at angles as large as positions are.
    """
    angles = np.arange(position, position + rows, dtype=np.float32)[:, None] * np.array(rope.inv_freq, np.float32)
    return mx.array(np.cos(angles)[:, None]), mx.array(np.sin(angles)[:, None])
