"""Memory: caches that grow by stages, and what is said when the device has none left."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.backends.cuda import memory
from specdec.backends.cuda.memory import OutOfMemory, rows_for, stage
from specdec.backends.cuda.ops import CudaOps
from specdec.backends.ops import DeltaShape
from specdec.errors import SpecdecError
from tests import tiny
from tests.backends.cuda.fake import FakeDevice
from tests.backends.cuda.test_models import TINY

SHAPE = DeltaShape(key_heads=2, value_heads=4, key_dim=128, value_dim=128, kernel=4)


@given(needed=st.integers(0, 2**20), held=st.integers(0, 2**18), capacity=st.integers(1, 2**20))
def test_a_cache_grows_by_stages(needed, held, capacity):
    """Never above the capacity, never smaller, always enough; a graph for the stage serves it."""
    held, needed = min(held, capacity), min(needed, capacity)
    rows = rows_for(needed, held, capacity)
    assert max(needed, held) <= rows <= capacity
    assert rows in (capacity, stage(rows))
    assert stage(rows) >= rows
    assert rows <= memory.GROWTH * max(needed, held, memory.FIRST_ROWS)
    assert rows_for(needed, rows, capacity) == rows  # and stays as it is


def test_a_capacity_is_not_paid_for_before_its_use():
    ops = CudaOps(FakeDevice(), torch.bfloat16)
    kv = ops.new_kv(262144, 4, 256)
    assert kv.nbytes() == 2 * memory.FIRST_ROWS * 4 * 256 * 2
    assert ops.new_kv(10, 4, 256).nbytes() == 2 * 10 * 4 * 256 * 2


MATRIX = torch.zeros(512, 512)


ASKED = {
    "weight": (lambda ops: ops.weight(MATRIX), "a weight of shape [512, 512]"),
    "stack": (lambda ops: ops.stack([MATRIX] * 3), "3 weights of shape [512, 512]"),
    "kv": (lambda ops: ops.new_kv(4096, 2, 64), "keys and values of 1024 tokens in one layer"),
    "latent": (lambda ops: ops.new_latent(4096, 576), "keys and values of 1024 tokens in one layer"),
    "delta": (lambda ops: ops.new_delta(SHAPE), "the recurrent state of one layer (6 rows)"),
}


@pytest.mark.parametrize("what", ASKED)
def test_what_does_not_fit_is_named(what):
    """At load and where a state is made: what was asked for, what was free, what helps."""
    make, asked = ASKED[what]
    with pytest.raises(OutOfMemory) as error:
        make(CudaOps(FakeDevice(free=10_000, total=2**30), torch.float32))
    assert asked in error.value.message
    assert error.value.facts["free"] == "0.0 of 1073.7 MB"
    assert error.value.facts["asked for"].endswith(" MB")
    assert error.value.facts["try"]
    assert isinstance(error.value, SpecdecError)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where a CUDA device is")
def test_a_sequence_that_outgrows_the_device_fails_and_others_go_on(checkpoint, monkeypatch):
    """In the middle of a generation; the rows that were there are there still."""
    monkeypatch.setattr(memory, "FIRST_ROWS", 4)
    device = FakeDevice()
    target = tiny.make_target(checkpoint("llama", **TINY["llama"]), ops=CudaOps(device, torch.float32))
    state = target.new_state(64)
    target.prefill(state, [1, 2, 3, 4])
    kept = target.snapshot(state).arrays
    device.free = 600
    with pytest.raises(OutOfMemory, match="keys and values of 16 tokens") as error:
        target.decode(state, [5])
    assert "target.capacity" in error.value.facts["try"]
    tiny.assert_same_bits(target.snapshot(state).arrays, kept)
    device.free = 2**40
    target.decode(state, [5])
    target.commit(state, 1)
    assert state.length == 5
