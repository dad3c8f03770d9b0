"""``benchmarks.metal`` on MLX's CPU device: it runs, its tables are whole, and it sees a row that depends on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from benchmarks import metal as bench  # noqa: E402
from specdec.config import RunConfig, TargetConfig  # noqa: E402
from specdec.models.loading import load_target  # noqa: E402

QUICK = attrs.evolve(bench.SMOKE, rows=(1, 2, 3), vocab=64)


def columns(lines: list[str]) -> set[int]:
    return {line.count("|") for line in lines}


def test_every_kernel_is_timed_and_agrees_with_the_stock_one() -> None:
    timed, link = bench.time_kernels(bench.Lab(QUICK), 1, 1e9)
    assert link > 0.0
    by_case: dict[str, list[Any]] = {}
    for one in timed:
        by_case.setdefault(one.what, []).append(one)
    assert len(by_case) == 5 * 2 + 2 + 2 + 1 + 1
    for stock, own in by_case.values():
        assert (stock.arm, stock.off) == ("stock", None)
        assert own.off < 0.02
        for one in (stock, own):
            assert list(one.milliseconds) == [1, 2, 3]
            assert min(one.milliseconds.values()) > 0.0
            assert one.ratio[1] == 1.0
    lines = list(bench._kernel_table([attrs.asdict(one) for one in timed]))
    assert len(lines) == 2 + len(timed)
    assert len(columns(lines)) == 1


def test_rows_that_depend_on_their_company_are_seen() -> None:
    x = bench.Lab(QUICK).normal(3, 4)

    def case(run: Any) -> bench.Case:
        return bench.Case(what="x", arm="own", run=run, moved=1, copies=1)

    right = case(lambda first, rows, copy, link: x[first : first + rows] * 2)
    wrong = case(lambda first, rows, copy, link: x[first : first + rows] * (2 if rows < 3 else 2.1))
    assert bench._bits(right, QUICK) == "equal 2-3"
    assert bench._bits(wrong, QUICK) == "differ 3"


def test_the_packed_checkpoint_is_the_plain_one_in_four_bits(tmp_path: Path) -> None:
    bench.random_checkpoint(tmp_path / "plain", QUICK.config)
    bench.write_quantised(tmp_path / "plain", tmp_path / "packed")
    plain, packed = (
        load_target(RunConfig(target=TargetConfig(model=str(tmp_path / name), backend="metal"))).target
        for name in ("plain", "packed")
    )
    rows = []
    for target in (plain, packed):
        state = target.new_state(8)
        target.prefill(state, [1, 2, 3])
        rows.append(target.decode(state, [4]).need_logits().rows()[0].astype("float64"))
    near = (rows[0] @ rows[1]) / (rows[0] @ rows[0] * (rows[1] @ rows[1])) ** 0.5
    assert 0.8 < near < 1.0 - 1e-9
    weight = packed.info.fingerprint != plain.info.fingerprint
    assert weight
    size = {name: (tmp_path / name / "model.safetensors").stat().st_size for name in ("plain", "packed")}
    assert size["packed"] < 0.5 * size["plain"]
