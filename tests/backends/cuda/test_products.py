"""Products: the float64 value within a derived bound, and the same bits whatever the number of rows."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from specdec.backends.cuda import products
from specdec.backends.cuda.kernels import packed
from specdec.backends.cuda.weights import DenseWeight, fuse, runs
from specdec.errors import ShapeError
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
    rows_of,
    same_for_any_rows,
    weight_of,
)

pytestmark = pytest.mark.interpreter

PACKED = FORMS[1:]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_a_product_is_within_its_bound(form: str, dtype: torch.dtype, device: torch.device) -> None:
    """Up to 16 rows, and more; rounded to act, and not."""
    n, k = 37, 272
    weight = weight_of(form, n, k, dtype, device)
    for count in (5, 16, 18):
        x = rows_of(count, k, dtype, device)
        with poisoned():
            found = (
                products.linear(first_rows(x, count), weight),
                products.float32_product(first_rows(x, count), weight),
            )
        expected = packed.product_reference(x, weight)
        for y, act in zip(found, (dtype, torch.float32), strict=True):
            assert y.dtype == act
            # prompts multiply by weights that were rounded to act
            decoded = U[dtype] * (x.double().abs() @ weight.decode().double().abs().T) if count > 16 else 0.0
            close(y, expected, product_bound(x, weight, expected, act) + decoded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(40, 96), (37, 100), (512, 128), (96, 1024), (5, 33)])
def test_padding_makes_the_bits_of_a_row_independent_of_the_number_of_rows(
    n: int, k: int, dtype: torch.dtype, device: torch.device
) -> None:
    """With torch's products on the host. On a device only the probe at load promises it."""
    weight, x = weight_of("dense", n, k, dtype, device), rows_of(16, k, dtype, device)
    for product in (products.linear, products.float32_product):
        same_for_any_rows(functools.partial(product, weight=weight), x, tuple(range(1, 17)), tuple(range(16)))


