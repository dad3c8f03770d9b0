"""Checks of the gated delta rule and the ops around it: clauses O7 to O9."""

from __future__ import annotations

import numpy as np

from specdec.testing.checks import Run, check
from specdec.testing.clauses.ops.bench import EPS, ROWS, Bench, rms_normed, silu
from specdec.testing.clauses.ops.layers import SHAPE, DeltaLayer
from specdec.testing.subjects import OpsSubject


@check("O7")
def conv_window(subject: OpsSubject, run: Run) -> None:
    """``conv_window`` is the causal depthwise convolution with silu; the cache holds the rows before the pass."""
    _check_layer(subject, run, "conv_window")


@check("O8")
def gated_delta(subject: OpsSubject, run: Run) -> None:
    """``gated_delta`` is the gated delta rule, token by token from the cached matrix."""
    _check_layer(subject, run, "gated_delta")


def _check_layer(subject: OpsSubject, run: Run, op: str) -> None:
    bench = Bench(subject, run)
    for rows in (1, 3, 9, 19):
        layer, convolved, updated, at = DeltaLayer(bench, rows), [], [], 0
        cache = layer.cache()
        for end in sorted({max(1, rows - 5), max(1, rows - 4), rows}):  # a long pass, then short ones
            u, o = layer.outputs(cache, at, end)
            convolved.append(bench.host(u))
            updated.append(bench.host(o))
            cache.commit(end - at)
            at = end
        if op == "conv_window":
            wanted = layer.convolved()
            magnitude = 4 * np.abs(bench.host(layer.x)).max() * np.abs(bench.host(layer.weight)).max()
            bound = bench.eps * np.abs(wanted) + magnitude * 2.0**-18
            bench.close(np.concatenate(convolved), wanted, bound, op, rows=rows)
        else:
            wanted = layer.delta_rule(np.concatenate(convolved))
            bound = bench.eps * np.abs(wanted) + np.abs(wanted).max() * 2.0**-15
            bench.close(np.concatenate(updated), wanted, bound, op, rows=rows)


@check("O9")
def gated_rms_norm(subject: OpsSubject, run: Run) -> None:
    """``gated_rms_norm`` is ``rms_norm(x) * silu(z)`` per head."""
    bench = Bench(subject, run)
    for rows in ROWS:
        x, z = (bench.heads(bench.normal(rows, SHAPE.value_heads, SHAPE.value_dim)) for _ in range(2))
        weight = bench.vector(bench.normal(SHAPE.value_dim), plus=1.0)
        wanted = (rms_normed(bench.host(x), bench.host(weight)) * silu(bench.host(z))).reshape(rows, -1)
        bound = (bench.eps + 2.0**-17) * np.abs(wanted) + 1e-9
        bench.close(bench.ops.gated_rms_norm(x, z, weight, EPS), wanted, bound, "gated_rms_norm", rows=rows)
