"""Checks of a backend's operations against their float64 definitions in ``specdec.backends.ops``: clauses O1 to O20.

Sizes are odd on purpose: no multiple of a vector, a tile or a block. Inputs are rounded to the activation dtype first
and read back, so that only the operation's own error counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.backends.ops import DeltaShape, Ops, Rope, Routing
from specdec.contract import Parity
from specdec.errors import UnsupportedError
from specdec.testing.numerics import EPSILON, SMALLEST, dot_tolerance, fill_with_nan
from specdec.testing.registry import Broken, NotApplicable, OpsSubject, Run, check, expect, not_applicable
from specdec.testing.views import check_views

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]

ROWS = (1, 2, 5, 16, 19)  # one, a few, a full verification pass, a prompt
EPS = 1e-6
SHAPE = DeltaShape(key_heads=2, value_heads=6, key_dim=12, value_dim=10, kernel=4)
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 20
CAPACITY = 40


class _Bench:
    """A backend's ops, random inputs for them, and comparisons."""

    def __init__(self, subject: OpsSubject, run: Run) -> None:
        self.ops: Ops = subject.make()
        self.rng = np.random.default_rng(run.seed + 1)
        steps = {1 + 2.0**-12: "float32", 1 + 2.0**-9: "float16", 1 + 2.0**-6: "bfloat16"}
        kept = self.host(self.act(np.array([list(steps) + [1.0] * 5])))[0].tolist()
        self.dtype = next((dtype for step, dtype in steps.items() if step in kept), "bfloat16")
        self.eps = EPSILON[self.dtype]

    def host(self, array: Any) -> Float64:
        """An array of the backend, a packed weight decoded, or one of numpy; no value is rounded."""
        if isinstance(array, np.ndarray):
            return np.asarray(array, np.float64)
        return np.asarray(self.ops.to_host(array).double().numpy())

    def normal(self, *shape: int) -> Float64:
        return self.rng.standard_normal(shape)

    def act(self, values: Float64) -> Any:
        """An activation ``[T, H]``, made by the backend itself."""
        return self.ops.embed(self.matrix(values), list(range(len(values))))

    def heads(self, values: Float64) -> Any:
        """An activation ``[T, n, D]``."""
        rows, heads, dim = values.shape
        return self.act(values.reshape(rows, heads * dim)).reshape(rows, heads, dim)

    def matrix(self, values: Float64) -> Any:
        return self.ops.weight(_tensor(values))

    def vector(self, values: Float64, *, plus: float = 0.0) -> Any:
        return self.ops.vector(_tensor(values), plus=plus)

    def stack(self, values: Float64) -> Any:
        """Matrices ``[n, N, H]`` as views of a fused tensor, which has other rows between them."""
        count, rows, length = values.shape
        fused = _tensor(np.concatenate([values, np.full((count, 3, length), 7.0)], axis=1))
        return self.ops.stack([fused[i, :rows] for i in range(count)])

    def rounded(self, values: Float64) -> Float64:
        """What of ``[n, N, H]`` is left in the activation dtype."""
        return self.host(self.matrix(values.reshape(-1, values.shape[-1]))).reshape(values.shape)

    @contextlib.contextmanager
    def probing(self, *names: str) -> Iterator[None]:
        """Use these ops once inside; the clause says nothing about a backend that lacks one of them.

        Whatever they do outside is held against them.
        """
        try:
            yield
        except (NotImplementedError, UnsupportedError) as error:
            not_applicable(f"this backend lacks one of {', '.join(names)}: {type(error).__name__}: {error}")

    def close(self, got: Any, wanted: Float64, tolerance: Float64 | float, what: str, **case: object) -> None:
        array = self.host(got)
        expect(array.shape == wanted.shape, f"{what} has another shape", got=array.shape, expected=wanted.shape, **case)
        off = np.abs(array - wanted)
        wrong = ~(off <= tolerance + SMALLEST[self.dtype])  # a NaN is wrong too
        if wrong.any():
            place = tuple(int(i) for i in np.argwhere(wrong)[0])
            allowed = float(np.broadcast_to(tolerance, off.shape)[place])
            raise Broken(
                f"{what} is off at {place}",
                got=f"{array[place]:.7g}",
                expected=f"{wanted[place]:.7g} within {allowed:.1e}",
                dtype=self.dtype,
                **case,
            )


def _tensor(values: Float64) -> Any:
    import torch

    return torch.tensor(np.asarray(values), dtype=torch.float32)


def _silu(x: Float64) -> Float64:
    return x / (1.0 + np.exp(-x))


def _sigmoid(x: Float64) -> Float64:
    return 1.0 / (1.0 + np.exp(-x))


# --- dense -----------------------------------------------------------------------------------------------------------


@check("O1")
def parameters_and_embedding(subject: OpsSubject, run: Run) -> None:
    """``vector`` keeps float32 and adds ``plus`` in it; ``embed`` gives the table's rows in order, repeats included."""
    bench = _Bench(subject, run)
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
    bench = _Bench(subject, run)
    for rows in ROWS:
        for length, features in ((37, 29), (64, 5), (9, 130)):
            x, weight = bench.act(bench.normal(rows, length)), bench.matrix(bench.normal(features, length))
            wide = bench.matrix(bench.normal(3, length))
            host, w = bench.host(x), bench.host(weight)
            wanted, magnitude = host @ w.T, np.abs(host) @ np.abs(w).T
            bound = dot_tolerance(bench.dtype, length, magnitude)
            case = {"rows": rows, "length": length, "features": features}
            one, two = bench.ops.project(x, (weight, wide))
            bench.close(one, wanted, bound, "project", **case)
            second = bench.host(wide)
            second_bound = dot_tolerance(bench.dtype, length, np.abs(host) @ np.abs(second).T)
            bench.close(two, host @ second.T, second_bound, "the second weight of project", **case)
            bench.close(bench.ops.linear(x, weight), wanted, bound, "linear", **case)
            residual = bench.act(bench.normal(rows, features))
            more = dot_tolerance(bench.dtype, length, magnitude + np.abs(bench.host(residual)), 2)
            added = wanted + bench.host(residual)
            bench.close(bench.ops.linear(x, weight, residual), added, more, "linear with residual", **case)


