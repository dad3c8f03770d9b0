"""The emulator against NumPy and exact arithmetic; seeded bugs are caught and named; contraction changes bits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from specdec.backends.metal.kernels.kernel import Launch, MslKernel  # noqa: E402
from tests.backends.metal import emulator  # noqa: E402
from tests.backends.metal.emulator import ORDERS, TREES, Emulated, Knobs, emulate, every_knob, some_knobs  # noqa: E402
from tests.backends.metal.emulator.export import export  # noqa: E402
from tests.backends.metal.emulator.translate import translate  # noqa: E402

if TYPE_CHECKING:
    from numpy.typing import NDArray

pytestmark = pytest.mark.emulator

if reason := emulator.unavailable():
    pytest.skip(reason, allow_module_level=True)

KNOBS = [pytest.param(knobs, id=f"{knobs.order}-{knobs.tree}") for knobs in some_knobs()]
SYNC = "threadgroup_barrier(mem_flags::mem_threadgroup);"
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


SIZES = st.tuples(st.integers(1, 70), st.integers(1, 5), st.integers(1, 3))


@given(grid=SIZES, block=SIZES)
@example(grid=(7, 5, 2), block=(3, 4, 1))
@settings(max_examples=15)
def test_threads_know_where_they_are(grid: tuple[int, int, int], block: tuple[int, int, int]) -> None:
    """Metal shading language specification, table 5.8; MLX cuts the threadgroup to the grid."""
    source = """
      uint3 p = thread_position_in_grid, b = threadgroup_position_in_grid, l = thread_position_in_threadgroup;
      uint3 n = threads_per_grid, s = threads_per_threadgroup, d = dispatch_threads_per_threadgroup;
      uint3 c = threadgroups_per_grid;
      device uint* at = y + 24 * ((p.z * n.y + p.y) * n.x + p.x);
      for (int k = 0; k < 3; ++k) {
        at[k] = p[k]; at[3 + k] = b[k]; at[6 + k] = l[k]; at[9 + k] = n[k]; at[12 + k] = s[k]; at[15 + k] = d[k];
        at[18 + k] = c[k];
      }
      at[21] = thread_index_in_threadgroup;
      at[22] = 1000 * simdgroup_index_in_threadgroup + thread_index_in_simdgroup;
      at[23] = 1000 * simdgroups_per_threadgroup + threads_per_simdgroup + x[0];
    """
    x = np.zeros(1, np.uint32)
    got = run(source, {"x": x}, (*reversed(grid), 24), grid=grid, threadgroup=block, dtype=mx.uint32)
    position = np.moveaxis(np.indices(tuple(reversed(grid)))[::-1], 0, -1)
    cut = np.minimum(block, grid)
    where = position // cut
    local = position % cut
    size = np.minimum(cut, np.array(grid) - where * cut)
    index = local[..., 0] + size[..., 0] * (local[..., 1] + size[..., 1] * local[..., 2])
    simdgroups = -(-size.prod(-1) // 32)
    wanted = np.concatenate(
        [
            position,
            where,
            local,
            np.broadcast_to(grid, position.shape),
            size,
            np.broadcast_to(cut, position.shape),
            np.broadcast_to(-(-np.array(grid) // cut), position.shape),
            index[..., None],
            (index // 32 * 1000 + index % 32)[..., None],
            (simdgroups * 1000 + 32)[..., None],
        ],
        -1,
    )
    assert (got == wanted).all()


def summed(values: NDArray[np.float32], tree: str) -> np.float32:
    """A whole simdgroup in the order of a tree, for all but the random one."""
    if tree == "butterfly":
        while len(values) > 1:
            values = values[0::2] + values[1::2]
    elif tree == "halving":
        while len(values) > 1:
            values = values[: len(values) // 2] + values[len(values) // 2 :]
    else:
        total = np.float32(0)
        for value in values if tree == "sequential" else values[::-1]:
            total = np.float32(total + value)
        return total
    return np.float32(values[0])


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("order", ORDERS)
def test_a_sum_over_lanes_has_the_order_of_its_tree(tree: Any, order: Any) -> None:
    x = floats(3, 96)
    knobs = Knobs(order=order, tree=tree)
    got = run(I + "y[i] = simd_sum(x[i]);", {"x": x}, (96,), grid=96, threadgroup=96, knobs=knobs)
    for group in range(3):
        part = x[32 * group : 32 * group + 32]
        assert len(set(got[32 * group : 32 * group + 32])) == 1, "lanes disagree"
        assert abs(got[32 * group] - part.sum(dtype=np.float64)) < 1e-5
        if tree != "random":
            assert got[32 * group] == summed(part, tree)


def test_trees_differ() -> None:
    """Else a kernel that depends on the order of sums would look as if it did not."""
    x = floats(1, 32 * 50)
    sums = {
        knobs: run(I + "y[i] = simd_sum(x[i]);", {"x": x}, x.shape, grid=x.size, threadgroup=32, knobs=knobs).tobytes()
        for knobs in [*(Knobs(tree=tree) for tree in TREES), Knobs(tree="random", seed=1)]
    }
    assert len(set(sums.values())) == len(TREES) + 1


@pytest.mark.parametrize("lanes", [1, 5, 31, 32])
@pytest.mark.parametrize("tree", TREES)
def test_a_simdgroup_may_have_fewer_lanes(tree: Any, lanes: int) -> None:
    x = np.arange(1, 33 + lanes, dtype=np.float32)
    got = run(I + "y[i] = simd_sum(x[i]);", {"x": x}, x.shape, grid=x.size, threadgroup=64, knobs=Knobs(tree=tree))
    assert (got[:32] == x[:32].sum()).all()
    assert (got[32:] == x[32:].sum()).all()


LANE = np.arange(32)
X = np.random.default_rng(0).permutation(1000)[:32].astype(np.int32)
COLLECTIVES: dict[str, tuple[str, Any]] = {
    "xor": ("simd_shuffle_xor(v, 5)", X[LANE ^ 5]),
    "shuffle": ("simd_shuffle(v, (lane * 7 + 3) % 32)", X[(LANE * 7 + 3) % 32]),
    "broadcast": ("simd_broadcast(v, 9)", np.full(32, X[9])),
    "first": ("simd_broadcast_first(v)", np.full(32, X[0])),
    "rotate": ("simd_shuffle_rotate_down(v, 5)", X[(LANE + 5) % 32]),
    "rotate up": ("simd_shuffle_rotate_up(v, 5)", X[(LANE - 5) % 32]),
    "max": ("simd_max(v)", np.full(32, X.max())),
    "min": ("simd_min(v)", np.full(32, X.min())),
    "or": ("simd_or(v)", np.full(32, np.bitwise_or.reduce(X))),
    "and": ("simd_and(v)", np.full(32, np.bitwise_and.reduce(X))),
    "inclusive": ("simd_prefix_inclusive_sum(v)", np.cumsum(X)),
    "exclusive": ("simd_prefix_exclusive_sum(v)", np.cumsum(X) - X),
    "all": ("simd_all(v >= 0) * 2 + simd_all(v > 500)", np.full(32, 2 * (X >= 0).all() + (X > 500).all())),
    "any": ("simd_any(v < 0) * 2 + simd_any(v > 500)", np.full(32, 2 * (X < 0).any() + (X > 500).any())),
    "quad": ("quad_sum(v)", np.repeat(X.reshape(8, 4).sum(1), 4)),
    "quad xor": ("quad_shuffle_xor(v, 2)", X[LANE ^ 2]),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_are_those_of_numpy(name: str) -> None:
    call, wanted = COLLECTIVES[name]
    source = f"int lane = int(thread_index_in_simdgroup); int v = x[lane]; y[lane] = {call};"
    for order in ORDERS:
        got = run(source, {"x": X}, (32,), grid=32, threadgroup=32, dtype=mx.int32, knobs=Knobs(order=order))
        assert (got == wanted).all()


def test_a_lane_that_is_not_there_gives_no_number() -> None:
    x = floats(0, 32)
    got = run(I + "y[i] = simd_shuffle_down(x[i], 3);", {"x": x}, (32,), grid=32, threadgroup=32, partial=("y",))
    assert (got[:29] == x[3:]).all()
    assert np.isnan(got[29:]).all()


TRANSPOSE = """
  threadgroup float tile[32][33];
  uint2 l = uint2(thread_position_in_threadgroup.x, thread_position_in_threadgroup.y);
  uint2 b = uint2(threadgroup_position_in_grid.x * 32, threadgroup_position_in_grid.y * 32);
  for (uint r = l.y; r < 32; r += 8) {
    tile[r][l.x] = x[(b.y + r) * x_shape[1] + b.x + l.x];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint r = l.y; r < 32; r += 8) {
    y[(b.x + r) * x_shape[0] + b.y + l.x] = tile[l.x][r];
  }
