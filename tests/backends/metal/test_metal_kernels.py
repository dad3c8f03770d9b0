"""specdec's Metal kernels: the contract of operations over them, and packed products against float64."""

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from specdec.backends.metal.kernels.attention import attend  # noqa: E402
from specdec.backends.metal.kernels.matvec import expert_matvec, matvec  # noqa: E402
from specdec.backends.metal.ops import MetalOps  # noqa: E402
from specdec.backends.metal.quantised import PackedMatrix  # noqa: E402
from tests.backends import oracle  # noqa: E402
from tests.backends.contract import check_operations  # noqa: E402
from tests.backends.metal.kernel_runs import (  # noqa: E402
    CONTRACTED,
    EMULATED,
    EXECUTORS,
    RUNS,
    UNIT,
    affine,
    float64,
    rounding,
    same_bits,
)

pytestmark = pytest.mark.emulator

seeds = st.integers(0, 2**20)


def normal(rng, *shape, dtype=mx.float32):
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


@pytest.mark.parametrize("executor", [EMULATED, CONTRACTED], ids=["emulated", "contracted"])
def test_the_contract_of_operations(executor):
    check_operations(lambda: MetalOps(mx.float32, executor=executor))


@pytest.mark.sample
@pytest.mark.parametrize("executor", EXECUTORS)
def test_large_scores_do_not_overflow(executor):
    rng = np.random.default_rng(5)
    q, k, v = (30 * normal(rng, 40, heads, 40) for heads in (4, 2, 2))
    keys, values = (one.swapaxes(0, 1)[None] for one in (k, v))
    got = attend(q[33:], keys, values, mx.array([33]), scale=0.2, dtype=mx.float32, part=16, executor=executor)
    wanted = oracle.attend(float64(q[33:]), float64(k), float64(v), 0.2)
    scores = 44 * UNIT * 0.2 * np.abs(float64(q)).sum(-1).max() * np.abs(float64(k)).max()
    assert np.abs(float64(got) - wanted).max() <= (4 * scores + 224 * UNIT) * np.abs(float64(v)).max()


# --- products --------------------------------------------------------------------------------------------------------

# rows, dtype of the inputs, dtype of the result, what is added, group and bits; each line is a text of its own
QUANTISED = [
    (1, mx.bfloat16, mx.bfloat16, "nothing", 64, 4),
    (2, mx.float16, mx.float16, "a row", 32, 8),
    (3, mx.float32, mx.float32, "rows", 128, 4),
    (2, mx.bfloat16, mx.float32, "nothing", 32, 2),
    (1, mx.bfloat16, mx.float32, "nothing", 64, 3),
    (2, mx.bfloat16, mx.float32, "nothing", 32, 6),
]


def added(rng, what, rows, features, dtype):
    if what == "nothing":
        return None
    return normal(rng, *((features,) if what == "a row" else (rows, features)), dtype=dtype)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("rows", "dtype", "wanted_dtype", "what", "group", "bits"), QUANTISED)
@given(seed=seeds, groups=st.integers(1, 6), features=st.integers(8, 21))
@settings(max_examples=6)
def test_quantised_products_are_those_of_float64(
    executor, rows, dtype, wanted_dtype, what, group, bits, seed, groups, features
):
    rng = np.random.default_rng(seed)
    length = groups * group
    x, residual = normal(rng, rows, length, dtype=dtype), added(rng, what, rows, features, dtype)
    w, (levels, scales, biases) = affine(rng, features, length, group=group, bits=bits, dtype=dtype)
    got = matvec(x, w, residual, dtype=wanted_dtype, executor=executor)
    rest = 0.0 if residual is None else float64(residual)
    wanted = float64(x) @ (levels * scales + biases).T + rest
    terms = np.abs(float64(x)) @ (levels * np.abs(scales) + np.abs(biases)).T + np.abs(rest)
    assert (np.abs(float64(got) - wanted) <= (length + 4) * UNIT * terms + rounding(wanted, wanted_dtype)).all()


