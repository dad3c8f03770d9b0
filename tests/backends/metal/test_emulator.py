"""The emulator: seeded bugs are caught and named, and contraction changes bits."""

from __future__ import annotations

import re

import attrs
import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from specdec.backends.metal.kernels.kernel import Launch, MslKernel  # noqa: E402
from tests.backends.metal import emulator  # noqa: E402
from tests.backends.metal.emulator import ORDERS, Knobs, emulate  # noqa: E402

pytestmark = pytest.mark.emulator

if reason := emulator.unavailable():
    pytest.skip(reason, allow_module_level=True)

I = "uint i = thread_position_in_grid.x;\n"  # noqa: E741


def run(source, inputs, size=64, knobs=None):
    """Output ``y`` of a kernel of ``size`` threads in groups of 64."""
    kernel = MslKernel(name="buggy", inputs=tuple(inputs), outputs=("y",), source=I + source)
    launch = Launch(
        template=(), grid=(size, 1, 1), threadgroup=(64, 1, 1), output_shapes=((size,),), output_dtypes=(mx.float32,)
    )
    (y,) = emulate(kernel, [mx.array(value) for value in inputs.values()], launch, knobs)
    return y


def floats(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_contraction_changes_a_plain_multiply_add_and_not_an_fma():
    inputs = {name: floats(seed, 256) for seed, name in enumerate("abc")}
    plain, fused, apart = (
        "y[i] = a[i] * b[i] + c[i];",
        "y[i] = fma(a[i], b[i], c[i]);",
        "float p = a[i] * b[i];\nfloat q = p + c[i];\ny[i] = q;",
    )
    off, on = Knobs(contract=False), Knobs(contract=True)

    def bits(source, knobs):
        return run(source, inputs, 256, knobs).tobytes()

    a, b, c = inputs.values()
    assert bits(plain, off) == (a * b + c).tobytes()
    assert bits(plain, on) != bits(plain, off)
    assert bits(plain, on) == bits(fused, on) == bits(fused, off)
    assert bits(apart, off) == bits(plain, off)
    assert bits(apart, on) == bits(fused, on), "contraction ends at a statement"


@attrs.frozen
class Bug:
    source: str
    error: type[emulator.KernelError]
    message: str  # a regular expression
    orders: tuple[str, ...] = ORDERS


BUGS = {
    "write behind": Bug("y[i + 1] = x[i];\ny[0] = 0;", emulator.OutOfBounds, r"thread \(63, 0, 0\).*writes y\[64\] of"),
    "write before": Bug("y[int(i) - 1] = x[i];", emulator.OutOfBounds, r"thread \(0, 0, 0\).*writes y\[-1\] of 64"),
    "read far away": Bug("y[i] = x[i + 5000];", emulator.OutOfBounds, r"reads x\[50\d\d\] of 64 elements at line"),
    "read behind": Bug("y[i] = x[i + 1];", emulator.OutOfBounds, r"thread \(63, 0, 0\).*reads x\[64\] of 64"),
    "write to an input": Bug(
        "((device float*)x)[i] = 1;\ny[i] = x[i];", emulator.OutOfBounds, r"writes the input x\[\d+\] of 64 elements at"
    ),
    "index of a local array": Bug(
        "float a[4] = {1, 2, 3, 4};\ny[i] = a[i % 5];", emulator.OutOfBounds, "array with 4, outside its bounds at line"
    ),
    "shuffle of some lanes": Bug(
        "float v = x[i];\nif (thread_index_in_simdgroup < 16) {\n v = simd_shuffle_xor(v, 1);\n}\ny[i] = v;",
        emulator.Divergence,
        r"simd_shuffle_xor at line \d+ .*, and thread \(\d+, 0, 0\) has returned",
    ),
    "output left unset": Bug("if (i != 5) y[i] = x[i];", emulator.Uninitialised, r"leaves y\[5\] \(1 of 64 elements\)"),
    "output added to": Bug("y[i] += x[i];", emulator.Uninitialised, r"leaves y\[0\] \(64 of 64 elements\)"),
    "signed overflow": Bug(
        "int big = 2147483600;\ny[i] = x[i] + (big + int(i));",
        emulator.ArithmeticFault,
        r"overflows a signed integer in an addition at line \d+ \(y\[i\] =",
    ),
    "shift": Bug("y[i] = x[i] + (1u << i);", emulator.ArithmeticFault, "shifts an integer by more bits"),
    "unset local variable": Bug("float v;\ny[i] = v;", emulator.CompileError, "is used uninitialized", ("ascending",)),
    "double": Bug(
        "double v = x[i];\ny[i] = v;", emulator.ForbiddenError, r"uses double.*\(line \d+: double", ("ascending",)
    ),
    "narrowing to bfloat": Bug("bfloat v = x[i];\ny[i] = v;", emulator.CompileError, "bfloat", ("ascending",)),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_caught_and_named(name):
    """In every order of the threads: nobody has to be lucky."""
    bug = BUGS[name]
    x = np.abs(floats(0, 64)) + 1
    for order in bug.orders:
        for guard in ("back", "front") if bug.error is emulator.OutOfBounds and "read" not in name else ("back",):
            knobs = Knobs(order=order, guard=guard, seconds=1)
            with pytest.raises(bug.error) as caught:
                run(bug.source, {"x": x}, knobs=knobs)
            assert re.search(bug.message, str(caught.value)), str(caught.value)
            assert str(caught.value).startswith("kernel buggy: ")
