"""Checks of parameters, products, norms, elementwise ops and output heads: clauses O1 to O4, O10, O11, O20 to O23."""

from __future__ import annotations

import numpy as np

from specdec.testing.checks import Run, check, expect, expect_equal
from specdec.testing.clauses.forward_pass import check_logits
from specdec.testing.clauses.ops.bench import EPS, ROWS, Bench, rms_normed
from specdec.testing.clauses.ops.experts import swiglu_with_error
from specdec.testing.subjects import OpsSubject

VOCAB, LENGTH = 301, 37


@check("O1")
def parameters_and_embedding(subject: OpsSubject, run: Run) -> None:
    """``vector`` keeps float32 and adds ``plus`` in it; ``embed`` gives the table's rows in order, repeats included."""
    bench = Bench(subject, run)
    values = bench.normal(7)
    wanted = (values.astype(np.float32) + np.float32(1.0)).astype(np.float64)
    bench.close(bench.vector(values, plus=1.0), wanted, 0.0, "vector")
    table = bench.matrix(bench.normal(11, 13))
    rows = bench.host(table)
    for tokens in ([3], [10, 0, 3, 3], list(range(11)) * 2):
        bench.close(bench.ops.embed(table, tokens), rows[tokens], 0.0, "embed", tokens=tokens)


@check("O2")
def products(subject: OpsSubject, run: Run) -> None:
    """``project`` and ``linear`` are the matrix products, with bias and residual."""
    bench = Bench(subject, run)
    for rows in ROWS:
        for length, features in ((37, 29), (64, 5), (9, 130)):
            x, weight = bench.act(bench.normal(rows, length)), bench.matrix(bench.normal(features, length))
            narrow, residual = bench.matrix(bench.normal(3, length)), bench.act(bench.normal(rows, features))
            host, w, other, added = (bench.host(one) for one in (x, weight, narrow, residual))
            one, two = bench.ops.project(x, (weight, narrow))
            products = bench.ops.linear(x, weight), bench.ops.linear(x, weight, residual)
            bound, case = bench.dot_tolerance(host, w), {"rows": rows, "length": length, "features": features}
            bench.close(one, host @ w.T, bound, "project", **case)
            bench.close(two, host @ other.T, bench.dot_tolerance(host, other), "the second of project", **case)
            bench.close(products[0], host @ w.T, bound, "linear", **case)
            bound = bench.dot_tolerance(host, w, plus=added, roundings=2)
            bench.close(products[1], host @ w.T + added, bound, "linear with residual", **case)


@check("O3")
def swiglu(subject: OpsSubject, run: Run) -> None:
    """``swiglu`` is ``silu(x @ gate.T) * (x @ up.T)``."""
    bench = Bench(subject, run)
    for rows in ROWS:
        x = bench.act(bench.normal(rows, LENGTH))
        gate, up = (bench.matrix(bench.normal(45, LENGTH) / 4) for _ in range(2))
        wanted, bound = swiglu_with_error(bench, bench.host(x), bench.host(gate), bench.host(up))
        bench.close(bench.ops.swiglu(x, gate, up), wanted, bound, "swiglu", rows=rows)


@check("O4")
def rms_norm(subject: OpsSubject, run: Run) -> None:
    """``rms_norm`` divides by the root mean square over the last axis and multiplies by the weight, in float32."""
    bench = Bench(subject, run)
    for rows in ROWS:
        for scale in (1.0, 1e-4, 300.0):
            x, weight = bench.act(bench.normal(rows, LENGTH) * scale), bench.vector(bench.normal(LENGTH), plus=1.0)
            wanted = rms_normed(bench.host(x), bench.host(weight))
            bound = (bench.eps + 2.0**-18) * np.abs(wanted) + 1e-12
            bench.close(bench.ops.rms_norm(x, weight, EPS), wanted, bound, "rms_norm", rows=rows, scale=scale)


@check("O10")
def head(subject: OpsSubject, run: Run) -> None:
    """``head`` gives float32 logits of every row over a vocabulary of any size, and their argmax, the lowest id of
    equal ones."""
    bench = Bench(subject, run)
    for rows in ROWS:
        x, weight = bench.act(bench.normal(rows, LENGTH)), bench.matrix(bench.normal(VOCAB, LENGTH))
        host, w, logits = bench.host(x), bench.host(weight), bench.ops.head(x, weight)
        bench.close(logits.rows(), host @ w.T, bench.dot_tolerance(host, w), "head", rows=rows)
        expect_equal(logits.rows().dtype, np.dtype(np.float32), "logits are not float32")
        expect_equal(logits.argmax(), logits.rows().argmax(axis=1).tolist(), "argmax of head differs from its rows")
        check_logits(logits, rows, VOCAB, [VOCAB - 1] * rows)
    equal = np.tile(bench.rng.integers(-3, 4, (1, LENGTH)).astype(np.float64), (VOCAB, 1))  # exact in integers
    equal[:4] = equal[9:] = 0
    check_logits(bench.ops.head(bench.act(equal[4:6]), bench.matrix(equal)), 2, VOCAB, [VOCAB - 1, 4])


@check("O11")
def arrays(subject: OpsSubject, run: Run) -> None:
    """``concat`` joins activations side by side; ``hidden`` and ``array`` wrap and unwrap; slices keep their rows."""
    bench = Bench(subject, run)
    a, b = bench.act(bench.normal(5, 7)), bench.act(bench.normal(5, 4))
    bench.close(bench.ops.concat(a, b), np.concatenate([bench.host(a), bench.host(b)], axis=1), 0.0, "concat")
    again = bench.ops.from_host(bench.ops.to_host(a))
    bench.close(
        bench.ops.concat(again, b), bench.host(bench.ops.concat(a, b)), 0.0, "an array copied to the host and back"
    )
    hidden = bench.ops.hidden(a)
    expect_equal(len(hidden), 5, "hidden states have the wrong number of rows")
    bench.close(bench.ops.array(hidden[1:4]), bench.host(a)[1:4], 0.0, "a slice of hidden states")
    bench.close(bench.ops.array(hidden[-1:].join([hidden[:2]])), bench.host(a)[[4, 0, 1]], 0.0, "joined hidden states")


