"""The ops on MLX arrays. Graphs are lazy, so no op waits for the device.

Two modes (docs/decisions.md). ``exact`` computes passes of up to ``max_rows`` rows with specdec's own
kernels, which are row-invariant; ``fast`` uses MLX's stock kernels throughout.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import torch

from specdec.backends.metal.arrays import MetalHeadRows, MetalHidden, MetalLogits, from_host, lowest_best, to_host
from specdec.backends.metal.caches import MetalDeltaCache, MetalRowCache
from specdec.backends.metal.device import number
from specdec.backends.metal.kernel_sets import KernelSet, OwnKernels, StockKernels, updated
from specdec.backends.metal.kernels import attention, lanes
from specdec.backends.metal.kernels.delta import DeltaInputs
from specdec.backends.metal.kernels.kernel import Executor, OnMetal
from specdec.backends.metal.passes import MetalPasses
from specdec.backends.metal.quantised import PACKED_FORMATS, Matrix, PackedMatrix, packed, take
from specdec.backends.ops import Cache, Capabilities, DeltaShape, Ops, Rope, Routing
from specdec.backends.passes import Body
from specdec.backends.placeholders import DeviceTokens
from specdec.checkpoints.quantised import StoredMatrix
from specdec.contract import Parity

Mode = Literal["exact", "fast"]
MAX_ROWS = 16  # rows of the longest pass that is not a prompt, unless a kernel of ours sets a lower limit
_REFERENCES = (
    "MLX's CPU device has been row-invariant wherever it was tried; MLX does not promise it, so every load probes it"
)
_OWN = (
    f"specdec's kernels give a row the same bits in passes of 1 to {lanes.MAX_ROWS} rows; longer chunks of a "
    "prompt are computed by MLX's stock kernels, with other bits"
)
_STOCK = (
    'mode = "fast": MLX\'s stock kernels may sum a row alone in another order than among others; near-ties may fall '
    "differently"
)


class MetalOps(Ops):
    """Ops in MLX operations.

    Args:
        dtype: act.
        mode: which kernels compute passes of a few rows.
        executor: runs specdec's kernels; by default on MLX's GPU. Without a GPU, their references in MLX operations
            are used.
    """

    hidden_type = MetalHidden

    def __init__(self, dtype: mx.Dtype, *, mode: Mode = "exact", executor: Executor | None = None) -> None:
        self.dtype = dtype
        self.mode = mode
        on_gpu = mx.default_device().type == mx.DeviceType.gpu
        if executor is None and on_gpu:
            executor = OnMetal()
        device = "GPU" if on_gpu else "CPU"
        # MLX's CPU device lacks some products in other dtypes, or rounds in between
        self._wide = not on_gpu and dtype != mx.float32
        stock = StockKernels(self._wide)
        self._few: KernelSet = stock
        self._many: KernelSet = stock
        self._max_rows = MAX_ROWS
        if mode == "fast":
            self.capabilities = Capabilities(
                kernels=f"MLX {mx.__version__}, stock kernels of the {device}",
                parity=Parity.NUMERIC,
                parity_reason=_STOCK,
                packed_formats=PACKED_FORMATS,
            )
            return
        self._few = OwnKernels(executor)
        if executor is None:
            self._many = self._few  # references are row-invariant in passes of any length
            kernels = f"MLX {mx.__version__}, operations of the {device} in place of specdec's kernels"
        else:
            self._max_rows = lanes.MAX_ROWS
            kernels = f"specdec's Metal kernels on MLX {mx.__version__}; prompts with its stock kernels"
        self.capabilities = Capabilities(
            kernels=kernels,
            parity=Parity.BITWISE,
            parity_reason=_REFERENCES if executor is None else _OWN,
            probed_context=attention.PART + lanes.MAX_ROWS if on_gpu else 0,
            max_rows=self._max_rows,
            packed_formats=PACKED_FORMATS,
        )

    def record_passes(self, body: Body, caches: Sequence[Cache], hidden_size: int = 0) -> MetalPasses:
        """Return passes that build their graph each time (see ``specdec.backends.metal.passes``)."""
        return MetalPasses(body, self.best)

    def _set(self, rows: int) -> KernelSet:
        """Return the kernels for a pass of ``rows`` rows."""
        return self._few if rows <= self._max_rows else self._many

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

    def to_host(self, array: Any) -> torch.Tensor:
        if isinstance(array, torch.Tensor):  # saved caches are already in host memory
            return array
        return to_host(array.decoded(self.dtype) if isinstance(array, PackedMatrix) else array)

    def from_host(self, tensor: torch.Tensor) -> mx.array:
        return from_host(tensor)

    def vector(self, tensor: Any, *, plus: float = 0.0) -> mx.array:
        made = from_host(tensor, mx.float32) + plus
        mx.eval(made)
        return made

    def new_kv(self, capacity: int, kv_heads: int, head_dim: int) -> MetalRowCache:
        return MetalRowCache(capacity, dict.fromkeys(("keys", "values"), (kv_heads, head_dim)), self.dtype)

    def new_latent(self, capacity: int, dims: int) -> MetalRowCache:
        return MetalRowCache(capacity, {"rows": (1, dims)}, self.dtype)

    def new_delta(self, shape: DeltaShape) -> MetalDeltaCache:
        return MetalDeltaCache(shape, self.dtype, self._few)

    # --- dense -----------------------------------------------------------------------------------------------------

    def embed(self, table: Matrix, tokens: Sequence[int]) -> mx.array:
        ids = tokens.ids if isinstance(tokens, DeviceTokens) else mx.array(list(tokens), mx.int32)
        rows = take(table, ids)
        return rows.decoded(self.dtype) if isinstance(rows, PackedMatrix) else rows

    def project(
        self, x: mx.array, weights: Sequence[Matrix], biases: Sequence[mx.array | None] = ()
    ) -> tuple[mx.array, ...]:
        biases = biases or [None] * len(weights)
        return tuple(self.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    def project_heads(self, x: mx.array, weights: Matrix) -> mx.array:
        rows, heads, _ = x.shape
        ids = mx.broadcast_to(mx.arange(heads, dtype=mx.int32), (rows, heads))
        return self._set(rows).expert_product(x, weights, ids, dtype=self.dtype)

    def linear(self, x: mx.array, weight: Matrix, residual: mx.array | None = None) -> mx.array:
        return self._set(x.shape[0]).product(x, weight, residual, dtype=self.dtype)

    def swiglu(self, x: mx.array, gate: Matrix, up: Matrix) -> mx.array:
        return self._gated(self._float32_product(x, gate), self._float32_product(x, up))

    def _float32_product(self, x: mx.array, weight: Matrix) -> mx.array:
        return self._set(x.shape[0]).product(x, weight, dtype=mx.float32)

    def _gated(self, gate: mx.array, up: mx.array) -> mx.array:
        return (_silu(gate) * up).astype(self.dtype)

    def rms_norm(self, x: mx.array, weight: mx.array, eps: float) -> mx.array:
        return mx.fast.rms_norm(x.astype(mx.float32), weight, eps).astype(self.dtype)

    def layer_norm(self, x: mx.array, weight: mx.array, bias: mx.array, eps: float) -> mx.array:
        return mx.fast.layer_norm(x.astype(mx.float32), weight, bias, eps).astype(self.dtype)

    def gelu(self, x: mx.array) -> mx.array:
        wide = x.astype(mx.float32)  # sigmoid(2 y) is (1 + tanh(y)) / 2
        return (wide * mx.sigmoid(wide * (1.5957691216057308 + 0.07135481627260025 * wide * wide))).astype(self.dtype)

    def scale(self, x: mx.array, factor: float) -> mx.array:
        return (x.astype(mx.float32) * factor).astype(self.dtype)

    def scale_by_position(self, x: mx.array, beta: float, length: int, position: int) -> mx.array:
        grown = mx.array([[1 + beta * math.log1p((position + t) // length)] for t in range(x.shape[0])], mx.float32)
        mx.eval(grown)
        return (x.astype(mx.float32) * grown).astype(self.dtype)

    def add_positions(self, x: mx.array, table: Matrix, position: int) -> mx.array:
        return self.add(x, self.embed(table, DeviceTokens(number(position) + mx.arange(x.shape[0], dtype=mx.int32))))

    def concat(self, a: mx.array, b: mx.array) -> mx.array:
        return mx.concatenate([a, b], axis=-1)

    # --- experts ---------------------------------------------------------------------------------------------------

    def route(
        self, x: mx.array, weight: Matrix, routing: Routing, bias: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        logits = self._float32_product(x.astype(mx.float32), weight)
        sigmoid = routing.scores == "sigmoid"
        scores = mx.sigmoid(logits) if sigmoid else mx.softmax(logits, axis=-1, precise=True)
        choice = scores if bias is None else scores + bias
        if routing.groups > 1:
            grouped = choice.reshape(x.shape[0], routing.groups, -1)
            worth = _in_order(mx.take_along_axis(grouped, _best(grouped, 2), axis=-1))[..., 0]
            kept = _best(worth, routing.kept_groups)
            open_ = (kept[:, :, None] == mx.arange(routing.groups)).any(axis=1)
            choice = mx.where(open_[:, :, None], grouped, -mx.inf).reshape(choice.shape)
        ids = _best(choice, routing.top_k)
        weights = mx.take_along_axis(scores, ids, axis=-1)
        if routing.normalised:
            weights = weights / (_in_order(weights) + 1e-20)
        return ids, weights * routing.scale

    def moe(
        self,
        x: mx.array,
        chosen: tuple[mx.array, mx.array],
        experts: tuple[Matrix, Matrix, Matrix],
        residual: mx.array,
        *,
        shared: tuple[Matrix, Matrix, Matrix] | None = None,
        shared_gate: Matrix | None = None,
    ) -> mx.array:
        ids, weights = chosen
        gates, ups, downs = experts
        kernels = self._set(x.shape[0])
        each = x[:, None]  # [T, 1, H], for all of a row's experts
        gate, up = (kernels.expert_product(each, stack, ids, dtype=mx.float32) for stack in (gates, ups))
        parts = kernels.expert_product(self._gated(gate, up), downs, ids, dtype=self.dtype).astype(mx.float32)
        total = _in_order(weights[:, :, None] * parts, axis=1)[:, 0]
        if shared is not None:
            gate, up, down = shared
            common = self.linear(self.swiglu(x, gate, up), down).astype(mx.float32)
            if shared_gate is not None:
                common = common * mx.sigmoid(self._float32_product(x.astype(mx.float32), shared_gate))
            total = total + common
        return (total + residual.astype(mx.float32)).astype(self.dtype)

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
        self, q: mx.array, k: mx.array, v: mx.array, cache: MetalRowCache, *, scale: float, gate: mx.array | None = None
    ) -> mx.array:
        keys, values = cache.append(k, v)
        wide = self.dtype if gate is None else mx.float32
        out = self._set(q.shape[0]).attend(q, keys, values, cache.length, scale=scale, dtype=wide)
        if gate is not None:
            out = (out * mx.sigmoid(gate.astype(mx.float32))).astype(self.dtype)
        return out.reshape(q.shape[0], -1)

    def append(self, k: mx.array, v: mx.array, cache: MetalRowCache) -> None:
        cache.append(k, v)
        mx.async_eval(cache.arrays())

    def attend_from(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        cache: MetalRowCache,
        *,
        scale: float,
        first: Sequence[int],
        causal: bool = True,
    ) -> mx.array:
        start, rows = cache.length, q.shape[0]
        keys, values = cache.append(k, v)
        place = mx.arange(keys.shape[2])
        ends = mx.arange(start + 1, start + rows + 1) if causal else mx.full(rows, start + rows, dtype=mx.int32)
        seen = (place >= mx.array(list(first))[:, None]) & (place < ends[:, None])
        out = mx.fast.scaled_dot_product_attention(q.transpose(1, 0, 2)[None], keys, values, scale=scale, mask=seen)
        return out[0].transpose(1, 0, 2).reshape(rows, -1)

    def attend_latent(
        self, q: mx.array, row: mx.array, cache: MetalRowCache, *, scale: float, value_dims: int
    ) -> mx.array:
        (rows,) = cache.append(row[:, None])
        return self._set(q.shape[0]).attend(
            q, rows, rows, cache.length, scale=scale, dtype=self.dtype, value_dims=value_dims
        )

    # --- gated delta rule ------------------------------------------------------------------------------------------

    def conv_window(self, x: mx.array, weight: mx.array, cache: MetalDeltaCache) -> mx.array:
        wide, rows = cache.convolve(x).astype(mx.float32), x.shape[0]
        total = wide[:rows] * weight[:, 0]
        for tap in range(1, weight.shape[1]):
            total = total + wide[tap : tap + rows] * weight[:, tap]
        return _silu(total).astype(self.dtype)

    def gated_delta(
        self,
        u: mx.array,
        a: mx.array,
        b: mx.array,
        a_log: mx.array,
        dt_bias: mx.array,
        cache: MetalDeltaCache,
        shape: DeltaShape,
    ) -> mx.array:
        rows, keys = u.shape[0], shape.key_heads * shape.key_dim
        split = [keys, 2 * keys]
        q, k, v = (
            part.reshape(rows, heads, -1)
            for part, heads in zip(
                mx.split(u, split, axis=1), (shape.key_heads, shape.key_heads, shape.value_heads), strict=True
            )
        )
        block = DeltaInputs(
            q=_unit(q) * shape.key_dim**-0.5,
            k=_unit(k),
            v=v,
            g=mx.exp(-mx.exp(a_log) * mx.logaddexp(a.astype(mx.float32) + dt_bias, 0.0)),  # softplus
            beta=mx.sigmoid(b.astype(mx.float32)),
        )
        state = cache.state
        if rows > self._max_rows:
            out, after = updated(cache.matrix(), block)
            cache.follow_whole(after)
            return out.astype(self.dtype)
        out, base, past = cache.kernels.delta(state.base, state.past, state.kept, block, dtype=self.dtype)
        cache.follow(base, past)
        return out

    def gated_rms_norm(self, x: mx.array, z: mx.array, weight: mx.array, eps: float) -> mx.array:
        normed = mx.fast.rms_norm(x.astype(mx.float32), weight, eps)
        return (normed * _silu(z.astype(mx.float32))).astype(self.dtype).reshape(x.shape[0], -1)

    # --- head and rows ---------------------------------------------------------------------------------------------

    def head(self, x: mx.array, weight: Matrix) -> MetalLogits:
        return MetalLogits(self._float32_product(x, weight))

    def head_rows(self, weight: Matrix, tokens: Sequence[int], base: Any = None) -> MetalHeadRows:
        if base is None:
            return MetalHeadRows.of(weight, tokens)
        own: MetalHeadRows = base
        return own.extended(weight, tokens)

    def pruned_head(self, x: mx.array, rows: Any) -> MetalLogits:
        own: MetalHeadRows = rows
        return own.spread(self._pruned_product(x, own))

    def _pruned_product(self, x: mx.array, rows: MetalHeadRows) -> mx.array:
        return mx.concatenate([self._float32_product(x, part) for part in rows.parts], axis=1)

    def best(self, x: mx.array, head: Matrix | MetalHeadRows) -> mx.array:
        """The best token of every row, -1 where logits are not finite: int32 ``[T]``. Lazy.

        The logits are written to device memory: 4 bytes per token, beside the thousands of its row of the head.
        """
        if isinstance(head, MetalHeadRows):
            return lowest_best(self._pruned_product(x, head), head.device_ids)
        return lowest_best(self._float32_product(x, head), mx.arange(head.shape[0]))


def _silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


def _unit(x: mx.array) -> mx.array:
    """``x * rsqrt(sum(x^2) + 1e-6)`` over the last axis in float32, as an RMS norm, which is row-invariant."""
    size = x.shape[-1]
    return mx.fast.rms_norm(x.astype(mx.float32), None, 1e-6 / size) * size**-0.5


def _in_order(parts: mx.array, axis: int = -1) -> mx.array:
    """Sum over an axis from first to last, keeping the axis; the order of a reduction may depend on other axes."""
    first, *others = mx.split(parts, parts.shape[axis], axis=axis)
    for other in others:
        first = first + other
    return first


def _best(values: mx.array, count: int) -> mx.array:
    """Indices of the ``count`` largest float32 values along the last axis, in descending order; ties by lower index.

    MLX's sort guarantees no order for ties, so value and index are sorted as one integer. Flipping all bits but the
    sign of negative floats makes the order of the bits the order of the floats.
    """
    bits = (values + 0.0).view(mx.int32)  # -0 becomes 0
    ordered = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(mx.int64)
    keys = mx.arange(values.shape[-1], dtype=mx.int64) - ordered * 2**24
    return mx.argsort(keys, axis=-1)[..., :count].astype(mx.int32)


@functools.lru_cache(maxsize=8)
def _turns(rope: Rope, position: int, rows: int) -> tuple[mx.array, mx.array]:
    """Cosines and sines ``[T, 1, R/2]`` float32, the same for all layers of a pass.

    Computed on the host, because a GPU's functions lose precision at large angles. Row by row, because numpy's bits may
    depend on an element's place in an array.
    """
    frequencies = np.array(rope.inv_freq, np.float32)
    angles = [np.float32(position + row) * frequencies[None] for row in range(rows)]
    turns = mx.array(np.stack([np.cos(row) for row in angles])), mx.array(np.stack([np.sin(row) for row in angles]))
    mx.eval(turns)
    return turns