"""


@pytest.mark.parametrize("knobs", KNOBS)
def test_a_matrix_is_transposed_through_threadgroup_memory(knobs: Knobs) -> None:
    x = floats(0, 64, 96)
    got = run(TRANSPOSE, {"x": x}, (96, 64), grid=(96, 16, 1), threadgroup=(32, 8, 1), knobs=knobs)
    assert (got == x.T).all()


MATVEC = """
  uint row = thread_position_in_grid.y, lane = thread_index_in_simdgroup;
  float sum = 0;
  for (int at = lane; at < x_shape[0]; at += 32) {
    sum = fma(float(w[row * x_shape[0] + at]), float(x[at]), sum);
  }
  sum = simd_sum(sum);
  if (lane == 0) {
    y[row] = T(sum);
  }
"""


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


def test_shapes_are_handed_over() -> None:
    """Also of an array that was not row contiguous before."""
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    source = """
      uint i = thread_position_in_grid.x;
      int strides[2] = {int(x_strides[0]), int(x_strides[1])};
      y[i] = x[elem_to_loc(int(i), x_shape, x_strides, x_ndim)] + 100 * strides[0] + 1000 * x_ndim;
    """
    got = run(source, {"x": mx.array(x).T}, (24,), grid=24, threadgroup=24)
    assert (got == x.T.ravel() + 100 * 4 + 1000 * 2).all()


def test_every_half_is_numpys() -> None:
    x = np.arange(2**16, dtype=np.uint16).view(np.float16)
    got = run(I + "y[i] = float(x[i]);", {"x": x}, x.shape, grid=x.size, threadgroup=256)
    wanted = x.astype(np.float32)
    assert ((got == wanted) | (np.isnan(got) & np.isnan(wanted))).all()


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


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("operation", ["+", "-", "*", "/"])
def test_arithmetic_in_16_bits_is_mlx_s(dtype: Any, operation: str) -> None:
    """Each operation rounded by itself."""
    a, b = (mx.array(floats(seed, 4096)).astype(dtype) for seed in (0, 1))
    got = run(I + f"y[i] = a[i] {operation} b[i];", {"a": a, "b": b}, (4096,), grid=4096, threadgroup=256, dtype=dtype)
    wanted = {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[operation]
    assert (got.view(np.uint16) == np.array(wanted.view(mx.uint16))).all()


FUNCTIONS = "exp exp2 log sqrt rsqrt sin cos tanh floor ceil rint trunc fabs abs".split()


def test_functions_are_numpys() -> None:
    x = np.abs(floats(0, 64)) + np.float32(0.01)
    source = I + "\n".join(
        f"y[{k} * 64 + i] = {space}{name}(x[i]);"
        for k, (space, name) in enumerate([(s, n) for n in FUNCTIONS for s in ("", "metal::")])
    )
    got = run(source, {"x": x}, (2 * len(FUNCTIONS), 64))
    for k, name in enumerate(n for n in FUNCTIONS for _ in range(2)):
        wide = x.astype(np.float64)
        wanted = 1 / np.sqrt(wide) if name == "rsqrt" else getattr(np, name)(wide)
        np.testing.assert_allclose(got[k], wanted, rtol=5e-7, atol=1e-7, err_msg=name)


def test_vectors_have_four_numbers() -> None:
    x = floats(0, 64, 4)
    source = """
      uint i = thread_position_in_grid.x;
      float4 v = ((const device float4*)x)[i];
      float4 twice = fma(v, float4(2), float4(v.x, 1, 2, 3)) - 1;
      twice[2] = select(twice.z, -1.0f, v.y > 0);
      *(device float4*)(y + 4 * i) = max(twice, float4(0));
    """
    got = run(source, {"x": x}, (64, 4))
    wanted = 2 * x + np.stack([x[:, 0], *(np.full(64, n) for n in (1, 2, 3))], 1) - 1
    wanted[:, 2] = np.where(x[:, 1] > 0, -1, wanted[:, 2])
    np.testing.assert_allclose(got, np.maximum(wanted, 0), rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------- contraction


def exact_fma(a: float, b: float, c: float) -> np.float32:
    """``a * b + c`` rounded once: of the float32 around the sum, the nearest to it, of two the even one."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    guess = np.float32(float(exact))
    near = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return min(near, key=lambda n: (abs(Fraction(float(n)) - exact), int(n.view(np.uint32)) & 1))


