"""The delta rule with lazy commit: any sequence of blocks and accepts leaves the bits of one-row decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from specdec.backends.metal.kernels.delta import DeltaRows, flush, gated_delta  # noqa: E402
from specdec.backends.metal.kernels.kernel import Executor  # noqa: E402
from tests.backends.metal.kernel_runs import (  # noqa: E402
    CONTRACTED,
    EMULATED,
    EXECUTORS,
    RUNS,
    UNIT,
    caught,
    emulated_only,
    float64,
    same_bits,
)

pytestmark = pytest.mark.emulator

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

    def arrays(self, rows: slice) -> tuple[Any, ...]:
        return tuple(mx.array(array[rows]) for array in attrs.astuple(self))

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
            self.base,
            self.past,
            mx.array([self.kept]),
            *rows.arrays(slice(None)),
            dtype=self.dtype,
            executor=self.executor,
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


def oracle(base: Any, rows: Rows) -> tuple[Any, Any]:
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
    wanted, _ = oracle(base, rows)
    layer.accept(accepted)
    _, state = oracle(base, Rows(*(array[:accepted] for array in attrs.astuple(rows))))
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


def test_outputs_are_rounded_once() -> None:
    rows = Rows.draw(np.random.default_rng(4), 5)
    wide = Layer(EMULATED).block(rows)
    assert same_bits(Layer(EMULATED, mx.bfloat16).block(rows), wide.astype(mx.bfloat16))


def several_blocks(executor: Executor) -> bool:
    return speculates_exactly(executor, [(4, 2), (3, 1), (2, 2)], 0)


@emulated_only
def test_a_product_that_the_compiler_may_contract_is_caught() -> None:
    """Without ``fma`` the two loops are contracted differently, and the state depends on the accepts."""
    fused, plain = "return fma(key, delta, state * decay);", "return state * decay + key * delta;"
    assert caught(several_blocks, fused, plain, CONTRACTED)


@emulated_only
@pytest.mark.parametrize("kept", ["kept[0] + 1", "kept[0] - 1", "0"])
def test_a_wrong_count_of_kept_rows_is_caught(kept: str) -> None:
    assert caught(several_blocks, "const int count = kept[0];", f"const int count = {kept};", EMULATED)
