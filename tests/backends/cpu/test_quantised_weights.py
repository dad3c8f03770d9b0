"""Quantised weights that stay packed: every format against float64, and the same bits for any rows and threads.

A product sums groups of at most 128 columns in two accumulators, scales the sum and adds it to the total, all in
float32 and with activations as they are. Codes are exact. With n columns and g groups a result is off by at most
(64 + 64 + g + 8) U sum (|value| + |centre| + |offset|) |scale| |x| + |bias| |x| (Higham 2002, section 4.2), where the
parts of a value count one by one because sums of codes and of activations are scaled apart.

With AVX2, bfloat16 activations and codes of integers become whole numbers, whose sums are exact. There the oracle takes
``x`` as the kernels do (``as_taken``), and the bound stays; how far that may be from ``x`` has a test of its own.
"""

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.backends.cpu.packed import FORMATS, MAX_GROUP
from specdec.checkpoints import StoredWeights
from specdec.checkpoints.quantised import StoredMatrix, rounded
from tests.backends.cpu.test_native_ops import TINY, U, assert_same_bits, assert_within, draw
from tests.checkpoints.quantised import mlx_layout
from tests.checkpoints.quantised import quantisers as q
from tests.checkpoints.quantised.quantisers import NAME, meaning
from tests.selection import examples

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


def as_taken(ops, x, group, *, whole=True):
    """Activations in float64 as the kernels multiply them: with 15 bits for the largest of a group (``packed.h``)."""
    if not whole or ops.dtype is not torch.bfloat16 or "(avx2," not in ops.capabilities.kernels:
        return x.double()
    taken = []
    for part in x.double().split(group, 1):
        exponent = part.abs().amax(1, keepdim=True).log2().floor().clamp(min=-112.0)
        unit = torch.exp2(exponent - 14)
        taken.append((part / unit).round() * unit)
    return torch.cat(taken, 1)


def check_products(ops, matrix, *, rows, seed, packed=True):
    """Every operation that takes the matrix agrees with float64."""
    held = ops.weight(matrix)
    assert held.is_meta == packed
    features, columns = matrix.shape
    values, parts = meaning(matrix)
    x = draw(rows, columns, seed=seed, dtype=ops.dtype)
    whole = packed and not matrix.format.startswith("fp8")
    exact = as_taken(ops, x, group_of(matrix) if packed else 0, whole=whole) @ values.T
    terms = 128 + columns // matrix.meta["block_columns"] + columns // 128 + 8
    bound = terms * U * (x.double().abs() @ parts.T)
    assert_within(torch.from_numpy(ops.head(x, held).rows()), exact, bound)
    residual = draw(rows, features, seed=seed + 1, dtype=ops.dtype)
    assert_within(ops.linear(x, held, residual), exact + residual.double(), bound + U * residual.double().abs())


def test_products_of_every_format_are_right(ops, tmp_path_factory):
    @given(
        name=st.sampled_from(list(QUANTISERS)),
        rows=st.integers(1, 30),
        features=st.integers(1, 80),
        units=st.integers(1, 12),
        seed=st.integers(0, 2**31),
    )
    @settings(examples(200), deadline=None)
    def check(name, rows, features, units, seed):
        unit = int(name.rpartition(" g")[2]) if name.startswith("mlx") else 8 if name.startswith("rounded") else 32
        folder = tmp_path_factory.mktemp("weight")
        matrix = QUANTISERS[name](drawn(features, units * unit, seed), folder, ops.dtype)
        check_products(ops, matrix, rows=rows, seed=seed % 1000)

    check()


@given(exponent=st.integers(-120, 90), spread=st.integers(0, 240), seed=st.integers(0, 2**31))
@SETTINGS
def test_activations_are_taken_as_they_are(ops, exponent, spread, seed):
    """Exact down to a 128th of a group's largest, and within 2^-15 of that below. Not with AVX2: exact always."""
    generator = torch.Generator().manual_seed(seed)
    down = torch.randint(0, spread + 1, (64,), generator=generator)
    size = torch.exp2((exponent - down).clamp(min=-126).double())
    x = ((torch.rand(1, 64, generator=generator).double() + 1) * size).to(ops.dtype)
    identity = ops.weight(rounded(127 * torch.eye(64), 8, ops.dtype))
    got = torch.from_numpy(ops.head(x, identity).rows()).double() / 127
    largest = x.double().abs().max()
    assert_within(got.float(), as_taken(ops, x, 64), 4 * U * x.double().abs())
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
            assert_same_bits(got[row], torch.from_numpy(ops.head(x[row : row + 1], w).rows())[0])


