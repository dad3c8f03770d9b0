"""Trained draft heads on the Metal backend draft what speculators' classes draft."""

import pytest

from tests.drafters.heads.recorded_heads import NAMES, Recorded
from tests.drafters.heads.test_recorded_heads import BOUND, run
from tests.selection import cases

mx = pytest.importorskip("mlx.core")


@pytest.mark.parametrize("name", cases(NAMES, sample=1, mark="slow"))
def test_heads_draft_the_same(name, monkeypatch):
    from specdec.backends.metal.ops import MetalOps

    assert run(Recorded.load(name, ops=MetalOps(mx.float32)), monkeypatch) < BOUND