@check("O3")
def swiglu(subject: OpsSubject, run: Run) -> None:
    """``swiglu`` is ``silu(x @ gate.T) * (x @ up.T)``."""
    bench = _Bench(subject, run)
    for rows in ROWS:
        length, features = 37, 45
        x = bench.act(bench.normal(rows, length))
        gate, up = (bench.matrix(bench.normal(features, length) / 4) for _ in range(2))
        host, g, u = bench.host(x), bench.host(gate), bench.host(up)
        gated, raised = host @ g.T, host @ u.T
        gate_error = dot_tolerance(bench.dtype, length, np.abs(host) @ np.abs(g).T)
        up_error = dot_tolerance(bench.dtype, length, np.abs(host) @ np.abs(u).T)
        wanted = _silu(gated) * raised
        bound = (
            1.1 * gate_error * (np.abs(raised) + up_error)
            + np.abs(_silu(gated)) * up_error
            + bench.eps * np.abs(wanted)
        )
        bench.close(bench.ops.swiglu(x, gate, up), wanted, bound, "swiglu", rows=rows)


def _normed(x: Float64, weight: Float64) -> Float64:
    normed: Float64 = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight
    return normed


@check("O4")
def rms_norm(subject: OpsSubject, run: Run) -> None:
    """``rms_norm`` divides by the root mean square over the last axis and multiplies by the weight, in float32."""
    bench = _Bench(subject, run)
    for rows in ROWS:
        for scale in (1.0, 1e-4, 300.0):
            x, weight = bench.act(bench.normal(rows, 37) * scale), bench.vector(bench.normal(37), plus=1.0)
            wanted = _normed(bench.host(x), bench.host(weight))
            bound = (bench.eps + 2.0**-18) * np.abs(wanted) + 1e-12
            bench.close(bench.ops.rms_norm(x, weight, EPS), wanted, bound, "rms_norm", rows=rows, scale=scale)


@check("O10")
def head(subject: OpsSubject, run: Run) -> None:
    """``head`` gives float32 logits of every row over a vocabulary of any size, best token and all."""
    bench = _Bench(subject, run)
    for rows in ROWS:
        length, vocab = 37, 301
        x, weight = bench.act(bench.normal(rows, length)), bench.matrix(bench.normal(vocab, length))
        host, w = bench.host(x), bench.host(weight)
        logits = bench.ops.head(x, weight)
        bound = dot_tolerance(bench.dtype, length, np.abs(host) @ np.abs(w).T)
        bench.close(logits.rows(), host @ w.T, bound, "head", rows=rows)
        best = logits.rows().argmax(axis=1).tolist()
        expect(logits.argmax() == best, "argmax of head", got=logits.argmax(), expected=best)
        expect(logits.rows().dtype == np.float32, "logits are float32", got=logits.rows().dtype)


@check("O11")
def rows_and_sides(subject: OpsSubject, run: Run) -> None:
    """``concat`` puts activations side by side; ``hidden`` and ``array`` wrap and unwrap; slices keep their rows."""
    bench = _Bench(subject, run)
    a, b = bench.act(bench.normal(5, 7)), bench.act(bench.normal(5, 4))
    bench.close(bench.ops.concat(a, b), np.concatenate([bench.host(a), bench.host(b)], axis=1), 0.0, "concat")
    hidden = bench.ops.hidden(a)
    expect(len(hidden) == 5, "the rows of hidden states", got=len(hidden), expected=5)
    bench.close(bench.ops.array(hidden[1:4]), bench.host(a)[1:4], 0.0, "a slice of hidden states")
    bench.close(bench.ops.array(hidden[-1:].join([hidden[:2]])), bench.host(a)[[4, 0, 1]], 0.0, "joined hidden states")
    again = bench.ops.from_host(bench.ops.to_host(a))
    bench.close(bench.ops.concat(again, b), bench.host(bench.ops.concat(a, b)), 0.0, "an array that went by the host")


# --- attention -------------------------------------------------------------------------------------------------------


@check("O5")
def norm_rope(subject: OpsSubject, run: Run) -> None:
    """``norm_rope`` norms each head where it has a weight, then turns pairs (j, j + R/2) by the row's own position."""
    bench = _Bench(subject, run)
    for rows in ROWS:
        for rotary, position, normed in ((HEAD_DIM, 0, True), (8, 777, True), (HEAD_DIM, 3, False)):
            rope = Rope.of(1e4, rotary)
            wide = bench.heads(bench.normal(rows, 3, 2 * HEAD_DIM))
            x = wide[:, :, :HEAD_DIM]  # a strided view, as of an interleaved projection
            weight = bench.vector(bench.normal(HEAD_DIM), plus=1.0) if normed else None
            host = bench.host(x)
            y = _normed(host, bench.host(weight)) if normed else host
            angles = (position + np.arange(rows))[:, None] * np.array(rope.inv_freq)
            cos, sin, half = np.cos(angles)[:, None], np.sin(angles)[:, None], rotary // 2
            left, right = y[..., :half], y[..., half:rotary]
            wanted = np.concatenate([left * cos - right * sin, right * cos + left * sin, y[..., rotary:]], -1)
            size = np.abs(y).max(-1, keepdims=True)
            bound = size * (3 * bench.eps + 2.0**-16 + (position + rows) * 2.0**-22)
            got = bench.ops.norm_rope(x, weight, EPS, rope, position)
            bench.close(got, wanted, bound, "norm_rope", rows=rows, rotary=rotary, position=position, normed=normed)


def _attention(q: Float64, keys: Float64, values: Float64, scale: float) -> Float64:
    """Rows of q are the last rows of keys."""
    rows, heads, _ = q.shape
    out = np.zeros_like(q)
    for t in range(rows):
        seen = len(keys) - rows + t + 1
        for h in range(heads):
            kv = h // (heads // keys.shape[1])
            scores = keys[:seen, kv] @ q[t, h] * scale
            weights = np.exp(scores - scores.max())
            out[t, h] = weights / weights.sum() @ values[:seen, kv]
    return out


