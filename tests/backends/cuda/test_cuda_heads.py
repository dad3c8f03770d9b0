"""Trained draft heads on the CUDA backend draft what speculators' classes draft."""

import pytest
import torch

from specdec.backends.cuda.ops import CudaOps
from tests.drafters.heads.recorded_heads import Recorded
from tests.drafters.heads.test_recorded_heads import BOUND, run
from tests.selection import cases

pytestmark = pytest.mark.interpreter

TRIED = ("dflash-window-both", "dspark", "dspark-rnn", "eagle3-bias", "eagle3-window", "p_eagle")
"""Those with the most different operations; the tests of the heads try every variant on the CPU."""


@pytest.mark.parametrize("name", cases(TRIED, sample=("dspark",)))
def test_heads_draft_the_same(name, new_device, monkeypatch):
    ops = CudaOps(new_device(), torch.float32)
    assert run(Recorded.load(name, ops=ops), monkeypatch) < BOUND
