"""Native ops on every instruction set that this machine can run."""

from functools import partial

import pytest
import torch

from specdec.backends.cpu.native import NativeOps
from tests import tiny
from tests.instruction_sets import each_set, kernels_of

ROWS = [*range(1, 17), 23, 49, 67, 101, 130]  # around tiles, behind a panel of a product, several query blocks


@pytest.fixture(scope="module", params=each_set())
def instruction_set(request):
    return str(request.param)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request):
    chosen = request.param
    return chosen


@pytest.fixture(scope="module")
def ops(instruction_set, dtype):
    return NativeOps(dtype, kernels_of(instruction_set))


@pytest.fixture
def same_bits(ops):
    """``same_bits(run, x)``: the results ``[T, N]`` of ``run`` over single rows on one thread, checked to be those of
    any number of rows and threads."""

    def check(run, x):
        ops.threads.chosen = 1
        alone = [torch.cat(parts) for parts in zip(*(run(x[t : t + 1]) for t in range(len(x))), strict=True)]
        for count in (1, 2, 5):
            ops.threads.chosen = count
            for rows in [rows for rows in ROWS if rows <= len(x)]:
                for number, (got, expected) in enumerate(zip(run(x[:rows]), alone, strict=True)):
                    tiny.assert_equal_bits(got, expected[:rows], f"result {number} of {rows}")
        return alone

    yield check
    ops.threads.chosen = None


@pytest.fixture
def threads(ops):
    yield partial(setattr, ops.threads, "chosen")
    ops.threads.chosen = None
