"""Checks of positions and attention: clauses O5, O6, O19, O24 and O25."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specdec.backends.ops import Rope
from specdec.testing.checks import Run, check, expect_equal
from specdec.testing.clauses.ops.bench import EPS, ROWS, Bench, rms_normed, sigmoid, softmax
from specdec.testing.clauses.ops.layers import HEAD_DIM, LATENT, LATENT_VALUES, AttentionLayer, LatentLayer, WindowLayer
from specdec.testing.numerics import fill_with_nan
from specdec.testing.subjects import OpsSubject

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]

CAPACITY = 640
PASSES = (
    (1, 0, True),
    (1, 17, False),
    (4, 3, True),
    (16, 5, False),
    (19, 2, True),
    (5, 31, True),
    (2, 255, False),
    (3, 620, True),
)
"""Rows of the pass, rows in the cache, with or without a gate."""


@check("O5")
def norm_rope(subject: OpsSubject, run: Run) -> None:
    """``norm_rope`` norms each head if given a weight, then rotates pairs (j, j + R/2) by the row's own position."""
    bench = Bench(subject, run)
    for rows in ROWS:
        for rotary, position, normed in ((HEAD_DIM, 0, True), (8, 777, True), (HEAD_DIM, 3, False), (8, 254, True)):
            rope = Rope.of(1e4, rotary)
            wide = bench.heads(bench.normal(rows, 3, 2 * HEAD_DIM))
            x = wide[:, :, :HEAD_DIM]  # a strided view, like that of an interleaved projection
            weight = bench.vector(bench.normal(HEAD_DIM), plus=1.0) if normed else None
            y = rms_normed(bench.host(x), bench.host(weight)) if normed else bench.host(x)
            angles = (position + np.arange(rows))[:, None] * np.array(rope.inv_freq)
            cos, sin, half = np.cos(angles)[:, None], np.sin(angles)[:, None], rotary // 2
            left, right = y[..., :half], y[..., half:rotary]
            wanted = np.concatenate([left * cos - right * sin, right * cos + left * sin, y[..., rotary:]], -1)
            size = np.abs(y).max(-1, keepdims=True)
            bound = size * (3 * bench.eps + 2.0**-16 + (position + rows) * 2.0**-22)
            got = bench.ops.norm_rope(x, weight, EPS, rope, position)
            bench.close(got, wanted, bound, "norm_rope", rows=rows, rotary=rotary, position=position, normed=normed)


def _attention(
    q: Float64, keys: Float64, values: Float64, scale: float, first: Sequence[int] | None = None, causal: bool = True
) -> Float64:
    """Attention of the last rows of keys; row t sees those from ``first[t]`` on, up to itself if ``causal``."""
    rows, heads, _ = q.shape
    out = np.zeros_like(q)
    for t in range(rows):
        seen = slice(first[t] if first else 0, len(keys) - rows + t + 1 if causal else len(keys))
        for h in range(heads):
            kv = h // (heads // keys.shape[1])
            out[t, h] = softmax(keys[seen, kv] @ q[t, h] * scale) @ values[seen, kv]
    return out


@check("O6")
def attend(subject: OpsSubject, run: Run) -> None:
    """``attend`` is causal softmax attention over cached and own rows, with grouped heads and the sigmoid gate."""
    bench = Bench(subject, run)
    for rows, before, gated in PASSES:
        layer = AttentionLayer(bench, before + rows, gated=gated)
        cache = layer.cache(CAPACITY)
        fill_with_nan(cache)
        if before:
            layer.in_passes([before], cache)
        q, k, v = bench.host(layer.q)[before:], bench.host(layer.k), bench.host(layer.v)
        wanted = _attention(q, k, v, HEAD_DIM**-0.5) * (sigmoid(bench.host(layer.gate)[before:]) if gated else 1.0)
        [got] = layer.outputs(cache, before, before + rows)
        bound = np.abs(v).max() * (2 * bench.eps + 1e-5)
        bench.close(got, wanted.reshape(rows, -1), bound, "attend", rows=rows, cached=before, gated=gated)