@pytest.mark.parametrize("executor", RUNS)
def test_a_quantised_row_has_the_same_bits_in_any_company(executor):
    rng = np.random.default_rng(1)
    x = normal(rng, 11, 320, dtype=mx.bfloat16)
    w, _ = affine(rng, 9, 320, group=64, bits=4, dtype=mx.bfloat16)
    counts = (2, 5, 8) if executor in (None, EMULATED) else (8,)
    alone = mx.concatenate([matvec(x[t : t + 1], w, dtype=mx.float32, executor=executor) for t in range(11)])
    for count in counts:
        several = matvec(x[11 - count :], w, dtype=mx.float32, executor=executor)
        assert same_bits(several, alone[11 - count :]), count


@pytest.mark.sample
def test_mlx_packs_weights_in_the_same_order():
    """The packing above is ours; this one is not."""
    rng = np.random.default_rng(2)
    x, full = normal(rng, 2, 192), normal(rng, 5, 192)
    for group, bits in ((64, 4), (32, 8)):
        packed, scales, biases = mx.quantize(full, group_size=group, bits=bits)
        w = PackedMatrix(codes=packed, scales=scales, biases=biases, group=group, bits=bits)
        plain = mx.dequantize(packed, scales, biases, group_size=group, bits=bits)
        wanted = float64(x) @ float64(plain).T
        got = float64(matvec(x, w, dtype=mx.float32, executor=EMULATED))
        assert np.abs(got - wanted).max() <= 200 * UNIT * (np.abs(float64(x)) @ np.abs(float64(plain)).T * 3).max()


# --- products with experts -------------------------------------------------------------------------------------------

EXPERTS, SLOTS = 5, 3


def stacked(rng, features, length, dtype):
    """Quantised matrices, and their float64 values ``[E, N, K]``."""
    made = [affine(rng, features, length, group=32, bits=4, dtype=dtype) for _ in range(EXPERTS)]
    arrays = [mx.stack(parts) for parts in zip(*(weight.parts() for weight, _ in made), strict=True)]
    weight = attrs.evolve(made[0][0], codes=arrays[0], scales=arrays[1], biases=arrays[2])
    return weight, np.stack([levels * scales + biases for _, (levels, scales, biases) in made])


def chosen(rng, rows):
    return mx.array(rng.integers(0, EXPERTS, (rows, SLOTS)).astype(np.int32))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("shared", [False, True], ids=["each slot", "shared"])
@given(seed=st.integers(0, 2**20), rows=st.integers(3, 8), features=st.integers(1, 19), groups=st.integers(1, 5))
@settings(max_examples=5)
def test_packed_expert_products_are_those_of_float64(executor, shared, seed, rows, features, groups):
    rng = np.random.default_rng(seed)
    length = 32 * groups
    ids = chosen(rng, rows)
    x = normal(rng, rows, 1 if shared else SLOTS, length, dtype=mx.bfloat16)
    w, wide = stacked(rng, features, length, mx.bfloat16)
    size = 16 * np.abs(wide).max()  # of scale * level and bias, which may cancel
    got = float64(expert_matvec(x, w, ids, dtype=mx.bfloat16, executor=executor))
    matrices = wide[np.array(ids)]  # [T, k, N, K]
    wanted = np.einsum("tjk,tjnk->tjn", np.broadcast_to(float64(x), (rows, SLOTS, length)), matrices)
    bound = (length + 4) * UNIT * np.abs(float64(x)).sum(-1).max() * size
    assert (np.abs(got - wanted) <= bound + rounding(wanted, mx.bfloat16)).all()


@pytest.mark.parametrize("executor", RUNS)
def test_a_slot_has_the_bits_of_matvec(executor):
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
            assert same_bits(quantised[t, j], matvec(x[t], one, dtype=mx.float32, executor=executor)[0])
