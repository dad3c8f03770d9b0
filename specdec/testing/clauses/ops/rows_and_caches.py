"""Checks of row invariance, caches and inputs, over all operations: clauses O12 to O15."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.backends.ops import Rope
from specdec.contract import Parity
from specdec.testing.checks import NotApplicable, Run, check, expect, expect_equal, not_applicable
from specdec.testing.clauses.ops.bench import EPS, Bench
from specdec.testing.clauses.ops.experts import ExpertsLayer
from specdec.testing.clauses.ops.layers import HEAD_DIM, AttentionLayer, DeltaLayer, LatentLayer, Layer, layers
from specdec.testing.subjects import OpsSubject

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]

RowOp = Callable[[int, int], Any]
"""An op without a cache, as a function of a range of rows."""


def _row_ops(bench: Bench, count: int) -> dict[str, RowOp]:
    """Every op without a cache, over ``count`` rows."""
    ops, n = bench.ops, count
    x, z = bench.act(bench.normal(n, 37)), bench.act(bench.normal(n, 29))
    weight, other, table = (bench.matrix(bench.normal(29, 37)) for _ in range(3))
    y, positions = bench.act(bench.normal(n, 37)), bench.matrix(bench.normal(n + 5, 37))
    vector, shift = (bench.vector(bench.normal(37)) for _ in range(2))
    heads, gates = (bench.heads(bench.normal(n, 3, HEAD_DIM)) for _ in range(2))
    head_vector, rope = bench.vector(bench.normal(HEAD_DIM)), Rope.of(1e4, HEAD_DIM)
    found: dict[str, RowOp] = {
        "project": lambda a, b: ops.project(x[a:b], (weight, other))[1],
        "linear": lambda a, b: ops.linear(x[a:b], weight, z[a:b]),
        "swiglu": lambda a, b: ops.swiglu(x[a:b], weight, other),
        "rms_norm": lambda a, b: ops.rms_norm(x[a:b], vector, EPS),
        "layer_norm": lambda a, b: ops.layer_norm(x[a:b], vector, shift, EPS),
        "gelu": lambda a, b: ops.gelu(x[a:b]),
        "add": lambda a, b: ops.add(x[a:b], y[a:b]),
        "add_positions": lambda a, b: ops.add_positions(x[a:b], positions, 5 + a),
        "norm_rope": lambda a, b: ops.norm_rope(heads[a:b], head_vector, EPS, rope, 50 + a),
        "gated_rms_norm": lambda a, b: ops.gated_rms_norm(heads[a:b], gates[a:b], head_vector, EPS),
        "concat": lambda a, b: ops.concat(x[a:b], z[a:b]),
        "head": lambda a, b: ops.head(x[a:b], table).rows(),
    }
    with contextlib.suppress(NotApplicable):
        layer = ExpertsLayer(bench, n)
        found["route, ids"] = lambda a, b: layer.route(a, b)[0]
        found["route, weights"] = lambda a, b: layer.route(a, b)[1]
        found["moe"] = lambda a, b: layer.run(a, b, shared=True, gated=True)
    with contextlib.suppress(NotApplicable):
        wide, matrices = bench.heads(bench.normal(n, 3, 37)), bench.normal(3, 29, 37)
        with bench.optional("stack", "project_heads"):
            stack = bench.stack(matrices)
            ops.project_heads(wide[:1], stack)
        found["project_heads"] = lambda a, b: ops.project_heads(wide[a:b], stack)
    with contextlib.suppress(NotApplicable):
        full = bench.matrix(bench.normal(301, 37))
        with bench.optional("head_rows", "pruned_head"):
            rows = ops.head_rows(full, [300, 5, 17], ops.head_rows(full, range(0, 100, 3)))
            ops.pruned_head(x[:1], rows)
        found["pruned_head"] = lambda a, b: ops.pruned_head(x[a:b], rows).rows()
    return found


@check("O12")
def row_invariance(subject: OpsSubject, run: Run) -> None:
    """BITWISE: a row's bits are the same in a pass of one row and in a pass of any number up to ``max_rows``."""
    bench = Bench(subject, run)
    if bench.ops.capabilities.parity is not Parity.BITWISE:
        not_applicable(f"it declares numeric parity: {bench.ops.capabilities.parity_reason}")
    most = bench.ops.capabilities.max_rows
    for name, op in _row_ops(bench, most).items():
        alone = [bench.host(op(t, t + 1))[0] for t in range(most)]
        for count in (2, 3, 5, 8, most):
            for t, row in enumerate(bench.host(op(0, count))):
                expect_equal(row, alone[t], f"{name}: row {t} of {count} has other bits than alone")
    for layer in (layer for layer in layers(bench, most) if layer.verifies):
        single = layer.in_passes([1] * most)
        for count in (2, 3, 5, most):
            for t, row in enumerate(layer.in_passes([count] * (most // count))):
                expect_equal(row, single[t], f"{layer.name}: row {t} has other bits in passes of {count}")


# --- caches ----------------------------------------------------------------------------------------------------------


def _expect_saved(layer: Layer, cache: Any, wanted: Mapping[str, Float64], what: str, **case: object) -> None:
    got = layer.saved(cache)
    expect_equal(sorted(got), sorted(wanted), f"{what} saves different arrays", **case)
    for name, array in wanted.items():
        expect_equal(got[name], array, f"{what} has other bits in {name}", **case)


@check("O13")
def commit_cuts(subject: OpsSubject, run: Run) -> None:
    """``commit(a)`` after T rows leaves the bits of a pass of a rows; dropped rows leave no trace, even if NaN."""
    bench = Bench(subject, run)
    for rows in {min(6, bench.ops.capabilities.max_rows), bench.ops.capabilities.max_rows}:
        _check_commits(bench, rows, range(rows + 1) if rows <= 6 else (0, 1, 2, rows // 2, rows - 1))


def _check_commits(bench: Bench, rows: int, counts: Sequence[int]) -> None:
    for layer in layers(bench, rows + 3):
        poison = layer.poisoned()

        def play(kept: int, decoded: int, *, poisoned: bool, layer: Layer = layer, poison: Layer = poison) -> Any:
            """A row, then a pass of ``decoded`` rows of which ``kept`` stay: the cache, and its number of rows."""
            cache = layer.cache(rows + 9)
            for at, passed, committed in ((0, 1, 1), (1, decoded, kept)):
                if poisoned:
                    poison.run(cache, 0, rows)
                    cache.commit(0)
                if passed:
                    layer.run(cache, at, at + passed)
                    cache.commit(committed)
            return cache

        for kept in counts:
            plain = play(kept, kept, poisoned=False)
            wanted, last = layer.saved(plain), layer.run(plain, 1 + kept, 2 + kept)
            for poisoned in (False, True):
                what = f"the cache of {layer.name} after commit({kept}) of {rows} rows"
                cache = play(kept, rows, poisoned=poisoned)
                expect(cache.length == 1 + kept, f"{what} has another length", got=cache.length, expected=1 + kept)
                _expect_saved(layer, cache, wanted, what, poisoned=poisoned)
                after = layer.run(cache, 1 + kept, 2 + kept)
                expect_equal(after, last, f"{what} gives different bits in the next row", poisoned=poisoned)


@check("O14")
def going_back(subject: OpsSubject, run: Run) -> None:
    """``truncate`` reaches a point in the cache, or changes nothing and returns False; ``save`` and ``load`` copy."""
    bench = Bench(subject, run)
    _check_marks(DeltaLayer(bench, 9))
    _check_truncate(AttentionLayer(bench, 7))
    with contextlib.suppress(NotApplicable):
        _check_truncate(LatentLayer(bench, 7))


def _check_marks(layer: DeltaLayer) -> None:
    """A recurrent cache can go back to its marks."""
    cache = layer.cache()
    points = {0: layer.saved(cache)}
    for at in range(8):
        layer.run(cache, at, at + 1)
        cache.commit(1)
        if at in (2, 5):
            cache.mark()
        points[at + 1] = layer.saved(cache)
    expect_equal(cache.length, 8, "the length does not count the committed rows")
    marks = list(cache.marks() or ())
    expect({0, 3, 6, 8} <= set(marks), "marks() does not list where truncate can go", got=marks, expected=[0, 3, 6, 8])
    copy = layer.loaded(cache.save(), 8)
    for length in (7, 6, 4, 3, 0):
        held, reached = cache.length, cache.truncate(length)
        expect_equal(reached, length in marks, f"truncate({length}) returns the wrong answer")
        _expect_saved(layer, cache, points[length if reached else held], f"the delta cache after truncate({length})")
    _expect_saved(layer, copy, points[8], "a loaded delta cache after the original went back")
    expect(cache.nbytes() > 0, "nbytes counts nothing")


def _check_truncate(layer: Layer) -> None:
    """A cache with an entry per row can go back anywhere."""
    cache = layer.cache(8)
    layer.in_passes([6], cache)
    taken, held = cache.save(), layer.saved(cache)
    expect(cache.truncate(2), f"the cache of {layer.name} cannot go back anywhere")
    layer.run(cache, 6, 7)
    cache.commit(1)
    expect_equal(cache.length, 3, "the length does not count the committed rows")
    other = layer.loaded(taken, 6)
    expect_equal(other.length, 6, "load does not set the length")
    other.load(layer.cache(8).save(), 0)
    expect_equal(other.length, 0, "load of an empty cache does not set the length")
    other = layer.loaded(taken, 6)
    _expect_saved(layer, other, held, f"a loaded cache of {layer.name} after the original went on")
    plain = layer.cache(8)
    for first, last in ((0, 2), (6, 7)):
        layer.run(plain, first, last)
        plain.commit(last - first)
    _expect_saved(layer, cache, layer.saved(plain), f"the cache of {layer.name} after truncate(2) and another row")
    expect(cache.nbytes() > 0, "nbytes counts nothing")


# --- inputs ----------------------------------------------------------------------------------------------------------


@check("O15")
def inputs_untouched(subject: OpsSubject, run: Run) -> None:
    """Ops return new arrays and never write to their inputs."""
    bench = Bench(subject, run)
    rows = 4
    row_ops, cached = _row_ops(bench, rows), list(layers(bench, rows))
    before = [bench.host(array).copy() for array in bench.inputs]
    for op in row_ops.values():
        op(0, rows)
    for layer in cached:
        cache = layer.cache(8)
        outputs = layer.outputs(cache, 0, rows)
        given = [bench.host(one).copy() for one in outputs]
        cache.commit(2)  # a partial commit may compute the rows again
        for one, old in zip(outputs, given, strict=True):
            expect_equal(bench.host(one), old, f"an output of {layer.name} was changed by commit")
    for array, old in zip(bench.inputs, before, strict=True):
        expect(np.array_equal(bench.host(array), old, equal_nan=True), "an input was changed", got=array, expected=old)
