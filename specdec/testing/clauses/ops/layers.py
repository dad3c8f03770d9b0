"""Operations that have a cache, as layers over drawn rows: attention, latent attention, windows, the delta rule."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specdec.backends.ops import Cache, Ops
from specdec.testing.checks import NotApplicable, expect_equal
from specdec.testing.clauses.ops.operations import HEAD_DIM, REFERENCE, SHAPE, Bench, Call, Drawn

if TYPE_CHECKING:
    from specdec.exchange import Float64

CAPACITY = 640
HEADS, KV_HEADS = 6, 2
LATENT, LATENT_VALUES = 21, 13  # values of a latent row, and the number that are mixed


class Layer(Call):
    """A call ``run(ops, cache, *arguments)`` that appends its rows to a cache of ``new(ops, capacity)``.

    Attributes:
        mixed: which drawn argument the results are averages of; None: of none.
        verifies: whether targets run it, so that a row must have the same bits in any pass.
    """

    def __init__(
        self,
        bench: Bench,
        name: str,
        new: Callable[[Ops, int], Cache],
        run: Callable[..., Any],
        *arguments: Drawn,
        mixed: int | None = -1,
        verifies: bool = True,
    ) -> None:
        super().__init__(run, *arguments)
        self.bench, self.name, self.new, self.mixed, self.verifies = bench, name, new, mixed, verifies

    def cache(self, capacity: int) -> Any:
        """An empty cache of the backend."""
        return self.new(self.bench.ops, capacity)

    def outputs(self, cache: Any, first: int, last: int) -> Float64:
        """The backend's results for these rows on the host, side by side: ``[rows, N]``; the caller commits."""
        results = self.of(self.bench.ops, first, last, cache=cache)
        return np.concatenate([self.bench.host(one).reshape(last - first, -1) for one in results], axis=1)

    def tried(self) -> Layer:
        """This layer. Raises: NotApplicable if the backend lacks it."""
        with self.bench.optional(self.name):
            self.outputs(self.cache(1), 0, 1)
        return self

    def in_passes(self, passes: list[int]) -> Float64:
        """The results of all rows in passes of these lengths, each committed as a whole."""
        cache, out, at = self.cache(sum(passes) + 3), [], 0
        for rows in passes:
            out.append(self.outputs(cache, at, at + rows))
            cache.commit(rows)
            at += rows
        return np.concatenate(out)

    def taken_in(self, cache: Any, *rows: int) -> Any:
        """The cache after these rows, each committed after a pass of its own."""
        for row in rows:
            self.outputs(cache, row, row + 1)
            cache.commit(1)
        return cache

    def poisoned(self) -> Layer:
        """The same layer with rows of NaN."""
        arguments = []
        for one in self.drawn:
            nan = self.bench.rows(torch.full_like(one.values.flatten(1), torch.nan)) if one.by_row else one
            arguments.append(nan.heads(one.values.shape[1]) if one.by_row and one.values.ndim > 2 else nan)
        return Layer(self.bench, self.name, self.new, self.run, *arguments)

    def saved(self, cache: Any) -> dict[str, Float64]:
        """The saved contents of the cache, on the host."""
        return {name: self.bench.host(array) for name, array in cache.save().items()}

    def expect_saved(self, cache: Any, truth: Mapping[str, Float64], what: str) -> None:
        """Raises: Broken unless the cache saves these arrays, bit for bit."""
        got = self.saved(cache)
        expect_equal(sorted(got), sorted(truth), f"{what} saves different arrays")
        for name, array in truth.items():
            expect_equal(got[name], array, f"{what} has other bits in {name}")

    def loaded(self, arrays: Mapping[str, Any], length: int) -> Any:
        """A new cache of 9 rows, loaded with saved arrays by way of the host."""
        ops, cache = self.bench.ops, self.cache(9)
        cache.load({name: ops.from_host(ops.to_host(array)) for name, array in arrays.items()}, length)
        return cache


def fill_with_nan(cache: object) -> None:
    """Fill a cache's rows in host memory with NaN: what no row was written to must not matter."""
    for array in vars(cache).values():
        if getattr(array, "ndim", 0) < 2:  # a parameter
            continue
        if isinstance(array, np.ndarray) and np.issubdtype(array.dtype, np.floating):
            array.fill(np.nan)
        elif isinstance(array, torch.Tensor) and array.is_floating_point():
            array.fill_(torch.nan)


def _heads(bench: Bench, rows: int, *gate: int) -> list[Drawn]:
    """Queries, keys and values, and a gate of so many heads."""
    return [bench.act(rows, count * HEAD_DIM).heads(count) for count in (HEADS, KV_HEADS, KV_HEADS, *gate)]


def _new_kv(ops: Ops, capacity: int) -> Cache:
    return ops.new_kv(capacity, KV_HEADS, HEAD_DIM)