@pytest.mark.parametrize("knobs", KNOBS)
def test_fma_is_rounded_once(knobs: Knobs) -> None:
    a, b, c = (floats(seed, 256) for seed in range(3))
    c = -a * b * (1 + c * np.float32(1e-6))  # nearly cancelling: what is rounded twice is wrong
    got = run(I + "y[i] = metal::fma(a[i], b[i], c[i]);", {"a": a, "b": b, "c": c}, (256,), grid=256, knobs=knobs)
    assert (got == [exact_fma(*map(float, three)) for three in zip(a, b, c, strict=True)]).all()


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


def test_every_knob_is_every_combination() -> None:
    knobs = list(every_knob(seeds=2))
    assert len(knobs) == len(set(knobs)) == 2 * (2 * 4 + 2 * 2 + 5 * 2)
    chosen = some_knobs()
    assert {k.order for k in chosen} == set(ORDERS)
    assert {k.tree for k in chosen} == set(TREES)
    assert {k.contract for k in chosen} == {False, True}


@given(seed=st.integers(0, 2**16))
def test_every_tree_takes_every_lane_once(seed: int) -> None:
    for tree in TREES:
        left = set(range(32))
        for into, source in Knobs(tree=tree, seed=seed).merges():
            assert into in left
            left.remove(source)
        assert left == {into}


