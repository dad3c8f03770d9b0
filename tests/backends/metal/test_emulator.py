"""The emulator against NumPy and exact arithmetic; seeded bugs are caught and named; contraction changes bits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from specdec.backends.metal.kernels.kernel import Launch, MslKernel  # noqa: E402
from tests.backends.metal import emulator  # noqa: E402
from tests.backends.metal.emulator import ORDERS, Emulated, Knobs, emulate, some_knobs  # noqa: E402

if TYPE_CHECKING:
    from numpy.typing import NDArray

pytestmark = pytest.mark.emulator

if reason := emulator.unavailable():
    pytest.skip(reason, allow_module_level=True)

KNOBS = [pytest.param(knobs, id=knobs.order) for knobs in some_knobs()]
I = "uint i = thread_position_in_grid.x;\n"  # noqa: E741


def run(
    source: str,
    inputs: dict[str, Any],
    output: tuple[int, ...],
    *,
    grid: tuple[int, int, int] | int = 64,
    threadgroup: tuple[int, int, int] | int = 64,
    dtype: Any = mx.float32,
    template: tuple[tuple[str, Any], ...] = (),
    knobs: Knobs | None = None,
    header: str = "",
    name: str = "kernel_under_test",
    partial: Sequence[str] = (),
) -> NDArray[Any]:
    """Output ``y`` of a kernel of one output."""
    kernel = MslKernel(name=name, inputs=tuple(inputs), outputs=("y",), source=source, header=header)
    launch = Launch(
        template=template,
        grid=(grid, 1, 1) if isinstance(grid, int) else grid,
        threadgroup=(threadgroup, 1, 1) if isinstance(threadgroup, int) else threadgroup,
        output_shapes=(output,),
        output_dtypes=(dtype,),
    )
    arrays = [mx.array(value) for value in inputs.values()]
    (y,) = emulate(kernel, arrays, launch, knobs, partial=partial)
    return y


def floats(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --------------------------------------------------------------------------------------------------- what is computed


@pytest.mark.sample
@settings(max_examples=15)
@given(size=st.integers(1, 200), block=st.sampled_from([1, 7, 32, 64, 96]), seed=st.integers(0, 99))
def test_vectors_are_added(size: int, block: int, seed: int) -> None:
    """Also with a last threadgroup of fewer threads."""
    a, b = floats(seed, size), floats(seed + 1, size)
    got = run(I + "y[i] = a[i] + b[i];", {"a": a, "b": b}, (size,), grid=size, threadgroup=block)
    assert (got == a + b).all()


MATVEC = """
  uint row = thread_position_in_grid.y, lane = thread_index_in_simdgroup;
  float sum = 0;
  for (int at = lane; at < x_shape[0]; at += 32) {
    sum = fma(float(w[row * x_shape[0] + at]), float(x[at]), sum);
  }
  for (int step = 16; step; step /= 2) {
    sum = sum + simd_shuffle_xor(sum, ushort(step));
  }
  if (lane == 0) {
    y[row] = T(sum);
  }