def test_a_product_without_padding_has_other_bits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: a library has another kernel for a single row."""
    monkeypatch.setattr(products, "padded", lambda x: x)
    weight, x = weight_of("dense", 96, 1024, torch.float32, device), rows_of(16, 1024, torch.float32, device)
    with pytest.raises(AssertionError, match="other bits"):
        same_for_any_rows(functools.partial(products.linear, weight=weight), x)


@pytest.mark.parametrize("form", PACKED)
def test_packed_products_have_the_same_bits_for_any_rows(form: str, device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weight, x = weight_of(form, 37, 112, dtype, device), rows_of(16, 112, dtype, device)
    # float32 results: a rounding to act would hide most differences
    same_for_any_rows(functools.partial(products.float32_product, weight=weight), x, (1, 2, 7), (6, 15))


_TERMS = "tl.sum(x.to(tl.float32)[:, None, :]"
MUTANTS = {
    "columns beyond K are read": ("mask = mask & (at < K)[None, :]", "mask = mask"),
    "the sum forgets earlier blocks": ("multiply(x, acc,", "multiply(x, acc * 0,"),
    "the scale of a row is left out": ("acc = finish(acc, globals_ptr, inside, FORMAT)", "acc = acc"),
    "rows share their sums": (f"acc + {_TERMS}", f"acc + 1e-6 * tl.sum(x.to(tl.float32)) + {_TERMS}"),
}


@only_interpreted
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_the_packed_product_are_killed(name: str, tmp_path: Path, device: torch.device) -> None:
    mutant = mutated(packed, tmp_path, MUTANTS[name])

    def check() -> None:
        for form in ("fp8 32x32", "nvfp4"):
            weight, x = weight_of(form, 37, 272, torch.float32, device), rows_of(16, 272, torch.float32, device)
            run = functools.partial(mutant.product, weight=weight, size=37, dtype=torch.float32)
            y, expected = same_for_any_rows(run, x, (3,), (6,)), packed.product_reference(x, weight)
            close(y, expected, product_bound(x, weight, expected, torch.float32))

    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("form", ["dense", "fp8 32x32", "nvfp4"])
def test_swiglu(form: str, device: torch.device) -> None:
    dtype, n, k = torch.float32, 32, 96
    gate, up = weight_of(form, n, k, dtype, device), weight_of(form, n, k, dtype, device, seed=5)
    x = rows_of(16, k, dtype, device) / (100 * k)
    y = same_for_any_rows(functools.partial(products.swiglu, gate=gate, up=up), x, (1, 3))
    left, right = packed.product_reference(x, gate), packed.product_reference(x, up)
    error_left = product_bound(x, gate, left, torch.float32)
    error_right = product_bound(x, up, right, torch.float32)
    gated = torch.nn.functional.silu(left)
    # |silu'| <= 1.1; exp, division and two products in float32 add less than 16 roundings
    expected = gated * right
    bound = 1.1 * error_left * (right.abs() + error_right) + gated.abs() * error_right + 16 * U[dtype] * expected.abs()
    close(y, expected, bound + 1e-30)
    assert fuse([gate, up])
    assert torch.equal(products.swiglu(x, gate, up), y)


@pytest.mark.parametrize("form", FORMS)
def test_fused_weights_give_what_each_of_them_gives(form: str, device: torch.device) -> None:
    """One product for a run in memory, with some biases, for passes and for prompts."""
    sizes = (128, 256, 32) if "128x128" in form else (32, 64, 32)
    weights = [weight_of(form, n, 128, torch.float32, device, seed=n) for n in sizes]
    biases = [DenseWeight(rows_of(1, n, torch.float32, device, seed=2)[0]) for n in sizes[:2]]
    for count in (3, 20):
        x = rows_of(count, 128, torch.float32, device)
        apart = products.project(x, weights, [*biases, None])
        twins = [weight_of(form, n, 128, torch.float32, device, seed=n) for n in sizes]
        assert fuse(twins)
        assert runs(twins) == [3]
        assert not fuse(twins)
        for y, alone in zip(products.project(x, twins, [*biases, None]), apart, strict=True):
            assert torch.allclose(y, alone, rtol=1e-5, atol=1e-5 * float(alone.abs().max()))
    plain = products.project(x, weights)
    assert torch.allclose(plain[0] + biases[0].tensor, apart[0])


def test_what_cannot_be_fused_stays(device: torch.device) -> None:
    dense, packed_ = (weight_of(form, 40, 64, torch.float32, device) for form in ("dense", "nvfp4"))
    uneven = [weight_of("fp8 32x32", 40, 64, torch.float32, device, seed=seed) for seed in (0, 1)]
    assert not fuse([dense, packed_])
    assert not fuse(uneven)  # a block of scales would straddle both
    assert runs([dense, packed_]) == [1, 1]


@pytest.mark.parametrize("count", [3, 16, 19])
def test_heads_with_matrices_of_their_own(count: int, device: torch.device) -> None:
    x = rows_of(count, 3 * 41, torch.float32, device).view(count, 3, 41)[..., 4:]  # strided
    weights = torch.randn(3, 11, 37, device=device)
    expected = torch.einsum("tni,noi->tno", x.double(), weights.double())
    bound = 90 * 2.0**-24 * torch.einsum("tni,noi->tno", x.double().abs(), weights.double().abs())
    if count == 16:
        y = same_for_any_rows(functools.partial(products.project_heads, weights=weights), x)
    else:
        y = products.project_heads(x, weights)
    assert y.is_contiguous()
    close(y, expected, bound)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    for form in ("dense", "nvfp4"):
        with pytest.raises(ShapeError, match="rows of 40 values do not fit a weight of 64 columns"):
            products.linear(torch.zeros(2, 40, device=device), weight_of(form, 8, 64, torch.float32, device))
    with pytest.raises(ShapeError, match="takes 1 to 16 rows, got 17"):
        packed.product(torch.zeros(17, 64), weight_of("nvfp4", 8, 64, torch.float32, device), 8, torch.float32)
