"""Cached layers over random inputs: attention, latent attention, and the gated delta rule."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from specdec.backends.ops import DeltaShape
from specdec.testing.checks import NotApplicable
from specdec.testing.clauses.ops.bench import Bench, sigmoid, silu

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]

SHAPE = DeltaShape(key_heads=2, value_heads=6, key_dim=12, value_dim=10, kernel=4)
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 20
LATENT, LATENT_VALUES = 21, 13  # values of a latent row, and the number that are mixed


class Layer(abc.ABC):
    """Inputs of one layer for some rows."""

    name: str
    verifies = True  # whether targets run it, so that a row must have the same bits in any pass

    def __init__(self, bench: Bench, rows: int) -> None:
        self.bench = bench
        self.rows = rows

    @abc.abstractmethod
    def cache(self, capacity: int) -> Any:
        """An empty cache."""

    @abc.abstractmethod
    def outputs(self, cache: Any, first: int, last: int) -> list[Any]:
        """The output of the layer's ops for rows ``first..last``; the caller commits."""

    @abc.abstractmethod
    def poisoned(self) -> Self:
        """The same layer with rows of NaN."""

    def run(self, cache: Any, first: int, last: int) -> Float64:
        """``outputs`` on the host, side by side: ``[rows, N]``."""
        outputs = [self.bench.host(one).reshape(last - first, -1) for one in self.outputs(cache, first, last)]
        return np.concatenate(outputs, axis=1)

    def saved(self, cache: Any) -> dict[str, Float64]:
        """The saved contents of the cache, on the host."""
        return {name: self.bench.host(array) for name, array in cache.save().items()}

    def loaded(self, arrays: Mapping[str, Any], length: int) -> Any:
        """A new cache of 8 rows, loaded with saved arrays by way of the host."""
        ops, cache = self.bench.ops, self.cache(8)
        cache.load({name: ops.from_host(ops.to_host(array)) for name, array in arrays.items()}, length)
        return cache

    def in_passes(self, passes: list[int], cache: Any = None) -> Float64:
        """All rows in passes of these lengths, each fully committed."""
        cache, out, at = self.cache(self.rows + 3) if cache is None else cache, [], 0
        for rows in passes:
            out.append(self.run(cache, at, at + rows))
            cache.commit(rows)
            at += rows
        return np.concatenate(out)