"""


def test_lanes_exchange_values() -> None:
    x = np.random.default_rng(0).permutation(1000)[:32].astype(np.int32)
    source = "int lane = int(thread_index_in_simdgroup);\ny[lane] = simd_shuffle_xor(x[lane], 5);"
    for order in ORDERS:
        got = run(source, {"x": x}, (32,), grid=32, threadgroup=32, dtype=mx.int32, knobs=Knobs(order=order))
        assert (got == x[np.arange(32) ^ 5]).all()


@pytest.mark.parametrize("knobs", KNOBS)
def test_a_product_in_bfloat16(knobs: Knobs) -> None:
    x, w = (mx.array(floats(seed, *shape)).astype(mx.bfloat16) for seed, shape in ((0, (300,)), (1, (40, 300))))
    kernel = MslKernel(name="matvec_under_test", inputs=("x", "w"), outputs=("y",), source=MATVEC)
    launch = Launch(
        template=(("T", mx.bfloat16),),
        grid=(32, 40, 1),
        threadgroup=(32, 4, 1),
        output_shapes=((40,),),
        output_dtypes=(mx.bfloat16,),
    )
    (got,) = Emulated(knobs).run(kernel, [x, w], launch)
    assert (got.dtype, got.shape) == (mx.bfloat16, (40,))
    wide_x, wide_w = (np.array(array.astype(mx.float32)).astype(np.float64) for array in (x, w))
    wanted = wide_w @ wide_x
    sums = np.abs(wide_w) @ np.abs(wide_x) * 300 * 2.0**-24
    assert (np.abs(np.array(got.astype(mx.float32)) - wanted) <= sums + 2.0**-8 * np.abs(wanted)).all()


def hard_floats() -> NDArray[np.float32]:
    """Bits of all kinds: subnormals, ties between neighbours, overflows, infinities, NaN."""
    rng = np.random.default_rng(0)
    some = rng.integers(0, 2**32, 20000, dtype=np.uint64).astype(np.uint32)
    near_one = rng.integers(0x32000000, 0x48000000, 20000, dtype=np.uint64).astype(np.uint32)
    ties = (some & np.uint32(0xFFFFF000)) | np.uint32(0x1000)
    halves = (some & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    edges = np.array([0, 2**31, 0x7F800000, 0xFF800000, 0x477FF000, 0x477FEFFF, 0x33000000, 0x33000001], np.uint32)
    return np.concatenate([some, near_one, ties, halves, edges]).view(np.float32)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_rounding_to_16_bits_is_mlx_s(dtype: Any) -> None:
    x = hard_floats()
    got = run(
        I + "y[i] = T(x[i]);",
        {"x": x},
        x.shape,
        grid=x.size,
        threadgroup=256,
        dtype=dtype,
        template=(("T", dtype),),
        partial=("y",),
    )
    wanted = mx.array(x).astype(dtype)
    same = got.view(np.uint16) == np.array(wanted.view(mx.uint16))
    assert (same | np.isnan(x)).all()
    assert np.isnan(np.array(mx.array(got.view(np.uint16)).view(dtype).astype(mx.float32))[np.isnan(x)]).all()


# ---------------------------------------------------------------------------------------------------------- contraction


def test_contraction_changes_a_plain_multiply_add_and_not_an_fma() -> None:
    inputs = {name: floats(seed, 256) for seed, name in enumerate("abc")}
    plain, fused, apart = (
        "y[i] = a[i] * b[i] + c[i];",
        "y[i] = fma(a[i], b[i], c[i]);",
        "float p = a[i] * b[i];\nfloat q = p + c[i];\ny[i] = q;",
    )
    off, on = Knobs(contract=False), Knobs(contract=True)

    def bits(source: str, knobs: Knobs) -> bytes:
        return run(I + source, inputs, (256,), grid=256, knobs=knobs).tobytes()

    a, b, c = inputs.values()
    assert bits(plain, off) == (a * b + c).tobytes()
    assert bits(plain, on) != bits(plain, off)
    assert bits(plain, on) == bits(fused, on) == bits(fused, off)
    assert bits(apart, off) == bits(plain, off)
    assert bits(apart, on) == bits(fused, on), "contraction ends at a statement"


# ---------------------------------------------------------------------------------------------------------- seeded bugs


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
def test_a_bug_is_caught_and_named(name: str) -> None:
    """In every order of the threads: nobody has to be lucky."""
    bug = BUGS[name]
    x = np.abs(floats(0, 64)) + 1
    for order in bug.orders:
        for guard in ("back", "front") if bug.error is emulator.OutOfBounds and "read" not in name else ("back",):
            knobs = Knobs(order=order, guard=guard, seconds=1)  # type: ignore[arg-type]
            with pytest.raises(bug.error) as caught:
                run(I + bug.source, {"x": x}, (64,), knobs=knobs, name="buggy")
            assert re.search(bug.message, str(caught.value)), str(caught.value)
            assert str(caught.value).startswith("kernel buggy: ")
