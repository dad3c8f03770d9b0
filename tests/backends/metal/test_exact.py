"""Exact mode with the kernels themselves: whole passes and draft chains of a tiny model, run as Metal source.

On Linux the text that MLX would compile runs under emulation, on a Mac on its GPU.
"""

import attrs
import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from specdec.backends.metal.kernels import lanes  # noqa: E402
from specdec.backends.metal.kernels.attention import PART  # noqa: E402
from specdec.backends.metal.kernels.kernel import Executor, OnMetal  # noqa: E402
from specdec.backends.metal.ops import MetalOps  # noqa: E402
from specdec.contract import Parity  # noqa: E402
from specdec.errors import UnsupportedError  # noqa: E402
from tests import tiny  # noqa: E402
from tests.backends import families  # noqa: E402
from tests.backends.metal.kernel_runs import CONTRACTED, EMULATED  # noqa: E402

pytestmark = pytest.mark.emulator

SMALL = tiny.shape(
    "hidden=20 layers=2 heads=2 kv_heads=1 head_dim=8 rotary_factor=0.5 "
    "key_heads=1 value_heads=2 key_dim=6 value_dim=8 intermediate=24",
    layer_types=["linear_attention", "full_attention"],
)
TOKENS = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)


@attrs.define
class Counted:
    """Counts launches by kernel."""

    executor: Executor
    launches: dict[str, int] = attrs.field(factory=dict)

    def run(self, kernel, inputs, **launch):
        self.launches[kernel.name] = self.launches.get(kernel.name, 0) + 1
        return self.executor.run(kernel, inputs, **launch)


@pytest.fixture(scope="module")
def made(checkpoint):
    def get(executor, dtype="float32", **options):
        ops = MetalOps(getattr(mx, dtype), executor=executor, **options)
        return tiny.make_target(checkpoint("qwen3_5", **SMALL), dtype=dtype, ops=ops)

    return get


def logits(target, passes):
    """Logits of the rows that are kept of each pass, behind a prompt of two tokens; and the state."""
    state, at, found = target.new_state(32), 2, []
    target.prefill(state, TOKENS[:2])
    for rows, kept in passes:
        drafted = [*TOKENS[at : at + kept], *[0] * (rows - kept)]
        found.append(target.decode(state, drafted).need_logits().rows()[:kept].copy())
        target.commit(state, kept)
        at += kept
    return np.concatenate(found), state


@pytest.mark.parametrize(("dtype", "executor"), [("float32", CONTRACTED), ("bfloat16", EMULATED)])
def test_a_pass_of_several_rows_has_the_bits_of_passes_of_one(made, dtype, executor):
    """Whatever is kept of one pass after the other: the delta rule takes in the rows of the pass before."""
    counted = Counted(executor)
    target = made(counted, dtype)
    assert target.info.parity is Parity.BITWISE
    assert target.info.max_rows == lanes.MAX_ROWS
    singly, one = logits(target, [(1, 1)] * 8)
    assert counted.launches["specdec_gated_delta"] == 9
    together, other = logits(target, [(3, 1), (4, 2), (2, 0), (8, 3), (2, 2)])
    assert np.array_equal(singly.view(np.uint32), together.view(np.uint32))
    tiny.assert_same_bits(tiny.state_arrays(target, other), tiny.state_arrays(target, one))
    reference, _ = logits(made(None, dtype), [(8, 8)])
    assert np.ptp(reference) > 5
    assert np.abs(reference - singly).max() <= (1e-4 if dtype == "float32" else 0.05) * np.ptp(reference)


def test_a_chain_of_the_kernels_drafts_what_their_steps_draft(made):
    families.check_drafts(made(EMULATED), [(3, None, 1)])


@pytest.mark.sample
def test_the_probe_at_load_sees_more_than_one_part_of_attention_on_a_gpu(monkeypatch):
    class Gpu:
        type = mx.DeviceType.gpu

    monkeypatch.setattr(mx, "default_device", Gpu)
    ops = MetalOps(mx.bfloat16)
    assert ops.capabilities.probed_context > PART
    assert (ops.capabilities.parity, ops.capabilities.max_rows) == (Parity.BITWISE, lanes.MAX_ROWS)
    assert MetalOps(mx.bfloat16, mode="fast").capabilities.parity is Parity.NUMERIC


# --- modes -----------------------------------------------------------------------------------------------------------


@pytest.mark.sample
@pytest.mark.skipif(mx.metal.is_available(), reason="its kernels can be built here")
def test_a_kernel_that_cannot_be_built_is_an_error_with_a_way_out(made):
    target = made(OnMetal())
    with pytest.raises(UnsupportedError, match=r"No Metal back-end(?s:.*)backend_options\.mode=fast"):
        target.prefill(target.new_state(8), TOKENS[:3])
