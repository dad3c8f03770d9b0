"""RMS norms within a derived bound of float64, for any number of rows and any strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdec.backends.cuda.kernels import norm
from specdec.errors import ShapeError
from tests.backends.cuda.dense import DTYPES, U, close, first_rows, poisoned, rows_of, same_for_any_rows

pytestmark = pytest.mark.interpreter

EPS = 1e-6


def _bound(expected: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """The sum of K squares has a relative error of at most (K + 1) 2^-24, half of which its root keeps; the root of the
    device is within 2 units, and division, two products, silu and rounding add less than 20 more."""
    error = (k / 2 + 24) * 2.0**-24 * expected.abs()
    return error + U[dtype] * (expected.abs() + error) + 1e-30


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "k"), [(1, 5), (3, 64), (17, 48), (40, 200), (2, 5000)])
def test_rms_norm(rows: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = rows_of(rows, k, dtype, device), torch.rand(k, device=device) + 0.5
    with poisoned(device):
        y = norm.rms_norm(x, weight, EPS)
    expected = norm.rms_norm_reference(x, weight, EPS)
    assert y.dtype == dtype
    close(y, expected, _bound(expected, k, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "k"), [(1, 5), (17, 48), (2, 5000)])
def test_layer_norm(rows: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias = rows_of(rows, k, dtype, device), torch.rand(k, device=device) + 0.5, torch.rand(k, device=device)
    with poisoned(device):
        y = norm.layer_norm(x, weight, bias, EPS)
    expected = norm.layer_norm_reference(x, weight, bias, EPS)
    wide = expected.abs() + bias + x.double().abs().amax(1, keepdim=True) * weight  # what is cancelled
    close(y, expected, _bound(wide, k, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 1, 16), (5, 3, 24), (20, 2, 128)])
def test_gated_rms_norm(rows: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    both = rows_of(rows, 2 * heads * dim, dtype, device).view(rows, 2, heads, dim)
    x, z = both.unbind(1)  # strided views
    weight = torch.rand(dim, device=device) + 0.5
    with poisoned(device):
        y = norm.gated_rms_norm(x, z, weight, EPS)
    expected = norm.gated_rms_norm_reference(x, z, weight, EPS)
    # exp(-z) has a relative error of about |z| 2^-24 more than its roundings
    wide = (1 + z.double().abs().flatten(1) / 8) * expected.abs()
    close(y, expected, _bound(wide, dim, dtype))


@pytest.mark.sample
def test_bits_do_not_depend_on_the_number_of_rows(device: torch.device) -> None:
    weight, x = torch.rand(72, device=device), rows_of(16, 72, torch.float32, device)
    same_for_any_rows(lambda rows: norm.rms_norm(rows, weight, EPS), x, tuple(range(1, 17)), tuple(range(16)))
    long = torch.cat([x, x, x])
    assert torch.equal(norm.rms_norm(long, weight, EPS), norm.rms_norm(x, weight, EPS).repeat(3, 1))


def test_heads_are_rows(device: torch.device) -> None:
    x, weight = rows_of(6, 32, torch.float32, device), torch.rand(32, device=device)
    heads = norm.rms_norm(first_rows(x.view(2, 3, 32), 2), weight, EPS)
    assert torch.equal(heads.view(6, 32), norm.rms_norm(x, weight, EPS))


def test_a_gate_of_another_shape_is_refused(device: torch.device) -> None:
    with pytest.raises(ShapeError, match="shape of what it gates"):
        norm.gated_rms_norm(torch.zeros(2, 3, 16), torch.zeros(2, 3, 8), torch.ones(16), EPS)
