"""Quantised weights that stay packed: every format against float64, and the same bits for any rows and threads.

With activations as they are, a product sums groups of at most 128 columns in two accumulators, scales the sum and adds
it to the total, all in float32. Codes are exact. With n columns and g groups a result is off by at most
(64 + 64 + g + 8) U sum (|value| + |centre| + |offset|) |scale| |x| + |bias| |x| (Higham 2002, section 4.2), where the
parts of a value count one by one because sums of codes and of activations are scaled apart. With AVX2, bfloat16
activations and codes of integers become whole numbers, whose sums are exact.

With int8 activations, a product sums integers exactly over cells of at most 32 columns. A cell adds at most two fused
multiply-adds in float32, of a scale, a unit and an offset that are rounded once or twice. With c cells a result is off
by at most (2 c + 8) U times the sum of the magnitudes of the parts of its values.

The oracle takes ``x`` as the kernels do (``taken``); how far that may be from ``x`` has a test of its own.
"""

import math

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.backends.cpu.native import NativeOps
from specdec.backends.cpu.packed import FORMATS, MAX_GROUP
from specdec.backends.cpu.reference import ReferenceOps
from specdec.checkpoints import StoredWeights
from specdec.checkpoints.opening import open_checkpoint
from specdec.checkpoints.quantised import StoredMatrix, rounded
from specdec.checkpoints.quantised.stored import RowParts
from tests.backends.cpu.test_native_ops import TINY, U, assert_within, draw
from tests.checkpoints.gguf_files import random_blocks
from tests.checkpoints.quantised import mlx_layout
from tests.checkpoints.quantised import quantisers as q
from tests.checkpoints.quantised.quantisers import NAME, meaning
from tests.checkpoints.test_gguf import BLOCK_TYPES, with_matrix
from tests.instruction_sets import RUNNABLE, kernels_of
from tests.selection import cases, examples
from tests.tiny import assert_equal_bits

SETTINGS = settings(examples(12), deadline=None)


def in_checkpoint(parts, config, folder, dtype):
    matrix = StoredWeights(q.opened(folder, parts, **config), dtype=dtype, keeps=FORMATS).matrix(NAME)
    assert isinstance(matrix, StoredMatrix)
    return matrix


def affine(bits, group):
    def quantise(weight, folder, dtype):
        config = {"quantization": {"group_size": group, "bits": bits}}
        return in_checkpoint(mlx_layout.affine(weight, bits, group, torch.bfloat16)[0], config, folder, dtype)

    return quantise


def by_tool(name):
    return lambda weight, folder, dtype: in_checkpoint(q.QUANTISERS[name](weight)[0], {}, folder, dtype)


QUANTISERS = {
    **{name: by_tool(name) for name in q.QUANTISERS},
    **{f"mlx-affine {bits} g{group}": affine(bits, group) for bits, group in ((2, 32), (3, 64), (4, 128), (5, 32))},
    **{f"mlx-affine {bits} g{group}": affine(bits, group) for bits, group in ((4, 64), (6, 64), (8, 64))},
    "rounded int4": lambda weight, folder, dtype: rounded(torch.from_numpy(weight), 4, dtype),
    "rounded int8": lambda weight, folder, dtype: rounded(torch.from_numpy(weight), 8, dtype),
}


INTEGERS = [name for name in QUANTISERS if not name.startswith(("fp8", "mxfp8"))]
WIDTHS = {name: 256 for name in BLOCK_TYPES if "K" in name or name == "IQ4_XS"}  # columns of a block; else 32 or 8


@pytest.fixture(scope="module")
def float_ops(instruction_set, dtype):
    return NativeOps(dtype, kernels_of(instruction_set))


@pytest.fixture(scope="module")
def int8_ops(instruction_set, dtype):
    return NativeOps(dtype, kernels_of(instruction_set), int8=FORMATS)


@pytest.fixture(scope="module", params=["float", "int8"])
def ops(request, float_ops, int8_ops):
    """Activations as they are, and in int8."""
    return {"float": float_ops, "int8": int8_ops}[request.param]


