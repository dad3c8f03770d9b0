"""The conformance kit over the ops and over a target on them, on whatever device MLX has here."""

import attrs
import pytest

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from specdec.backends.metal.ops import MetalOps  # noqa: E402
from specdec.contract import Parity  # noqa: E402
from specdec.testing import OpsSubject, Subject, as_subject, check_subjects  # noqa: E402
from tests import tiny  # noqa: E402


def numeric(dtype):
    """What a GPU gets that was not probed: the same ops, promising less."""
    ops = MetalOps(getattr(mx, dtype))
    ops.capabilities = attrs.evolve(ops.capabilities, parity=Parity.NUMERIC, parity_reason="as on a GPU")
    return ops


def fast(dtype):
    """Stock kernels."""
    return MetalOps(getattr(mx, dtype), mode="fast")


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda dtype: MetalOps(getattr(mx, dtype)), id="own parity"),
        pytest.param(numeric, id="numeric", marks=pytest.mark.slow),
        pytest.param(fast, id="fast", marks=pytest.mark.slow),
    ],
)
def test_operations(make, dtype):
    check_subjects(f"metal {dtype}", {Subject.OPS: OpsSubject(make=lambda: make(dtype))}).raise_for_failures()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "make", "effort"),
    [
        pytest.param("qwen3_5", lambda: MetalOps(mx.float32), "sample", id="qwen3_5", marks=pytest.mark.slow),
        pytest.param("qwen3", lambda: MetalOps(mx.float32), "sample", id="qwen3"),
        pytest.param("qwen3_5", lambda: numeric("float32"), "sample", id="qwen3_5 numeric", marks=pytest.mark.slow),
        pytest.param("qwen3_5", lambda: fast("float32"), "sample", id="qwen3_5 fast", marks=pytest.mark.slow),
    ],
)
def test_a_target_over_them(checkpoint, family, make, effort):
    target = tiny.make_target(checkpoint(family), ops=make())
    subjects = {Subject.FORWARD_PASS: as_subject(Subject.FORWARD_PASS, target)}
    check_subjects(family, subjects, effort=effort).raise_for_failures()
