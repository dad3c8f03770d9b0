"""``benchmarks.metal`` on MLX's CPU device: it runs, its tables are whole, and it sees a row that depends on others."""

import attrs
import pytest

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from benchmarks import metal as bench  # noqa: E402

QUICK = attrs.evolve(bench.SMOKE, rows=(1, 2, 3), vocab=64)


def test_every_kernel_is_timed_and_agrees_with_the_stock_one():
    timed = bench.time_kernels(bench.Lab(QUICK), 1, 1e9)
    assert len(timed) == 2 * (5 * 2 + 2 + 1 + 1)
    for each in timed:
        assert each["off"] < 0.02
        assert list(each["milliseconds"]) == [1, 2, 3]
        assert min(each["milliseconds"].values()) > 0.0
    lines = list(bench.kernel_table(timed))
    assert len(lines) == 2 + len(timed)
    assert len({line.count("|") for line in lines}) == 1