@check("O6")
def attend(subject: OpsSubject, run: Run) -> None:
    """``attend`` is causal softmax attention over cached and own rows, with grouped heads and the sigmoid gate."""
    bench = _Bench(subject, run)
    scale = HEAD_DIM**-0.5
    for rows, before, gated in (
        (1, 0, True),
        (1, 17, False),
        (4, 3, True),
        (16, 5, False),
        (19, 2, True),
        (5, 31, True),
    ):
        cache = bench.ops.new_kv(CAPACITY, KV_HEADS, HEAD_DIM)
        fill_with_nan(cache)
        q, gate = (bench.heads(bench.normal(rows, HEADS, HEAD_DIM)) for _ in range(2))
        k, v = (bench.heads(bench.normal(before + rows, KV_HEADS, HEAD_DIM)) for _ in range(2))
        if before:
            first = bench.heads(bench.normal(before, HEADS, HEAD_DIM))
            bench.ops.attend(first, k[:before], v[:before], cache, scale=scale)
            cache.commit(before)
        wanted = _attention(bench.host(q), bench.host(k), bench.host(v), scale)
        if gated:
            wanted = wanted * _sigmoid(bench.host(gate))
        got = bench.ops.attend(q, k[before:], v[before:], cache, scale=scale, gate=gate if gated else None)
        bound = np.abs(bench.host(v)).max() * (2 * bench.eps + 1e-5)
        bench.close(got, wanted.reshape(rows, -1), bound, "attend", rows=rows, cached=before, gated=gated)


LATENT, LATENT_VALUES = 21, 13  # values of a latent row, and how many of them are mixed


class _Latent:
    """Inputs of one latent-attention layer for some rows."""

    def __init__(self, bench: _Bench, rows: int) -> None:
        self.bench = bench
        self.q = bench.heads(bench.normal(rows, HEADS, LATENT))
        self.rows = bench.act(bench.normal(rows, LATENT))

    def cache(self, capacity: int) -> Any:
        return self.bench.ops.new_latent(capacity, LATENT)

    def run(self, cache: Any, first: int, last: int) -> Any:
        """Rows ``first..last``; the caller commits."""
        q, rows = self.q[first:last], self.rows[first:last]
        return self.bench.ops.attend_latent(q, rows, cache, scale=LATENT**-0.5, value_dims=LATENT_VALUES)


def _latent(bench: _Bench, rows: int) -> _Latent:
    """Raises: NotApplicable where a backend has no latent attention."""
    layer = _Latent(bench, rows)
    with bench.probing("new_latent", "attend_latent"):
        layer.run(layer.cache(1), 0, 1)
    return layer


@check("O19")
def attend_latent(subject: OpsSubject, run: Run) -> None:
    """``attend_latent`` is causal softmax attention in which all heads read whole rows and mix their first values."""
    bench = _Bench(subject, run)
    for rows, before in ((1, 0), (1, 17), (4, 3), (16, 5), (19, 2), (5, 31)):
        layer = _latent(bench, before + rows)
        cache = layer.cache(CAPACITY)
        fill_with_nan(cache)
        if before:
            layer.run(cache, 0, before)
            cache.commit(before)
        got = layer.run(cache, before, before + rows)
        keys = bench.host(layer.rows)[:, None]  # one head that all query heads read
        wanted = _attention(bench.host(layer.q)[before:], keys, keys, LATENT**-0.5)[..., :LATENT_VALUES]
        bound = np.abs(keys).max() * (2 * bench.eps + 1e-5)
        bench.close(got, wanted, bound, "attend_latent", rows=rows, cached=before)


# --- the gated delta rule --------------------------------------------------------------------------------------------


class _Delta:
    """Inputs of one delta layer for some rows."""

    def __init__(self, bench: _Bench, rows: int) -> None:
        shape = SHAPE
        self.bench, self.rows = bench, rows
        self.x = bench.act(bench.normal(rows, shape.channels))
        self.a, self.b = (bench.act(bench.normal(rows, shape.value_heads)) for _ in range(2))
        self.weight = bench.vector(bench.normal(shape.channels, shape.kernel) / 2)
        self.a_log = bench.vector(np.log(bench.rng.uniform(0.05, 4.0, shape.value_heads)))
        self.dt_bias = bench.vector(bench.normal(shape.value_heads) - 1.0)

    def run(self, cache: Any, first: int, last: int) -> tuple[Any, Any]:
        """Rows ``first..last`` through both ops; the caller commits."""
        ops = self.bench.ops
        u = ops.conv_window(self.x[first:last], self.weight, cache)
        a, b = self.a[first:last], self.b[first:last]
        return u, ops.gated_delta(u, a, b, self.a_log, self.dt_bias, cache, SHAPE)

    def convolved(self) -> Float64:
        taps, x, weight = SHAPE.kernel, self.bench.host(self.x), self.bench.host(self.weight)
        padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
        summed: Float64 = np.sum([padded[j : j + self.rows] * weight[:, j] for j in range(taps)], axis=0)
        return _silu(summed)

    def ruled(self, u: Float64) -> Float64:
        """The delta rule over the given convolved rows ``[T, C]``: ``[T, Hv, Dv]``."""
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
                delta = _sigmoid(b[t, h]) * (v[h] - state[h].T @ k[key])
                state[h] += np.outer(k[key], delta)
                out[t, h] = state[h].T @ q[key]
        return out


def _passes(rows: int) -> list[int]:
    """Where passes over ``rows`` rows end: a long one, then short ones."""
    return sorted({max(1, rows - 5), max(1, rows - 4), rows})


@check("O7")
def conv_window(subject: OpsSubject, run: Run) -> None:
    """``conv_window`` is the causal depthwise convolution with silu, over the rows before the pass from the cache."""
    _delta_op(subject, run, 0)


@check("O8")
def gated_delta(subject: OpsSubject, run: Run) -> None:
    """``gated_delta`` is the gated delta rule, token by token from the cached matrix."""
    _delta_op(subject, run, 1)


def _delta_op(subject: OpsSubject, run: Run, which: int) -> None:
    bench = _Bench(subject, run)
    for rows in (1, 3, 9, 19):
        layer = _Delta(bench, rows)
        cache = bench.ops.new_delta(SHAPE)
        convolved, ruled, at = [], [], 0
        for end in _passes(rows):
            u, o = layer.run(cache, at, end)
            convolved.append(bench.host(u))
            ruled.append(bench.host(o))
            cache.commit(end - at)
            at = end
        if which == 0:
            magnitude = 4 * np.abs(bench.host(layer.x)).max() * np.abs(bench.host(layer.weight)).max()
            bound = bench.eps * np.abs(layer.convolved()) + magnitude * 2.0**-18
            bench.close(np.concatenate(convolved), layer.convolved(), bound, "conv_window", rows=rows)
        else:
            wanted = layer.ruled(np.concatenate(convolved))
            bound = bench.eps * np.abs(wanted) + np.abs(wanted).max() * 2.0**-15
            bench.close(np.concatenate(ruled), wanted, bound, "gated_delta", rows=rows)


