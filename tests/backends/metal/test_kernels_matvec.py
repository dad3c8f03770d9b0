"""Products with dense and with quantised matrices: against float64, and a row's bits in any company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from specdec.backends.metal.kernels.kernel import Executor  # noqa: E402
from specdec.backends.metal.kernels.matvec import matvec  # noqa: E402
from specdec.backends.metal.kernels.quantised_matvec import quantised_matvec  # noqa: E402
from specdec.backends.metal.quantised import PackedMatrix  # noqa: E402
from tests.backends.metal.kernel_runs import (  # noqa: E402
    EMULATED,
    EXECUTORS,
    RUNS,
    UNIT,
    affine,
    caught,
    emulated_only,
    float64,
    rounding,
    same_bits,
)

pytestmark = pytest.mark.emulator

seeds = st.integers(0, 2**20)


def normal(rng: np.random.Generator, *shape: int, dtype: Any = mx.float32) -> Any:
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


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


@emulated_only
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("at + i < length", "at + i <= length"),
        ("at += 128", "at += 124"),
        ("part += simd_shuffle_xor(part, 1);", ""),
        ("min(first_row + r, rows - 1)", "first_row"),
    ],
)
def test_a_seeded_fault_is_caught(old: str, new: str) -> None:
    rng = np.random.default_rng(3)
    x, w = normal(rng, 3, 141), normal(rng, 6, 141)

    def right(executor: Executor) -> bool:
        off = float64(matvec(x, w, dtype=mx.float32, executor=executor)) - float64(x) @ float64(w).T
        return bool(np.abs(off).max() < 1e-4)

    assert caught(right, old, new, EMULATED)
