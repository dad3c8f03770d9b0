"""Checks of a backend's operations against the torch reference: clauses O1 to O31."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from specdec.contract import Parity
from specdec.testing.checks import Run, check, checks_of, expect, expect_equal, not_applicable
from specdec.testing.clauses.forward_pass import check_logits
from specdec.testing.clauses.ops import layers
from specdec.testing.clauses.ops.layers import CAPACITY, Layer
from specdec.testing.clauses.ops.operations import LENGTH, OPERATIONS, REFERENCE, ROWS, VOCAB, Bench, row_calls
from specdec.testing.subjects import PluginSubject

SENTENCES = {
    "O1": "``vector`` keeps float32 and adds ``plus`` in it; ``embed`` gives the rows of a ``weight`` or ``table`` in "
    "order, repeats included.",
    "O2": "``project`` and ``linear`` are the matrix products, with bias and residual.",
    "O3": "``swiglu`` is ``silu(x @ gate.T) * (x @ up.T)``.",
    "O4": "``rms_norm`` divides by the root mean square over the last axis and multiplies by the weight, in float32.",
    "O5": "``norm_rope`` norms each head if given a weight, then rotates pairs (j, j + R/2) by the row's own position.",
    "O9": "``gated_rms_norm`` is ``rms_norm(x) * silu(z)`` per head.",
    "O11": "``concat`` joins activations side by side; ``hidden`` and ``array`` wrap and unwrap; "
    "slices keep their rows.",
    "O16": "``project_heads`` multiplies every head by its own matrix of a ``stack``, including views "
    "of a fused tensor.",
    "O17": "``route`` chooses by score plus bias, ties by lower id, in kept groups only; weights exclude the bias.",
    "O18": "``moe`` adds the weighted chosen experts and the gated shared one to the residual; "
    "other experts are not read.",
    "O21": "``layer_norm`` takes off the mean, divides by the standard deviation, scales and shifts, in float32.",
    "O22": "``gelu`` is the approximation with tanh of every element.",
    "O23": "``add`` is the sum of two activations, ``multiply`` their product; ``add_positions`` adds the table's rows "
    "from the first position on; ``scale`` multiplies every element.",
    "O27": "``geglu`` is ``gelu(x @ gate.T) * (x @ up.T)``.",
    "O29": "``scale_by_position`` multiplies a row by 1 plus beta times the logarithm of 1 plus the lengths before it.",
    "O30": "``clamped_moe`` routes by biased logits to experts with biases and a clamped gating; others are not read.",
}
"""The clauses that hold if the operations of the table agree with the reference."""


def _compare(subject: PluginSubject, run: Run, clause: str) -> None:
    bench = Bench(subject, run)
    for operation in OPERATIONS:
        if operation.clause == clause:
            operation.compare(bench)


checks_of(_compare, SENTENCES)


# --- output heads ----------------------------------------------------------------------------------------------------


def _tied(bench: Bench) -> Any:
    """An activation and a head in which ids 4 to 8 are equally good, exact in integers: the lowest is best."""
    equal = torch.tensor(bench.rng.integers(-3, 4, (1, LENGTH)), dtype=torch.float32).repeat(VOCAB, 1)
    x = bench.rows(equal[:2])
    equal[:4] = equal[9:] = 0
    return x.array, bench.ops.weight(equal)


@check("O10")
def head(subject: PluginSubject, run: Run) -> None:
    """``head`` gives float32 logits of every row over a vocabulary of any size, and their argmax, the lowest id of
    equal ones; ``softcap`` limits them."""
    _compare(subject, run, "O10")
    bench = Bench(subject, run)
    for rows in ROWS:
        logits = bench.ops.head(bench.act(rows, LENGTH).array, bench.matrix(VOCAB, LENGTH).array)
        check_logits(logits, rows, VOCAB)
        capped, exact = bench.ops.softcap(logits, 30.0), 30 * np.tanh(logits.rows().astype(np.float64) / 30)
        bench.close(check_logits(capped, rows, VOCAB), exact, 2e-5, "softcap")
    check_logits(bench.ops.head(*_tied(bench)), 2, VOCAB)


@check("O20")
def pruned_head(subject: PluginSubject, run: Run) -> None:
    """``pruned_head`` gives ``head``'s logits at the ids of ``head_rows`` and -inf elsewhere, added ids included."""
    _compare(subject, run, "O20")
    bench = Bench(subject, run)
    ops, x, weight = bench.ops, bench.act(5, LENGTH), bench.matrix(VOCAB, LENGTH)
    ids = [0, VOCAB - 1, *range(40, 170, 3)]
    base = ops.head_rows(weight.array, ids[::-1])
    extended = ops.head_rows(weight.array, [5, 40, 299], base)
    other = ops.head_rows(weight.array, [200, 7], base)  # another extension of the same rows
    again = ops.head_rows(weight.array, [1, 2, 200], extended)
    truth, size = x.values @ weight.values.T, x.values.abs() @ weight.values.abs().T
    for part, added in ((base, ()), (extended, (5, 299)), (other, (7, 200)), (again, (1, 2, 5, 200, 299))):
        expected = sorted({*ids, *added})
        expect_equal(list(part.tokens), expected, "head_rows has the wrong ids, or in the wrong order")
        logits = ops.pruned_head(x.array, part).rows()
        outside = np.setdiff1d(np.flatnonzero((logits > -np.inf).any(axis=0)), expected)
        expect(not len(outside), "an id without a row has a logit", got=outside, expected=expected)
        bound = size[:, expected] * (bench.eps + LENGTH * 2.0**-23)
        bench.close(logits[:, expected], truth[:, expected], bound, "pruned_head")
    check_logits(ops.pruned_head(x.array, extended), 5, VOCAB)
    x_tied, equal = _tied(bench)
    tied = ops.pruned_head(x_tied, ops.head_rows(equal, [7, 4], ops.head_rows(equal, [250, 8, 12])))
    check_logits(tied, 2, VOCAB)
    expect_equal(tied.argmax(), [4, 4], "equal logits do not go to the lowest id")