@check("O19")
def attend_latent(subject: OpsSubject, run: Run) -> None:
    """``attend_latent`` is causal softmax attention in which all heads read whole rows and mix their first values."""
    bench = Bench(subject, run)
    for rows, before, _ in PASSES:
        layer = LatentLayer(bench, before + rows)
        cache = layer.cache(CAPACITY)
        fill_with_nan(cache)
        if before:
            layer.in_passes([before], cache)
        [got] = layer.outputs(cache, before, before + rows)
        keys = bench.host(layer.row)[:, None]  # one head, shared by all query heads
        wanted = _attention(bench.host(layer.q)[before:], keys, keys, LATENT**-0.5)[..., :LATENT_VALUES]
        bound = np.abs(keys).max() * (2 * bench.eps + 1e-5)
        bench.close(got, wanted, bound, "attend_latent", rows=rows, cached=before)


SPANS = (
    (1, 0, lambda row, start: 0),
    (1, 9, lambda row, start: row),  # itself alone
    (4, 5, lambda row, start: max(0, row - 2)),  # a window that slides
    (4, 5, lambda row, start: max(0, row - 6)),
    (7, 12, lambda row, start: start - 3),  # all rows of a block from one point on
    (5, 0, lambda row, start: 0),
    (3, 70, lambda row, start: row - 64 + start % 2),
)
"""Rows of the pass, rows in the cache, and the first row seen by a row of the cache in a pass from ``start`` on."""


@check("O24")
def attend_from(subject: OpsSubject, run: Run) -> None:
    """``attend_from`` attends from each row's first row on, up to itself, or to the end of the pass."""
    bench = Bench(subject, run)
    for rows, before, where in SPANS:
        layer = WindowLayer(bench, before + rows)
        q, k, v = bench.host(layer.q)[before:], bench.host(layer.k), bench.host(layer.v)
        first = [where(row, before) for row in range(before, before + rows)]
        for causal in (True, False):
            cache = layer.cache(CAPACITY)
            fill_with_nan(cache)
            if before:
                layer.in_passes([before], cache)
            got = layer.attended(cache, before, before + rows, first, causal=causal)
            wanted = _attention(q, k, v, HEAD_DIM**-0.5, first, causal)
            bound = np.abs(v).max() * (2 * bench.eps + 1e-5)
            case = {"rows": rows, "cached": before, "first": first, "causal": causal}
            bench.close(got, wanted.reshape(rows, -1), bound, "attend_from", **case)


@check("O25")
def append(subject: OpsSubject, run: Run) -> None:
    """``append`` leaves the cache as ``attend`` of the same rows does; they are provisional until a commit."""
    bench = Bench(subject, run)
    layer = WindowLayer(bench, 9)
    plain = AttentionLayer(bench, 9, gated=False)
    plain.q, plain.k, plain.v = layer.q, layer.k, layer.v
    bad = layer.poisoned()
    for passes in ([5], [1, 4], [2, 1, 2]):
        wanted, cache, at = plain.cache(CAPACITY), layer.cache(CAPACITY), 0
        fill_with_nan(cache)
        for rows in passes:
            bench.ops.append(bad.k[:3], bad.v[:3], cache)
            expect_equal(cache.length, at, "rows that are not committed count", rows=rows)
            cache.commit(0)
            plain.run(wanted, at, at + rows)
            bench.ops.append(layer.k[at : at + rows + 1], layer.v[at : at + rows + 1], cache)
            for one in (wanted, cache):
                one.commit(rows)
            at += rows
        expect_equal(cache.length, 5, "the length does not count the committed rows", passes=passes)
        for name, array in plain.saved(wanted).items():
            expect_equal(
                layer.saved(cache)[name], array, f"append leaves other bits in {name} than attend", passes=passes
            )
        after = [plain.run(one, 5, 8) for one in (wanted, cache)]
        expect_equal(after[1], after[0], "attention after append has other bits", passes=passes)
