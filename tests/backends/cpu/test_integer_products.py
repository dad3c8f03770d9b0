"""Products of packed integers with int8 activations: every format against float64, and the same bits for any rows,
threads and instruction set.

A product sums integers exactly over cells of at most 32 columns. A cell adds at most two fused multiply-adds in
float32, of a scale, a unit and an offset that are rounded once or twice. With c cells a result is off by at most
(2 c + 8) U times the sum of the magnitudes of the parts of its values (Higham 2002, section 4.2).
"""

import math

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.backends.cpu.native import NativeOps
from specdec.backends.cpu.packed import FORMATS
from specdec.backends.cpu.reference import ReferenceOps
from specdec.checkpoints import StoredWeights
from specdec.checkpoints.opening import open_checkpoint
from specdec.checkpoints.quantised import StoredMatrix
from tests.backends.cpu.test_native_ops import U, assert_same_bits, assert_within, draw
from tests.backends.cpu.test_quantised_weights import QUANTISERS, drawn, group_of
from tests.checkpoints.gguf_files import random_blocks
from tests.checkpoints.quantised.quantisers import NAME, meaning
from tests.checkpoints.test_gguf import BLOCK_TYPES, with_matrix
from tests.instruction_sets import RUNNABLE, kernels_of
from tests.selection import examples

INTEGERS = [name for name in QUANTISERS if not name.startswith(("fp8", "mxfp8"))]
WIDTHS = {name: 256 for name in BLOCK_TYPES if "K" in name or name == "IQ4_XS"}  # columns of a block; else 32 or 8


@pytest.fixture(scope="module")
def ops(instruction_set, dtype):
    return NativeOps(dtype, kernels_of(instruction_set), int8=FORMATS)


def matrix_of(name, rows, units, seed, folder, dtype):
    if name not in BLOCK_TYPES:
        width = int(name.rpartition(" g")[2]) if name.startswith("mlx") else 8 if name.startswith("rounded") else 32
        return QUANTISERS[name](drawn(rows, units * width, seed), folder, dtype)
    width = WIDTHS.get(name, 32)
    blocks = random_blocks(name, rows * units, seed)
    if name == "MXFP4":
        blocks[:, 0] = np.minimum(blocks[:, 0], 180)  # products with 1e20 stay finite
    file = with_matrix(folder / "one.gguf", name, blocks, width * units)
    with open_checkpoint(file) as checkpoint:
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


def int8(x):
    """Activations as they are multiplied, float64: the docstring of kernels/integers.cpp in numpy."""
    taken = []
    for part in (group.float().numpy() for group in x.split(32, 1)):
        largest = np.maximum(np.abs(part).max(1, keepdims=True), np.float32(2.0**-119))
        numbers = np.rint(part * (np.float32(127) / largest)).astype(np.float64)
        taken.append(numbers * (largest / np.float32(127)).astype(np.float64))
    return torch.from_numpy(np.concatenate(taken, 1))


