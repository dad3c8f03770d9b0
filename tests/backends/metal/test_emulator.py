"""The emulator: seeded bugs are caught and named, and contraction changes bits."""

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from specdec.backends.metal.kernels.kernel import MslKernel  # noqa: E402
from tests.backends.metal import emulator  # noqa: E402
from tests.backends.metal.emulator import ORDERS, KernelError, Knobs, emulate  # noqa: E402

pytestmark = pytest.mark.emulator

if reason := emulator.unavailable():
    pytest.skip(reason, allow_module_level=True)

I = "uint i = thread_position_in_grid.x;\n"  # noqa: E741


def run(source, inputs, size=64, knobs=None):
    """Output ``y`` of a kernel of ``size`` threads."""
    kernel = MslKernel(name="buggy", inputs=tuple(inputs), outputs=("y",), source=I + source)
    launch = {"template": (), "grid": (size, 1, 1), "threadgroup": (32, 1, 1)}
    launch |= {"output_shapes": ((size,),), "output_dtypes": (mx.float32,)}
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


BUGS = {  # what the error says, as a regular expression
    "y[i + 1] = x[i];\ny[0] = 0;": r"thread \(63, 0, 0\) writes y\[64\] of 64 elements",
    "y[int(i) - 1] = x[i];": r"writes y\[-1\] of 64",
    "y[i] = x[i + 5000];": r"reads x\[50\d\d\] of 64 elements",
    "y[i] = x[i + 1];": r"thread \(63, 0, 0\) reads x\[64\] of 64",
    "y[i] = x[int(i) - 1];": r"leaves y\[0\] \(1 of 64 elements\)",
    "((device float*)x)[i] = 1;\ny[i] = x[i];": r"writes the input x\[\d+\] of 64 elements",
    "float a[4] = {1, 2, 3, 4};\ny[i] = a[i % 5];": "computes, converts or indexes what has no defined result",
    "int big = 2147483600;\ny[i] = x[i] + (big + int(i));": "what has no defined result",
    "y[i] = x[i] + (1u << i);": "what has no defined result",
    "float v = x[i];\nif (thread_index_in_simdgroup < 16) {\n v = simd_shuffle_xor(v, 1);\n}\ny[i] = v;": (
        r"waits in simd_shuffle_xor at line \d+, and thread \(\d+, 0, 0\) has returned"
    ),
    "float v = x[i];\nv += i % 2 ? simd_shuffle_xor(v, 1) :\n simd_shuffle_xor(v, 1);\ny[i] = v;": "at another line",
    "if (i != 5) y[i] = x[i];": r"leaves y\[5\] \(1 of 64 elements\)",
    "y[i] += x[i];": r"leaves y\[0\] \(64 of 64 elements\)",
    "float v;\ny[i] = v;": "is used uninitialized",
    "double v = x[i];\ny[i] = v;": "poisoned",
    "threadgroup float v[32];\ny[i] = x[i];": "poisoned",
    "y[i] = simd_sum(x[i]);": "simd_sum",
    "bfloat v = x[i];\ny[i] = v;": "bfloat",
}


@pytest.mark.parametrize("source", BUGS)
def test_a_bug_is_caught_and_named(source):
    """In every order of the threads: nobody has to be lucky."""
    x = np.abs(floats(0, 64)) + 1
    for order in ORDERS:
        with pytest.raises(KernelError, match=f"^kernel buggy: (?s:.*){BUGS[source]}"):
            run(source, {"x": x}, knobs=Knobs(order=order))


@pytest.mark.parametrize("threadgroup", [(16, 1, 1), (32, 9, 1), (32, 1, 3)])
def test_a_launch_that_does_not_fit_every_gpu_is_refused(threadgroup):
    kernel = MslKernel(name="buggy", inputs=(), outputs=("y",), source=I + "y[i] = 1;")
    shape = {"output_shapes": ((32,),), "output_dtypes": (mx.float32,)}
    with pytest.raises(KernelError, match="has threadgroups of"):
        emulate(kernel, [], {"template": (), "grid": (32, 9, 1), "threadgroup": threadgroup, **shape})