def drawn(rows, columns, seed):
    """Values of many sizes, a few of them outliers and zeros."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((rows, columns)) * 10 ** rng.uniform(-3, 1, (rows, 1))
    weight[rng.random((rows, columns)) < 0.02] *= 8
    weight[rng.random((rows, columns)) < 0.05] = 0
    return weight.astype(np.float32)


def group_of(matrix):
    """Columns that the kernels sum before they scale: the widest group of words that divides a block."""
    width = min(matrix.meta["block_columns"], matrix.shape[1])
    return max(size for size in range(8, MAX_GROUP + 1, 8) if width % size == 0)


def matrix_of(name, rows, units, seed, folder, dtype):
    """So many units of columns, which are blocks or what divides them."""
    if name not in BLOCK_TYPES:
        width = int(name.rpartition(" g")[2]) if name.startswith("mlx") else 8 if name.startswith("rounded") else 32
        return QUANTISERS[name](drawn(rows, units * width, seed), folder, dtype)
    width = WIDTHS.get(name, 32)
    blocks = random_blocks(name, rows * units, seed)
    if name == "MXFP4":
        blocks[:, 0] = np.minimum(blocks[:, 0], 180)  # products with 1e20 stay finite
    with open_checkpoint(with_matrix(folder / "one.gguf", name, blocks, width * units)) as checkpoint:
        matrix = StoredWeights(checkpoint, dtype=dtype, keeps=FORMATS).matrix(NAME)
    assert isinstance(matrix, StoredMatrix)
    return matrix


def activations(rows, columns, seed, kind, dtype):
    """Rows of many sizes: plain, of zeros alone, with one huge value, or subnormal."""
    x = draw(rows, columns, seed=seed)
    if kind == "zeros":
        x[::2] = 0
    elif kind == "huge":
        x[:, seed % columns] = 1e20
    elif kind == "subnormal":
        x = x * 2.0**-128
    return x.to(dtype)


def whole_numbers(x, group):
    """With 15 bits for the largest of a group (``packed.h``)."""
    taken = []
    for part in x.double().split(group, 1):
        exponent = part.abs().amax(1, keepdim=True).log2().floor().clamp(min=-112.0)
        unit = torch.exp2(exponent - 14)
        taken.append((part / unit).round() * unit)
    return torch.cat(taken, 1)


def int8(x):
    """With 8 bits for the largest of 32: the docstring of kernels/integers.cpp in numpy."""
    taken = []
    for part in (group.float().numpy() for group in x.split(32, 1)):
        largest = np.maximum(np.abs(part).max(1, keepdims=True), np.float32(2.0**-119))
        numbers = np.rint(part * (np.float32(127) / largest)).astype(np.float64)
        taken.append(numbers * (largest / np.float32(127)).astype(np.float64))
    return torch.from_numpy(np.concatenate(taken, 1))


def taken(ops, x, matrix):
    """Activations in float64 as the kernels multiply them by a packed matrix."""
    if matrix.format.startswith("fp8"):
        return x.double()
    if ops.int8:
        return int8(x)
    instructions = ops.capabilities.kernels.partition("(")[2].partition(",")[0]
    whole = ops.dtype is torch.bfloat16 and instructions in ("avx2", "avx-vnni", "avx512")
    return whole_numbers(x, group_of(matrix)) if whole else x.double()


def check_products(ops, matrix, x, *, packed=True):
    """Every operation that takes the matrix agrees with float64."""
    held = ops.weight(matrix)
    assert held.is_meta == packed
    values, parts = meaning(matrix)
    multiplied = taken(ops, x, matrix) if packed else x.double()
    exact, columns = multiplied @ values.T, matrix.shape[1]
    terms = 128 + columns // matrix.meta["block_columns"] + columns // 128 + 8
    if ops.int8 and packed:
        terms = 2 * -(-columns // math.gcd(group_of(matrix), 32)) + 8
    bound = terms * U * (torch.maximum(x.double().abs(), multiplied.abs()) @ parts.T)
    assert_within(torch.from_numpy(ops.head(x, held).rows()), exact, bound)
    residual = draw(len(x), matrix.shape[0], seed=1, dtype=ops.dtype)
    assert_within(ops.linear(x, held, residual), exact + residual.double(), bound + U * residual.double().abs())


def test_products_of_every_format_are_right(ops, tmp_path_factory):
    kinds = ["plain", "zeros", "huge", "subnormal"] if ops.int8 else ["plain"]

    @given(
        name=st.sampled_from([*INTEGERS, *BLOCK_TYPES] if ops.int8 else list(QUANTISERS)),
        rows=st.integers(1, 30),
        features=st.integers(1, 80),
        units=st.integers(1, 12),
        kind=st.sampled_from(kinds),
        seed=st.integers(0, 2**31),
    )
    @settings(examples(200), deadline=None)
    def check(name, rows, features, units, kind, seed):
        matrix = matrix_of(name, features, units, seed, tmp_path_factory.mktemp("weight"), ops.dtype)
        check_products(ops, matrix, activations(rows, matrix.shape[1], seed, kind, ops.dtype))

    check()


@pytest.mark.parametrize("name", ["rounded int4", "rounded int8", "mlx-affine 4 g64", "Q4_K", "Q6_K", "IQ4_NL"])
def test_the_reference_multiplies_the_same(name, tmp_path):
    """Its weights are decoded, so it rounds once more; sums of MKL have any order."""
    ops = ReferenceOps(torch.float32, int8=FORMATS)
    matrix = matrix_of(name, 40, 2, 3, tmp_path, torch.float32)
    x = activations(5, matrix.shape[1], 0, "plain", torch.float32)
    values, parts = meaning(matrix)
    bound = (matrix.shape[1] + 8) * U * (int8(x).abs() @ parts.T)
    weight = ops.weight(matrix)
    assert_within(torch.from_numpy(ops.head(x, weight).rows()), int8(x) @ values.T, bound)
    assert_within(ops.linear(x, weight), int8(x) @ values.T, bound)
    x[2, 5] = torch.inf
    assert ops.linear(x, weight).isfinite().all(1).tolist() == [True, True, False, True, True]


@given(exponent=st.integers(-120, 90), spread=st.integers(0, 240), seed=st.integers(0, 2**31))
@SETTINGS
def test_activations_are_taken_as_they_are(float_ops, exponent, spread, seed):
    """Exact down to a 128th of a group's largest, and within 2^-15 of that below. Not with AVX2: exact always."""
    ops = float_ops
    generator = torch.Generator().manual_seed(seed)
    down = torch.randint(0, spread + 1, (64,), generator=generator)
    size = torch.exp2((exponent - down).clamp(min=-126).double())
    x = ((torch.rand(1, 64, generator=generator).double() + 1) * size).to(ops.dtype)
    matrix = rounded(127 * torch.eye(64), 8, ops.dtype)
    got = torch.from_numpy(ops.head(x, ops.weight(matrix)).rows()).double() / 127
    largest = x.double().abs().max()
    assert_within(got.float(), taken(ops, x, matrix), 4 * U * x.double().abs())
    near = x.double().abs() >= largest / 128
    error = (got - x.double()).abs()
    bound = 4 * U * x.double().abs() + TINY
    assert (error[near] <= bound[near]).all()
    assert (error <= 2.0**-15 * largest + bound).all()


