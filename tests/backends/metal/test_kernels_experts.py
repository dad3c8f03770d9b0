"""Products with the matrices that a row names: against float64, and with the bits of ``matvec``."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from specdec.backends.metal.kernels.expert_matvec import expert_matvec  # noqa: E402
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

EXPERTS, SLOTS = 5, 3


def normal(rng: np.random.Generator, *shape: int, dtype: Any = mx.float32) -> Any:
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


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
def test_products_are_those_of_float64(
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


@emulated_only
@pytest.mark.parametrize(
    ("old", "new"), [("slot / ids_shape[1]", "slot % ids_shape[1]"), ("ids[slot]", "ids[slot / ids_shape[1]]")]
)
def test_a_seeded_fault_is_caught(old: str, new: str) -> None:
    rng = np.random.default_rng(1)
    x, ids, w = normal(rng, 4, 1, 96), chosen(rng, 4), normal(rng, EXPERTS, 9, 96)
    wanted = np.einsum("tk,tjnk->tjn", float64(x)[:, 0], float64(w)[np.array(ids)])

    def right(executor: Executor) -> bool:
        return bool(
            np.abs(float64(expert_matvec(x, w, ids, dtype=mx.float32, executor=executor)) - wanted).max() < 1e-4
        )

    assert caught(right, old, new, EMULATED)
