"""The table of operations: each over drawn arguments, beside the torch reference with a bound on the difference.

Sizes are deliberately odd: no multiple of a vector, a tile or a block. The backend makes the arguments, and the
reference takes what ``to_host`` gives back of them as float32, so that only the operation's own error counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from specdec.backends.cpu.reference import ReferenceOps
from specdec.backends.ops import Clamp, DeltaShape, Ops, Rope, Routing
from specdec.errors import UnsupportedError
from specdec.testing.checks import Broken, NotApplicable, Run, expect, expect_equal, not_applicable
from specdec.testing.subjects import PluginSubject

if TYPE_CHECKING:
    from specdec.exchange import Float64

REFERENCE = ReferenceOps(torch.float32)
ROWS = (1, 2, 5, 16, 19)  # one, a few, a full verification pass, a prompt
EPS = 1e-6  # of norms
LENGTH, VOCAB = 37, 301
SHAPE = DeltaShape(key_heads=2, value_heads=6, key_dim=12, value_dim=10, kernel=4)
HEAD_DIM = 20


@attrs.frozen(eq=False)
class Drawn:
    """An argument: the backend's array, and its values for the reference. ``by_row``: a row for each of the pass."""

    array: Any
    values: Any
    by_row: bool = False

    def heads(self, count: int) -> Drawn:
        """``[T, H]`` as ``[T, count, H / count]``."""
        shape = len(self.values), count, self.values.shape[1] // count
        return attrs.evolve(self, array=self.array.reshape(*shape), values=self.values.reshape(shape))

    def first(self, dims: int) -> Drawn:
        """The first values of every head: a strided view, like that of an interleaved projection."""
        return attrs.evolve(self, array=self.array[..., :dims], values=self.values[..., :dims])


@attrs.frozen
class Position:
    """An argument: the position of a pass's first row, if the pass begins with the first drawn row."""

    at: int


