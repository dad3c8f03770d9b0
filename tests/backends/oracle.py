"""Operations in float64, written from the docstrings of ``specdec.backends.ops`` alone. Nothing here is a test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specdec.backends.ops import DeltaShape

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]


def to_host(array: Any) -> Float64:
    """An array of MLX, torch or numpy as float64."""
    if not isinstance(array, (torch.Tensor, np.ndarray)):
        from specdec.backends.metal.arrays import to_host as from_mlx

        array = from_mlx(array)
    return array.double().cpu().numpy() if isinstance(array, torch.Tensor) else np.asarray(array, np.float64)


def sigmoid(x: Float64) -> Float64:
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: Float64) -> Float64:
    return x * sigmoid(x)


def rms_norm(x: Float64, weight: Float64, eps: float) -> Float64:
    normed: Float64 = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return normed


def norm_rope(x: Float64, weight: Float64 | None, eps: float, inv_freq: Any, position: int) -> Float64:
    """Heads ``[T, n, D]``; as in every backend, an angle is a product in float32."""
    if weight is not None:
        x = rms_norm(x, weight, eps)
    half = len(inv_freq)
    positions = np.arange(position, position + len(x), dtype=np.float32)
    angles = (positions[:, None] * np.asarray(inv_freq, np.float32)).astype(np.float64)[:, None]
    left, right = x[..., :half], x[..., half : 2 * half]
    turned = left * np.cos(angles) - right * np.sin(angles), right * np.cos(angles) + left * np.sin(angles)
    return np.concatenate([*turned, x[..., 2 * half :]], -1)


def attend(q: Float64, keys: Float64, values: Float64, scale: float, window: int = 0) -> Float64:
    """q ``[T, nq, D]`` are the last rows of keys ``[S, nkv, D]`` and values ``[S, nkv, Dv]``: ``[T, nq, Dv]``.

    A row sees the last ``window`` rows, or all if it is 0.
    """
    rows, group = np.arange(len(q))[:, None], q.shape[1] // keys.shape[1]
    at = np.arange(len(keys)) - (len(keys) - len(q))  # 0: the first row of q
    seen = (at <= rows) & (at > rows - (window or len(keys)))
    out = []
    for h in range(q.shape[1]):
        scores = np.where(seen, q[:, h] @ keys[:, h // group].T * scale, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out.append(weights / weights.sum(-1, keepdims=True) @ values[:, h // group])
    return np.stack(out, 1)


def conv_window(x: Float64, weight: Float64) -> Float64:
    """The rows of ``x [taps - 1 + T, C]`` behind the first taps - 1: ``[T, C]``."""
    taps = weight.shape[1]
    return silu(np.stack([(x[t : t + taps].T * weight).sum(1) for t in range(len(x) - taps + 1)]))


def gated_delta(
    u: Float64, a: Float64, b: Float64, a_log: Float64, dt_bias: Float64, shape: DeltaShape, state: Float64
) -> tuple[Float64, Float64]:
    """From the matrix ``state [Hv, Dk, Dv]``: ``[T, Hv, Dv]``, and the matrix after each row ``[T, Hv, Dk, Dv]``."""
    state, states = state.copy(), []
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
        states.append(state.copy())
    return out, np.stack(states)