@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_in_its_row(ops, odd):
    x = draw(3, 192, seed=0, dtype=ops.dtype)
    x[1, 100] = odd
    for bits in (4, 8):
        w = ops.weight(rounded(torch.from_numpy(drawn(40, 192, 1)), bits, ops.dtype))
        got = torch.from_numpy(ops.head(x, w).rows())
        assert not got[1].isfinite().any()
        for row in (0, 2):
            assert_equal_bits(got[row], torch.from_numpy(ops.head(x[row : row + 1], w).rows())[0])


@pytest.mark.parametrize(("bits", "byte"), [(8, 255), (8, 0), (4, 255), (4, 0)])
def test_the_largest_sums_are_right(float_ops, tmp_path, bits, byte):
    """Groups of 128 columns of the largest codes and activations. Catches: sums that leave 32 bits."""
    matrix = affine(bits, 128)(drawn(33, 256, 0), tmp_path, float_ops.dtype)
    codes = torch.full_like(matrix.parts["codes"], -1 if byte else 0)
    matrix = attrs.evolve(matrix, parts={**matrix.parts, "codes": codes})
    x = torch.tensor([[1.9921875], [-1.9921875]]).repeat(1, 256).to(float_ops.dtype)
    check_products(float_ops, matrix, x)


@pytest.mark.parametrize("code", [0, -1])
@pytest.mark.parametrize("name", ["rounded int4", "rounded int8", "mlx-affine 8 g64", "IQ4_NL", "Q5_0", "Q6_K"])
@pytest.mark.parametrize("largest", [127, -127])
def test_the_largest_sums_of_integers_are_exact(int8_ops, tmp_path, name, code, largest):
    """All codes and activations at an end, units of 1: float32 holds each sum. Catches: pairs that leave 16 bits."""
    ops = int8_ops
    matrix = matrix_of(name, 33, 2 if name.startswith("mlx") else 12, 0, tmp_path, ops.dtype)
    scales = {role: torch.ones_like(part) for role, part in matrix.parts.items() if role.startswith(("scale", "bias"))}
    last = len(matrix.values) - 1 if len(matrix.values) in (32, 64) else -1  # a byte holds one code
    codes = torch.full_like(matrix.parts["codes"], code and last)
    matrix = attrs.evolve(matrix, parts={**matrix.parts, **scales, "codes": codes})
    x = torch.full((3, matrix.shape[1]), float(largest)).to(ops.dtype)
    got = torch.from_numpy(ops.head(x, ops.weight(matrix)).rows())
    assert torch.equal(got.double(), x.double() @ meaning(matrix)[0].T)


