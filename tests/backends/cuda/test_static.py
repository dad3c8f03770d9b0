"""``python -m benchmarks.cuda.static``: its arithmetic, and the prediction that docs/performance.md records."""

from __future__ import annotations

import pathlib
import re

import pytest

pytest.importorskip("triton")

from benchmarks.cuda import static
from benchmarks.cuda.shapes import SHAPES
from specdec.backends.cuda.kernels.catalogue import Compiled
from specdec.backends.cuda.kernels.tiles import HOPPER_SMS
from tests.processes import run_python

pytestmark = pytest.mark.interpreter

DOCUMENT = pathlib.Path(__file__).resolve().parents[3] / "docs" / "performance.md"
BANDWIDTH = 4e12


def compiled(*, programs: int, registers: int = 168, shared: int = 78848, ptx: str = "") -> Compiled:
    return Compiled(
        name="made up",
        kernel="product_kernel",
        architecture=90,
        grid=(programs,),
        warps=4,
        registers=registers,
        shared=shared,
        spilled=0,
        copies=(),
        loads=(),
        parameters=("x_ptr", "w_ptr"),
        ttir="",
        ptx=ptx,
    )


@pytest.mark.parametrize(
    ("registers", "shared", "fit"), [(168, 78848, 2), (168, 46080, 3), (64, 40960, 5), (32, 0, 16), (255, 0, 2)]
)
def test_programs_of_a_multiprocessor(registers: int, shared: int, fit: int) -> None:
    """65,536 registers, 228 kB of shared memory of which each block takes one more than its own, 64 warps."""
    assert compiled(programs=1, registers=registers, shared=shared).resident == fit


def test_seconds_by_cause() -> None:
    """Twice a product of 3 * 132 + 1 programs with two slices, whose norm takes four rounds."""
    kernel = static.Kernel(
        compiled=compiled(programs=3 * HOPPER_SMS + 1), times=2, nbytes=40_000_000, rounds=4, asked=0, splits=2
    )
    assert kernel.waves == 2
    reading = 2 * 40_000_000 / BANDWIDTH
    assert kernel.seconds(BANDWIDTH) == pytest.approx(
        {
            "bytes": reading,
            "tails": reading * (4 * HOPPER_SMS / (3 * HOPPER_SMS + 1) - 1),
            "launches": 2 * static.LAUNCH,
            "norms": 2 * 2 * 4 * static.ROUND,
            "meetings": 2 * static.MEETING,
        }
    )


@pytest.mark.parametrize(("asked", "hidden"), [(0, 0.0), (10_000, 2 * 10_000 * HOPPER_SMS / BANDWIDTH), (10**6, 1.0)])
def test_a_norm_hides_behind_the_weights_that_were_asked_for(asked: int, hidden: float) -> None:
    kernel = static.Kernel(compiled=compiled(programs=200), times=1, nbytes=1, rounds=8, asked=asked, splits=1)
    assert kernel.norm(BANDWIDTH) == pytest.approx(max(0.0, 8 * static.ROUND - hidden))


def test_instructions_before_a_weight_are_counted() -> None:
    ptx = """
        ld.param.b64 %rd1, [product_kernel_param_0];
        ld.param.b64 %rd2, [product_kernel_param_1];
        .loc 1 2 3
        add.s64 %rd3, %rd1, 16;
        ld.global.b32 %r1, [%rd3];
        add.s64 %rd4, %rd2, 16;
        mad.wide.s32 %rd5, %r1, 2, %rd4;
        @%p1 ld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd5 + 0 ];
    """
    found = compiled(programs=1, ptx=ptx)
    assert found.before_access("w_ptr") == 6
    assert found.before_access("x_ptr") == 3
    assert found.before_access("z_ptr") is None


@pytest.mark.slow
def test_the_documented_prediction_is_that_of_the_compiled_kernels() -> None:
    printed = run_python("-m", "benchmarks.cuda.static", "--shapes", "0.8b", without=["TRITON_INTERPRET"]).stdout
    row = re.search(r"^\| 0\.8B \|.*$", printed, re.MULTILINE)
    assert row
    assert row[0] in DOCUMENT.read_text()
    cells = [cell.strip() for cell in row[0].strip("|").split("|")]
    kernels, reading = int(cells[1]), float(cells[2])
    assert kernels == 138
    shape = SHAPES["0.8b"]
    assert reading == pytest.approx(1e3 * shape.pass_bytes(1) / static.BANDWIDTH, rel=0.01)