class Bench:
    """A backend's ops, arguments drawn for them, and comparisons."""

    def __init__(self, subject: PluginSubject, run: Run) -> None:
        self.ops: Ops = subject.make()
        self.rng = np.random.default_rng(run.seed + 1)
        dtype = torch.finfo(self.ops.to_host(self.act(1, 8).array).dtype)
        self.eps, self.finest = dtype.eps, dtype.tiny * dtype.eps  # relative rounding, and that next to 0

    def host(self, array: Any) -> Float64:
        """An array of the backend, of torch or of numpy as float64, without rounding."""
        if not isinstance(array, np.ndarray):
            array = self.ops.to_host(array).double().numpy()
        return np.asarray(array, np.float64)

    def drawn(self, array: Any, *, by_row: bool = False) -> Drawn:
        """An array of the backend as an argument."""
        values = self.ops.to_host(array)
        return Drawn(array, values.float() if values.is_floating_point() else values.long(), by_row)

    def normal(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> torch.Tensor:
        """Normal values."""
        return torch.tensor(self.rng.standard_normal(shape) * scale + mean, dtype=torch.float32)

    def rows(self, values: torch.Tensor) -> Drawn:
        """An activation ``[T, H]`` of these values."""
        return self.drawn(self.ops.embed(self.ops.weight(values), list(range(len(values)))), by_row=True)

    def act(self, rows: int, length: int, **how: float) -> Drawn:
        """An activation ``[T, H]``."""
        return self.rows(self.normal(rows, length, **how))

    def matrix(self, *shape: int, scale: float = 1.0) -> Drawn:
        """A weight ``[N, H]``, or a bias."""
        return self.drawn(self.ops.weight(self.normal(*shape, scale=scale)))

    def vector(self, *shape: int, plus: float = 0.0, **how: float) -> Drawn:
        """A float32 parameter."""
        return self.drawn(self.ops.vector(self.normal(*shape, **how), plus=plus))

    def stack(self, values: torch.Tensor) -> Drawn:
        """Matrices ``[n, N, H]`` as views of a fused tensor with other rows between them."""
        count, rows, length = values.shape
        fused = torch.cat([values, torch.full((count, 3, length), 7.0)], dim=1)
        rounded = [self.drawn(self.ops.weight(matrix.contiguous())).values for matrix in values]
        return Drawn(self.ops.stack([fused[i, :rows] for i in range(count)]), rounded)

    def close(self, got: Any, truth: Any, tolerance: Any, what: str, **case: object) -> None:
        """Raises: Broken if ``got`` is further from ``truth`` than the tolerance."""
        array, expected = self.host(got), np.asarray(truth, np.float64)
        expect_equal(array.shape, expected.shape, f"{what} has the wrong shape", **case)
        off = np.abs(array - expected)
        wrong = ~(off <= np.asarray(tolerance) + self.finest)  # NaN is wrong too
        if wrong.any():
            place = tuple(int(i) for i in np.argwhere(wrong)[0])
            allowed = float(np.broadcast_to(tolerance, off.shape)[place])
            close_to = f"{expected[place]:.7g} within {allowed:.1e}"
            raise Broken(f"{what} is off at {place}", got=f"{array[place]:.7g}", expected=close_to, **case)

    @contextlib.contextmanager
    def optional(self, name: str, applies: bool = True) -> Iterator[None]:
        """Try an operation for the first time: its clause does not apply to a backend that refuses it now."""
        try:
            yield
        except (NotImplementedError, UnsupportedError) as error:
            if not applies:
                raise
            not_applicable(f"this backend lacks {name}, or what it needs: {type(error).__name__}: {error}")


class Call:
    """An operation, by its name or as ``run(ops, *arguments)``, over drawn and other arguments.

    A result may differ from the reference's by ``roundings`` units of the activation dtype and ``terms`` units of
    float32, relative to its ``magnitude``: the result over the absolute values of all arguments, or a function of the
    reference's results and arguments. The sum of n products in any order is off by at most ``n * 2^-24`` of the sum of
    their magnitudes (Higham 2002, section 3.1), and a rounding by half a unit. Both are doubled, because the reference
    adds in float32 too, and because the inputs of later roundings are rounded themselves.
    """

    def __init__(
        self,
        run: str | Callable[..., Any],
        *arguments: Any,
        roundings: float = 1,
        terms: float = 64,
        magnitude: Callable[..., Any] | None = None,
    ) -> None:
        self.run: Callable[..., Any] = (lambda ops, *a: getattr(ops, run)(*a)) if isinstance(run, str) else run
        self.arguments, self.roundings, self.terms, self.magnitude = arguments, roundings, terms, magnitude
        self.drawn = [one for one in arguments if isinstance(one, Drawn)]
        self.by_row = any(one.by_row for one in self.drawn)

    def of(self, ops: Ops, first: int = 0, last: int | None = None, *, cache: Any = None) -> list[Any]:
        """The results of the backend, or of the reference, for rows ``first`` to ``last``."""

        def value(argument: Any) -> Any:
            if isinstance(argument, Position):
                return argument.at + first
            if not isinstance(argument, Drawn):
                return argument
            array = argument.values if ops is REFERENCE else argument.array
            return array[first:last] if argument.by_row else array

        results = self.run(ops, *([] if cache is None else [cache]), *map(value, self.arguments))
        return list(results) if isinstance(results, tuple | list) else [results]

    def magnitudes(self, results: list[Any]) -> list[Any]:
        """Those of the reference's results."""
        if self.magnitude is not None:
            sizes = self.magnitude(results, *(one.values for one in self.drawn))
            return sizes if isinstance(sizes, list) else [sizes]
        sizes = [
            attrs.evolve(one, values=_absolute(one.values)) if isinstance(one, Drawn) else one for one in self.arguments
        ]
        return Call(self.run, *sizes).of(REFERENCE)


def _absolute(values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        return values.abs()
    return [_absolute(one) for one in values] if isinstance(values, list) else values


@attrs.frozen
class Operation:
    """A row of the table: ``draw(bench, rows, number)`` gives the call of case ``number``.

    A backend may lack an ``optional`` one: it then refuses the first case.
    """

    clause: str
    name: str
    draw: Callable[[Bench, int, int], Call]
    cases: int = 15  # each number of rows with each of three sizes or scales
    optional: bool = False

    def compare(self, bench: Bench) -> None:
        """Raises: Broken unless every case is the reference's within its bound."""
        for number in range(self.cases):
            rows = ROWS[number % len(ROWS)]
            with bench.optional(self.name, applies=self.optional and number == 0):
                call = self.draw(bench, rows, number)
                results = call.of(bench.ops)
            truth = call.of(REFERENCE)
            relative = call.roundings * bench.eps + call.terms * 2.0**-23
            for got, expected, size in zip(results, truth, call.magnitudes(truth), strict=True):
                bench.close(got, expected, np.asarray(size, np.float64) * relative, self.name, rows=rows, case=number)


def row_calls(bench: Bench, rows: int) -> Iterator[tuple[str, Call]]:
    """A call over ``rows`` rows of every operation that works row by row and that the backend has."""
    for operation in (*OPERATIONS, Operation("O17", "route", _any_route, optional=True)):
        with contextlib.suppress(NotApplicable), bench.optional(operation.name, applies=operation.optional):
            call = operation.draw(bench, rows, 2)
            call.of(bench.ops, 0, 1)
            if call.by_row:
                yield operation.name, call


# --- draws -----------------------------------------------------------------------------------------------------------


def _product(bench: Bench, rows: int, number: int) -> tuple[Drawn, Drawn, int]:
    features, length = ((29, LENGTH), (5, 64), (130, 9))[number % 3]
    return bench.act(rows, length), bench.matrix(features, length), features


def _embed(bench: Bench, rows: int, number: int) -> Call:
    ids = [10, 0, 3, 3, *range(11), 7, 10, 10, 1][-rows:]
    table = bench.drawn((bench.ops.table if number % 2 else bench.ops.weight)(bench.normal(11, 13)))
    return Call("embed", table, Drawn(ids, ids, by_row=True), roundings=0, terms=0)


def _vector(bench: Bench, rows: int, number: int) -> Call:
    values = bench.normal(7)
    return Call(lambda ops, one: ops.vector(one, plus=1.0), Drawn(values, values), roundings=0, terms=0)


def _project(bench: Bench, rows: int, number: int) -> Call:
    x, weight, features = _product(bench, rows, number)
    more = bench.matrix(3, x.values.shape[1]), bench.matrix(features)
    return Call(lambda ops, x, one, two, bias: ops.project(x, (one, two), (bias, None)), x, weight, *more, roundings=2)


def _linear(bench: Bench, rows: int, number: int) -> Call:
    x, weight, features = _product(bench, rows, number)
    y = bench.act(rows, features)
    return Call(lambda ops, x, w, y: (ops.linear(x, w), ops.linear(x, w, y)), x, weight, y, roundings=2)


def _gated(name: str) -> Callable[[Bench, int, int], Call]:
    def draw(bench: Bench, rows: int, number: int) -> Call:
        gate, up = (bench.matrix(45, LENGTH, scale=0.25) for _ in range(2))
        return Call(name, bench.act(rows, LENGTH), gate, up, roundings=5, terms=320)

    return draw


def _rms_norm(bench: Bench, rows: int, number: int) -> Call:
    x = bench.act(rows, LENGTH, scale=(1.0, 1e-4, 300.0)[number % 3])
    return Call("rms_norm", x, bench.vector(LENGTH, plus=1.0), EPS)


def _layer_norm(bench: Bench, rows: int, number: int) -> Call:
    scale, mean = ((1.0, 0.0), (1e-4, 0.0), (3.0, 40.0))[number % 3]

    def magnitude(results: list[Any], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        deviation = (x.var(-1, correction=0, keepdim=True) + EPS).sqrt()
        cancelled = x.abs().amax(-1, keepdim=True) / deviation * 2.0**-23 / bench.eps  # by the mean, in float32
        sizes: torch.Tensor = results[0].abs() + bias.abs() + weight.abs() * (1 + cancelled)
        return sizes

    x, weight, bias = bench.act(rows, LENGTH, scale=scale, mean=mean), bench.vector(LENGTH), bench.vector(LENGTH)
    return Call("layer_norm", x, weight, bias, EPS, terms=32, magnitude=magnitude)


def _gelu(bench: Bench, rows: int, number: int) -> Call:
    return Call("gelu", bench.act(rows, LENGTH, scale=(0.1, 2.0, 30.0)[number % 3]), terms=16)


def _joined(name: str) -> Callable[[Bench, int, int], Call]:
    return lambda bench, rows, number: Call(name, bench.act(rows, LENGTH), bench.act(rows, LENGTH), terms=1)


def _scale(bench: Bench, rows: int, number: int) -> Call:
    return Call("scale", bench.act(rows, LENGTH), (25.25, 0.22, 1 / 3)[number % 3], terms=1)


def _scale_by_position(bench: Bench, rows: int, number: int) -> Call:
    position = Position((0, 3, 60 - rows)[number % 3])
    return Call("scale_by_position", bench.act(rows, LENGTH), 0.375, (16, 5, 1)[number % 3], position, terms=8)


def _add_positions(bench: Bench, rows: int, number: int) -> Call:
    position = Position((0, 3, 60 - rows)[number % 3])
    return Call("add_positions", bench.act(rows, LENGTH), bench.matrix(60, LENGTH), position, terms=1)


def _norm_rope(bench: Bench, rows: int, number: int) -> Call:
    rotary, position, normed = ((HEAD_DIM, 3, False), (8, 777, True), (HEAD_DIM, 0, True), (8, 254, True))[number % 4]
    return Call(
        "norm_rope",
        bench.act(rows, 6 * HEAD_DIM).heads(3).first(HEAD_DIM),
        bench.vector(HEAD_DIM, plus=1.0) if normed else None,
        EPS,
        Rope.of(1e4, rotary),
        Position(position),
        roundings=3,
        terms=128 + 4 * (position + rows),  # the angle's rounding grows with the position
        magnitude=lambda results, *_: 2**0.5 * results[0].abs().amax(-1, keepdim=True),
    )


def _gated_rms_norm(bench: Bench, rows: int, number: int) -> Call:
    x, z = (bench.act(rows, SHAPE.value_heads * SHAPE.value_dim).heads(SHAPE.value_heads) for _ in range(2))
    return Call("gated_rms_norm", x, z, bench.vector(SHAPE.value_dim, plus=1.0), EPS)


def _head(bench: Bench, rows: int, number: int) -> Call:
    return Call(lambda ops, x, w: ops.head(x, w).rows(), bench.act(rows, LENGTH), bench.matrix(VOCAB, LENGTH))


def _pruned_head(bench: Bench, rows: int, number: int) -> Call:
    ids = [300, 5, 17, *range(0, 100, 3)]

    def run(ops: Ops, x: Any, weight: Any) -> Any:
        return ops.pruned_head(x, ops.head_rows(weight, ids[:3], ops.head_rows(weight, ids[3:]))).rows()[:, sorted(ids)]

    return Call(run, bench.act(rows, LENGTH), bench.matrix(VOCAB, LENGTH))


def _concat(bench: Bench, rows: int, number: int) -> Call:
    def run(ops: Ops, a: Any, b: Any) -> Any:
        return ops.concat(ops.from_host(ops.to_host(a)), b)

    return Call(run, bench.act(rows, 7), bench.act(rows, 4), roundings=0, terms=0)


def _hidden(bench: Bench, rows: int, number: int) -> Call:
    def run(ops: Ops, x: Any) -> Any:
        hidden = ops.hidden(x)
        expect_equal(len(hidden), x.shape[0], "hidden states have the wrong number of rows")
        return ops.array(hidden[1:4]), ops.array(hidden[-1:].join([hidden[:2]]))

    return Call(run, attrs.evolve(bench.act(rows, 7), by_row=False), roundings=0, terms=0)


def _project_heads(bench: Bench, rows: int, number: int) -> Call:
    heads, length, features = ((3, LENGTH, 29), (5, 9, 64), (1, 16, 21))[number % 3]
    matrices = bench.stack(bench.normal(heads, features, length))
    return Call("project_heads", bench.act(rows, heads * length).heads(heads), matrices)


EXPERTS = 16
CLEAR = 1e-3  # far above the error of a float32 product
ROUTINGS = (
    Routing(top_k=1, scores="softmax", normalised=False),
    Routing(top_k=4, scores="softmax", normalised=True),
    Routing(top_k=3, scores="sigmoid", normalised=False, scale=2.5),
    Routing(top_k=4, scores="sigmoid", normalised=True, scale=2.5, groups=4, kept_groups=2),
    Routing(top_k=2, scores="softmax", normalised=True, groups=2, kept_groups=1),
    Routing(top_k=EXPERTS, scores="softmax", normalised=True),
)


def _route(bench: Bench, rows: int, number: int) -> Call:
    """Every routing over scores of which many are equal, then over random ones without and with a bias."""
    routing, kind = ROUTINGS[number % len(ROUTINGS)], number // len(ROUTINGS)
    bias = bench.vector(EXPERTS, scale=0.4, mean=-0.7) if kind == 2 else None  # a group masked with 0 would win
    if kind == 0:  # logits 0, 1 and 2 are exact in any order of addition; those of the first row are all 0
        values = torch.eye(LENGTH)[:rows]
        values[0] = 0
        weight = torch.tensor(bench.rng.integers(0, 3, (EXPERTS, LENGTH)), dtype=torch.float32)
        router = bench.drawn(bench.ops.weight(weight))
    else:
        many = 40 if routing.top_k == EXPERTS else 8
        router, values = bench.matrix(EXPERTS, LENGTH, scale=1 / 3), bench.normal(many * rows + many, LENGTH)
        added = torch.zeros(EXPERTS) if bias is None else bias.values
        values = values[_clear(bench.rows(values).values, router.values, routing, added)[:rows]]
        expect(len(values) == rows, "the check found no clear cases")

    def magnitude(results: list[Any], *_: Any) -> list[Any]:
        return [0 * results[0], results[1].abs()]

    # the absolute error of a logit is the relative error of its score
    return Call("route", bench.rows(values), router, routing, bias, roundings=0, terms=4000, magnitude=magnitude)


def _clear(x: torch.Tensor, router: torch.Tensor, routing: Routing, bias: torch.Tensor) -> torch.Tensor:
    """The rows whose experts stay the same when scores change by ``CLEAR``."""
    size = CLEAR / 10 if routing.top_k == EXPERTS else CLEAR
    noise = torch.tensor(np.random.default_rng(3).choice([-size, size], (4, EXPERTS)), dtype=torch.float32)
    ids, *changed = (REFERENCE.route(x, router, routing, bias + one)[0] for one in (torch.zeros(EXPERTS), *noise))
    return torch.stack([(one == ids).all(-1) for one in changed]).all(0).nonzero()[:, 0]


def _any_route(bench: Bench, rows: int, number: int) -> Call:
    return Call("route", bench.act(rows, LENGTH), bench.matrix(EXPERTS, LENGTH), ROUTINGS[3], bench.vector(EXPERTS))


FEW, NEVER = 9, [2, 5, 8]  # experts, and those that are never chosen


def _shapes() -> tuple[tuple[int, int], ...]:
    """Of an expert's three matrices."""
    return (19, LENGTH), (19, LENGTH), (LENGTH, 19)


def _experts(bench: Bench) -> list[Drawn]:
    """Stacks of three matrices of every expert; those of experts that are never chosen hold NaN."""
    stacks = [bench.normal(FEW, *shape, scale=1 / 3) for shape in _shapes()]
    for values in stacks:
        values[NEVER] = torch.nan
    return [*map(bench.stack, stacks)]


def _moe(bench: Bench, rows: int, number: int) -> Call:
    """Alone, with a shared expert, and with a gated one; a third of the experts is never chosen and holds NaN."""
    x, residual, router = bench.act(rows, LENGTH), bench.act(rows, LENGTH), bench.matrix(FEW, LENGTH, scale=1 / 3)
    bias = bench.ops.vector(torch.tensor([-10.0 if expert in NEVER else 0.0 for expert in range(FEW)]))
    routing = Routing(top_k=3, scores="sigmoid", normalised=True, scale=1.5)
    ids, weights = (bench.drawn(one, by_row=True) for one in bench.ops.route(x.array, router.array, routing, bias))
    expect(not np.isin(ids.values, NEVER).any(), "route chose an expert with a bias of -10", got=ids.values)
    shared = [bench.matrix(*shape, scale=1 / 3) for shape in _shapes()] if number % 3 else []
    gate = [bench.matrix(1, LENGTH, scale=1 / 3)] if number % 3 == 2 else []

    def run(ops: Ops, x: Any, ids: Any, weights: Any, residual: Any, *matrices: Any) -> Any:
        more: dict[str, Any] = {"shared": matrices[3:6]} if shared else {}
        more |= {"shared_gate": matrices[6]} if gate else {}
        return ops.moe(x, (ids, weights), matrices[:3], residual, **more)

    return Call(run, x, ids, weights, residual, *_experts(bench), *shared, *gate, roundings=8, terms=500)


def _clamped_moe(bench: Bench, rows: int, number: int) -> Call:
    """With a limit that is often reached; a third of the experts is never chosen and holds NaN."""
    logits = torch.zeros(FEW)
    logits[NEVER] = -100.0
    routing = Routing(top_k=6, scores="softmax", normalised=True)
    clamp = Clamp(alpha=1.702, limit=(0.7, 2.0)[number % 2])

    def run(ops: Ops, x: Any, residual: Any, router: Any, added: Any, *parts: Any) -> Any:
        return ops.clamped_moe(x, (router, added), routing, parts[:3], parts[3:], clamp, residual)

    return Call(
        run,
        bench.act(rows, LENGTH),
        bench.act(rows, LENGTH),
        bench.matrix(FEW, LENGTH, scale=1 / 3),
        bench.drawn(bench.ops.vector(logits)),
        *_experts(bench),
        *(bench.vector(FEW, size, scale=0.5) for size, _ in _shapes()),
        roundings=8,
        terms=2000,
        magnitude=lambda results, *_: results[0].abs().amax(-1, keepdim=True),
    )


OPERATIONS: Sequence[Operation] = (
    Operation("O1", "vector", _vector, 1),
    Operation("O1", "embed", _embed, 5),
    Operation("O2", "project", _project),
    Operation("O2", "linear", _linear),
    Operation("O3", "swiglu", _gated("swiglu"), 5),
    Operation("O4", "rms_norm", _rms_norm),
    Operation("O5", "norm_rope", _norm_rope, 20),
    Operation("O9", "gated_rms_norm", _gated_rms_norm, 5),
    Operation("O10", "head", _head, 5),
    Operation("O11", "concat", _concat, 5),
    Operation("O11", "hidden", _hidden, 5),
    Operation("O16", "project_heads", _project_heads, optional=True),
    Operation("O17", "route", _route, 18, optional=True),
    Operation("O18", "moe", _moe, optional=True),
    Operation("O20", "pruned_head", _pruned_head, 5, optional=True),
    Operation("O21", "layer_norm", _layer_norm),
    Operation("O22", "gelu", _gelu),
    Operation("O23", "add", _joined("add"), 5),
    Operation("O23", "multiply", _joined("multiply"), 5),
    Operation("O23", "add_positions", _add_positions),
    Operation("O23", "scale", _scale),
    Operation("O27", "geglu", _gated("geglu"), 5, optional=True),
    Operation("O29", "scale_by_position", _scale_by_position, optional=True),
    Operation("O30", "clamped_moe", _clamped_moe, 10, optional=True),
)