# --- caches ----------------------------------------------------------------------------------------------------------

PASSES = ((1, 0), (1, 17), (4, 3), (16, 5), (19, 2), (5, 31), (2, 255), (3, 620))
"""Rows of the pass, and rows in the cache."""
SPANS = (
    (1, 0, lambda row, start: 0),
    (1, 9, lambda row, start: row),  # itself alone
    (4, 5, lambda row, start: max(0, row - 2)),  # a window that slides
    (4, 5, lambda row, start: max(0, row - 6)),
    (7, 12, lambda row, start: max(0, start - 3)),  # all rows of a block from one point on
    (5, 0, lambda row, start: 0),
    (3, 70, lambda row, start: max(0, row - 64 + start % 2)),
)
"""Rows of the pass, rows in the cache, and the first row seen by a row of the cache in a pass from ``start`` on."""


def _layers(bench: Bench, clause: str) -> Iterator[tuple[Layer, Sequence[int]]]:
    """The layers that a clause is about, and where their passes end."""
    for rows in (1, 3, 9, 19) if clause in ("O7", "O8") else ():
        yield layers.delta(bench, rows), sorted({max(1, rows - 5), max(1, rows - 4), rows})
    for rows, before, first in SPANS if clause == "O24" else ():
        for causal in (True, False):
            yield layers.window(bench, before + rows, first, causal=causal), (before, before + rows)
    for number, (rows, before) in enumerate(PASSES):
        end = before + rows
        if clause == "O6":
            yield layers.attention(bench, end, gated=number % 3 != 1), (before, end)
        elif clause == "O31":
            yield layers.cached(bench, end), (before, end)
        elif clause == "O19":
            yield layers.latent(bench, end), (before, end)
        elif clause == "O26":
            for size in (1, 5, 70):
                yield layers.sliding(bench, end, size), (before, end)
        elif clause == "O28":
            yield layers.sunk(bench, end, (0, 5)[number % 2]), (before, end)


