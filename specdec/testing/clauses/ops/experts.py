"""Checks of per-head products, routers and experts: clauses O16 to O18."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.backends.ops import Routing
from specdec.testing.checks import Run, check, expect, expect_equal
from specdec.testing.clauses.ops.bench import ROWS, Bench, sigmoid, silu, softmax
from specdec.testing.numerics import dot_tolerance
from specdec.testing.subjects import OpsSubject

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]


@check("O16")
def project_heads(subject: OpsSubject, run: Run) -> None:
    """``project_heads`` multiplies every head by its own matrix of a ``stack``, including views of a fused tensor."""
    bench = Bench(subject, run)
    with bench.optional("stack", "project_heads"):
        bench.ops.project_heads(bench.heads(bench.normal(1, 2, 8)), bench.stack(bench.normal(2, 3, 8)))
    for rows in ROWS:
        for heads, length, features in ((3, 37, 29), (5, 9, 64), (1, 16, 21)):
            x, values = bench.heads(bench.normal(rows, heads, length)), bench.normal(heads, features, length)
            host, w = bench.host(x), bench.rounded(values)
            wanted = np.einsum("thi,hoi->tho", host, w)
            bound = dot_tolerance(bench.dtype, length, np.einsum("thi,hoi->tho", np.abs(host), np.abs(w)))
            got = bench.ops.project_heads(x, bench.stack(values))
            bench.close(got, wanted, bound, "project_heads", rows=rows, heads=heads, length=length, features=features)


EXPERTS, ROUTED = 16, 37  # experts of a router, and its row length
CLEAR = 1e-3  # least margin of a choice, far above the error of a float32 product
_ROUTINGS = (
    Routing(top_k=1, scores="softmax", normalised=False),
    Routing(top_k=4, scores="softmax", normalised=True),
    Routing(top_k=3, scores="sigmoid", normalised=False, scale=2.5),
    Routing(top_k=4, scores="sigmoid", normalised=True, scale=2.5, groups=4, kept_groups=2),
    Routing(top_k=2, scores="softmax", normalised=True, groups=2, kept_groups=1),
    Routing(top_k=EXPERTS, scores="softmax", normalised=True),
)


def _routed(logits: Float64, routing: Routing, bias: Float64) -> tuple[list[int], Float64, float]:
    """One row's chosen experts, their weights, and the smallest deciding difference (ties aside)."""
    scores = sigmoid(logits) if routing.scores == "sigmoid" else softmax(logits)
    choice, least = scores + bias, np.inf

    def best(values: Sequence[float], count: int) -> list[int]:
        nonlocal least
        order = sorted(range(len(values)), key=lambda i: (-values[i], i))
        ranked = [values[i] for i in order[: count + 1] if values[i] > -np.inf]
        steps = [one - other for one, other in zip(ranked, ranked[1:], strict=False) if one != other]
        least = min([least, *steps])
        return order[:count]

    if routing.groups > 1:
        grouped = choice.reshape(routing.groups, -1)
        kept = best([float(np.sort(group)[-2:].sum()) for group in grouped], routing.kept_groups)
        masked = np.full_like(grouped, -np.inf)
        masked[kept] = grouped[kept]
        choice = masked.ravel()
    ids = best(choice.tolist(), routing.top_k)
    weights = scores[ids]
    if routing.normalised:
        weights = weights / (weights.sum() + 1e-20)
    return ids, weights * routing.scale, least


def _ties(rows: int) -> tuple[Float64, Float64]:
    """Rows and a router of small integers: logits are exact in any order of addition, and often equal."""
    weight = np.zeros((EXPERTS, ROUTED))
    weight[:, :8] = (np.arange(EXPERTS)[:, None] * np.arange(3, 11)) % 3 - 1.0
    x = np.zeros((rows, ROUTED))  # the first row stays zero: all its scores are equal
    x[1:, :8] = np.random.default_rng(5).integers(-2, 3, (rows - 1, 8))
    return x, weight