@check("O20")
def pruned_head(subject: OpsSubject, run: Run) -> None:
    """``pruned_head`` gives ``head``'s logits at the ids of ``head_rows`` and -inf elsewhere, added ids included."""
    bench = Bench(subject, run)
    ops, weight = bench.ops, bench.matrix(bench.normal(VOCAB, LENGTH))
    with bench.optional("head_rows", "pruned_head"):
        ops.pruned_head(bench.act(bench.normal(1, LENGTH)), ops.head_rows(weight, [1]))
    ids = [0, VOCAB - 1, *range(40, 170, 3)]
    base = ops.head_rows(weight, ids[::-1])
    one = ops.head_rows(weight, [5, 40, 299], base)
    other = ops.head_rows(weight, [200, 7], base)  # another extension of the same rows
    known = [
        (base, ids),
        (one, [*ids, 5, 299]),
        (other, [*ids, 7, 200]),
        (ops.head_rows(weight, [1, 2, 200], one), [*ids, 1, 2, 5, 200, 299]),
        (ops.head_rows(weight, [40], base), ids),
    ]
    for rows in ROWS:
        x = bench.act(bench.normal(rows, LENGTH))
        host, w = bench.host(x), bench.host(weight)
        truth, bound = host @ w.T, bench.dot_tolerance(host, w)
        for made, there in known:
            wanted = sorted(set(there))
            expect_equal(list(made.tokens), wanted, "head_rows has the wrong ids, or in the wrong order")
            logits = check_logits(ops.pruned_head(x, made), rows, VOCAB, [VOCAB - 1, *([3] * (rows - 1))])
            outside = np.setdiff1d(np.flatnonzero((logits > -np.inf).any(axis=0)), wanted)
            expect(not len(outside), "an id without a row has a logit", rows=rows, got=outside, expected=wanted)
            bench.close(logits[:, wanted], truth[:, wanted], bound[:, wanted], "pruned_head", rows=rows)
    # equal logits, exact in integers: the lower id is best, even if its row comes later
    whole = np.tile(bench.rng.integers(-3, 4, (1, LENGTH)).astype(np.float64), (VOCAB, 1))
    equal = bench.matrix(whole)
    made = ops.head_rows(equal, [9, 4], ops.head_rows(equal, [250, 30, 12]))
    tied = ops.pruned_head(bench.act(whole[:2]), made)
    expect_equal(tied.argmax(), [4, 4], "equal logits do not go to the lowest id")
    check_logits(tied, 2, VOCAB, [250, 4])


@check("O21")
def layer_norm(subject: OpsSubject, run: Run) -> None:
    """``layer_norm`` takes off the mean, divides by the standard deviation, scales and shifts, in float32."""
    bench = Bench(subject, run)
    for rows in ROWS:
        for scale, mean in ((1.0, 0.0), (1e-4, 0.0), (3.0, 40.0)):
            x = bench.act(bench.normal(rows, LENGTH) * scale + mean)
            weight, bias = bench.vector(bench.normal(LENGTH), plus=1.0), bench.vector(bench.normal(LENGTH))
            host, w, b = bench.host(x), bench.host(weight), bench.host(bias)
            deviation = np.sqrt(host.var(-1, keepdims=True) + EPS)
            scaled = (host - host.mean(-1, keepdims=True)) / deviation * w
            cancelled = np.abs(host).max(-1, keepdims=True) / deviation * np.abs(w)
            bound = bench.eps * np.abs(scaled + b) + 2.0**-18 * (np.abs(scaled) + np.abs(b) + cancelled)
            bench.close(
                bench.ops.layer_norm(x, weight, bias, EPS), scaled + b, bound, "layer_norm", rows=rows, scale=scale
            )


@check("O22")
def gelu(subject: OpsSubject, run: Run) -> None:
    """``gelu`` is the approximation with tanh of every element."""
    bench = Bench(subject, run)
    for rows in ROWS:
        for scale in (0.1, 2.0, 30.0):
            x = bench.act(bench.normal(rows, LENGTH) * scale)
            host = bench.host(x)
            wanted = 0.5 * host * (1 + np.tanh(np.sqrt(2 / np.pi) * (host + 0.044715 * host**3)))
            bound = bench.eps * np.abs(wanted) + 2.0**-20 * np.abs(host)
            bench.close(bench.ops.gelu(x), wanted, bound, "gelu", rows=rows, scale=scale)


@check("O23")
def sums(subject: OpsSubject, run: Run) -> None:
    """``add`` is the sum of two activations; ``add_positions`` adds the table's rows from the first position on."""
    bench = Bench(subject, run)
    table = bench.matrix(bench.normal(60, LENGTH))
    for rows in ROWS:
        a, b = bench.act(bench.normal(rows, LENGTH)), bench.act(bench.normal(rows, LENGTH))
        wanted = bench.host(a) + bench.host(b)
        bench.close(bench.ops.add(a, b), wanted, bench.eps * np.abs(wanted), "add", rows=rows)
        for position in (0, 3, 60 - rows):
            wanted = bench.host(a) + bench.host(table)[position : position + rows]
            got = bench.ops.add_positions(a, table, position)
            bench.close(got, wanted, bench.eps * np.abs(wanted), "add_positions", rows=rows, position=position)