def _compare_layers(subject: PluginSubject, run: Run, clause: str) -> None:
    """Compare passes with the reference, over caches that were full of NaN."""
    bench, result = Bench(subject, run), int(clause == "O8")
    for number, (layer, ends) in enumerate(_layers(bench, clause)):
        caches, at = {ops: layer.new(ops, CAPACITY) for ops in (bench.ops, REFERENCE)}, 0
        if layer.mixed is not None:
            layers.fill_with_nan(caches[bench.ops])
        for end in filter(None, ends):
            got, truth = (layer.of(ops, at, end, cache=cache)[result] for ops, cache in caches.items())
            for cache in caches.values():
                cache.commit(end - at)
            if layer.mixed is None:
                bound = float(truth.abs().max()) * (8 * bench.eps + 2.0**-15)
            else:
                bound = float(layer.drawn[layer.mixed].values.abs().max()) * (2 * bench.eps + 1e-5)
            bench.close(got, truth, bound, layer.name, rows=end - at, cached=at, case=number)
            at = end


checks_of(
    _compare_layers,
    {
        "O6": "``attend`` is causal softmax attention over cached and own rows, with grouped heads and the sigmoid "
        "gate.",
        "O7": "``conv_window`` is the causal depthwise convolution with silu; the cache holds the rows before the "
        "pass.",
        "O8": "``gated_delta`` is the gated delta rule, token by token from the cached matrix.",
        "O19": "``attend_latent`` is causal softmax attention in which all heads read whole rows and mix their first "
        "values.",
        "O24": "``attend_from`` attends from each row's first row on, up to itself, or to the end of the pass.",
        "O26": "``attend`` over a cache of ``new_window`` sees the last rows of the window only, the row's own "
        "included.",
        "O28": "``attend`` over a cache with sinks gives them their share of every softmax, and mixes no value for it.",
        "O31": "``attend_cached`` is ``attend`` over cached rows and those that the pass has appended.",
    },
)


