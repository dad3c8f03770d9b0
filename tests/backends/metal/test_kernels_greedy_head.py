"""The greedy head against exact integer logits with many ties, and against the logits of the products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from specdec.backends.metal.kernels.greedy_head import greedy_head  # noqa: E402
from specdec.backends.metal.kernels.kernel import Executor  # noqa: E402
from specdec.backends.metal.kernels.matvec import matvec  # noqa: E402
from tests.backends.metal.kernel_runs import EMULATED, EXECUTORS, RUNS, affine, caught, emulated_only, float64  # noqa: E402

pytestmark = pytest.mark.emulator


def small(rng: np.random.Generator, *shape: int, dtype: Any = mx.bfloat16) -> Any:
    """-1, 0 or 1: products are exact, and sums of few tie often."""
    return mx.array(rng.integers(-1, 2, shape).astype(np.float32)).astype(dtype)


def lowest_best(logits: Any, ids: Sequence[int]) -> list[int]:
    return [min(i for i, value in zip(ids, row, strict=True) if value == row.max()) for row in logits]


@pytest.mark.parametrize("executor", RUNS)
@given(seed=st.integers(0, 2**20), features=st.integers(1, 200))
@settings(max_examples=10)
def test_the_lowest_of_equal_tokens_wins(executor: Executor | None, seed: int, features: int) -> None:
    rng = np.random.default_rng(seed)
    x, w = small(rng, 3, 4), small(rng, features, 4)
    found = greedy_head(x, [w], executor=executor)
    assert found.dtype == mx.int32
    assert found.tolist() == lowest_best(float64(x) @ float64(w).T, range(features))


@pytest.mark.parametrize("executor", EXECUTORS)
@given(seed=st.integers(0, 2**20), sizes=st.lists(st.integers(1, 90), min_size=1, max_size=3))
@settings(max_examples=8)
def test_a_pruned_head_of_several_parts_gives_token_ids(executor: Executor | None, seed: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.permutation(1000)[: sum(sizes)].astype(np.int32)  # in no order
    x, w = small(rng, 3, 4), small(rng, len(ids), 4)
    cuts = np.cumsum(sizes)[:-1]
    parts = [w[int(start) : int(stop)] for start, stop in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    found = greedy_head(x, parts, [mx.array(part) for part in np.split(ids, cuts)], executor=executor)
    assert found.tolist() == lowest_best(float64(x) @ float64(w).T, ids.tolist())


@pytest.mark.parametrize("executor", EXECUTORS)
@given(seed=st.integers(0, 2**20), features=st.integers(1, 80))
@settings(max_examples=5)
def test_a_quantised_head(executor: Executor | None, seed: int, features: int) -> None:
    rng = np.random.default_rng(seed)
    x = small(rng, 2, 64)
    w, (levels, scales, biases) = affine(rng, features, 64, group=64, bits=4, dtype=mx.bfloat16, whole=True)
    logits = float64(x) @ (levels * scales + biases).T
    assert greedy_head(x, [w], executor=executor).tolist() == lowest_best(logits, range(features))


@pytest.mark.sample
@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_logits_are_those_of_matvec(executor: Executor | None) -> None:
    """Copies of a row of the head tie only if every logit has the bits that ``matvec`` gives it."""
    rng = np.random.default_rng(1)
    x, w = (mx.array(rng.standard_normal(shape).astype(np.float32)) for shape in ((3, 200), (150, 200)))
    w[1::2] = w[::2]
    logits = matvec(x, w, dtype=mx.float32, executor=executor)
    assert greedy_head(x, [w], executor=executor).tolist() == lowest_best(np.array(logits), range(150))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_row_that_has_no_best_token_is_reported(executor: Executor | None) -> None:
    """NaN or +infinity in any place, or nothing finite; -infinity beside finite logits is no fault."""
    x = mx.array([[1.0]])
    for value, winner in ((1.0, 9), (mx.nan, -1), (mx.inf, -1), (-mx.inf, 9)):
        for place in (0, 40, 69):
            w = np.full((70, 1), 0.5, np.float32)
            w[9] = w[33] = 3.0
            w[place] = value
            assert greedy_head(x, [mx.array(w)], executor=executor).tolist() == [winner], (value, place)
    for value in (mx.nan, mx.inf, -mx.inf):
        assert greedy_head(x, [mx.full((70, 1), value)], executor=executor).tolist() == [-1]


@emulated_only
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("logit == best[r] && id < token[r]", "logit == best[r]"),
        ("logit == best && other < token", "false"),
        ("block * SPAN; first", "block * SPAN + 1; first"),
        ("token[r] = -1;", ""),
    ],
)
def test_a_seeded_fault_is_caught(old: str, new: str) -> None:
    """Two equal winners, here and there among the features of one simdgroup and of several; and a NaN."""
    x = mx.array([[1.0, 0.0, 0.0], [2.0, 0.0, 0.0], [3.0, 0.0, 0.0]])

    def right(executor: Executor) -> bool:
        for first, second in ((0, 9), (1, 64), (40, 70), (98, 101)):
            w = np.zeros((102, 3), np.float32)
            w[[first, second], 0] = 1.0
            if greedy_head(x, [mx.array(w)], executor=executor).tolist() != [first] * 3:
                return False
        w[77] = np.nan
        return greedy_head(x, [mx.array(w)], executor=executor).tolist() == [-1] * 3

    assert caught(right, old, new, EMULATED)
