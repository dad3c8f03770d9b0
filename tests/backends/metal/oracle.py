"""The operations in float64, written from the docstrings of ``specdec.backends.ops`` alone. Nothing here is a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import torch

from specdec.backends.metal.arrays import to_host as _on_host
from specdec.backends.ops import DeltaShape, Rope, Routing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]


def to_host(array: Any) -> Float64:
    """An array of MLX, torch or numpy as float64."""
    if isinstance(array, mx.array):
        array = _on_host(array)
    return array.double().numpy() if isinstance(array, torch.Tensor) else np.asarray(array, np.float64)


def sigmoid(x: Float64) -> Float64:
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: Float64) -> Float64:
    return x * sigmoid(x)


def swiglu(x: Float64, gate: Float64, up: Float64) -> Float64:
    return silu(x @ gate.T) * (x @ up.T)


def rms_norm(x: Float64, weight: Float64, eps: float) -> Float64:
    normed: Float64 = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return normed


def norm_rope(x: Float64, weight: Float64 | None, eps: float, rope: Rope, position: int) -> Float64:
    if weight is not None:
        x = rms_norm(x, weight, eps)
    half = len(rope.inv_freq)
    out = x.copy()
    for t in range(len(x)):
        for j, frequency in enumerate(rope.inv_freq):
            angle = (position + t) * frequency
            pair = x[t, :, j], x[t, :, half + j]
            out[t, :, j] = pair[0] * np.cos(angle) - pair[1] * np.sin(angle)
            out[t, :, half + j] = pair[1] * np.cos(angle) + pair[0] * np.sin(angle)
    return out


def attend(q: Float64, keys: Float64, values: Float64, scale: float) -> Float64:
    """q ``[T, nq, D]`` are the last rows of keys ``[S, nkv, D]`` and values ``[S, nkv, Dv]``: ``[T, nq, Dv]``."""
    rows, heads, _ = q.shape
    out = np.zeros((rows, heads, values.shape[2]))
    for t in range(rows):
        seen = len(keys) - rows + t + 1
        for h in range(heads):
            kv = h // (heads // keys.shape[1])
            scores = keys[:seen, kv] @ q[t, h] * scale
            weights = np.exp(scores - scores.max())
            out[t, h] = weights / weights.sum() @ values[:seen, kv]
    return out


def conv_window(x: Float64, weight: Float64) -> Float64:
    """All rows since the first token."""
    taps = weight.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
    return silu(np.stack([(padded[t : t + taps].T * weight).sum(1) for t in range(len(x))]))


def gated_delta(
    u: Float64, a: Float64, b: Float64, a_log: Float64, dt_bias: Float64, shape: DeltaShape
) -> tuple[Float64, Float64]:
    """All rows since the first token: ``[T, Hv, Dv]``, and the matrix S after them ``[Hv, Dk, Dv]``."""
    state = np.zeros((shape.value_heads, shape.key_dim, shape.value_dim))
    out = np.zeros((len(u), shape.value_heads, shape.value_dim))
    keys = shape.key_heads * shape.key_dim
    for t, row in enumerate(u):
        q, k = (part.reshape(shape.key_heads, -1) for part in (row[:keys], row[keys : 2 * keys]))
        q, k = (part / np.sqrt((part * part).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
        v = row[2 * keys :].reshape(shape.value_heads, -1)
        for h in range(shape.value_heads):
            key = h // (shape.value_heads // shape.key_heads)
            state[h] *= np.exp(-np.exp(a_log[h]) * np.logaddexp(a[t, h] + dt_bias[h], 0.0))
            error = sigmoid(b[t, h]) * (v[h] - state[h].T @ k[key])
            state[h] += np.outer(k[key], error)
            out[t, h] = state[h].T @ q[key] * shape.key_dim**-0.5
    return out, state


def route(x: Float64, weight: Float64, routing: Routing, bias: Float64 | None) -> tuple[Float64, Float64, float]:
    """Ids ``[T, k]``, weights ``[T, k]`` and the smallest gap on which a choice hung."""
    logits = x @ weight.T
    if routing.scores == "sigmoid":
        scores = sigmoid(logits)
    else:
        scores = np.exp(logits - logits.max(1, keepdims=True))
        scores /= scores.sum(1, keepdims=True)
    choice = scores if bias is None else scores + bias
    gap = np.inf
    if routing.groups > 1:
        grouped = choice.reshape(len(x), routing.groups, -1)
        worth = np.sort(grouped, axis=-1)[..., -2:].sum(-1)
        kept, gap = _best(worth, routing.kept_groups)
        masked = np.full_like(grouped, -np.inf)
        for t, groups in enumerate(kept):
            masked[t, groups] = grouped[t, groups]
        choice = masked.reshape(choice.shape)
    ids, nearest = _best(choice, routing.top_k)
    weights = np.take_along_axis(scores, ids, 1)
    if routing.normalised:
        weights = weights / (weights.sum(1, keepdims=True) + 1e-20)
    return ids, weights * routing.scale, min(gap, nearest)


def _best(values: Float64, count: int) -> tuple[NDArray[np.int64], float]:
    order = np.argsort(-values, axis=1, kind="stable")
    ranked = np.take_along_axis(values, order, 1)[:, : count + 1]
    gaps = -np.diff(ranked, axis=1)
    return order[:, :count], float(gaps.min()) if gaps.size else np.inf


def moe(
    x: Float64,
    ids: NDArray[np.int64],
    weights: Float64,
    experts: Sequence[Sequence[Float64]],
    residual: Float64,
    shared: Sequence[Float64] | None,
    shared_gate: Float64 | None,
) -> Float64:
    gates, ups, downs = experts
    out = residual.copy()
    for t in range(len(x)):
        for expert, weight in zip(ids[t], weights[t], strict=True):
            out[t] += weight * (swiglu(x[t : t + 1], gates[expert], ups[expert]) @ downs[expert].T)[0]
    if shared is not None:
        gate, up, down = shared
        share = 1.0 if shared_gate is None else sigmoid(x @ shared_gate.T)
        out = out + share * (swiglu(x, gate, up) @ down.T)
    return out