@check("O9")
def gated_rms_norm(subject: OpsSubject, run: Run) -> None:
    """``gated_rms_norm`` is ``rms_norm(x) * silu(z)`` per head."""
    bench = _Bench(subject, run)
    for rows in ROWS:
        x, z = (bench.heads(bench.normal(rows, SHAPE.value_heads, SHAPE.value_dim)) for _ in range(2))
        weight = bench.vector(bench.normal(SHAPE.value_dim), plus=1.0)
        wanted = _normed(bench.host(x), bench.host(weight)) * _silu(bench.host(z))
        wanted = wanted.reshape(rows, -1)
        bound = (bench.eps + 2.0**-17) * np.abs(wanted) + 1e-9
        got = bench.ops.gated_rms_norm(x, z, weight, EPS)
        bench.close(got, wanted, bound, "gated_rms_norm", rows=rows)


# --- heads and experts -----------------------------------------------------------------------------------------------


@check("O16")
def project_heads(subject: OpsSubject, run: Run) -> None:
    """``project_heads`` multiplies every head with its own matrix of a ``stack``, maybe views of a fused tensor."""
    bench = _Bench(subject, run)
    with bench.probing("stack", "project_heads"):
        bench.ops.project_heads(bench.heads(bench.normal(1, 2, 8)), bench.stack(bench.normal(2, 3, 8)))
    for rows in ROWS:
        for heads, length, features in ((3, 37, 29), (5, 9, 64), (1, 16, 21)):
            x, values = bench.heads(bench.normal(rows, heads, length)), bench.normal(heads, features, length)
            host, w = bench.host(x), bench.rounded(values)
            wanted = np.einsum("thi,hoi->tho", host, w)
            bound = dot_tolerance(bench.dtype, length, np.einsum("thi,hoi->tho", np.abs(host), np.abs(w)))
            got = bench.ops.project_heads(x, bench.stack(values))
            bench.close(got, wanted, bound, "project_heads", rows=rows, heads=heads, length=length, features=features)


EXPERTS, ROUTED = 16, 37  # experts of a router, and the length of its rows
CLEAR = 1e-3  # least difference between what is chosen and what is not: far above the error of a float32 product
_ROUTINGS = (
    Routing(top_k=1, scores="softmax", normalised=False),
    Routing(top_k=4, scores="softmax", normalised=True),
    Routing(top_k=3, scores="sigmoid", normalised=False, scale=2.5),
    Routing(top_k=4, scores="sigmoid", normalised=True, scale=2.5, groups=4, kept_groups=2),
    Routing(top_k=2, scores="softmax", normalised=True, groups=2, kept_groups=1),
    Routing(top_k=EXPERTS, scores="softmax", normalised=True),
)


def _routed(logits: Float64, routing: Routing, bias: Float64) -> tuple[list[int], Float64, float]:
    """Of one row: the chosen experts, their weights, and the smallest difference that decided (equal ones aside)."""
    scores = _sigmoid(logits) if routing.scores == "sigmoid" else _softmax(logits)
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


def _softmax(x: Float64) -> Float64:
    weights = np.exp(x - x.max(-1, keepdims=True))
    law: Float64 = weights / weights.sum(-1, keepdims=True)
    return law


def _ties(rows: int) -> tuple[Float64, Float64]:
    """Rows and a router of small whole numbers, whose logits are exact in any order of addition, and often equal."""
    weight = np.zeros((EXPERTS, ROUTED))
    weight[:, :8] = (np.arange(EXPERTS)[:, None] * np.arange(3, 11)) % 3 - 1.0
    x = np.zeros((rows, ROUTED))  # the first row stays zero: all are equal
    x[1:, :8] = np.random.default_rng(5).integers(-2, 3, (rows - 1, 8))
    return x, weight


@check("O17")
def route(subject: OpsSubject, run: Run) -> None:
    """``route`` chooses by score plus bias, equals by lower id, in kept groups only; weights are without the bias."""
    bench = _Bench(subject, run)
    with bench.probing("route"):
        bench.ops.route(bench.act(bench.normal(1, 8)), bench.matrix(bench.normal(2, 8)), _ROUTINGS[0])
    for routing in _ROUTINGS:
        if routing.top_k < EXPERTS:
            _check_ties(bench, routing)
        # some choices below 0: a group that is masked with 0 instead of -inf would win
        for bias in (None, bench.vector(bench.normal(EXPERTS) * 0.4 - 0.7)):
            weight = bench.matrix(bench.normal(EXPERTS, ROUTED) / 3)
            values = bench.normal(40 * max(ROWS), ROUTED)
            added = np.zeros(EXPERTS) if bias is None else bench.host(bias)
            logits = bench.host(bench.act(values)) @ bench.host(weight).T
            least = CLEAR / 10 if routing.top_k == EXPERTS else CLEAR
            clear = [t for t in range(len(values)) if _routed(logits[t], routing, added)[2] > least]
            for rows in ROWS:
                chosen = clear[:rows]
                expect(len(chosen) == rows, "the check found no clear cases")
                got = bench.ops.route(bench.act(values[chosen]), weight, routing, bias)
                _same_routes(bench, got, logits[chosen], routing, added, "route", biased=bias is not None)


def _check_ties(bench: _Bench, routing: Routing) -> None:
    for rows in (1, 5, 19):
        x, weight = _ties(rows)
        got = bench.ops.route(bench.act(x), bench.matrix(weight), routing)
        _same_routes(bench, got, x @ weight.T, routing, np.zeros(EXPERTS), "route with equal scores")


