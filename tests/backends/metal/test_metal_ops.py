"""Every operation on MLX, beside the torch reference, against its float64 definition: any shape, both dtypes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from specdec.backends.cpu.reference import ReferenceOps  # noqa: E402
from specdec.backends.metal.ops import MetalOps  # noqa: E402
from specdec.backends.ops import DeltaShape, Rope, Routing  # noqa: E402
from specdec.errors import ContractError, StateError  # noqa: E402
from tests.backends.metal import oracle  # noqa: E402
from tests.backends.metal.oracle import to_host  # noqa: E402

EPS = 1e-6
CLOSE = {"float32": 1e-5, "bfloat16": 0.04}  # of the largest value of a result, or of the terms it is a sum of

dtypes = st.sampled_from(["float32", "bfloat16"])
rows_ = st.integers(1, 19)
sizes = st.integers(1, 40)
seeds = st.integers(0, 2**20)


class Bench:
    """Both backends in one dtype, with the same random inputs; what they hold is what the oracle gets."""

    def __init__(self, dtype: str, seed: int) -> None:
        self.dtype = dtype
        self.torch_dtype = getattr(torch, dtype)
        self.backends: tuple[Any, Any] = (ReferenceOps(self.torch_dtype), MetalOps(getattr(mx, dtype)))
        self.rng = np.random.default_rng(seed)

    def draw(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.tensor(self.rng.standard_normal(shape) * scale, dtype=torch.float32).to(self.torch_dtype)

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        return self.draw(rows, columns, scale=columns**-0.5)

    def wide(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.tensor(self.rng.standard_normal(shape) * scale, dtype=torch.float32)

    def both(self, call: Any, wanted: Any, what: str, terms: Any = 0.0) -> None:
        """``call(ops, to)`` of each backend; ``to`` brings a drawn tensor there.

        ``terms``: the result with every term taken absolutely, where terms may cancel.
        """
        for ops in self.backends:
            self.close(call(ops, to_backend(ops)), wanted, f"{what} on {type(ops).__name__}", terms)

    def close(self, got: Any, wanted: Any, what: str, terms: Any = 0.0) -> None:
        got = to_host(got)
        assert got.shape == wanted.shape, what
        size = max(np.abs(wanted).max(initial=1e-6), np.max(terms))
        off = np.abs(got - wanted).max(initial=0.0)
        assert off <= CLOSE[self.dtype] * size, f"{what}: off by {off:.3g}, the largest value is {size:.3g}"


def to_backend(ops: Any) -> Any:
    """What brings a drawn tensor to these ops."""
    return ops.weight if isinstance(ops, MetalOps) else lambda x: x


def f(tensor: torch.Tensor) -> Any:
    return tensor.double().numpy()


@given(dtype=dtypes, seed=seeds, rows=rows_, length=sizes, features=sizes, heads=st.integers(1, 4))
def test_products(dtype: str, seed: int, rows: int, length: int, features: int, heads: int) -> None:
    bench = Bench(dtype, seed)
    x, w, bias = bench.draw(rows, length), bench.matrix(features, length), bench.draw(features)
    up, residual = bench.matrix(features, length), bench.draw(rows, features)
    size = np.abs(f(x)) @ np.abs(f(w)).T
    bench.both(lambda ops, to: ops.linear(to(x), ops.weight(w)), f(x) @ f(w).T, "linear", size)
    wanted = f(x) @ f(w).T + f(residual)
    bench.both(lambda ops, to: ops.linear(to(x), ops.weight(w), to(residual)), wanted, "linear with residual", size)
    wanted = f(x) @ f(up).T + f(bias)
    call = lambda ops, to: ops.project(to(x), (ops.weight(w), ops.weight(up)), (None, ops.weight(bias)))[1]  # noqa: E731
    size_up = np.abs(f(x)) @ np.abs(f(up)).T
    bench.both(call, wanted, "project with bias", size_up)
    bench.both(lambda ops, to: ops.project(to(x), (ops.weight(up),))[0], f(x) @ f(up).T, "project", size_up)
    wanted = oracle.swiglu(f(x), f(w), f(up))
    bench.both(lambda ops, to: ops.swiglu(to(x), ops.weight(w), ops.weight(up)), wanted, "swiglu", size * size_up)
    bench.both(lambda ops, to: ops.head(to(x), ops.weight(w)).rows(), f(x) @ f(w).T, "head", size)
    each, mats = bench.draw(rows, heads, length), [bench.matrix(features, length) for _ in range(heads)]
    wanted = np.stack([f(each)[:, h] @ f(mats[h]).T for h in range(heads)], axis=1)
    size = np.stack([np.abs(f(each)[:, h]) @ np.abs(f(mats[h])).T for h in range(heads)])
    bench.both(lambda ops, to: ops.project_heads(to(each), ops.stack(mats)), wanted, "project_heads", size)
    tokens = bench.rng.integers(0, features, rows).tolist()
    bench.both(lambda ops, to: ops.embed(ops.weight(w), tokens), f(w)[tokens], "embed")
    bench.both(lambda ops, to: ops.concat(to(x), to(residual)), np.concatenate([f(x), f(residual)], 1), "concat")


@given(
    dtype=dtypes,
    seed=seeds,
    rows=rows_,
    heads=st.integers(1, 4),
    half=st.integers(1, 8),
    rest=st.integers(0, 5),
    position=st.integers(0, 3000),
    normed=st.booleans(),
)
def test_norms_and_rotation(
    dtype: str, seed: int, rows: int, heads: int, half: int, rest: int, position: int, normed: bool
) -> None:
    bench = Bench(dtype, seed)
    dim = 2 * half + rest
    pair, weight = bench.draw(rows, heads, 2, dim), bench.wide(dim)
    x, z = pair[:, :, 0], pair[:, :, 1]  # strided views
    rope = Rope.of(1e4, 2 * half)
    bench.both(
        lambda ops, to: ops.rms_norm(to(x), ops.vector(weight, plus=1.0), EPS),
        oracle.rms_norm(f(x), f(weight + 1.0), EPS),
        "rms_norm",
    )
    bench.both(
        lambda ops, to: ops.gated_rms_norm(to(x), to(z), ops.vector(weight), EPS),
        (oracle.rms_norm(f(x), f(weight), EPS) * oracle.silu(f(z))).reshape(rows, -1),
        "gated_rms_norm",
    )
    wanted = oracle.norm_rope(f(x), f(weight) if normed else None, EPS, rope, position)
    loose = CLOSE[dtype] + (position + rows) * 2.0**-23  # the angle itself is a float32
    for ops in bench.backends:
        got = to_host(ops.norm_rope(to_backend(ops)(x), ops.vector(weight) if normed else None, EPS, rope, position))
        assert np.abs(got - wanted).max() <= loose * max(np.abs(wanted).max(), 1e-6)


@given(
    dtype=dtypes,
    seed=seeds,
    passes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    kv=st.integers(1, 3),
    share=st.integers(1, 3),
    dim=st.integers(1, 33),
    gated=st.booleans(),
    latent=st.booleans(),
)
def test_attention(
    dtype: str, seed: int, passes: list[int], kv: int, share: int, dim: int, gated: bool, latent: bool
) -> None:
    """In passes of any lengths; for latent attention keys are whole rows and values their beginning."""
    bench = Bench(dtype, seed)
    total, kv, values = sum(passes), 1 if latent else kv, max(1, dim - 3)
    q, gate = bench.draw(total, kv * share, dim), bench.draw(total, kv * share, dim)
    k, v = bench.draw(total, kv, dim), bench.draw(total, kv, dim)
    scale = dim**-0.5
    wanted = oracle.attend(f(q), f(k), f(k)[..., :values] if latent else f(v), scale)
    if gated and not latent:
        wanted = wanted * oracle.sigmoid(f(gate))
    if not latent:
        wanted = wanted.reshape(total, -1)

    def call(ops: Any, to: Any) -> Any:
        cache = ops.new_latent(total, dim) if latent else ops.new_kv(total, kv, dim)
        out, at = [], 0
        for rows in passes:
            part = slice(at, at + rows)
            if latent:
                got = ops.attend_latent(to(q[part]), to(k[part, 0]), cache, scale=scale, value_dims=values)
            else:
                own_gate = to(gate[part]) if gated else None
                got = ops.attend(to(q[part]), to(k[part]), to(v[part]), cache, scale=scale, gate=own_gate)
            out.append(to_host(got))
            cache.commit(rows)
            at += rows
        assert cache.length == total
        with pytest.raises(StateError):
            (
                ops.attend_latent(to(q[:1]), to(k[:1, 0]), cache, scale=scale, value_dims=values)
                if latent
                else ops.attend(to(q[:1]), to(k[:1]), to(v[:1]), cache, scale=scale)
            )
        return np.concatenate(out)

    bench.both(call, wanted, "attend_latent" if latent else "attend", np.abs(f(k if latent else v)))


@given(
    dtype=dtypes,
    seed=seeds,
    passes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    data=st.data(),
    shape=st.builds(
        lambda key_heads, share, **more: DeltaShape(key_heads=key_heads, value_heads=key_heads * share, **more),
        key_heads=st.integers(1, 3),
        share=st.integers(1, 3),
        key_dim=st.integers(2, 16),
        value_dim=st.integers(1, 16),
        kernel=st.integers(2, 5),
    ),
)
def test_convolution_and_delta_rule(
    dtype: str, seed: int, passes: list[int], data: st.DataObject, shape: DeltaShape
) -> None:
    """In passes of any lengths, of which any number of rows is kept."""
    bench = Bench(dtype, seed)
    kept = [data.draw(st.integers(0, rows)) for rows in passes]
    total = sum(kept)
    assume(total)
    x, weight = bench.draw(total, shape.channels), bench.wide(shape.channels, shape.kernel, scale=0.5)
    a, b = bench.draw(total, shape.value_heads), bench.draw(total, shape.value_heads)
    a_log, bias = bench.wide(shape.value_heads), bench.wide(shape.value_heads)
    junk = [bench.draw(9, columns) for columns in (shape.channels, shape.value_heads, shape.value_heads)]
    convolved = oracle.conv_window(f(x), f(weight))

    def call(ops: Any, to: Any) -> tuple[Any, Any, Any]:
        cache = ops.new_delta(shape)
        us, outs, at = [], [], 0
        for rows, keep in zip(passes, kept, strict=True):
            pairs = zip((x, a, b), junk, strict=True)
            parts = [torch.cat([own[at : at + keep], other[: rows - keep]]) for own, other in pairs]
            u = ops.conv_window(to(parts[0]), ops.vector(weight), cache)
            o = ops.gated_delta(u, to(parts[1]), to(parts[2]), ops.vector(a_log), ops.vector(bias), cache, shape)
            cache.commit(keep)
            us.append(to_host(u)[:keep])
            outs.append(to_host(o)[:keep])
            at += keep
        state = to_host(cache.save()["state"])
        return (
            np.concatenate(us),
            np.concatenate(outs),
            state.transpose(0, 2, 1) if isinstance(ops, MetalOps) else state,
        )

    for ops in bench.backends:
        u, out, state = call(ops, to_backend(ops))
        bench.close(u, convolved, "conv_window", np.abs(f(x)).max() * np.abs(f(weight)).max() * shape.kernel)
        wanted, last = oracle.gated_delta(u, f(a), f(b), f(a_log), f(bias), shape)
        bench.close(out, wanted, "gated_delta", np.abs(last).max() * shape.key_dim**-0.5)
        assert np.abs(state - last).max() <= 2e-5 * max(np.abs(last).max(), 1.0)  # float32 in either dtype


@given(
    dtype=dtypes,
    seed=seeds,
    rows=rows_,
    groups=st.integers(1, 4),
    each=st.integers(2, 6),
    data=st.data(),
    scores=st.sampled_from(["softmax", "sigmoid"]),
    normalised=st.booleans(),
    biased=st.booleans(),
    shared=st.sampled_from(["none", "whole", "gated"]),
)
def test_experts(
    dtype: str,
    seed: int,
    rows: int,
    groups: int,
    each: int,
    data: st.DataObject,
    scores: Any,
    normalised: bool,
    biased: bool,
    shared: str,
) -> None:
    bench = Bench(dtype, seed)
    kept = data.draw(st.integers(1, groups))
    routing = Routing(
        top_k=data.draw(st.integers(1, kept * each)),
        scores=scores,
        normalised=normalised,
        scale=1.5,
        groups=groups,
        kept_groups=kept,
    )
    length, inner, count = 12, 7, groups * each
    x, residual, router = bench.draw(rows, length), bench.draw(rows, length), bench.matrix(count, length)
    bias = bench.wide(count) if biased else None
    shapes = ((inner, length), (inner, length), (length, inner))
    experts = [[bench.matrix(*shape) for _ in range(count)] for shape in shapes]
    common = [bench.matrix(*size) for size in ((5, length), (5, length), (length, 5))]
    gate = bench.matrix(1, length)
    ids, weights, gap = oracle.route(f(x), f(router), routing, None if bias is None else f(bias))
    assume(gap > 1e-5)
    wanted = oracle.moe(
        f(x),
        ids,
        weights,
        [[f(w) for w in stack] for stack in experts],
        f(residual),
        None if shared == "none" else [f(w) for w in common],
        f(gate) if shared == "gated" else None,
    )

    def call(ops: Any, to: Any) -> Any:
        chosen = ops.route(to(x), ops.weight(router), routing, None if bias is None else ops.vector(bias))
        assert (to_host(chosen[0]) == ids).all()
        assert np.abs(to_host(chosen[1]) - weights).max() <= 1e-5 * np.abs(weights).max()  # float32 in either dtype
        return ops.moe(
            to(x),
            chosen,
            tuple(ops.stack(stack) for stack in experts),
            to(residual),
            shared=None if shared == "none" else tuple(ops.weight(w) for w in common),
            shared_gate=ops.weight(gate) if shared == "gated" else None,
        )

    bench.both(call, wanted, "moe", np.abs(f(residual)))


def test_equal_experts_go_by_id() -> None:
    """Equal scores, negative ones and zeros of either sign among them; and a NaN names an expert that exists."""
    ops = MetalOps(mx.float32)
    bias = ops.vector(torch.tensor([0.0, -1.0, 2.0, -0.0, 2.0, -3.0, -1.0]) - 0.5)
    x, router = mx.zeros((3, 4)), mx.zeros((7, 4))
    ids, _ = ops.route(x, router, Routing(top_k=7, scores="sigmoid", normalised=True), bias)
    assert ids.tolist() == [[2, 4, 0, 3, 1, 6, 5]] * 3
    ids, _ = ops.route(x + mx.nan, router, Routing(top_k=3, scores="softmax", normalised=True))
    assert all(0 <= expert < 7 for row in ids.tolist() for expert in row)


# --- logits and hidden states ----------------------------------------------------------------------------------------


@functools.cache
def _ops() -> MetalOps:
    return MetalOps(mx.float32)


@given(seed=seeds, rows=st.integers(1, 5), vocab=st.integers(2, 60), levels=st.integers(1, 6), data=st.data())
def test_logits_full_and_pruned(seed: int, rows: int, vocab: int, levels: int, data: st.DataObject) -> None:
    """Few different values, so that equals abound: each view beside that of the reference over the same bits."""
    rng = np.random.default_rng(seed)
    weight = torch.tensor(rng.integers(0, levels, (vocab, 3)), dtype=torch.float32)
    x = torch.tensor(rng.integers(-2, 3, (rows, 3)), dtype=torch.float32)  # all products are exact
    reference, ops = ReferenceOps(torch.float32), _ops()
    tokens = data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=8))
    more = data.draw(st.lists(st.integers(0, vocab - 1), max_size=5))
    picked = rng.integers(0, vocab, rows).tolist()
    held = ops.weight(weight)
    base = reference.head_rows(weight, tokens), ops.head_rows(held, tokens)
    wider = reference.head_rows(weight, more, base[0]), ops.head_rows(held, more, base[1])
    assert wider[1].tokens == tuple(sorted({*tokens, *more}))
    assert wider[1].parts[0] is base[1].parts[0]
    pairs = [(reference.head(x, weight), ops.head(ops.weight(x), held))]
    pairs += [(reference.pruned_head(x, a), ops.pruned_head(ops.weight(x), b)) for a, b in (base, wider)]
    for theirs, ours in pairs:
        assert len(ours) == rows
        assert np.array_equal(ours.rows(), theirs.rows())
        assert ours.rows().dtype == np.float32
        assert ours.argmax() == theirs.argmax()
        for k in (1, 2, vocab, vocab + 3):
            assert ours.topk(k) == theirs.topk(k)
        assert ours.gather(picked) == theirs.gather(picked)
        assert ours.gather(picked[:1]) == theirs.gather(picked[:1])
        assert np.allclose(ours.logsumexp(), theirs.logsumexp(), rtol=1e-12)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_has_no_best_token(value: float) -> None:
    from specdec.backends.metal.arrays import MetalLogits

    rows = np.zeros((3, 5), np.float32)
    rows[1, 2] = value
    with pytest.raises(ContractError, match="row 1"):
        MetalLogits(mx.array(rows)).argmax()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_way_to_mlx_and_back_keeps_the_bits(dtype: str) -> None:
    from specdec.backends.metal.arrays import from_host, to_host

    tensor = torch.randn(7, 6).to(getattr(torch, dtype))[:, 1:4]  # strided
    array = from_host(tensor, getattr(mx, dtype))
    assert array.dtype == getattr(mx, dtype)
    assert torch.equal(to_host(array), tensor)
    assert torch.equal(to_host(array.T), tensor.T)


def test_arrays_of_another_backend_are_refused() -> None:
    reference, ops = ReferenceOps(torch.float32), _ops()
    weight = torch.ones(4, 3)
    with pytest.raises(ContractError, match="another backend"):
        ops.array(reference.hidden(weight))
    with pytest.raises(ContractError, match="another backend"):
        ops.hidden(weight).join([reference.hidden(weight)])
    with pytest.raises(ContractError, match="another backend"):
        ops.pruned_head(mx.ones((1, 3)), reference.head_rows(weight, [1]))
    with pytest.raises(StateError, match="without a pass"):
        ops.new_delta(DeltaShape(key_heads=1, value_heads=1, key_dim=2, value_dim=2, kernel=2)).commit(1)