@pytest.mark.parametrize("row", [0, 63, 64, 76])
@pytest.mark.parametrize("byte", [2, 33, 34 * 3 - 1])  # of a row: the first code, the last of a block, and of all
def test_a_single_lowest_code_is_kept(ops, tmp_path, row, byte):
    """Catches: -128 taken for -127, which stands for it where no code is -128."""
    matrix = matrix_of("Q8_0", 77, 3, 0, tmp_path, ops.dtype)
    rows = matrix.parts.rows.clone()
    codes = rows.view(77, 3, 34)[:, :, 2:]
    codes[codes == 128] = 129
    rows[row, byte] = 128
    matrix = attrs.evolve(matrix, parts=RowParts(rows, matrix.parts.block, matrix.parts._unpack))
    assert_equal_bits(ops.to_host(ops.weight(matrix)), matrix.decode())


def test_rows_of_a_table_are_the_decoded_ones(ops, tmp_path):
    """``embed``, ``to_host`` and a pruned head: the bits of ``StoredMatrix.decode`` and of the whole head."""
    for number, name in enumerate([*QUANTISERS, "Q6_K", "IQ4_NL"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        matrix = matrix_of(name, 77, 3 if name.startswith("mlx") else 12, number, folder, ops.dtype)
        held, decoded = ops.weight(matrix), matrix.decode()
        if "divisor" not in matrix.parts:  # a reciprocal is rounded
            assert_equal_bits(ops.to_host(held), decoded)
        ids = [0, 31, 32, 64, 76, 5, 5]
        assert_equal_bits(ops.embed(held, ids), ops.to_host(held)[ids])
        x = draw(5, matrix.shape[1], seed=1, dtype=ops.dtype)
        whole = torch.from_numpy(ops.head(x, held).rows())
        pruned = ops.head_rows(held, sorted(set(ids)))
        found = ops.pruned_head(x, pruned).rows()
        assert_equal_bits(torch.from_numpy(found)[:, ids].contiguous(), whole[:, ids].contiguous())
        more = ops.pruned_head(x, ops.head_rows(held, [7, 40, 5], base=pruned)).rows()
        assert np.array_equal(more[:, ids], whole[:, ids])
        error = np.abs(more[:, [7, 40]] - whole[:, [7, 40]].numpy())
        assert (error <= 2.0**-7 * (x.float().abs() @ decoded[[7, 40]].float().abs().T).numpy()).all()


@pytest.mark.parametrize(
    "name", ["rounded int4", "rounded int8", "int8 per channel zero points", "mlx-affine 4 g64", "Q4_K", "Q5_0", "Q6_K"]
)
def test_rows_and_threads_do_not_change_bits(ops, same_bits, tmp_path, name):
    """Catches: an order of additions that depends on the tile or on opened values; sums of another row or matrix."""
    units = 5 if name in WIDTHS else 172 if name.startswith("rounded") else 22 if name.startswith("mlx") else 43
    a, up = (ops.weight(matrix_of(name, 99, units, n, tmp_path, ops.dtype)) for n in (1, 2))
    columns = a.shape[1]
    other = ops.weight(matrix_of("rounded int8", 40, columns // 8, 3, tmp_path, ops.dtype))
    plain, panels = (draw(rows, columns, seed=rows, dtype=ops.dtype) for rows in (50, 48))
    ops.pack(panels)
    x = draw(101, columns, seed=0, dtype=ops.dtype)
    x[3, 40] = torch.nan

    def run(x):
        logits = torch.from_numpy(ops.head(x, a).rows())
        return [*ops.project(x, [a, plain, panels, other, up]), ops.linear(x, a), ops.swiglu(x, a, up), logits]

    alone = same_bits(run, x)
    assert_equal_bits(alone[1], ops.linear(x, plain))
    assert_equal_bits(alone[2], ops.linear(x, panels))
    assert [bool(row.isfinite().all()) for row in alone[0][:5]] == [True, True, True, False, True]


def test_matrices_of_one_call_have_groups_of_their_own(ops, tmp_path):
    """Catches: sums or units of activations that are shared by matrices with other groups, or with none."""
    names = ["rounded int4", "mlx-affine 4 g128", "nvfp4", "fp8 per channel", "mlx-affine 5 g32", "mlx-affine 8 g64"]
    held = [
        ops.weight(QUANTISERS[name](drawn(40, 384, n), tmp_path / str(n), ops.dtype)) for n, name in enumerate(names)
    ]
    x = draw(7, 384, seed=9, dtype=ops.dtype)
    for together, w in zip(ops.project(x, held), held, strict=True):
        assert_equal_bits(together, ops.linear(x, w))


@pytest.mark.parametrize("bits", [4, 8])
@given(rows=st.integers(1, 40), units=st.integers(1, 40), seed=st.integers(0, 2**31))
@SETTINGS
def test_rounding_is_to_the_nearest(bits, rows, units, seed):
    """No value is further from its result than half a step, and the largest of a group sets the step."""
    weight = torch.from_numpy(drawn(rows, 8 * units, seed)).bfloat16()
    matrix = rounded(weight, bits, torch.float32)
    steps = matrix.parts["scale"].float().repeat_interleave(64, 1)[:, : 8 * units]
    off = (matrix.decode() - weight.float()).abs()
    assert bool((off <= steps * (0.5 + 2.0**-8 * (7.5 if bits == 4 else 127))).all())
    for group in range(0, 8 * units, 64):
        top = weight[:, group : group + 64].float().abs().amax(1)
        wanted = (top / (7.5 if bits == 4 else 127)).bfloat16()
        assert torch.equal(matrix.parts["scale"][:, group // 64], wanted)


def test_what_does_not_fit_the_layout_is_decoded(ops):
    """Rows of half words, blocks that no group divides, values that are no bfloat16."""
    sound = rounded(torch.from_numpy(drawn(9, 64, 0)), 4, ops.dtype)
    noted = []
    sound = attrs.evolve(sound, on_decode=lambda: noted.append(1))
    check_products(ops, sound, draw(3, 64, seed=0, dtype=ops.dtype))
    assert not noted
    narrow = attrs.evolve(sound, meta={**sound.meta, "block_columns": 4, "group": 4})
    parts = {**sound.parts, "scale": sound.parts["scale"].repeat_interleave(16, 1)}
    for number, odd in enumerate((attrs.evolve(narrow, parts=parts), attrs.evolve(sound, values=sound.values + 0.001))):
        held = ops.weight(odd)
        assert len(noted) == number + 1
        assert_equal_bits(ops.embed(held, range(9)), odd.decode())
        noted.pop()


FUSED = [name for name in RUNNABLE if name != "baseline"]


@pytest.mark.parametrize("narrower", cases(FUSED[1:], sample=(), mark="slow"))
@pytest.mark.parametrize("name", ["rounded int4", "rounded int8", "mlx-affine 4 g64", "Q4_1", "Q5_K", "Q6_K", "IQ4_XS"])
def test_instruction_sets_with_fused_multiply_add_agree(name, narrower, tmp_path):
    matrix = matrix_of(name, 70, 3, 1, tmp_path, torch.bfloat16)
    x = activations(9, matrix.shape[1], 2, "plain", torch.bfloat16)
    both = (NativeOps(torch.bfloat16, kernels_of(one), int8=FORMATS) for one in (FUSED[0], narrower))
    assert_equal_bits(*(torch.from_numpy(ops.head(x, ops.weight(matrix)).rows()) for ops in both))


def test_codes_that_are_no_integers_take_activations_as_they_are(int8_ops, float_ops, tmp_path):
    x = draw(3, 384, seed=1, dtype=int8_ops.dtype)
    for number, name in enumerate(name for name in QUANTISERS if name not in INTEGERS):
        matrix = QUANTISERS[name](drawn(40, 384, number), tmp_path / str(number), int8_ops.dtype)
        count = int8_ops.int8_matrices
        results = [ops.linear(x, ops.weight(matrix)) for ops in (int8_ops, float_ops)]
        assert_equal_bits(*results)
        assert int8_ops.int8_matrices == count