def _same_routes(
    bench: _Bench, got: tuple[Any, Any], logits: Float64, routing: Routing, bias: Float64, what: str, **case: object
) -> None:
    wanted = [_routed(row, routing, bias) for row in logits]
    ids, weights = bench.host(got[0]), bench.host(got[1])
    case = {**case, "rows": len(logits), "routing": routing}
    chosen = np.array([row[0] for row in wanted], np.float64)
    expect(ids.shape == chosen.shape, f"{what}: the ids have another shape", got=ids.shape, expected=chosen.shape)
    for t in range(len(logits)):
        expect(
            np.array_equal(ids[t], chosen[t]),
            f"{what}: row {t} has other experts",
            got=ids[t],
            expected=chosen[t],
            **case,
        )
    # a logit is off by at most the float32 error of its product, a score by no more than that, relatively
    error = 4 * ROUTED * 2.0**-23 * (np.abs(logits).max() + 8.0) + 2.0**-18
    truth = np.array([row[1] for row in wanted])
    bench.close(weights, truth, np.abs(truth) * error + 1e-9, f"{what}: the weights", **case)


class _Experts:
    """A layer of small experts of which some are never chosen, and hold NaN."""

    count, wide, length, never = 9, 19, 37, (2, 5, 8)

    def __init__(self, bench: _Bench, rows: int) -> None:
        self.bench = bench
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
        return self.bench.ops.route(self.x[first:last], self.router, self.routing, self.bias)

    def run(self, first: int, last: int, chosen: tuple[Any, Any] | None = None, **shared: Any) -> Any:
        chosen = self.route(first, last) if chosen is None else chosen
        return self.bench.ops.moe(self.x[first:last], chosen, self.experts, self.residual[first:last], **shared)

    def expert(self, x: Float64, gate: Float64, up: Float64, down: Float64) -> tuple[Float64, Float64]:
        """``down(silu(gate x) * up x)`` of one row, and how far an op may be from it."""
        dtype, eps = self.bench.dtype, self.bench.eps
        gated, raised = gate @ x, up @ x
        gate_error = dot_tolerance(dtype, self.length, np.abs(gate) @ np.abs(x))
        up_error = dot_tolerance(dtype, self.length, np.abs(up) @ np.abs(x))
        inner = _silu(gated) * raised
        error = 1.1 * gate_error * (np.abs(raised) + up_error) + np.abs(_silu(gated)) * up_error + eps * np.abs(inner)
        out = down @ inner
        return out, np.abs(down) @ error + dot_tolerance(dtype, self.wide, np.abs(down) @ (np.abs(inner) + error))


def _experts(bench: _Bench, rows: int) -> _Experts:
    """Raises: NotApplicable where a backend has no experts."""
    with bench.probing("stack", "route", "moe"):
        layer = _Experts(bench, rows)
        layer.run(0, 1)
    return layer


@check("O18")
def moe(subject: OpsSubject, run: Run) -> None:
    """``moe`` is the residual, the weighted sum of chosen experts and the gated shared one; others are not read."""
    bench = _Bench(subject, run)
    for rows in ROWS:
        layer = _experts(bench, rows)
        chosen = layer.route(0, rows)
        ids, weights = bench.host(chosen[0]).astype(int), bench.host(chosen[1])
        expect(not np.isin(ids, layer.never).any(), "route chose an expert with a bias of -10", got=ids)
        x, residual = bench.host(layer.x), bench.host(layer.residual)
        common = [bench.host(one) for one in layer.shared]
        gate = bench.host(layer.shared_gate)[0]
        for shared, gated in ((False, False), (True, False), (True, True)):
            wanted, bound = residual.copy(), np.zeros_like(residual)
            for t in range(rows):
                for expert, weight in zip(ids[t], weights[t], strict=True):
                    out, error = layer.expert(x[t], *(host[expert] for host in layer.hosts))
                    wanted[t] += weight * out
                    bound[t] += abs(weight) * (error + np.abs(out) * 2.0**-20)
                if shared:
                    out, error = layer.expert(x[t], *common)
                    share = float(_sigmoid(gate @ x[t])) if gated else 1.0
                    off = float(dot_tolerance(bench.dtype, layer.length, np.abs(gate) @ np.abs(x[t])))
                    wanted[t] += share * out
                    bound[t] += share * error + (np.abs(out) + error) * off * gated
            bound += (bench.eps + 2.0**-18) * (np.abs(wanted) + np.abs(residual))
            options = {
                **({"shared": layer.shared} if shared else {}),
                **({"shared_gate": layer.shared_gate} if gated else {}),
            }
            got = layer.run(0, rows, chosen, **options)
            bench.close(got, wanted, bound, "moe", rows=rows, shared=shared, gated=gated)


VOCAB, HEAD_LENGTH = 301, 37


@check("O20")
def pruned_head(subject: OpsSubject, run: Run) -> None:
    """``pruned_head`` gives ``head``'s logits at the ids of ``head_rows`` and -inf elsewhere, added ids included."""
    bench = _Bench(subject, run)
    ops = bench.ops
    values = bench.normal(VOCAB, HEAD_LENGTH)
    weight = bench.matrix(values)
    with bench.probing("head_rows", "pruned_head"):
        ops.pruned_head(bench.act(bench.normal(1, HEAD_LENGTH)), ops.head_rows(weight, [1]))
    ids = [0, VOCAB - 1, *range(40, 170, 3)]
    base = ops.head_rows(weight, ids[::-1])
    one = ops.head_rows(weight, [5, 40, 299], base)
    other = ops.head_rows(weight, [200, 7], base)  # another continuation of the same rows
    further = ops.head_rows(weight, [1, 2, 200], one)
    known = [
        (base, ids),
        (one, [*ids, 5, 299]),
        (other, [*ids, 7, 200]),
        (further, [*ids, 1, 2, 5, 200, 299]),
        (ops.head_rows(weight, [40], base), ids),
    ]
    for rows in ROWS:
        x = bench.act(bench.normal(rows, HEAD_LENGTH))
        host, w = bench.host(x), bench.host(weight)
        truth, bound = host @ w.T, dot_tolerance(bench.dtype, HEAD_LENGTH, np.abs(host) @ np.abs(w).T)
        for made, there in known:
            wanted = sorted(set(there))
            got = list(made.tokens)
            expect(got == wanted, "head_rows has other ids, or in another order", got=got, expected=wanted)
            logits = ops.pruned_head(x, made)
            seen = check_views(logits, rows, VOCAB, [VOCAB - 1, *([3] * (rows - 1))])
            left_out = np.setdiff1d(np.arange(VOCAB), wanted)
            expect(
                bool((seen[:, left_out] == -np.inf).all()),
                "an id without a row has a logit",
                rows=rows,
                got=[int(i) for i in np.flatnonzero((seen > -np.inf).any(axis=0))],
                expected=wanted,
            )
            bench.close(seen[:, wanted], truth[:, wanted], bound[:, wanted], "pruned_head", rows=rows)
    # equal logits, exact in whole numbers: the lower id is best, though its row stands behind
    whole = np.tile(bench.rng.integers(-3, 4, (1, HEAD_LENGTH)).astype(np.float64), (VOCAB, 1))
    equal = bench.matrix(whole)
    made = ops.head_rows(equal, [9, 4], ops.head_rows(equal, [250, 30, 12]))
    logits = ops.pruned_head(bench.act(whole[:2]), made)
    expect(logits.argmax() == [4, 4], "equal logits go by ascending id", got=logits.argmax(), expected=[4, 4])
    check_views(logits, 2, VOCAB, [250, 4])


