"""The native argmax against numpy's: the lowest id among equals, and a refusal of what is not finite."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.backends.cpu.arrays import CpuLogits
from specdec.backends.cpu.native import NativeLogits, NativeOps
from specdec.errors import ContractError
from tests.instruction_sets import kernels_of

SIZES = [1, 2, 15, 16, 17, 63, 64, 65, 4095, 4096, 4097, 8193, 30_011]  # around a vector, four of them and a span


@pytest.fixture(scope="module")
def ops(instruction_set):
    return NativeOps(torch.float32, kernels_of(instruction_set))


@pytest.fixture(scope="module", params=[1, 2], autouse=True)
def _threads(request, ops):
    ops.threads.chosen = request.param


@st.composite
def logits(draw):
    """Rows of few different values, so that the best one stands in many places; some rows are all equal."""
    rows, size = draw(st.integers(1, 4)), draw(st.sampled_from(SIZES))
    values = np.random.default_rng(draw(st.integers(0, 99))).integers(-draw(st.integers(0, 9)), 1, (rows, size))
    return torch.from_numpy(values.astype(np.float32) / 4 + draw(st.sampled_from([0.0, -1e30, 3e38])))


@given(array=logits())
def test_argmax_is_numpys(ops, array):
    native = ops.logits(array)
    assert isinstance(native, NativeLogits)
    assert native.argmax() == array.numpy().argmax(axis=1).tolist() == CpuLogits(array).argmax()


@given(array=logits(), data=st.data())
def test_what_is_not_finite_is_refused_as_in_numpy(ops, array, data):
    """NaN anywhere, plus infinity, a row of minus infinities: refused with the same sentence. A lone -inf is fine."""
    row, size = data.draw(st.integers(0, array.shape[0] - 1)), array.shape[1]
    for value in data.draw(st.lists(st.sampled_from([torch.nan, torch.inf, -torch.inf]), min_size=1, max_size=3)):
        array[row, data.draw(st.integers(0, size - 1))] = value
    if data.draw(st.booleans()):
        array[row] = -torch.inf
    assert _outcome(ops.logits(array)) == _outcome(CpuLogits(array))


def _outcome(logits):
    try:
        return logits.argmax()
    except ContractError as refusal:
        return str(refusal)
