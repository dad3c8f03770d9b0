"""Native ops on every instruction set that this machine can run."""

from __future__ import annotations

import pytest
import torch

from specdec.backends.cpu.native import NativeOps
from tests.instruction_sets import each_set, kernels_of


@pytest.fixture(scope="module", params=each_set())
def instruction_set(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture(scope="module")
def ops(instruction_set: str, dtype: torch.dtype) -> NativeOps:
    return NativeOps(dtype, kernels_of(instruction_set))