# --- rows, caches, inputs --------------------------------------------------------------------------------------------


def _row_ops(bench: _Bench, count: int) -> dict[str, Callable[[int, int], Any]]:
    """Every op without a cache, as a function of a range of rows."""
    ops, n = bench.ops, count
    x, z = bench.act(bench.normal(n, 37)), bench.act(bench.normal(n, 29))
    weight, other, table = (bench.matrix(bench.normal(29, 37)) for _ in range(3))
    vector = bench.vector(bench.normal(37))
    heads, gates = (bench.heads(bench.normal(n, 3, HEAD_DIM)) for _ in range(2))
    head_vector, rope = bench.vector(bench.normal(HEAD_DIM)), Rope.of(1e4, HEAD_DIM)
    return {
        **_optional_row_ops(bench, n),
        "project": lambda a, b: ops.project(x[a:b], (weight, other))[1],
        "linear": lambda a, b: ops.linear(x[a:b], weight, z[a:b]),
        "swiglu": lambda a, b: ops.swiglu(x[a:b], weight, other),
        "rms_norm": lambda a, b: ops.rms_norm(x[a:b], vector, EPS),
        "norm_rope": lambda a, b: ops.norm_rope(heads[a:b], head_vector, EPS, rope, 50 + a),
        "gated_rms_norm": lambda a, b: ops.gated_rms_norm(heads[a:b], gates[a:b], head_vector, EPS),
        "head": lambda a, b: ops.head(x[a:b], table).rows(),
    }


def _optional_row_ops(bench: _Bench, count: int) -> dict[str, Callable[[int, int], Any]]:
    """Those that a backend may lack; clauses of their own say so."""
    ops, found = bench.ops, {}
    with contextlib.suppress(NotApplicable):
        layer = _experts(bench, count)
        shared = {"shared": layer.shared, "shared_gate": layer.shared_gate}
        found["route, ids"] = lambda a, b: layer.route(a, b)[0]
        found["route, weights"] = lambda a, b: layer.route(a, b)[1]
        found["moe"] = lambda a, b: layer.run(a, b, **shared)
    with contextlib.suppress(NotApplicable):
        x, matrices = bench.heads(bench.normal(count, 3, 37)), bench.normal(3, 29, 37)
        with bench.probing("stack", "project_heads"):
            stack = bench.stack(matrices)
            ops.project_heads(x[:1], stack)
        found["project_heads"] = lambda a, b: ops.project_heads(x[a:b], stack)
    with contextlib.suppress(NotApplicable):
        weight, row = bench.matrix(bench.normal(VOCAB, 37)), bench.act(bench.normal(count, 37))
        with bench.probing("head_rows", "pruned_head"):
            rows = ops.head_rows(weight, [300, 5, 17], ops.head_rows(weight, range(0, 100, 3)))
            ops.pruned_head(row[:1], rows)
        found["pruned_head"] = lambda a, b: ops.pruned_head(row[a:b], rows).rows()
    return found


