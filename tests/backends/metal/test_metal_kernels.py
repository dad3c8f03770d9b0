"""specdec's Metal kernels: against float64, a row's bits among any others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from specdec.backends.metal.kernels.attention import attend  # noqa: E402
from specdec.backends.metal.kernels.delta import DeltaInputs, DeltaRows, flush, gated_delta  # noqa: E402
from specdec.backends.metal.kernels.expert_matvec import expert_matvec  # noqa: E402
from specdec.backends.metal.kernels.kernel import Executor  # noqa: E402
from specdec.backends.metal.kernels.matvec import matvec  # noqa: E402
from specdec.backends.metal.kernels.quantised_matvec import quantised_matvec  # noqa: E402
from specdec.backends.metal.quantised import PackedMatrix  # noqa: E402
from tests.backends import oracle  # noqa: E402
from tests.backends.metal.kernel_runs import EMULATED, EXECUTORS, RUNS, UNIT, affine, float64, rounding, same_bits  # noqa: E402

pytestmark = pytest.mark.emulator

seeds = st.integers(0, 2**20)


def normal(rng: np.random.Generator, *shape: int, dtype: Any = mx.float32) -> Any:
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


# --- products --------------------------------------------------------------------------------------------------------

# rows, dtype of the inputs, dtype of the result, what is added; each line is a text of its own
DENSE = [
    (1, mx.bfloat16, mx.bfloat16, "nothing"),
    (3, mx.bfloat16, mx.float32, "a row"),
    (2, mx.float16, mx.float16, "rows"),
    (5, mx.float32, mx.float32, "rows"),
]
QUANTISED = [
    (1, mx.bfloat16, mx.bfloat16, "nothing", 64, 4),
    (2, mx.float16, mx.float16, "a row", 32, 8),
    (3, mx.float32, mx.float32, "rows", 128, 4),
    (2, mx.bfloat16, mx.float32, "nothing", 32, 2),
    (1, mx.bfloat16, mx.float32, "nothing", 64, 3),
    (2, mx.bfloat16, mx.float32, "nothing", 32, 6),
]


def added(rng: np.random.Generator, what: str, rows: int, features: int, dtype: Any) -> Any:
    if what == "nothing":
        return None
    return normal(rng, *((features,) if what == "a row" else (rows, features)), dtype=dtype)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("rows", "dtype", "wanted_dtype", "what"), DENSE)
@given(seed=seeds, length=st.integers(8, 300), features=st.integers(8, 21))
@settings(max_examples=6)
def test_dense_products_are_those_of_float64(
    executor: Executor | None,
    rows: int,
    dtype: Any,
    wanted_dtype: Any,
    what: str,
    seed: int,
    length: int,
    features: int,
) -> None:
    rng = np.random.default_rng(seed)
    x, w = normal(rng, rows, length, dtype=dtype), normal(rng, features, length, dtype=dtype)
    residual = added(rng, what, rows, features, dtype)
    got = matvec(x, w, residual, dtype=wanted_dtype, executor=executor)
    rest = 0.0 if residual is None else float64(residual)
    wanted = float64(x) @ float64(w).T + rest
    # a sum of n products in float32, in any order: Higham 2002, equation 3.5
    bound = (length + 2) * UNIT * (np.abs(float64(x)) @ np.abs(float64(w)).T + np.abs(rest))
    assert (np.abs(float64(got) - wanted) <= bound + rounding(wanted, wanted_dtype)).all()


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("rows", "dtype", "wanted_dtype", "what", "group", "bits"), QUANTISED)
@given(seed=seeds, groups=st.integers(1, 6), features=st.integers(8, 21))
@settings(max_examples=6)
def test_quantised_products_are_those_of_float64(
    executor: Executor | None,
    rows: int,
    dtype: Any,
    wanted_dtype: Any,
    what: str,
    group: int,
    bits: int,
    seed: int,
    groups: int,
    features: int,
) -> None:
    rng = np.random.default_rng(seed)
    length = groups * group
    x, residual = normal(rng, rows, length, dtype=dtype), added(rng, what, rows, features, dtype)
    w, (levels, scales, biases) = affine(rng, features, length, group=group, bits=bits, dtype=dtype)
    got = quantised_matvec(x, w, residual, dtype=wanted_dtype, executor=executor)
    rest = 0.0 if residual is None else float64(residual)
    wanted = float64(x) @ (levels * scales + biases).T + rest
    terms = np.abs(float64(x)) @ (levels * np.abs(scales) + np.abs(biases)).T + np.abs(rest)
    assert (np.abs(float64(got) - wanted) <= (length + 4) * UNIT * terms + rounding(wanted, wanted_dtype)).all()


@pytest.mark.parametrize("executor", RUNS)
def test_a_dense_row_has_the_same_bits_in_any_company(executor: Executor | None) -> None:
    rng = np.random.default_rng(0)
    x, w, residual = normal(rng, 11, 196), normal(rng, 9, 196), normal(rng, 11, 9)
    counts = (2, 5, 8, 11) if executor in (None, EMULATED) else (8,)
    alone = mx.concatenate([matvec(x[t : t + 1], w, dtype=mx.float32, executor=executor) for t in range(11)])
    for count in counts:
        start = 11 - count
        assert same_bits(matvec(x[start:], w, dtype=mx.float32, executor=executor), alone[start:]), count
        if count == 8:
            several = matvec(x[start:], w, residual[start:], dtype=mx.float32, executor=executor)
            assert same_bits(several, alone[start:] + residual[start:])


@pytest.mark.parametrize("executor", RUNS)
def test_a_quantised_row_has_the_same_bits_in_any_company(executor: Executor | None) -> None:
    rng = np.random.default_rng(1)
    x = normal(rng, 11, 320, dtype=mx.bfloat16)
    w, _ = affine(rng, 9, 320, group=64, bits=4, dtype=mx.bfloat16)
    counts = (2, 5, 8) if executor in (None, EMULATED) else (8,)
    alone = mx.concatenate([quantised_matvec(x[t : t + 1], w, dtype=mx.float32, executor=executor) for t in range(11)])
    for count in counts:
        several = quantised_matvec(x[11 - count :], w, dtype=mx.float32, executor=executor)
        assert same_bits(several, alone[11 - count :]), count


@pytest.mark.sample
def test_mlx_packs_weights_in_the_same_order() -> None:
    """The packing above is ours; this one is not."""
    rng = np.random.default_rng(2)
    x, full = normal(rng, 2, 192), normal(rng, 5, 192)
    for group, bits in ((64, 4), (32, 8)):
        packed, scales, biases = mx.quantize(full, group_size=group, bits=bits)
        w = PackedMatrix(codes=packed, scales=scales, biases=biases, group=group, bits=bits)
        plain = mx.dequantize(packed, scales, biases, group_size=group, bits=bits)
        wanted = float64(x) @ float64(plain).T
        got = float64(quantised_matvec(x, w, dtype=mx.float32, executor=EMULATED))
        assert np.abs(got - wanted).max() <= 200 * UNIT * (np.abs(float64(x)) @ np.abs(float64(plain)).T * 3).max()


# --- products with experts -------------------------------------------------------------------------------------------

EXPERTS, SLOTS = 5, 3


def stacked(rng: np.random.Generator, features: int, length: int, dtype: Any) -> tuple[PackedMatrix, Any]:
    """Quantised matrices, and their float64 values ``[E, N, K]``."""
    made = [affine(rng, features, length, group=32, bits=4, dtype=dtype) for _ in range(EXPERTS)]
    arrays = [mx.stack(parts) for parts in zip(*(weight.parts() for weight, _ in made), strict=True)]
    weight = attrs.evolve(made[0][0], codes=arrays[0], scales=arrays[1], biases=arrays[2])
    return weight, np.stack([levels * scales + biases for _, (levels, scales, biases) in made])


def chosen(rng: np.random.Generator, rows: int) -> Any:
    return mx.array(rng.integers(0, EXPERTS, (rows, SLOTS)).astype(np.int32))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("quantised", [False, True], ids=["dense", "quantised"])
@pytest.mark.parametrize("shared", [False, True], ids=["each slot", "shared"])
@given(seed=st.integers(0, 2**20), rows=st.integers(3, 8), features=st.integers(1, 19), groups=st.integers(1, 5))
@settings(max_examples=5)
def test_expert_products_are_those_of_float64(
    executor: Executor | None, quantised: bool, shared: bool, seed: int, rows: int, features: int, groups: int
) -> None:
    rng = np.random.default_rng(seed)
    length = 32 * groups
    ids = chosen(rng, rows)
    x = normal(rng, rows, 1 if shared else SLOTS, length, dtype=mx.bfloat16)
    w: Any
    if quantised:
        w, wide = stacked(rng, features, length, mx.bfloat16)
        size = 16 * np.abs(wide).max()  # of scale * level and bias, which may cancel
    else:
        w = normal(rng, EXPERTS, features, length, dtype=mx.bfloat16)
        wide, size = float64(w), np.abs(float64(w)).max()
    got = float64(expert_matvec(x, w, ids, dtype=mx.bfloat16, executor=executor))
    matrices = wide[np.array(ids)]  # [T, k, N, K]
    wanted = np.einsum("tjk,tjnk->tjn", np.broadcast_to(float64(x), (rows, SLOTS, length)), matrices)
    bound = (length + 4) * UNIT * np.abs(float64(x)).sum(-1).max() * size
    assert (np.abs(got - wanted) <= bound + rounding(wanted, mx.bfloat16)).all()


@pytest.mark.parametrize("executor", RUNS)
def test_a_slot_has_the_bits_of_matvec(executor: Executor | None) -> None:
    """Also of a row alone, and of a row beside seven others: that is what ``matvec`` is tested for."""
    rng = np.random.default_rng(0)
    x, ids, w = normal(rng, 4, 1, 96), chosen(rng, 4), normal(rng, EXPERTS, 9, 96)
    packed, _ = stacked(rng, 9, 96, mx.float32)
    dense = expert_matvec(x, w, ids, dtype=mx.float32, executor=executor)
    quantised = expert_matvec(x, packed, ids, dtype=mx.float32, executor=executor)
    for t, row in enumerate(ids.tolist()):
        for j, expert in enumerate(row):
            alone = matvec(x[t], w[expert], dtype=mx.float32, executor=executor)[0]
            arrays = [array[expert] for array in packed.parts()]
            one = attrs.evolve(packed, codes=arrays[0], scales=arrays[1], biases=arrays[2])
            assert same_bits(dense[t, j], alone)
            assert same_bits(quantised[t, j], quantised_matvec(x[t], one, dtype=mx.float32, executor=executor)[0])


# --- attention -------------------------------------------------------------------------------------------------------

NQ, NKV, DIM, VALUES, SHORT = 4, 2, 40, 24, 16
SCALE = DIM**-0.5


class Cache:
    """Queries, keys and values of all positions, float64 for the oracle, and buckets that hold NaN elsewhere."""

    def __init__(self, seed: int, positions: int, dtype: Any = mx.float32, size: float = 1.0) -> None:
        rng = np.random.default_rng(seed)

        def normal(*shape: int) -> Any:
            return mx.array((rng.standard_normal(shape) * size).astype(np.float32)).astype(dtype)

        self.q, self.k, self.v = normal(positions, NQ, DIM), normal(positions, NKV, DIM), normal(positions, NKV, VALUES)

    def attend(self, start: int, stop: int, bucket: int, executor: Executor | None, **more: Any) -> Any:
        """Positions ``start`` to ``stop``, with only the positions before ``stop`` in the cache."""
        keys, values = (mx.full((1, NKV, bucket, dims), mx.nan, dtype=self.k.dtype) for dims in (DIM, VALUES))
        keys[0, :, :stop] = self.k[:stop].swapaxes(0, 1)
        values[0, :, :stop] = self.v[:stop].swapaxes(0, 1)
        return attend(
            self.q[start:stop],
            keys,
            values,
            mx.array([start]),
            scale=SCALE,
            executor=executor,
            **{"dtype": mx.float32, "part": SHORT, **more},
        )

    def wanted(self, start: int, stop: int) -> Any:
        return oracle.attend(float64(self.q[start:stop]), float64(self.k[:stop]), float64(self.v[:stop]), SCALE)

    def bound(self, stop: int) -> float:
        return bound(*(float64(array) for array in (self.q, self.k, self.v)), stop)


def bound(q: Any, k: Any, v: Any, stop: int) -> float:
    """Scores in float32 are off by ``scores`` at most, their weights relatively by twice that; then two sums follow."""
    scores = (DIM + 4) * UNIT * SCALE * np.abs(q).sum(-1).max() * np.abs(k).max()
    return float((4 * scores + 4 * (stop + 16) * UNIT) * np.abs(v).max())


@pytest.mark.parametrize("executor", EXECUTORS)
@given(seed=st.integers(0, 2**20), start=st.integers(0, 60), rows=st.integers(1, 8), more=st.integers(0, 40))
@settings(max_examples=12)
def test_attention_is_that_of_float64(executor: Executor | None, seed: int, start: int, rows: int, more: int) -> None:
    stop = start + rows
    cache = Cache(seed, stop)
    got = cache.attend(start, stop, stop + more, executor)
    assert np.abs(float64(got) - cache.wanted(start, stop)).max() <= cache.bound(stop)


@pytest.mark.sample
@pytest.mark.parametrize("executor", EXECUTORS)
def test_large_scores_do_not_overflow(executor: Executor | None) -> None:
    cache = Cache(5, 40, size=30.0)
    got = cache.attend(33, 40, 64, executor)
    assert np.abs(float64(got) - cache.wanted(33, 40)).max() <= cache.bound(40)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_attention_in_bfloat16_is_rounded_once(executor: Executor | None) -> None:
    cache = Cache(6, 37, mx.bfloat16)
    got = cache.attend(34, 37, 48, executor, dtype=mx.bfloat16)
    wanted = cache.wanted(34, 37)
    assert (np.abs(float64(got) - wanted) <= cache.bound(37) + rounding(wanted, mx.bfloat16)).all()


@pytest.mark.parametrize("executor", RUNS)
@given(seed=st.integers(0, 2**20), start=st.integers(0, 50), rows=st.integers(2, 8), more=st.integers(0, 40))
@settings(max_examples=6)
def test_a_query_has_the_same_bits_in_any_company(
    executor: Executor | None, seed: int, start: int, rows: int, more: int
) -> None:
    """Alone, a row finds NaN in the places of the rows behind it, and perhaps a smaller bucket."""
    stop = start + rows
    cache = Cache(seed, stop)
    block = cache.attend(start, stop, 64 + more, executor)
    for t in range(rows):
        bucket = 64 if executor is not None else 64 + more  # MLX's own products know their length
        assert same_bits(cache.attend(start + t, start + t + 1, bucket, executor), block[t : t + 1]), t


@pytest.mark.parametrize("executor", EXECUTORS)
def test_latent_rows_are_keys_and_values_at_once(executor: Executor | None) -> None:
    rng = np.random.default_rng(9)
    q, rows = (mx.array(rng.standard_normal(shape).astype(np.float32)) for shape in ((3, NQ, DIM), (1, 1, 64, DIM)))
    rows[:, :, 23:] = mx.nan
    got = attend(
        q, rows, rows, mx.array([20]), scale=SCALE, dtype=mx.float32, value_dims=VALUES, part=SHORT, executor=executor
    )
    keys = float64(rows)[0, 0, :23, None]
    wanted = oracle.attend(float64(q), keys, keys[..., :VALUES], SCALE)
    assert np.abs(float64(got) - wanted).max() <= bound(float64(q), keys, keys, 23)


# --- the delta rule --------------------------------------------------------------------------------------------------

HK, HV, DK, DV = 4, 8, 40, 3  # 40: lanes without a second key dimension
# of each block: rows drafted, and how many of them are accepted
blocks_ = st.lists(
    st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1, max_size=5
)


@attrs.frozen(eq=False)
class Rows:
    """Inputs of some rows, as the model would hand them over."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any

    @classmethod
    def draw(cls, rng: np.random.Generator, count: int) -> Rows:
        def normal(*shape: int) -> Any:
            return rng.standard_normal(shape).astype(np.float32)

        def unit(x: Any) -> Any:
            return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)

        return cls(
            q=unit(normal(count, HK, DK)) * np.float32(DK**-0.5),
            k=unit(normal(count, HK, DK)),
            v=normal(count, HV, DV),
            g=np.exp(-rng.exponential(0.3, (count, HV))).astype(np.float32),
            beta=rng.uniform(0, 1, (count, HV)).astype(np.float32),
        )

    def inputs(self) -> DeltaInputs:
        return DeltaInputs(**{name: mx.array(array) for name, array in attrs.asdict(self).items()})

    def between(self, start: int, stop: int, junk: Rows, end: int) -> Rows:
        """Rows ``start`` to ``stop`` of these, then rows of ``junk`` up to ``end``."""
        parts = zip(attrs.astuple(self), attrs.astuple(junk), strict=True)
        return Rows(*(np.concatenate([mine[start:stop], other[: end - stop]]) for mine, other in parts))


