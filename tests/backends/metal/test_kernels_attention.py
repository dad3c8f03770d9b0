"""Attention in fixed parts: against float64; a row's bits in any company; nothing behind a row is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from specdec.backends.metal.kernels.attention import PART, attend  # noqa: E402
from specdec.backends.metal.kernels.kernel import Executor  # noqa: E402
from tests.backends.metal import oracle  # noqa: E402
from tests.backends.metal.kernel_runs import (  # noqa: E402
    EMULATED,
    EXECUTORS,
    RUNS,
    UNIT,
    caught,
    emulated_only,
    float64,
    rounding,
    same_bits,
)

pytestmark = pytest.mark.emulator

NQ, NKV, DK, DV, SHORT = 4, 2, 40, 24, 16
SCALE = DK**-0.5


class Cache:
    """Queries, keys and values of all positions, float64 for the oracle, and buckets that hold NaN elsewhere."""

    def __init__(self, seed: int, positions: int, dtype: Any = mx.float32, size: float = 1.0) -> None:
        rng = np.random.default_rng(seed)

        def normal(*shape: int) -> Any:
            return mx.array((rng.standard_normal(shape) * size).astype(np.float32)).astype(dtype)

        self.q, self.k, self.v = normal(positions, NQ, DK), normal(positions, NKV, DK), normal(positions, NKV, DV)

    def attend(self, start: int, stop: int, bucket: int, executor: Executor | None, **more: Any) -> Any:
        """Positions ``start`` to ``stop``, with only the positions before ``stop`` in the cache."""
        keys, values = (mx.full((1, NKV, bucket, dims), mx.nan, dtype=self.k.dtype) for dims in (DK, DV))
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
    scores = (DK + 4) * UNIT * SCALE * np.abs(q).sum(-1).max() * np.abs(k).max()
    return float((4 * scores + 4 * (stop + 16) * UNIT) * np.abs(v).max())


@pytest.mark.parametrize("executor", EXECUTORS)
@given(seed=st.integers(0, 2**20), start=st.integers(0, 60), rows=st.integers(1, 8), more=st.integers(0, 40))
@settings(max_examples=12)
def test_rows_are_those_of_float64(executor: Executor | None, seed: int, start: int, rows: int, more: int) -> None:
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
def test_bfloat16_is_rounded_once(executor: Executor | None) -> None:
    cache = Cache(6, 37, mx.bfloat16)
    got = cache.attend(34, 37, 48, executor, dtype=mx.bfloat16)
    wanted = cache.wanted(34, 37)
    assert (np.abs(float64(got) - wanted) <= cache.bound(37) + rounding(wanted, mx.bfloat16)).all()


@pytest.mark.parametrize("executor", RUNS)
@given(seed=st.integers(0, 2**20), start=st.integers(0, 50), rows=st.integers(2, 8), more=st.integers(0, 40))
@settings(max_examples=6)
def test_a_row_has_the_same_bits_in_any_company(
    executor: Executor | None, seed: int, start: int, rows: int, more: int
) -> None:
    """Alone, a row finds NaN in the places of the rows behind it, and perhaps a smaller bucket."""
    stop = start + rows
    cache = Cache(seed, stop)
    block = cache.attend(start, stop, 64 + more, executor)
    for t in range(rows):
        bucket = 64 if executor is not None else 64 + more  # MLX's own products know their length
        assert same_bits(cache.attend(start + t, start + t + 1, bucket, executor), block[t : t + 1]), t


def test_the_default_part_and_a_second_one() -> None:
    cache = Cache(8, PART + 7)
    for start, stop in ((PART - 3, PART + 4), (PART + 4, PART + 7)):
        got = cache.attend(start, stop, 256, EMULATED, part=PART)
        assert np.abs(float64(got) - cache.wanted(start, stop)).max() <= cache.bound(stop)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_latent_rows_are_keys_and_values_at_once(executor: Executor | None) -> None:
    rng = np.random.default_rng(9)
    q, rows = (mx.array(rng.standard_normal(shape).astype(np.float32)) for shape in ((3, NQ, DK), (1, 1, 64, DK)))
    rows[:, :, 23:] = mx.nan
    got = attend(
        q, rows, rows, mx.array([20]), scale=SCALE, dtype=mx.float32, value_dims=DV, part=SHORT, executor=executor
    )
    keys = float64(rows)[0, 0, :23, None]
    wanted = oracle.attend(float64(q), keys, keys[..., :DV], SCALE)
    assert np.abs(float64(got) - wanted).max() <= bound(float64(q), keys, keys, 23)


@emulated_only
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("length[0] + t + 1", "length[0] + t + 2"),
        ("length[0] + t + 1", "length[0] + rows"),
        ("(length[0] + t) / PART + 1", "parts"),
        ("head / (NQ / NKV)", "head % NKV"),
    ],
)
def test_a_seeded_fault_is_caught(old: str, new: str) -> None:
    cache = Cache(10, 30)

    def right(executor: Executor) -> bool:
        off = float64(cache.attend(27, 30, 64, executor)) - cache.wanted(27, 30)
        return bool(np.abs(off).max() <= cache.bound(30))

    assert caught(right, old, new, EMULATED)