@check("O12")
def rows_stand_alone(subject: OpsSubject, run: Run) -> None:
    """BITWISE: a row's bits are the same in a pass of one row and in a pass of any number up to ``max_rows``."""
    bench = _Bench(subject, run)
    if bench.ops.capabilities.parity is not Parity.BITWISE:
        not_applicable(f"it declares numeric parity: {bench.ops.capabilities.parity_reason}")
    most = bench.ops.capabilities.max_rows
    for name, op in _row_ops(bench, most).items():
        singly = [bench.host(op(t, t + 1))[0] for t in range(most)]
        for count in (2, 3, 5, 8, most):
            together = bench.host(op(0, count))
            for t in range(count):
                same = np.array_equal(together[t], singly[t])
                expect(
                    same, f"{name}: row {t} of {count} has other bits than alone", got=together[t], expected=singly[t]
                )
    for name, run_rows in _cached_ops(bench, most).items():
        alone = run_rows([1] * most)
        for count in (2, 3, 5, most):
            passes = [count] * (most // count)
            together = run_rows(passes)
            for t in range(len(together)):
                same = np.array_equal(together[t], alone[t])
                expect(same, f"{name}: row {t} has other bits in passes of {count}", got=together[t], expected=alone[t])


def _cached_ops(bench: _Bench, most: int) -> dict[str, Callable[[Sequence[int]], Float64]]:
    """Ops with a cache, as functions of the lengths of the passes."""
    q, gate = (bench.heads(bench.normal(most, HEADS, HEAD_DIM)) for _ in range(2))
    k, v = (bench.heads(bench.normal(most, KV_HEADS, HEAD_DIM)) for _ in range(2))
    layer = _Delta(bench, most)

    def attending(passes: Sequence[int]) -> Float64:
        cache, out, at = bench.ops.new_kv(most + 3, KV_HEADS, HEAD_DIM), [], 0
        for rows in passes:
            part = slice(at, at + rows)
            mixed = bench.ops.attend(q[part], k[part], v[part], cache, scale=HEAD_DIM**-0.5, gate=gate[part])
            out.append(bench.host(mixed))
            cache.commit(rows)
            at += rows
        return np.concatenate(out)

    def ruling(passes: Sequence[int]) -> Float64:
        cache, out, at = bench.ops.new_delta(SHAPE), [], 0
        for rows in passes:
            u, o = layer.run(cache, at, at + rows)
            out.append(np.concatenate([bench.host(u), bench.host(o).reshape(rows, -1)], axis=1))
            cache.commit(rows)
            at += rows
        return np.concatenate(out)

    def compressed(passes: Sequence[int]) -> Float64:
        cache, out, at = latent.cache(most + 3), [], 0
        for rows in passes:
            out.append(bench.host(latent.run(cache, at, at + rows)))
            cache.commit(rows)
            at += rows
        return np.concatenate(out)

    found: dict[str, Callable[[Sequence[int]], Float64]] = {"attend": attending, "conv_window and gated_delta": ruling}
    with contextlib.suppress(NotApplicable):
        latent = _latent(bench, most)
        found["attend_latent"] = compressed
    return found


def _saved(bench: _Bench, cache: Any) -> dict[str, Float64]:
    return {name: bench.host(array) for name, array in cache.save().items()}


def _same_saved(got: dict[str, Float64], wanted: dict[str, Float64], what: str, **case: object) -> None:
    expect(got.keys() == wanted.keys(), f"{what}: other arrays", got=sorted(got), expected=sorted(wanted), **case)
    for name, array in wanted.items():
        expect(
            np.array_equal(got[name], array), f"{what}: {name} has other bits", got=got[name], expected=array, **case
        )


@check("O13")
def commit_cuts(subject: OpsSubject, run: Run) -> None:
    """``commit(a)`` after a pass of T rows leaves the bits of a pass of a rows; dropped rows, even NaN, no trace."""
    bench = _Bench(subject, run)
    rows = min(6, bench.ops.capabilities.max_rows)
    layer = _Delta(bench, rows + 3)
    q = bench.heads(bench.normal(rows + 3, HEADS, HEAD_DIM))
    k, v = (bench.heads(bench.normal(rows + 3, KV_HEADS, HEAD_DIM)) for _ in range(2))
    junk, junk_kv = (
        bench.heads(np.full((rows, HEADS, HEAD_DIM), np.nan)),
        bench.heads(np.full((rows, KV_HEADS, HEAD_DIM), np.nan)),
    )
    nan = _Delta(bench, rows)
    nan.x, nan.weight, nan.a_log, nan.dt_bias = (
        bench.act(np.full((rows, SHAPE.channels), np.nan)),
        layer.weight,
        layer.a_log,
        layer.dt_bias,
    )

    def delta(passes: Sequence[tuple[int, int]], poisoned: bool) -> tuple[dict[str, Float64], Float64]:
        cache, at = bench.ops.new_delta(SHAPE), 0
        for decoded, kept in passes:
            if poisoned:
                nan.run(cache, 0, rows)
                cache.commit(0)
            layer.run(cache, at, at + decoded)
            cache.commit(kept)
            at += kept
        saved = _saved(bench, cache)
        return saved, bench.host(layer.run(cache, at, at + 1)[1])

    def attention(passes: Sequence[tuple[int, int]], poisoned: bool) -> tuple[dict[str, Float64], Float64]:
        cache, at = bench.ops.new_kv(rows + 9, KV_HEADS, HEAD_DIM), 0
        for decoded, kept in passes:
            if poisoned:
                bench.ops.attend(junk, junk_kv, junk_kv, cache, scale=1.0)
                cache.commit(0)
            part = slice(at, at + decoded)
            bench.ops.attend(q[part], k[part], v[part], cache, scale=1.0)
            cache.commit(kept)
            at += kept
        saved, part = _saved(bench, cache), slice(at, at + 1)
        return saved, bench.host(bench.ops.attend(q[part], k[part], v[part], cache, scale=1.0))

    def compressed(passes: Sequence[tuple[int, int]], poisoned: bool) -> tuple[dict[str, Float64], Float64]:
        cache, at = latent.cache(rows + 9), 0
        for decoded, kept in passes:
            if poisoned:
                nan_latent.run(cache, 0, rows)
                cache.commit(0)
            latent.run(cache, at, at + decoded)
            cache.commit(kept)
            at += kept
        saved = _saved(bench, cache)
        return saved, bench.host(latent.run(cache, at, at + 1))

    caches = {"the delta cache": delta, "the KV cache": attention}
    with contextlib.suppress(NotApplicable):
        latent, nan_latent = _latent(bench, rows + 3), _Latent(bench, rows)
        nan_latent.q, nan_latent.rows = (
            bench.heads(np.full((rows, HEADS, LATENT), np.nan)),
            bench.act(np.full((rows, LATENT), np.nan)),
        )
        caches["the latent cache"] = compressed
    for kept in range(rows + 1):
        for name, play in caches.items():
            wanted, last = play([(1, 1), (kept, kept)] if kept else [(1, 1)], False)
            for poisoned in (False, True):
                got, after = play([(1, 1), (rows, kept)], poisoned)
                what = f"{name} after commit({kept}) of {rows} rows"
                _same_saved(got, wanted, what, poisoned=poisoned)
                expect(
                    np.array_equal(after, last),
                    f"{what}: the next row has other bits",
                    got=after,
                    expected=last,
                    poisoned=poisoned,
                )


@check("O14")
def going_back(subject: OpsSubject, run: Run) -> None:
    """``truncate`` goes back to what the cache held or changes nothing and says False; ``save`` and ``load`` copy."""
    bench = _Bench(subject, run)
    layer = _Delta(bench, 9)
    cache = bench.ops.new_delta(SHAPE)
    points: dict[int, dict[str, Float64]] = {0: _saved(bench, cache)}
    for at in range(8):
        layer.run(cache, at, at + 1)
        cache.commit(1)
        if at in (2, 5):
            cache.mark()
        points[at + 1] = _saved(bench, cache)
    expect(cache.length == 8, "length counts committed rows", got=cache.length, expected=8)
    points_kept = cache.marks()
    expect(points_kept is not None, "a delta cache keeps marks", got=type(cache).__name__)
    marks = list(points_kept or ())
    expect({0, 3, 6, 8} <= set(marks), "marks tells where truncate can go", got=marks, expected=[0, 3, 6, 8])
    copy = bench.ops.new_delta(SHAPE)
    copy.load({name: bench.ops.from_host(bench.ops.to_host(array)) for name, array in cache.save().items()}, 8)
    for length in (7, 6, 4, 3, 0):
        held, reached = cache.length, cache.truncate(length)
        expect(reached == (length in marks), f"truncate({length})", got=reached, expected=length in marks)
        at = length if reached else held
        _same_saved(_saved(bench, cache), points[at], f"the delta cache after truncate({length})")
    _same_saved(_saved(bench, copy), points[8], "a loaded delta cache after the original went back")
    q, k, v = (bench.heads(bench.normal(6, n, HEAD_DIM)) for n in (HEADS, KV_HEADS, KV_HEADS))
    kv = bench.ops.new_kv(8, KV_HEADS, HEAD_DIM)
    bench.ops.attend(q, k, v, kv, scale=1.0)
    kv.commit(6)
    taken = kv.save()
    expect(kv.truncate(2), "a KV cache goes back anywhere")
    bench.ops.attend(q[:1], k[5:], v[5:], kv, scale=1.0)
    kv.commit(1)
    expect(kv.length == 3, "length counts committed rows", got=kv.length, expected=3)
    other = bench.ops.new_kv(8, KV_HEADS, HEAD_DIM)
    other.load({name: bench.ops.from_host(bench.ops.to_host(array)) for name, array in taken.items()}, 6)
    expect(other.length == 6, "load sets the length", got=other.length, expected=6)
    for name, array in (("keys", k), ("values", v)):
        if name in taken:
            bench.close(taken[name], bench.host(array), 0.0, f"saved {name} after the cache went on")
    expect(kv.nbytes() > 0 and cache.nbytes() > 0, "nbytes counts")
    with contextlib.suppress(NotApplicable):
        _latent_goes_back(_latent(bench, 7))


def _latent_goes_back(layer: _Latent) -> None:
    """The latent cache alone: cut anywhere, saved and loaded as a copy."""
    bench, cache = layer.bench, layer.cache(8)
    layer.run(cache, 0, 6)
    cache.commit(6)
    taken, held = cache.save(), _saved(bench, cache)
    expect(cache.truncate(2), "a latent cache goes back anywhere")
    layer.run(cache, 6, 7)
    cache.commit(1)
    expect(cache.length == 3, "length counts committed rows", got=cache.length, expected=3)
    other = layer.cache(8)
    other.load({name: bench.ops.from_host(bench.ops.to_host(array)) for name, array in taken.items()}, 6)
    expect(other.length == 6, "load sets the length", got=other.length, expected=6)
    _same_saved(_saved(bench, other), held, "a loaded latent cache after the original went on")
    plain = layer.cache(8)
    for first, last in ((0, 2), (6, 7)):
        layer.run(plain, first, last)
        plain.commit(last - first)
    _same_saved(_saved(bench, cache), _saved(bench, plain), "a latent cache after truncate(2) and another row")
    expect(cache.nbytes() > 0, "nbytes counts")


@check("O15")
def inputs_untouched(subject: OpsSubject, run: Run) -> None:
    """Ops give new arrays and never write to their inputs."""
    bench = _Bench(subject, run)
    ops, rows = bench.ops, 4
    x, z = bench.act(bench.normal(rows, 37)), bench.act(bench.normal(rows, 29))
    weight, up, vector = (
        bench.matrix(bench.normal(29, 37)),
        bench.matrix(bench.normal(29, 37)),
        bench.vector(bench.normal(37)),
    )
    q, gate = (bench.heads(bench.normal(rows, HEADS, HEAD_DIM)) for _ in range(2))
    k, v = (bench.heads(bench.normal(rows, KV_HEADS, HEAD_DIM)) for _ in range(2))
    layer = _Delta(bench, rows)
    dim = bench.vector(bench.normal(HEAD_DIM))
    watched = [
        x,
        z,
        weight,
        up,
        vector,
        q,
        gate,
        k,
        v,
        dim,
        layer.x,
        layer.a,
        layer.b,
        layer.weight,
        layer.a_log,
        layer.dt_bias,
    ]
    before = [bench.host(array).copy() for array in watched]
    ops.project(x, (weight, up))
    ops.linear(x, weight, z)
    ops.swiglu(x, weight, up)
    ops.rms_norm(x, vector, EPS)
    ops.norm_rope(q, dim, EPS, Rope.of(1e4, HEAD_DIM), 3)
    ops.attend(q, k, v, ops.new_kv(8, KV_HEADS, HEAD_DIM), scale=1.0, gate=gate)
    ops.gated_rms_norm(q, gate, dim, EPS)
    ops.concat(x, z)
    ops.head(x, weight).argmax()
    _optional_untouched(bench, rows)
    cache = ops.new_delta(SHAPE)
    u, _ = layer.run(cache, 0, rows)
    convolved = bench.host(u).copy()
    cache.commit(2)  # a cut may compute the rows again
    for array, old in zip([*watched, u], [*before, convolved], strict=True):
        expect(np.array_equal(bench.host(array), old), "an input was changed", got=bench.host(array), expected=old)


def _optional_untouched(bench: _Bench, rows: int) -> None:
    """The same for ops that a backend may lack."""
    ops = bench.ops
    cases: list[tuple[Callable[[], object], list[Any]]] = []
    with contextlib.suppress(NotApplicable):
        experts = _experts(bench, rows)
        ids, weights = experts.route(0, rows)
        shared = {"shared": experts.shared, "shared_gate": experts.shared_gate}
        inputs = [experts.x, experts.residual, experts.router, experts.bias, *experts.shared, experts.shared_gate]
        cases.append((lambda: experts.run(0, rows, (ids, weights), **shared), [*inputs, ids, weights]))
    with contextlib.suppress(NotApplicable):
        latent = _latent(bench, rows)
        cases.append((lambda: latent.run(latent.cache(rows), 0, rows), [latent.q, latent.rows]))
    with contextlib.suppress(NotApplicable):
        x, weight = bench.act(bench.normal(rows, 37)), bench.matrix(bench.normal(VOCAB, 37))
        with bench.probing("head_rows", "pruned_head"):
            ops.pruned_head(x[:1], ops.head_rows(weight, [1]))
        gathered = ops.head_rows(weight, [5, 9])
        cases.append((lambda: ops.pruned_head(x, ops.head_rows(weight, [7], gathered)).argmax(), [x, weight]))
    for call, watched in cases:
        before = [bench.host(array).copy() for array in watched]
        call()
        for array, old in zip(watched, before, strict=True):
            expect(np.array_equal(bench.host(array), old), "an input was changed", got=bench.host(array), expected=old)