@check("O17")
def route(subject: OpsSubject, run: Run) -> None:
    """``route`` chooses by score plus bias, ties by lower id, in kept groups only; weights exclude the bias."""
    bench = Bench(subject, run)
    with bench.optional("route"):
        bench.ops.route(bench.act(bench.normal(1, 8)), bench.matrix(bench.normal(2, 8)), _ROUTINGS[0])
    for routing in _ROUTINGS:
        for rows in (1, 5, 19) if routing.top_k < EXPERTS else ():
            x, weight = _ties(rows)
            got = bench.ops.route(bench.act(x), bench.matrix(weight), routing)
            _expect_routes(bench, got, x @ weight.T, routing, np.zeros(EXPERTS), "route with equal scores")
        # some choices are below 0: a group masked with 0 instead of -inf would win
        for bias in (None, bench.vector(bench.normal(EXPERTS) * 0.4 - 0.7)):
            router = bench.matrix(bench.normal(EXPERTS, ROUTED) / 3)
            values = bench.normal(40 * max(ROWS), ROUTED)
            added = np.zeros(EXPERTS) if bias is None else bench.host(bias)
            logits = bench.host(bench.act(values)) @ bench.host(router).T
            least = CLEAR / 10 if routing.top_k == EXPERTS else CLEAR
            clear = [t for t in range(len(values)) if _routed(logits[t], routing, added)[2] > least]
            for rows in ROWS:
                chosen = clear[:rows]
                expect(len(chosen) == rows, "the check found no clear cases")
                got = bench.ops.route(bench.act(values[chosen]), router, routing, bias)
                _expect_routes(bench, got, logits[chosen], routing, added, "route", biased=bias is not None)


def _expect_routes(
    bench: Bench, got: tuple[Any, Any], logits: Float64, routing: Routing, bias: Float64, what: str, **case: object
) -> None:
    wanted = [_routed(row, routing, bias) for row in logits]
    ids, case = bench.host(got[0]), {**case, "rows": len(logits), "routing": routing}
    chosen = np.array([row[0] for row in wanted], np.float64)
    expect_equal(ids.shape, chosen.shape, f"{what}: the ids have the wrong shape")
    for t in range(len(logits)):
        expect_equal(ids[t], chosen[t], f"{what}: row {t} has different experts", **case)
    # a logit's error is at most the float32 error of its product; a score's relative error is no larger
    error = 4 * ROUTED * 2.0**-23 * (np.abs(logits).max() + 8.0) + 2.0**-18
    truth = np.array([row[1] for row in wanted])
    bench.close(got[1], truth, np.abs(truth) * error + 1e-9, f"{what}: the weights", **case)