@check("O12")
def row_invariance(subject: PluginSubject, run: Run) -> None:
    """BITWISE: a row's bits are the same in a pass of one row and in a pass of any number up to ``max_rows``."""
    bench = Bench(subject, run)
    if bench.ops.capabilities.parity is not Parity.BITWISE:
        not_applicable(f"it declares numeric parity: {bench.ops.capabilities.parity_reason}")
    most = bench.ops.capabilities.max_rows
    for name, call in row_calls(bench, most):
        alone = [[bench.host(part)[0] for part in call.of(bench.ops, t, t + 1)] for t in range(most)]
        for count in (2, 3, 5, 8, most):
            for number, part in enumerate(call.of(bench.ops, 0, count)):
                for t, row in enumerate(bench.host(part)):
                    expect_equal(row, alone[t][number], f"{name}: row {t} of {count} has other bits than alone")
    for layer in (layer for layer in layers.every(bench, most) if layer.verifies):
        single = layer.in_passes([1] * most)
        for count in (2, 3, 5, most):
            for t, row in enumerate(layer.in_passes([count] * (most // count))):
                expect_equal(row, single[t], f"{layer.name}: row {t} has other bits in passes of {count}")


@check("O13")
def commit_cuts(subject: PluginSubject, run: Run) -> None:
    """``commit(a)`` after T rows leaves the bits of a pass of a rows; dropped rows leave no trace, even if NaN."""
    bench = Bench(subject, run)
    most = bench.ops.capabilities.max_rows
    for rows in {min(6, most), most}:
        for layer in layers.every(bench, rows + 3):
            poison = layer.poisoned()
            for kept in range(rows + 1) if rows <= 6 else (0, 1, 2, rows // 2, rows - 1):
                caches = []
                for decoded, poisoned in ((kept, False), (rows, False), (rows, True)):
                    cache = layer.cache(rows + 9)
                    for at, passed, committed in ((0, 1, 1), (1, decoded, kept)):
                        if poisoned:
                            poison.outputs(cache, 0, rows)
                            cache.commit(0)
                        if passed:
                            layer.outputs(cache, at, at + passed)
                            cache.commit(committed)
                    caches.append(cache)
                what = f"the cache of {layer.name} after commit({kept}) of {rows} rows"
                for cache in caches[1:]:
                    expect_equal(cache.length, 1 + kept, f"{what} has another length")
                    layer.expect_saved(cache, layer.saved(caches[0]), what)
                last, *after = (layer.outputs(cache, 1 + kept, 2 + kept) for cache in caches)
                for got in after:
                    expect_equal(got, last, f"{what} gives different bits in the next row")


@check("O14")
def going_back(subject: PluginSubject, run: Run) -> None:
    """``truncate`` reaches a point in the cache, or changes nothing and returns False; ``save`` and ``load`` copy."""
    bench = Bench(subject, run)
    for layer in layers.every(bench, 9):
        cache = layer.cache(9)
        points, arrays = [layer.saved(cache)], [cache.save()]
        for at in range(8):
            layer.taken_in(cache, at)
            if at in (2, 5):
                cache.mark()
            points.append(layer.saved(cache))
            arrays.append(cache.save())
        expect_equal(cache.length, 8, "the length does not count the committed rows")
        expect(cache.nbytes() > 0, "nbytes counts nothing")
        reachable = range(9) if cache.marks() is None else list(cache.marks())
        expect({0, 3, 6, 8} <= set(reachable), "marks() does not list where truncate can go", got=cache.marks())
        copy = layer.loaded(arrays[8], 8)
        for length in (7, 6, 4, 3, 0):
            before, reached = cache.length, cache.truncate(length)
            expect_equal(reached, length in reachable, f"truncate({length}) of {layer.name} returns the wrong answer")
            what = f"the cache of {layer.name} after truncate({length})"
            layer.expect_saved(cache, points[length if reached else before], what)
            if length == 3:
                plain = layer.taken_in(layer.cache(9), 0, 1, 2, 8)
                layer.expect_saved(layer.taken_in(cache, 8), layer.saved(plain), f"{what} and another row")
        for other, length in ((copy, 8), (layer.loaded(arrays[6], 6), 6), (layer.loaded(arrays[0], 0), 0)):
            expect_equal(other.length, length, "load does not set the length")
            layer.expect_saved(other, points[length], f"a loaded cache of {layer.name} after the original went back")


@check("O15")
def inputs_untouched(subject: PluginSubject, run: Run) -> None:
    """Ops return new arrays and never write to their inputs."""
    bench, rows = Bench(subject, run), 4
    for name, call in [*row_calls(bench, rows), *((layer.name, layer) for layer in layers.every(bench, rows))]:
        arrays = [one.array for one in call.drawn if not isinstance(one.array, list | tuple)]
        before = [bench.host(array).copy() for array in arrays]
        cache = call.cache(8) if isinstance(call, Layer) else None
        results = call.of(bench.ops, cache=cache)
        if cache is not None:
            outputs = [bench.host(one).copy() for one in results]
            cache.commit(2)  # a partial commit may compute the rows again
            for got, old in zip(results, outputs, strict=True):
                expect_equal(bench.host(got), old, f"an output of {name} was changed by commit")
        for array, old in zip(arrays, before, strict=True):
            same = np.array_equal(bench.host(array), old, equal_nan=True)
            expect(same, f"{name} changed an argument", got=bench.host(array), expected=old)


@check("O25")
def append(subject: PluginSubject, run: Run) -> None:
    """``append`` leaves the cache as ``attend`` of the same rows does; they are provisional until a commit."""
    bench = Bench(subject, run)
    layer = layers.attention(bench, 9, gated=False)

    def add(cache: Any, first: int, last: int) -> None:
        k, v = (one.array[first:last] for one in layer.drawn[1:])
        bench.ops.append(k, v, cache)

    with bench.optional("append"):
        add(layer.cache(2), 0, 1)
    for passes in ([5], [1, 4], [2, 1, 2]):
        attended, appended, at = layer.cache(CAPACITY), layer.cache(CAPACITY), 0
        layers.fill_with_nan(appended)
        for rows in passes:
            add(appended, 5, 8)  # others, which are not committed
            expect_equal(appended.length, at, "rows that are not committed count", rows=rows)
            appended.commit(0)
            layer.outputs(attended, at, at + rows)
            add(appended, at, at + rows + 1)
            for cache in (attended, appended):
                cache.commit(rows)
            at += rows
        layer.expect_saved(appended, layer.saved(attended), "the cache after append, unlike that after attend,")
        after = [layer.outputs(cache, 5, 8) for cache in (attended, appended)]
        expect_equal(after[1], after[0], "attention after append has other bits", passes=passes)