def _attend(ops: Ops, cache: Any, q: Any, k: Any, v: Any, gate: Any = None) -> Any:
    return ops.attend(q, k, v, cache, scale=HEAD_DIM**-0.5, gate=gate)


def attention(bench: Bench, rows: int, *, gated: bool = True) -> Layer:
    """Grouped-query attention over q, k and v, with or without a gate."""
    arguments = _heads(bench, rows, *([HEADS] if gated else []))
    return Layer(bench, "attend", _new_kv, _attend, *arguments, mixed=2)


def cached(bench: Bench, rows: int) -> Layer:
    """Attention with other queries over keys and values that the pass has appended, if the backend has it."""

    def run(ops: Ops, cache: Any, q: Any, k: Any, v: Any) -> Any:
        ops.append(k, v, cache)
        return ops.attend_cached(q, cache, scale=HEAD_DIM**-0.5)

    return Layer(bench, "attend_cached", _new_kv, run, *_heads(bench, rows)).tried()


def latent(bench: Bench, rows: int) -> Layer:
    """Latent attention, if the backend has it."""

    def run(ops: Ops, cache: Any, q: Any, row: Any) -> Any:
        return ops.attend_latent(q, row, cache, scale=LATENT**-0.5, value_dims=LATENT_VALUES)

    arguments = bench.act(rows, HEADS * LATENT).heads(HEADS), bench.act(rows, LATENT)
    return Layer(bench, "attend_latent", lambda ops, rows: ops.new_latent(rows, LATENT), run, *arguments).tried()


def window(
    bench: Bench,
    rows: int,
    first: Callable[[int, int], int] = lambda row, start: max(0, row - 2),
    *,
    causal: bool = True,
) -> Layer:
    """Attention of a row to the cache from ``first(row, the pass's first row)`` on, which draft heads run."""

    def run(ops: Ops, cache: Any, q: Any, k: Any, v: Any) -> Any:
        start = int(cache.length)
        spans = [first(row, start) for row in range(start, start + q.shape[0])]
        return ops.attend_from(q, k, v, cache, scale=HEAD_DIM**-0.5, first=spans, causal=causal)

    return Layer(bench, "attend_from", _new_kv, run, *_heads(bench, rows), verifies=False).tried()


def sliding(bench: Bench, rows: int, size: int = 3) -> Layer:
    """Attention over a cache with a window; the reference attends to a plain cache from each row's first key on."""

    def new(ops: Ops, capacity: int) -> Cache:
        return _new_kv(ops, capacity) if ops is REFERENCE else ops.new_window(capacity, size, KV_HEADS, HEAD_DIM)

    def run(ops: Ops, cache: Any, q: Any, k: Any, v: Any) -> Any:
        if ops is not REFERENCE:
            return _attend(ops, cache, q, k, v)
        ages = range(cache.length + 1 - size, cache.length + 1 - size + q.shape[0])
        return ops.attend_from(q, k, v, cache, scale=HEAD_DIM**-0.5, first=[max(0, first) for first in ages])

    return Layer(bench, "new_window", new, run, *_heads(bench, rows)).tried()


def sunk(bench: Bench, rows: int, size: int = 0) -> Layer:
    """Attention over a cache with sinks, and a window or none."""
    sinks = bench.vector(HEADS, scale=3.0)

    def new(ops: Ops, capacity: int) -> Cache:
        return ops.new_window(capacity, size, KV_HEADS, HEAD_DIM, sinks.values if ops is REFERENCE else sinks.array)

    return Layer(bench, "new_window with sinks", new, _attend, *_heads(bench, rows)).tried()


def delta(bench: Bench, rows: int) -> Layer:
    """A convolution window followed by the gated delta rule; the results of both."""

    def run(ops: Ops, cache: Any, x: Any, a: Any, b: Any, weight: Any, a_log: Any, dt_bias: Any) -> Any:
        u = ops.conv_window(x, weight, cache)
        return u, ops.gated_delta(u, a, b, a_log, dt_bias, cache, SHAPE)

    decays = torch.tensor(bench.rng.uniform(0.05, 4.0, SHAPE.value_heads), dtype=torch.float32)
    return Layer(
        bench,
        "conv_window and gated_delta",
        lambda ops, _: ops.new_delta(SHAPE),
        run,
        *(bench.act(rows, length) for length in (SHAPE.channels, SHAPE.value_heads, SHAPE.value_heads)),
        bench.vector(SHAPE.channels, SHAPE.kernel, scale=0.5),
        bench.drawn(bench.ops.vector(decays.log())),
        bench.vector(SHAPE.value_heads, mean=-1.0),
        mixed=None,
    )


def every(bench: Bench, rows: int) -> Iterator[Layer]:
    """A layer of each kind that the backend has."""
    yield attention(bench, rows)
    yield delta(bench, rows)
    for optional in (cached, latent, window, sliding, sunk):
        with contextlib.suppress(NotApplicable):
            yield optional(bench, rows)