class ExpertsLayer:
    """A layer of small experts, some of which are never chosen and hold NaN.

    Raises: NotApplicable if the backend has no experts.
    """

    count, wide, length, never = 9, 19, 37, (2, 5, 8)

    def __init__(self, bench: Bench, rows: int) -> None:
        self.bench = bench
        with bench.optional("stack", "route", "moe"):
            self._make(bench, rows)
            self.run(0, 1)

    def _make(self, bench: Bench, rows: int) -> None:
        shapes = [(self.wide, self.length), (self.wide, self.length), (self.length, self.wide)]
        values = [bench.normal(self.count, *shape) / 3 for shape in shapes]
        for one in values:
            one[list(self.never)] = np.nan
        self.experts = (bench.stack(values[0]), bench.stack(values[1]), bench.stack(values[2]))
        self.hosts = [bench.rounded(one) for one in values]
        gate, up, down = (bench.matrix(bench.normal(*shape) / 3) for shape in shapes)
        self.shared = (gate, up, down)
        self.shared_gate = bench.matrix(bench.normal(1, self.length) / 3)
        self.x, self.residual = (bench.act(bench.normal(rows, self.length)) for _ in range(2))
        self.router = bench.matrix(bench.normal(self.count, self.length) / 3)
        self.bias = bench.vector(np.where(np.isin(np.arange(self.count), self.never), -10.0, 0.0))
        self.routing = Routing(top_k=3, scores="sigmoid", normalised=True, scale=1.5)

    def route(self, first: int, last: int) -> tuple[Any, Any]:
        """The experts of these rows, and their weights."""
        return self.bench.ops.route(self.x[first:last], self.router, self.routing, self.bias)

    def run(self, first: int, last: int, *, shared: bool = False, gated: bool = False) -> Any:
        """``moe`` of these rows, with or without the shared expert."""
        chosen = self.route(first, last)
        options: dict[str, Any] = {"shared": self.shared} if shared else {}
        options |= {"shared_gate": self.shared_gate} if gated else {}
        return self.bench.ops.moe(self.x[first:last], chosen, self.experts, self.residual[first:last], **options)

    def expert(self, x: Float64, gate: Float64, up: Float64, down: Float64) -> tuple[Float64, Float64]:
        """``down(silu(gate x) * up x)`` of one row, and an op's tolerance."""
        inner, error = swiglu_with_error(self.bench, x[None], gate, up)
        out = (inner @ down.T)[0]
        magnitude = np.abs(down) @ (np.abs(inner[0]) + error[0])
        return out, np.abs(down) @ error[0] + dot_tolerance(self.bench.dtype, self.wide, magnitude)


def swiglu_with_error(bench: Bench, x: Float64, gate: Float64, up: Float64) -> tuple[Float64, Float64]:
    """``silu(x @ gate.T) * (x @ up.T)``, and an op's tolerance."""
    gated, raised = x @ gate.T, x @ up.T
    gate_error, up_error = bench.dot_tolerance(x, gate), bench.dot_tolerance(x, up)
    wanted = silu(gated) * raised
    error = 1.1 * gate_error * (np.abs(raised) + up_error) + np.abs(silu(gated)) * up_error
    return wanted, error + bench.eps * np.abs(wanted)


@check("O18")
def moe(subject: OpsSubject, run: Run) -> None:
    """``moe`` adds the weighted chosen experts and the gated shared one to the residual; other experts are not read."""
    bench = Bench(subject, run)
    for rows in ROWS:
        layer = ExpertsLayer(bench, rows)
        chosen = layer.route(0, rows)
        ids, weights = bench.host(chosen[0]).astype(int), bench.host(chosen[1])
        expect(not np.isin(ids, layer.never).any(), "route chose an expert with a bias of -10", got=ids)
        x, residual = bench.host(layer.x), bench.host(layer.residual)
        common, gate = [bench.host(one) for one in layer.shared], bench.host(layer.shared_gate)[0]
        for shared, gated in ((False, False), (True, False), (True, True)):
            wanted, bound = residual.copy(), np.zeros_like(residual)
            for t in range(rows):
                for expert, weight in zip(ids[t], weights[t], strict=True):
                    out, error = layer.expert(x[t], *(host[expert] for host in layer.hosts))
                    wanted[t] += weight * out
                    bound[t] += abs(weight) * (error + np.abs(out) * 2.0**-20)
                if shared:
                    out, error = layer.expert(x[t], *common)
                    share = float(sigmoid(gate @ x[t])) if gated else 1.0
                    off = float(dot_tolerance(bench.dtype, layer.length, np.abs(gate) @ np.abs(x[t])))
                    wanted[t] += share * out
                    bound[t] += share * error + (np.abs(out) + error) * off * gated
            bound += (bench.eps + 2.0**-18) * (np.abs(wanted) + np.abs(residual))
            got = layer.run(0, rows, shared=shared, gated=gated)
            bench.close(got, wanted, bound, "moe", rows=rows, shared=shared, gated=gated)