class Layer:
    """One layer that decodes in blocks, as a cache would."""

    def __init__(self, executor: Executor | None, dtype: Any = mx.float32) -> None:
        self.executor = executor
        self.dtype = dtype
        self.base = mx.array(np.random.default_rng(7).standard_normal((HV, DV, DK)).astype(np.float32))
        self.past = DeltaRows.none(HK, DK, HV, DV)
        self.kept = 0

    def block(self, rows: Rows) -> Any:
        y, self.base, past = gated_delta(
            self.base, self.past, mx.array([self.kept]), rows.inputs(), dtype=self.dtype, executor=self.executor
        )
        self.past = past
        return y

    def accept(self, kept: int) -> None:
        """Rows that are not accepted become NaN: nothing may read them."""
        dropped = mx.arange(self.past.k.shape[0]) >= kept
        self.past = DeltaRows(
            k=mx.where(dropped[:, None, None], mx.nan, self.past.k),
            g=mx.where(dropped[:, None], mx.nan, self.past.g),
            delta=mx.where(dropped[:, None, None], mx.nan, self.past.delta),
        )
        self.kept = kept

    def flushed(self) -> Any:
        return flush(self.base, self.past, mx.array([self.kept]), executor=self.executor)


def delta_oracle(base: Any, rows: Rows) -> tuple[Any, Any]:
    """float64, from the formula alone: y ``[T, HV, DV]`` and the matrix ``[HV, DV, DK]`` after all rows."""
    state = base.copy()
    q, k, v, g, beta = (array.astype(np.float64) for array in attrs.astuple(rows))
    y = np.zeros(v.shape)
    for t in range(len(q)):
        for h in range(HV):
            key, query = k[t, h // (HV // HK)], q[t, h // (HV // HK)]
            state[h] *= g[t, h]
            state[h] += np.outer(beta[t, h] * (v[t, h] - state[h] @ key), key)
            y[t, h] = state[h] @ query
    return y, state


def speculated(layer: Layer, rows: Rows, blocks: Sequence[tuple[int, int]], seed: int) -> tuple[list[Any], Any]:
    """Outputs of the accepted rows, and the matrix at the end. Behind the accepted rows every block holds others."""
    junk = Rows.draw(np.random.default_rng(seed + 1), 8)
    outs, at = [], 0
    for drafted, accepted in blocks:
        y = layer.block(rows.between(at, at + accepted, junk, at + drafted))
        layer.accept(accepted)
        outs += [y[t] for t in range(accepted)]
        at += accepted
    return outs, layer.flushed()


def speculates_exactly(executor: Executor | None, blocks: Sequence[tuple[int, int]], seed: int) -> bool:
    total = sum(accepted for _, accepted in blocks)
    rows = Rows.draw(np.random.default_rng(seed), max(total, 1))
    wanted, state = speculated(Layer(executor), rows, [(1, 1)] * total, seed)
    found, after = speculated(Layer(executor), rows, blocks, seed)
    return same_bits(state, after) and all(same_bits(a, b) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize("executor", RUNS)
@given(blocks=blocks_, seed=st.integers(0, 2**20))
@settings(max_examples=8)
def test_any_accepts_leave_the_bits_of_one_row_decoding(
    executor: Executor | None, blocks: list[tuple[int, int]], seed: int
) -> None:
    assert speculates_exactly(executor, blocks, seed)


@pytest.mark.parametrize("executor", EXECUTORS)
@given(count=st.integers(1, 8), accepted=st.integers(0, 8), seed=st.integers(0, 2**20))
@settings(max_examples=10)
def test_rows_and_matrix_are_those_of_float64(executor: Executor | None, count: int, accepted: int, seed: int) -> None:
    accepted = min(accepted, count)
    rows = Rows.draw(np.random.default_rng(seed), count)
    layer = Layer(executor)
    base = float64(layer.base)
    y = layer.block(rows)
    wanted, _ = delta_oracle(base, rows)
    layer.accept(accepted)
    _, state = delta_oracle(base, Rows(*(array[:accepted] for array in attrs.astuple(rows))))
    # keys of length 1 and steps below 1 shrink old errors; each row adds those of three sums over Dk
    size = np.linalg.norm(base, axis=-1).max() + np.abs(rows.v).max() * count
    bound = 3 * (count + 1) * (DK + 8) * UNIT * size
    assert np.abs(float64(y) - wanted).max() <= bound
    assert np.abs(float64(layer.flushed()) - state).max() <= bound


@pytest.mark.sample
@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_next_block_begins_with_what_flush_gives(executor: Executor | None) -> None:
    rows = Rows.draw(np.random.default_rng(3), 6)
    for accepted in range(5):
        layer = Layer(executor)
        layer.block(Rows(*(array[:4] for array in attrs.astuple(rows))))
        layer.accept(accepted)
        flushed = layer.flushed()
        layer.block(Rows(*(array[4:] for array in attrs.astuple(rows))))
        assert same_bits(layer.base, flushed)


def test_rows_of_the_delta_rule_are_rounded_once() -> None:
    rows = Rows.draw(np.random.default_rng(4), 5)
    wide = Layer(EMULATED).block(rows)
    assert same_bits(Layer(EMULATED, mx.bfloat16).block(rows), wide.astype(mx.bfloat16))
