"""``python -m benchmarks.cuda``: its arithmetic, its record, and all of its code on the host."""

import json

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels run on the device here; the benchmark itself is what to run", allow_module_level=True)

from benchmarks.cuda.shapes import Costs
from tests.processes import run_python

pytestmark = pytest.mark.interpreter


@pytest.mark.sample
def test_speed_up_is_tokens_over_seconds():
    """By hand: 1 + .763 + .623 tokens in 1.1 + 2 * 0.1 + 0.1 plain steps."""
    costs = Costs(decode=2.0, verify={1: 2.0, 2: 2.1, 3: 2.2}, draft=0.2, bookkeeping=0.2)
    assert costs.speedup(2) == pytest.approx((1 + 0.763 + 0.623) / 1.4)
    assert costs.best() == (2, costs.speedup(2))
    assert costs.best((0.1, 0.01))[0] == 1


def test_all_of_it_runs_on_the_host(tmp_path):
    """The stand-in device, a toy, a few tokens: figures are there and say that they are none."""
    done = run_python("-m", "benchmarks.cuda", "--smoke", "--out", tmp_path, "--stage", "models")
    assert "not a measurement" in done.stdout
    kept = json.loads((tmp_path / "cuda.json").read_text())
    model = kept["results"]["models"]["toy"]
    assert kept["measurement"] is False
    assert set(model["verify"]) == {"1", "2", "4"}
    assert model["decode"]["of_bound"] > 0
    assert set(model["generation"]["1"]) == {"plain", "made"}