def check_product(ops, matrix, x):
    values, parts = meaning(matrix)
    taken = int8(x)
    terms = 2 * -(-matrix.shape[1] // math.gcd(group_of(matrix), 32)) + 8
    got = torch.from_numpy(ops.head(x, ops.weight(matrix)).rows())
    assert_within(got, taken @ values.T, terms * U * (taken.abs() @ parts.T))


def test_products_of_every_format_are_right(ops, tmp_path_factory):
    @given(
        name=st.sampled_from([*INTEGERS, *BLOCK_TYPES]),
        rows=st.integers(1, 17),
        features=st.integers(1, 80),
        units=st.integers(1, 12),
        kind=st.sampled_from(["plain", "zeros", "huge", "subnormal"]),
        seed=st.integers(0, 2**31),
    )
    @settings(examples(200), deadline=None)
    def check(name, rows, features, units, kind, seed):
        matrix = matrix_of(name, features, units, seed, tmp_path_factory.mktemp("weight"), ops.dtype)
        check_product(ops, matrix, activations(rows, matrix.shape[1], seed, kind, ops.dtype))

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


@pytest.mark.parametrize("code", [0, -1])
@pytest.mark.parametrize("name", ["rounded int4", "rounded int8", "mlx-affine 8 g64", "IQ4_NL", "Q5_0", "Q6_K"])
@pytest.mark.parametrize("largest", [127, -127])
def test_the_largest_sums_are_exact(ops, tmp_path, name, code, largest):
    """All codes and activations at an end, units of 1: float32 holds each sum. Catches: pairs that leave 16 bits."""
    matrix = matrix_of(name, 33, 2 if name.startswith("mlx") else 12, 0, tmp_path, ops.dtype)
    scales = {role: torch.ones_like(part) for role, part in matrix.parts.items() if role.startswith(("scale", "bias"))}
    last = len(matrix.values) - 1 if len(matrix.values) in (32, 64) else -1  # a byte holds one code
    codes = torch.full_like(matrix.parts["codes"], code and last)
    matrix = attrs.evolve(matrix, parts={**matrix.parts, **scales, "codes": codes})
    x = torch.full((3, matrix.shape[1]), float(largest)).to(ops.dtype)
    got = torch.from_numpy(ops.head(x, ops.weight(matrix)).rows())
    assert torch.equal(got.double(), x.double() @ meaning(matrix)[0].T)


@pytest.mark.parametrize("name", ["rounded int4", "int8 per channel zero points", "Q4_K", "Q5_0", "Q6_K"])
def test_rows_and_threads_do_not_change_bits(ops, same_bits, tmp_path, name):
    """Catches: an order of additions that depends on the tile; a unit or sum of another row or matrix."""
    units = 5 if name in WIDTHS else 43 if name.startswith("int8") else 172
    a, up = (ops.weight(matrix_of(name, 99, units, n, tmp_path, ops.dtype)) for n in (1, 2))
    columns = a.shape[1]
    other = ops.weight(matrix_of("rounded int8", 40, columns // 8, 3, tmp_path, ops.dtype))
    plain = draw(50, columns, seed=3, dtype=ops.dtype)
    x = draw(101, columns, seed=0, dtype=ops.dtype)
    x[3, 40] = torch.nan

    def run(x):
        logits = torch.from_numpy(ops.head(x, a).rows())
        return [*ops.project(x, [a, plain, other, up]), ops.linear(x, a), ops.swiglu(x, a, up), logits]

    alone = same_bits(run, x)
    assert [bool(row.isfinite().all()) for row in alone[0][:5]] == [True, True, True, False, True]


FUSED = [name for name in RUNNABLE if name != "baseline"]


@pytest.mark.parametrize("name", ["rounded int4", "rounded int8", "mlx-affine 4 g64", "Q4_1", "Q5_K", "Q6_K", "IQ4_XS"])
def test_instruction_sets_with_fused_multiply_add_agree(name, tmp_path):
    matrix = matrix_of(name, 70, 3, 1, tmp_path, torch.bfloat16)
    x = activations(9, matrix.shape[1], 2, "plain", torch.bfloat16)
    first, *others = [
        torch.from_numpy(ops.head(x, ops.weight(matrix)).rows())
        for ops in (NativeOps(torch.bfloat16, kernels_of(instructions), int8=FORMATS) for instructions in FUSED)
    ]
    for other in others:
        assert_same_bits(other, first)


def test_rows_of_a_table_are_not_rounded(ops, tmp_path):
    """``embed`` and the rows of a pruned head read the layout that int8 activations need."""
    for name in ("rounded int4", "rounded int8", "mlx-affine 8 g64", "Q6_K", "IQ4_NL"):
        matrix = matrix_of(name, 77, 2, 1, tmp_path, ops.dtype)
        held = ops.weight(matrix)
        ids = [0, 31, 32, 64, 76, 5, 5]
        assert_same_bits(ops.embed(held, ids), matrix.decode()[ids])
        x = draw(5, matrix.shape[1], seed=1, dtype=ops.dtype)
        pruned = ops.pruned_head(x, ops.head_rows(held, sorted(set(ids)))).rows()
        assert np.array_equal(pruned[:, ids], ops.head(x, held).rows()[:, ids])


def test_codes_that_are_no_integers_take_activations_as_they_are(ops, tmp_path):
    floats = NativeOps(ops.dtype, kernels_of(ops.capabilities.kernels.partition("(")[2].partition(",")[0]))
    x = draw(3, 384, seed=1, dtype=ops.dtype)
    for number, name in enumerate(name for name in QUANTISERS if name not in INTEGERS):
        matrix = QUANTISERS[name](drawn(40, 384, number), tmp_path / str(number), ops.dtype)
        count = ops.int8_matrices
        assert_same_bits(ops.linear(x, ops.weight(matrix)), floats.linear(x, floats.weight(matrix)))
        assert ops.int8_matrices == count
