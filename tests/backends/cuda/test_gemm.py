"""Products: the float64 value within a derived bound, and the same bits whatever the number of rows."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdec.backends.cuda.kernels import gemm, norm, tiles
from specdec.backends.cuda.kernels.tiles import Tile
from specdec.backends.cuda.weights import DenseWeight, Weight, fuse, runs
from specdec.errors import ShapeError, UnsupportedError
from tests.backends.cuda.dense import (
    DTYPES,
    FORMS,
    U,
    close,
    first_rows,
    mutated,
    only_interpreted,
    poisoned,
    product_bound,
    program_order,
    rows_of,
    same_for_any_rows,
    weight_of,
)

pytestmark = pytest.mark.interpreter

TILES = [None, Tile(16, 16, 3), Tile(32, 32, 1)]
TILE = Tile(32, 32, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tile", TILES)
def test_linear_is_the_product_within_its_bound(
    form: str, dtype: torch.dtype, tile: Tile | None, device: torch.device
) -> None:
    n, k = 37, 112 if tile else 272
    x, residual = rows_of(5, k, dtype, device), rows_of(5, n, dtype, device, seed=1)
    weight, bias = weight_of(form, n, k, dtype, device), DenseWeight(rows_of(1, n, dtype, device, seed=2)[0])
    with poisoned(device):
        y = gemm.linear(first_rows(x, 5), weight, residual=first_rows(residual, 5), bias=bias, tile=tile)
    expected = gemm.linear_reference(x, weight, residual=residual, bias=bias)
    extra = residual.double().abs() + bias.tensor.double().abs()
    assert y.dtype == dtype
    close(y, expected, product_bound(x, weight, expected, dtype, extra))


@pytest.mark.sample
@pytest.mark.parametrize(("n", "k"), [(1, 16), (1, 40), (3, 17), (300, 5), (16, 129)])
def test_odd_sizes(n: int, k: int, device: torch.device) -> None:
    x, weight = rows_of(3, k, torch.float32, device), weight_of("dense", n, k, torch.float32, device)
    with poisoned(device):
        y = gemm.float32_product(first_rows(x, 3), weight)
    expected = gemm.linear_reference(x, weight)
    close(y, expected, product_bound(x, weight, expected, torch.float32))


@pytest.mark.parametrize("form", FORMS)
def test_bits_do_not_depend_on_the_number_of_rows(form: str, device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weight, x = weight_of(form, 37, 112, dtype, device), rows_of(16, 112, dtype, device)
    counts, alone = (range(1, 17), range(16)) if form == "dense" else ((1, 2, 7), (6, 15))
    # float32 results: a rounding to act would hide most differences
    same_for_any_rows(functools.partial(gemm.float32_product, weight=weight, tile=TILE), x, tuple(counts), tuple(alone))


@pytest.mark.parametrize("form", ["dense", "fp8 32x32", "nvfp4"])
def test_swiglu(form: str, device: torch.device) -> None:
    dtype, n, k = torch.float32, 24, 96
    gate, up = weight_of(form, n, k, dtype, device), weight_of(form, n, k, dtype, device, seed=5)
    x = rows_of(16, k, dtype, device) / (100 * k)

    def run(rows: Tensor) -> Tensor:
        return gemm.swiglu(rows, gate, up, tile=Tile(16, 32, 2))

    y = same_for_any_rows(run, x, (1, 3))
    left, right = gemm.linear_reference(x, gate), gemm.linear_reference(x, up)
    error_left = product_bound(x, gate, left, torch.float32)
    error_right = product_bound(x, up, right, torch.float32)
    expected = gemm.swiglu_reference(x, gate, up)
    # |silu'| <= 1.1; exp, division and two products in float32 add less than 16 roundings
    gated = torch.nn.functional.silu(left)
    bound = 1.1 * error_left * (right.abs() + error_right) + gated.abs() * error_right + 16 * U[dtype] * expected.abs()
    close(y, expected, bound + 1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_as_prologue_has_the_bits_of_the_norm_on_its_own(dtype: torch.dtype, device: torch.device) -> None:
    k, weight = 144, weight_of("dense", 20, 144, dtype, device)
    x, rms = rows_of(4, k, dtype, device), norm.Rms(torch.rand(k, device=device), 1e-6)
    with poisoned(device):
        fused = gemm.linear(first_rows(x, 4), weight, prologue=rms, tile=Tile(32, 64, 2))
        apart = gemm.linear(norm.rms_norm(x, rms.weight, rms.eps), weight, tile=Tile(32, 64, 2))
    assert torch.equal(fused, apart)


@pytest.mark.parametrize("dim", [32, 24])  # a tile of the product, and no tile: normalised by a launch of its own
def test_a_gated_norm_as_prologue_has_the_bits_of_the_norm_on_its_own(dim: int, device: torch.device) -> None:
    dtype, heads = torch.float32, 3
    x, z = rows_of(16, heads * dim, dtype, device), rows_of(16, heads * dim, dtype, device, seed=1)
    weight, scale = weight_of("dense", 20, heads * dim, dtype, device), torch.rand(dim, device=device)

    def run(both: Tensor) -> Tensor:
        rows, gate = both.view(len(both), 2, heads, dim).unbind(1)
        return gemm.linear(rows, weight, prologue=norm.GatedRms(gate, scale, 1e-6))

    fused = same_for_any_rows(run, torch.cat([x, z], dim=1), (1, 5))
    normed = norm.gated_rms_norm(x.view(16, heads, dim), z.view(16, heads, dim), scale, 1e-6)
    tile = Tile(32, 32) if dim == 32 else None
    plain = gemm.linear(normed, weight, tile=tile)
    if dim == 32:  # the fused product has the tile that fits a head: ``block_k`` is the head's size
        plain = gemm.linear(normed, weight, tile=tiles.choose(20, 96, 32, device, most_k=32))
    assert torch.equal(fused, plain)


@pytest.mark.parametrize("form", ["dense", "fp8 32x32", "nvfp4"])
def test_fused_weights_are_one_launch_with_the_same_results(form: str, device: torch.device) -> None:
    dtype, k = torch.float32, 64
    weights = [weight_of(form, n, k, dtype, device) for n in (64, 32, 40)]
    biases = [DenseWeight(rows_of(1, n, dtype, device, seed=n)[0]) for n in (64, 32, 40)]
    x, tile = rows_of(3, k, dtype, device), Tile(16, 32, 2)
    apart = gemm.project(x, weights, biases=biases, tile=tile)
    values = [weight.decode() for weight in weights]
    assert runs(weights) == [1, 1, 1]
    assert fuse(weights)
    assert runs(weights) == [3]
    assert not fuse(weights[:2]), "members of a fused tensor cannot be fused again"
    for weight, value in zip(weights, values, strict=True):
        assert torch.equal(weight.decode(), value)
    fuse(biases)
    with poisoned(device):
        together = gemm.project(first_rows(x, 3), weights, biases=biases, tile=tile)
    for one, other in zip(together, apart, strict=True):
        assert torch.equal(one, other)
    assert len({y.untyped_storage().data_ptr() for y in together}) == 1
    for y, weight, bias in zip(together, weights, biases, strict=True):
        expected = gemm.linear_reference(x, weight, bias=bias)
        close(y, expected, product_bound(x, weight, expected, dtype, bias.tensor.double().abs()))


def test_strided_and_unaligned_rows(device: torch.device) -> None:
    weight = weight_of("dense", 20, 64, torch.float32, device)
    whole = rows_of(4, 200, torch.float32, device)
    for columns in (slice(0, 64), slice(64, 128), slice(3, 67)):
        view = whole[:, columns]
        assert torch.equal(gemm.linear(view, weight), gemm.linear(view.contiguous(), weight))


def test_what_is_refused(device: torch.device) -> None:
    weight = weight_of("dense", 8, 32, torch.float32, device)
    fp8 = weight_of("fp8 32x32", 8, 32, torch.float32, device)
    with pytest.raises(ShapeError, match="1 to 16 rows, got 17"):
        gemm.project(torch.zeros(17, 32, device=device), [weight])
    with pytest.raises(ShapeError, match="31 values do not fit a weight of 32 columns"):
        gemm.linear(torch.zeros(2, 31, device=device), weight)
    with pytest.raises(UnsupportedError, match="different formats"):
        gemm.swiglu(torch.zeros(2, 32, device=device), weight, fp8)
    fp8 = weight_of("fp8 32x32", 8, 64, torch.float32, device)
    with pytest.raises(ShapeError, match="do not divide"):
        gemm.linear(torch.zeros(2, 64, device=device), fp8, tile=Tile(16, 64))


# --- mutants: the checks above see what they are there for -----------------------------------------------------------


def _case(device: torch.device) -> tuple[Tensor, Weight]:
    return rows_of(16, 160, torch.float32, device), weight_of("dense", 24, 160, torch.float32, device)


@only_interpreted
def test_mutant_slices_counted_from_the_rows(device: torch.device) -> None:
    x, weight = _case(device)

    def run(rows: Tensor) -> Tensor:
        return gemm.float32_product(rows, weight, tile=Tile(32, 32, 1 if len(rows) == 1 else 3))

    with pytest.raises(AssertionError, match="row 6 alone has other bits"):
        same_for_any_rows(run, x, (4,), (6,))


@only_interpreted
def test_mutant_another_tile_above_eight_rows(device: torch.device) -> None:
    x, weight = _case(device)

    def run(rows: Tensor) -> Tensor:
        return gemm.float32_product(rows, weight, tile=Tile(32, 64 if len(rows) > 8 else 32, 1))

    same_for_any_rows(run, x[:8], (1, 5), (3,))
    with pytest.raises(AssertionError, match="a pass of 5 rows has other bits"):
        same_for_any_rows(run, x, (5,))


def _orders_agree(product: object, device: torch.device) -> None:
    x, weight = _case(device)
    tile = Tile(32, 16, 5)
    found = []
    for seed in (None, 1, 2, 3):
        with program_order(seed), poisoned(device):
            found.append(product.float32_product(x[:4], weight, tile=tile))  # type: ignore[attr-defined]
    for other in found[1:]:
        assert torch.equal(found[0], other), "the order of arrival shows"


@only_interpreted
def test_bits_do_not_depend_on_the_order_of_arrival(device: torch.device) -> None:
    _orders_agree(gemm, device)


_FOLD = "(tiles.to(tl.int64) * other + tile)"


@only_interpreted
def test_mutant_folded_in_the_order_of_arrival(tmp_path: Path, device: torch.device) -> None:
    arrival = "(tiles.to(tl.int64) * ((piece + 1 + other) % SPLITS) + tile)"
    with pytest.raises(AssertionError, match="the order of arrival shows"):
        _orders_agree(mutated(gemm, tmp_path, (_FOLD, arrival)), device)


@only_interpreted
def test_mutant_float_atomics(tmp_path: Path, device: torch.device) -> None:
    atomics = mutated(
        gemm,
        tmp_path,
        (
            "        tl.store(at, acc, mask=present)\n",
            "        tl.atomic_add(partials_ptr + tile * (16 * BLOCK_N) + place, acc, mask=present)\n",
        ),
        ("for other in tl.static_range(SPLITS):", "for other in tl.static_range(1):"),
    )
    x, weight = _case(device)
    found = []
    for seed in (None, 1, 2, 3):
        gemm.Workspace.of(device).partials.zero_()
        with program_order(seed):
            found.append(atomics.float32_product(x[:4], weight, tile=Tile(32, 16, 5)))
    expected = gemm.linear_reference(x[:4], weight)
    close(found[0], expected, product_bound(x[:4], weight, expected, torch.float32))  # a sum, only not an ordered one
    assert any(not torch.equal(found[0], other) for other in found[1:])


@only_interpreted
def test_mutant_that_forgets_its_counters(tmp_path: Path, device: torch.device) -> None:
    forgetful = mutated(gemm, tmp_path, ("            tl.store(counters_ptr + tile, 0)\n", ""))
    x, weight = _case(device)
    with pytest.raises(AssertionError, match="counters"), poisoned(device):
        forgetful.float32_product(x[:2], weight, tile=Tile(32, 32, 2))
    gemm.Workspace.of(device).counters.zero_()


# --- the choice of tiles ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
@pytest.mark.parametrize("pair", [False, True])
def test_chosen_tiles_fit_the_workspace_and_leave_no_slice_empty(
    bits: int, pair: bool, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(tiles, "interpreting", lambda: False)
    for n in (1, 48, 256, 1024, 5120, 12352, 34816, 248320):
        for k in (16, 100, 1024, 3584, 5120, 25600):
            tile = tiles.choose.__wrapped__(n, k, bits, device, pair=pair, most_k=32 if bits == 32 else 128)
            count = -(-n // tile.block_n)
            if tile.splits > 1:
                assert count <= tiles.TILES
                assert (2 if pair else 1) * count * tile.block_n * tile.splits <= tiles.COLUMNS
            blocks = -(-k // tile.block_k)
            length = -(-blocks // tile.splits)
            assert (tile.splits - 1) * length < blocks <= tile.splits * length