@pytest.mark.parametrize(("bits", "byte"), [(8, 255), (8, 0), (4, 255), (4, 0)])
def test_the_largest_sums_are_right(ops, tmp_path, bits, byte):
    """Groups of 128 columns of the largest codes and activations. Catches: sums that leave 32 bits."""
    matrix = affine(bits, 128)(drawn(33, 256, 0), tmp_path, ops.dtype)
    codes = matrix.parts["codes"]
    matrix = attrs.evolve(matrix, parts={**matrix.parts, "codes": torch.full_like(codes, -1 if byte else 0)})
    held = ops.weight(matrix)
    values, parts = meaning(matrix)
    x = torch.full((2, 256), 1.9921875).to(ops.dtype)
    x[1] = -x[1]
    bound = 150 * U * (x.double().abs() @ parts.T)
    assert_within(torch.from_numpy(ops.head(x, held).rows()), x.double() @ values.T, bound)


def test_rows_of_a_table_are_the_decoded_ones(ops, tmp_path):
    """``embed``, ``to_host`` and a pruned head: the bits of ``StoredMatrix.decode`` and of the whole head."""
    for number, name in enumerate(QUANTISERS):
        matrix = QUANTISERS[name](drawn(77, 384, number), tmp_path / str(number), ops.dtype)
        held, decoded = ops.weight(matrix), matrix.decode()
        if matrix.divisor is None:  # a reciprocal is rounded
            assert_same_bits(ops.to_host(held), decoded)
        ids = [0, 31, 32, 64, 76, 5, 5]
        assert_same_bits(ops.embed(held, ids), ops.to_host(held)[ids])
        x = draw(5, 384, seed=1, dtype=ops.dtype)
        whole = torch.from_numpy(ops.head(x, held).rows())
        pruned = ops.head_rows(held, sorted(set(ids)))
        found = ops.pruned_head(x, pruned).rows()
        assert_same_bits(torch.from_numpy(found)[:, ids].contiguous(), whole[:, ids].contiguous())
        more = ops.pruned_head(x, ops.head_rows(held, [7, 40, 5], base=pruned)).rows()
        assert np.array_equal(more[:, ids], whole[:, ids])
        error = np.abs(more[:, [7, 40]] - whole[:, [7, 40]].numpy())
        assert (error <= 2.0**-7 * (x.float().abs() @ decoded[[7, 40]].float().abs().T).numpy()).all()


@pytest.mark.parametrize("name", ["rounded int4", "rounded int8", "int8 per channel zero points", "mlx-affine 4 g64"])
def test_rows_and_threads_do_not_change_bits(ops, same_bits, tmp_path, name):
    """Catches: an order of additions that depends on the tile or on opened values; sums of another row."""
    columns = 448  # the last group is half of one
    x = draw(101, columns, seed=0, dtype=ops.dtype)
    if name.startswith("mlx"):
        columns, x = 384, x[:, :384].contiguous()
    a, up = (ops.weight(QUANTISERS[name](drawn(99, columns, n), tmp_path / str(n), ops.dtype)) for n in (1, 2))
    plain = draw(50, columns, seed=3, dtype=ops.dtype)
    panels = draw(48, columns, seed=4, dtype=ops.dtype)
    ops.pack(panels)

    def run(x):
        logits = torch.from_numpy(ops.head(x, a).rows())
        mixed = ops.project(x, [a, plain, panels, up])
        return [*mixed, ops.linear(x, a), ops.swiglu(x, a, up), ops.swiglu(x[:, :columns], a, up), logits]

    alone = same_bits(run, x)
    assert_same_bits(alone[1], ops.linear(x, plain))
    assert_same_bits(alone[2], ops.linear(x, panels))


def test_matrices_of_one_call_have_groups_of_their_own(ops, tmp_path):
    """Catches: sums or units of activations that are shared by matrices with other groups, or with none."""
    names = ["rounded int4", "mlx-affine 4 g128", "nvfp4", "fp8 per channel", "mlx-affine 5 g32", "mlx-affine 8 g64"]
    held = [
        ops.weight(QUANTISERS[name](drawn(40, 384, n), tmp_path / str(n), ops.dtype)) for n, name in enumerate(names)
    ]
    x = draw(7, 384, seed=9, dtype=ops.dtype)
    for together, w in zip(ops.project(x, held), held, strict=True):
        assert_same_bits(together, ops.linear(x, w))


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
    check_products(ops, sound, rows=3, seed=0)
    assert not noted
    narrow = attrs.evolve(sound, meta={**sound.meta, "block_columns": 4, "group": 4})
    parts = {**sound.parts, "scale": sound.parts["scale"].repeat_interleave(16, 1)}
    for number, odd in enumerate((attrs.evolve(narrow, parts=parts), attrs.evolve(sound, values=sound.values + 0.001))):
        held = ops.weight(odd)
        assert len(noted) == number + 1
        assert_same_bits(ops.embed(held, range(9)), odd.decode())
        noted.pop()
