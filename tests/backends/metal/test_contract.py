"""The conformance kit over the ops and over a target on them, on whatever device MLX has here."""

import attrs
import pytest

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from specdec.backends.metal.ops import MetalOps  # noqa: E402
from specdec.contract import Parity  # noqa: E402
from specdec.testing import Subject, as_subject, check_plugin  # noqa: E402
from tests import tiny  # noqa: E402
from tests.backends.families import check_target  # noqa: E402
from tests.selection import cases  # noqa: E402


def numeric(dtype):
    """What a GPU gets that was not probed: the same ops, promising less."""
    ops = MetalOps(getattr(mx, dtype))
    ops.capabilities = attrs.evolve(ops.capabilities, parity=Parity.NUMERIC, parity_reason="as on a GPU")
    return ops


def fast(dtype):
    """Stock kernels."""
    return MetalOps(getattr(mx, dtype), mode="fast")


@pytest.mark.parametrize("dtype", cases(["float32", "bfloat16", "float16"], sample=1, mark="slow"))
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda dtype: MetalOps(getattr(mx, dtype)), id="own parity"),
        pytest.param(numeric, id="numeric", marks=pytest.mark.slow),
        pytest.param(fast, id="fast", marks=pytest.mark.slow),
    ],
)
def test_operations(make, dtype):
    check_plugin(as_subject(Subject.OPS, lambda: make(dtype))).raise_for_failures()


@pytest.mark.slow
@pytest.mark.parametrize("make", [numeric, fast])
def test_a_target_that_promises_less(checkpoint, make):
    check_target("qwen3_5", tiny.make_target(checkpoint("qwen3_5"), ops=make("float32")))