# ---------------------------------------------------------------------------------------------------------- seeded bugs


@attrs.frozen
class Bug:
    source: str
    error: type[emulator.KernelError]
    message: str  # a regular expression
    orders: tuple[str, ...] = ORDERS


S = "threadgroup float s[64];\n"
BUGS = {
    "no barrier": Bug(
        S + "s[i] = x[i];\ny[i] = s[i ^ 33];", emulator.KernelError, r"no barrier .* in between|no thread has written"
    ),
    "no barrier after": Bug(
        f"{S}for (int k = 0; k < 3; ++k) {{\n s[i] = x[i] + k;\n {SYNC}\n y[i] = s[63 - i];\n}}",
        emulator.Race,
        r"(writes|reads) s\[\d+\] at line \d+ \((s\[i\] = x\[i\] \+ k|y\[i\] = s\[63 - i\]);\), which thread "
        r"\(\d+, 0, 0\) (wrote|read) at line \d+ \((s\[i\] = x\[i\] \+ k|y\[i\] = s\[63 - i\]);\), with no barrier",
    ),
    "write while others read": Bug(
        f"{S}s[i] = x[i];\n{SYNC}\nif (i < 32) {{\n y[i] = s[i + 32];\n}} else {{\n s[i] = 0;\n y[i] = 0;\n}}",
        emulator.Race,
        r"(reads|writes) s\[\d+\] .*(read|wrote) at line",
    ),
    "write what others read before": Bug(
        f"{S}s[i] = x[i];\n{SYNC}\ny[i] = s[i] + s[(i + 32) % 64];\nif (i >= 32) s[i] = 0;",
        emulator.Race,
        r"(reads|writes) s\[\d+\] .*(read|wrote) at line",
    ),
    "barrier for no memory": Bug(
        S + "s[i] = x[i];\nthreadgroup_barrier(mem_flags::mem_none);\ny[i] = s[i ^ 1];", emulator.Race, "no barrier"
    ),
    "barrier of a simdgroup only": Bug(
        S + "s[i] = x[i];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = s[i ^ 32];",
        emulator.KernelError,
        "no barrier|no thread has written",
    ),
    "two writers": Bug(S + f"s[i / 2] = x[i];\n{SYNC}\ny[i] = s[i / 2];", emulator.Race, r"writes s\[\d+\].*wrote"),
    "unset threadgroup memory": Bug(
        S + f"if (i < 63) s[i] = x[i];\n{SYNC}\ny[i] = s[i];",
        emulator.Uninitialised,
        r"thread \(63, 0, 0\) of threadgroup \(0, 0, 0\) reads s\[63\] at line \d+ \(y\[i\] = s\[i\];\)",
    ),
    "write behind": Bug("y[i + 1] = x[i];\ny[0] = 0;", emulator.OutOfBounds, r"thread \(63, 0, 0\).*writes y\[64\] of"),
    "write before": Bug("y[int(i) - 1] = x[i];", emulator.OutOfBounds, r"thread \(0, 0, 0\).*writes y\[-1\] of 64"),
    "write far away": Bug("y[i + 5000] = x[i];", emulator.OutOfBounds, r"writes y\[50\d\d\] of 64 elements at line"),
    "read far away": Bug("y[i] = x[i + 5000];", emulator.OutOfBounds, r"reads x\[50\d\d\] of 64 elements at line"),
    "read behind": Bug("y[i] = x[i + 1];", emulator.OutOfBounds, r"thread \(63, 0, 0\).*reads x\[64\] of 64"),
    "write to an input": Bug(
        "((device float*)x)[i] = 1;\ny[i] = x[i];", emulator.OutOfBounds, r"writes the input x\[\d+\] of 64 elements at"
    ),
    "index of an array": Bug(
        f"{S}s[i + 1] = x[i];\n{SYNC}\ny[i] = s[i];", emulator.OutOfBounds, r"\(63, 0, 0\).*s\[64\]|an array with 64"
    ),
    "pointer into an array": Bug(
        f"{S}threadgroup float* p = s + 3;\np[i] = x[i];\n{SYNC}\ny[i] = p[0];",
        emulator.OutOfBounds,
        r"writes s\[6[456]\] at line \d+ \(p\[i\] = x\[i\];\)",
    ),
    "index of a local array": Bug(
        "float a[4] = {1, 2, 3, 4};\ny[i] = a[i % 5];", emulator.OutOfBounds, "array with 4, outside its bounds at line"
    ),
    "index of a vector": Bug("float4 v = x[i];\ny[i] = v[i % 5];", emulator.OutOfBounds, "a vector of 4 with 4"),
    "collective of some lanes": Bug(
        "float v = x[i];\nif (thread_index_in_simdgroup < 16) {\n v = simd_sum(v);\n}\ny[i] = v;",
        emulator.Divergence,
        r"simd_sum at line \d+ \(v = simd_sum\(v\);\), and thread \(\d+, 0, 0\) has returned",
    ),
    "two collectives of one kind": Bug(
        "float v = x[i];\nif (i % 32 < 16) {\n v = simd_sum(v);\n} else {\n v = simd_sum(v + 1);\n}\ny[i] = v;",
        emulator.Divergence,
        r"simd_sum at line \d+ \(v = simd_sum\(v.*simd_sum at line \d+ \(v = simd_sum\(v",
    ),
    "two kinds of collectives": Bug(
        "float v = x[i];\nif (i % 32 < 16) {\n v = simd_sum(v);\n} else {\n v = simd_max(v);\n}\ny[i] = v;",
        emulator.Divergence,
        "simd_(sum|max) at line.*simd_(sum|max) at line",
    ),
    "collective and barrier": Bug(
        f"float v = x[i];\nif (i % 32 < 16) {{\n v = simd_sum(v);\n}} else {{\n {SYNC}\n}}\ny[i] = v;",
        emulator.Divergence,
        "simd_sum at line.*threadgroup_barrier at line|threadgroup_barrier at .*simd_sum at line",
    ),
    "barrier of some threads": Bug(
        f"if (i < 40) {{\n {SYNC}\n}}\ny[i] = x[i];",
        emulator.Divergence,
        r"threadgroup_barrier at line \d+ .*and thread \(\d+, 0, 0\) has returned",
    ),
    "two barriers": Bug(
        f"if (i < 32) {{\n {SYNC}\n}} else {{\n {SYNC}\n}}\ny[i] = x[i];",
        emulator.Divergence,
        "in threadgroup_barrier at line .*another one at line",
    ),
    "output left unset": Bug("if (i != 5) y[i] = x[i];", emulator.Uninitialised, r"leaves y\[5\] \(1 of 64 elements\)"),
    "output added to": Bug("y[i] += x[i];", emulator.Uninitialised, r"leaves y\[0\] \(64 of 64 elements\)"),
    "too much threadgroup memory": Bug(
        "threadgroup float a[8000];\nthreadgroup float b[200];\na[i] = b[i] = x[i];\ny[i] = a[i];",
        emulator.ResourceError,
        "needs 32800 bytes of threadgroup memory .* 32768",
    ),
    "signed overflow": Bug(
        "int big = 2147483600;\ny[i] = x[i] + (big + int(i));",
        emulator.ArithmeticFault,
        r"overflows a signed integer in an addition at line \d+ \(y\[i\] =",
    ),
    "division by zero": Bug("y[i] = x[i] + 7 / int(i);", emulator.ArithmeticFault, r"thread \(0, 0, 0\).*divides"),
    "shift": Bug("y[i] = x[i] + (1u << i);", emulator.ArithmeticFault, "shifts an integer by more bits"),
    "conversion": Bug("y[i] = int(x[i] * 1e30f);", emulator.ArithmeticFault, "converts a float to an integer"),
    "alignment": Bug("y[i] = ((const device float4*)(x + 1))[i / 8].x;", emulator.ArithmeticFault, "not aligned"),
    "no end": Bug(
        "float v = 1;\nwhile (v > 0) {\n v = x[0] + 1 + fabs(v);\n}\ny[i] = v;",
        emulator.Endless,
        "still runs after 1 s",
        ("ascending",),
    ),
    "unset local variable": Bug("float v;\ny[i] = v;", emulator.CompileError, "is used uninitialized", ("ascending",)),
    "a name that is not there": Bug("y[i] = nothing[i];", emulator.CompileError, "nothing", ("ascending",)),
    "double": Bug(
        "double v = x[i];\ny[i] = v;", emulator.ForbiddenError, r"uses double.*\(line \d+: double", ("ascending",)
    ),
    "narrowing to bfloat": Bug("bfloat v = x[i];\ny[i] = v;", emulator.CompileError, "bfloat", ("ascending",)),
    "device pointer to threadgroup memory": Bug(
        S + "device float* p = s;\np[i] = x[i];\ny[i] = x[i];", emulator.CompileError, "Shared", ("ascending",)
    ),
    "array of variable length": Bug(
        "float a[i + 1];\na[0] = x[i];\ny[i] = a[0];", emulator.CompileError, "variable length", ("ascending",)
    ),
    "threads of a threadgroup": Bug("y[i] = x[i];", emulator.LaunchError, "2048 threads", ("ascending",)),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_caught_and_named(name: str) -> None:
    """In every order of the threads: nobody has to be lucky."""
    bug = BUGS[name]
    x = np.abs(floats(0, 64)) + 1
    for order in bug.orders:
        for guard in ("back", "front") if bug.error is emulator.OutOfBounds and "read" not in name else ("back",):
            knobs = Knobs(order=order, guard=guard, seconds=1)  # type: ignore[arg-type]
            size = 2048 if name == "threads of a threadgroup" else 64
            with pytest.raises(bug.error) as caught:
                run(I + bug.source, {"x": x}, (64,), threadgroup=size, knobs=knobs, name="buggy")
            assert re.search(bug.message, str(caught.value)), str(caught.value)
            assert str(caught.value).startswith("kernel buggy: ")


def test_threads_are_named_by_position() -> None:
    source = """
      uint3 p = thread_position_in_grid;
      bool bad = p.x == 7 && p.y == 4 && p.z == 1;
      y[p.x + 10 * (p.y + 6 * p.z)] = bad ? x[99999] : 0.0f;
    """
    with pytest.raises(emulator.OutOfBounds) as caught:
        run(source, {"x": floats(0, 64)}, (120,), grid=(10, 6, 2), threadgroup=(4, 3, 1))
    assert (caught.value.threadgroup, caught.value.thread) == ((1, 1, 1), (3, 1, 0))


def test_a_local_variable_that_nobody_set_shows() -> None:
    """Where the compiler cannot see it."""
    source = I + "float v;\nif (x[i] > 0) v = x[i];\ny[i] = v;"
    x = np.abs(floats(0, 64)) + 1
    x[3] = -1
    got = run(source, {"x": x}, (64,))
    assert abs(got[3]) > 1e30
    assert (np.delete(got, 3) == np.delete(x, 3)).all()


def test_a_literal_is_a_float() -> None:
    x = floats(0, 64)
    assert (run(I + "y[i] = x[i] * 0.1;", {"x": x}, (64,)) == x * np.float32(0.1)).all()
    assert (run(I + "y[i] = x[i] * 0.5h;", {"x": x}, (64,)) == x * np.float32(0.5)).all()


def test_reads_beside_a_buffer_give_nan_where_they_do_not_fault() -> None:
    got = run(I + "y[i] = x[i + 1];", {"x": np.ones(64, np.float32)}, (64,), knobs=Knobs(guard="front"), partial=("y",))
    assert np.isnan(got[63])
    assert (got[:63] == 1).all()


def test_parts_of_an_output_may_stay_unset_where_it_is_said() -> None:
    for dtype, is_poison in ((mx.float32, np.isnan), (mx.int32, lambda v: v == np.int32(-0x5A5A5A5B))):
        got = run("y[0] = x[0];", {"x": np.ones(9, np.float32)}, (3,), grid=1, dtype=dtype, partial=("y",))
        assert got[0] == 1
        assert is_poison(got[1:]).all()


def test_a_simdgroup_s_own_barrier_orders_its_own_memory() -> None:
    source = S + "s[i] = x[i];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\ny[i] = s[i ^ 5];"
    x = floats(0, 64)
    for order in ORDERS:
        assert (run(I + source, {"x": x}, (64,), knobs=Knobs(order=order)) == x[np.arange(64) ^ 5]).all()


def test_an_input_of_few_elements_is_in_the_constant_space() -> None:
    """MLX puts inputs of fewer than 8 elements there: code that takes a device pointer to one does not compile."""
    source = I + "const device float* p = x;\ny[i] = p[0];"
    assert (run(source, {"x": np.ones(8, np.float32)}, (64,)) == 1).all()
    with pytest.raises(emulator.CompileError, match="Constant"):
        run(source, {"x": np.ones(7, np.float32)}, (64,))
    for dtype in (mx.float32, mx.bfloat16):
        x = mx.full((7,), 2, dtype=dtype)
        sum_ = "float(x[3]) + x[1] * 2 + fma(float(x[0]), 1.0f, 1.0f) + max(1.0f, float(x[2]))"
        got = run(f"{I}y[i] = {sum_};", {"x": x}, (64,))
        assert (got == 2 + 4 + 3 + 2).all()


def test_threadgroup_memory_holds_any_element() -> None:
    source = """
      uint i = thread_position_in_grid.x;
      threadgroup bfloat16_t b[64], c[2][64]; threadgroup int n; threadgroup float4 v[64];
      b[i] = bfloat16_t(x[i]); c[1][i] = b[i]; v[i] = float4(x[i], 0, 0, 1);
      if (i == 7) n = 3;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      float4 other = v[i ^ 1];
      b[i] += bfloat16_t(1.0f);
      y[i] = float(b[i]) + c[1][i ^ 1] * 2 + n + other.x * other.w;
    """
    x = np.arange(64, dtype=np.float32)
    other = x[np.arange(64) ^ 1]
    for knobs in some_knobs():
        assert (run(source, {"x": x}, (64,), knobs=knobs) == x + 1 + 2 * other + 3 + other).all()


def test_a_caught_bug_leaves_nothing_behind() -> None:
    x = floats(0, 64)
    for bug in ("write far away", "no barrier", "collective of some lanes") * 5:
        with pytest.raises(emulator.KernelError):
            run(I + BUGS[bug].source, {"x": x}, (64,), name="buggy")
        assert (
            run(TRANSPOSE, {"x": floats(0, 64, 96)}, (96, 64), grid=(96, 16, 1), threadgroup=(32, 8, 1))
            == floats(0, 64, 96).T
        ).all()


# ------------------------------------------------------------------------------------------------------------- the text


def test_what_runs_is_what_mlx_generates() -> None:
    kernel = MslKernel(name="some", inputs=("x", "n"), outputs=("y",), source=TRANSPOSE, header="// a header\n")
    launch = Launch(
        template=(("T", mx.bfloat16), ("N", 4), ("B", True)),
        grid=(8, 1, 1),
        threadgroup=(8, 1, 1),
        output_shapes=((8,),),
        output_dtypes=(mx.float32,),
    )
    exported = export(kernel, [mx.zeros((4, 2)), mx.array(3)], launch)
    assert TRANSPOSE in exported.text
    assert exported.arguments == "bfloat16_t, 4, 1"
    assert [(p.name, p.type, p.space, p.pointer) for p in exported.parameters[:4]] == [
        ("x", "float", "device", True),
        ("x_shape", "int", "constant", True),
        ("n", "int32_t", "constant", False),
        ("y", "float", "device", True),
    ]
    translated = translate("some", exported).split('#line 1 "some.metal"\n')[1].split('\n#line 1 "entry"')[0]
    kept = exported.text[: exported.text.index("template [[host_name")]
    assert translated.count("\n") == kept.count("\n"), "lines moved"
    assert [line for line in translated.splitlines() if "threadgroup" not in line][-8:-3] == [
        line for line in kept.splitlines() if "threadgroup" not in line
    ][-8:-3]


def test_without_a_compiler_the_reason_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert emulator.unavailable() == "g++ is not on PATH"
    with pytest.raises(emulator.EmulatorUnavailable, match="g\\+\\+ is not on PATH"):
        run(I + "y[i] = x[i];", {"x": floats(0, 64)}, (64,))


@pytest.mark.parametrize("version", ["11.4.0", "4", "nonsense"])
def test_an_old_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, version: str) -> None:
    tool = tmp_path / "g++"
    tool.write_text(f"#!/bin/sh\necho {version}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert emulator.unavailable() == f"the emulator needs g++ 12 or newer, found {version!r}"


@pytest.mark.parametrize("shape", [(), (0,), (1, 0, 3)])
def test_scalars_and_empty_arrays_are_arrays(shape: tuple[int, ...]) -> None:
    source = "if (n == 2) y[0] = n;" if shape == () else "z[thread_position_in_grid.x] = n + x_shape[0];"
    kernel = MslKernel(name="small", inputs=("x", "n"), outputs=("y", "z"), source=source)
    launch = Launch(
        template=(),
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=(shape, (1,)),
        output_dtypes=(mx.float32, mx.float32),
    )
    y, z = emulate(kernel, [mx.zeros((*shape, 4)), mx.array(2)], launch, partial=("y", "z"))
    assert y.shape == shape
    assert (y == 2 if shape == () else z[0] == 2 + shape[0]).all()


def test_a_launch_that_mlx_refuses_is_refused() -> None:
    kernel = MslKernel(name="k", inputs=("x",), outputs=("y",), source="")
    one = (1, 1, 1)
    launch = Launch(template=(), grid=one, threadgroup=one, output_shapes=((1,),), output_dtypes=(mx.int32,))
    with pytest.raises(emulator.LaunchError, match="takes 1 inputs, got 2"):
        emulate(kernel, [mx.zeros(1), mx.zeros(1)], launch)
    with pytest.raises(emulator.LaunchError, match="at least 1"):
        run("", {"x": floats(0, 64)}, (64,), grid=0)