class AttentionLayer(Layer):
    """Grouped-query attention."""

    name = "attend"

    def __init__(self, bench: Bench, rows: int, *, gated: bool = True) -> None:
        super().__init__(bench, rows)
        self.q, self.gate = (bench.heads(bench.normal(rows, HEADS, HEAD_DIM)) for _ in range(2))
        self.k, self.v = (bench.heads(bench.normal(rows, KV_HEADS, HEAD_DIM)) for _ in range(2))
        self.gated = gated

    def cache(self, capacity: int) -> Any:
        return self.bench.ops.new_kv(capacity, KV_HEADS, HEAD_DIM)

    def outputs(self, cache: Any, first: int, last: int) -> list[Any]:
        rows, scale = slice(first, last), HEAD_DIM**-0.5
        gate = self.gate[rows] if self.gated else None
        return [self.bench.ops.attend(self.q[rows], self.k[rows], self.v[rows], cache, scale=scale, gate=gate)]

    def poisoned(self) -> Self:
        bad = type(self)(self.bench, self.rows)
        bad.q, bad.k, bad.v = (
            self.bench.heads(np.full((self.rows, heads, HEAD_DIM), np.nan)) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        return bad


class WindowLayer(AttentionLayer):
    """Grouped-query attention within windows of 3 rows. Raises: NotApplicable if the backend has none."""

    name = "attend_from"
    verifies = False  # draft heads do

    def __init__(self, bench: Bench, rows: int) -> None:
        super().__init__(bench, rows, gated=False)
        with bench.optional("append", "attend_from"):
            cache = self.cache(2)
            bench.ops.append(self.k[:1], self.v[:1], cache)
            self.outputs(cache, 0, 1)

    def outputs(self, cache: Any, first: int, last: int) -> list[Any]:
        return [self.attended(cache, first, last, [max(0, int(cache.length) + t - 2) for t in range(last - first)])]

    def attended(self, cache: Any, first: int, last: int, starts: Sequence[int], *, causal: bool = True) -> Any:
        """Rows ``first..last``; row t of the pass sees the cache from ``starts[t]`` on."""
        q, k, v = (array[first:last] for array in (self.q, self.k, self.v))
        return self.bench.ops.attend_from(q, k, v, cache, scale=HEAD_DIM**-0.5, first=starts, causal=causal)


class LatentLayer(Layer):
    """Latent attention. Raises: NotApplicable if the backend has none."""

    name = "attend_latent"

    def __init__(self, bench: Bench, rows: int) -> None:
        super().__init__(bench, rows)
        self.q = bench.heads(bench.normal(rows, HEADS, LATENT))
        self.row = bench.act(bench.normal(rows, LATENT))
        with bench.optional("new_latent", "attend_latent"):
            self.outputs(self.cache(1), 0, 1)

    def cache(self, capacity: int) -> Any:
        return self.bench.ops.new_latent(capacity, LATENT)

    def outputs(self, cache: Any, first: int, last: int) -> list[Any]:
        q, row = self.q[first:last], self.row[first:last]
        return [self.bench.ops.attend_latent(q, row, cache, scale=LATENT**-0.5, value_dims=LATENT_VALUES)]

    def poisoned(self) -> LatentLayer:
        bad = LatentLayer(self.bench, self.rows)
        bad.q = self.bench.heads(np.full((self.rows, HEADS, LATENT), np.nan))
        bad.row = self.bench.act(np.full((self.rows, LATENT), np.nan))
        return bad


class DeltaLayer(Layer):
    """A convolution window followed by the gated delta rule."""

    name = "conv_window and gated_delta"

    def __init__(self, bench: Bench, rows: int) -> None:
        super().__init__(bench, rows)
        self.x = bench.act(bench.normal(rows, SHAPE.channels))
        self.a, self.b = (bench.act(bench.normal(rows, SHAPE.value_heads)) for _ in range(2))
        self.weight = bench.vector(bench.normal(SHAPE.channels, SHAPE.kernel) / 2)
        self.a_log = bench.vector(np.log(bench.rng.uniform(0.05, 4.0, SHAPE.value_heads)))
        self.dt_bias = bench.vector(bench.normal(SHAPE.value_heads) - 1.0)

    def cache(self, capacity: int = 0) -> Any:
        return self.bench.ops.new_delta(SHAPE)

    def outputs(self, cache: Any, first: int, last: int) -> list[Any]:
        ops, rows = self.bench.ops, slice(first, last)
        u = ops.conv_window(self.x[rows], self.weight, cache)
        return [u, ops.gated_delta(u, self.a[rows], self.b[rows], self.a_log, self.dt_bias, cache, SHAPE)]

    def poisoned(self) -> DeltaLayer:
        bad = DeltaLayer(self.bench, self.rows)
        bad.x = self.bench.act(np.full((self.rows, SHAPE.channels), np.nan))
        bad.weight, bad.a_log, bad.dt_bias = self.weight, self.a_log, self.dt_bias
        return bad

    def convolved(self) -> Float64:
        """The convolution over all rows, by definition: ``[T, C]``."""
        taps, x, weight = SHAPE.kernel, self.bench.host(self.x), self.bench.host(self.weight)
        padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
        summed: Float64 = np.sum([padded[j : j + self.rows] * weight[:, j] for j in range(taps)], axis=0)
        return silu(summed)

    def delta_rule(self, u: Float64) -> Float64:
        """The delta rule over the given convolved rows ``[T, C]``, by definition: ``[T, Hv, Dv]``."""
        s = SHAPE
        state = np.zeros((s.value_heads, s.key_dim, s.value_dim))
        out = np.zeros((len(u), s.value_heads, s.value_dim))
        a, b, a_log, bias = (self.bench.host(one) for one in (self.a, self.b, self.a_log, self.dt_bias))
        keys = s.key_heads * s.key_dim
        for t, row in enumerate(u):
            q, k = row[:keys].reshape(s.key_heads, -1), row[keys : 2 * keys].reshape(s.key_heads, -1)
            v = row[2 * keys :].reshape(s.value_heads, -1)
            q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) * s.key_dim**-0.5
            k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
            for h in range(s.value_heads):
                key = h // (s.value_heads // s.key_heads)
                state[h] *= np.exp(-np.exp(a_log[h]) * np.log1p(np.exp(a[t, h] + bias[h])))
                delta = sigmoid(b[t, h]) * (v[h] - state[h].T @ k[key])
                state[h] += np.outer(k[key], delta)
                out[t, h] = state[h].T @ q[key]
        return out


def layers(bench: Bench, rows: int) -> Iterator[Layer]:
    """One layer of each kind that the backend has."""
    yield AttentionLayer(bench, rows)
    yield DeltaLayer(bench, rows)
    for optional in (LatentLayer, WindowLayer):
        with contextlib.suppress(NotApplicable):
            yield optional(bench, rows)
