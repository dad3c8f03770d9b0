"""Small kernels beside their float64 references: values, memory that holds NaN, rows in all company, and mutants."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from specdec.backends.cuda.kernels import commit, norm, rows
from specdec.errors import ShapeError
from tests.backends.cuda.dense import (
    DTYPES,
    U,
    close,
    first_rows,
    mutated,
    only_interpreted,
    poisoned,
    rows_of,
    same_for_any_rows,
)

pytestmark = pytest.mark.interpreter

EPS = 1e-6


def _sums(expected: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """The sum of K squares has a relative error of at most (K + 1) 2^-24, half of which its root keeps; the root of the
    device is within 2 units, and division, two products, silu and rounding add less than 20 more."""
    error = (k / 2 + 24) * 2.0**-24 * expected.abs()
    return error + U[dtype] * (expected.abs() + error) + 1e-30


@attrs.frozen(kw_only=True)
class Case:
    """A kernel over rows ``x [T, K]``.

    Attributes:
        run: the wrapper, in this module or in a mutant of it.
        reference: the values in float64.
        scale: the magnitudes that rounding errors are relative to; the values themselves by default.
    """

    module: ModuleType
    run: Callable[[Any, Tensor], Tensor]
    reference: Callable[[Tensor], Tensor]
    scale: Callable[[Tensor, Tensor], Tensor] = lambda x, expected: expected
    mutants: tuple[tuple[str, str], ...] = ()


def _vector(k: int, seed: int) -> Tensor:
    return torch.rand(k, generator=torch.Generator().manual_seed(seed)) + 0.5


def _halves(x: Tensor, heads: int = 1) -> tuple[Tensor, Tensor]:
    """Two strided views ``[T, heads, K / 2 / heads]`` of x."""
    first, second = x.view(len(x), 2, heads, -1).unbind(1)
    return first, second


def _on(x: Tensor, vector: Tensor) -> Tensor:
    return vector.to(x.device)


CASES: dict[str, Case] = {
    "rms norm": Case(
        module=norm,
        run=lambda m, x: m.rms_norm(x, _on(x, _vector(x.shape[1], 0)), EPS),
        reference=lambda x: norm.rms_norm_reference(x, _on(x, _vector(x.shape[1], 0)), EPS),
        mutants=(("tl.rsqrt(tl.sum(total, 1) / K + eps)", "tl.rsqrt(tl.sum(total, 1) / K)"),
                 ("return part.to(tl.float32) * scale[:, None] * weight[None, :]",
                  "return part.to(tl.float32) * scale[:, None]")),
    ),
    "layer norm": Case(
        module=norm,
        run=lambda m, x: m.layer_norm(x, _on(x, _vector(x.shape[1], 0)), _on(x, _vector(x.shape[1], 1)), EPS),
        reference=lambda x: norm.layer_norm_reference(
            x, _on(x, _vector(x.shape[1], 0)), _on(x, _vector(x.shape[1], 1)), EPS
        ),
        # with what is cancelled
        scale=lambda x, expected: expected.abs() + 2 + 1.5 * x.double().abs().amax(1, keepdim=True),
        mutants=(("centred = tl.where(mask, part - mean[:, None], 0.0)", "centred = tl.where(mask, part, 0.0)"),
                 ("weight[None, :], bias[None, :])", "weight[None, :], 0.0 * bias[None, :])")),
    ),
    "gated norm": Case(
        module=norm,
        run=lambda m, x: m.gated_rms_norm(*_halves(x, 2), _on(x, _vector(x.shape[1] // 4, 0)), EPS),
        reference=lambda x: norm.gated_rms_norm_reference(*_halves(x, 2), _on(x, _vector(x.shape[1] // 4, 0)), EPS),
        # exp(-z) has a relative error of about |z| 2^-24 more than its roundings
        scale=lambda x, expected: (1 + _halves(x)[1].double().abs().flatten(1) / 8) * expected.abs(),
        mutants=(("(wide_gate * tl.sigmoid(wide_gate))", "tl.sigmoid(wide_gate)"),),
    ),
    "gated by silu": Case(
        module=rows,
        run=lambda m, x: m.silu_product(*(part[:, 0] for part in _halves(x)), x.dtype),
        reference=lambda x: torch.nn.functional.silu(_halves(x)[0][:, 0].double()) * _halves(x)[1][:, 0].double(),
        scale=lambda x, expected: (1 + _halves(x)[0][:, 0].double().abs() / 8) * expected.abs(),
        mutants=(("packed.silu_product(a, b)", "packed.silu_product(b, a)"),),
    ),
    "gelu": Case(
        module=rows,
        run=lambda m, x: m.gelu(x),
        reference=lambda x: x.double() * torch.sigmoid(1.5957691216057308 * (x.double() + 0.044715 * x.double() ** 3)),
        scale=lambda x, expected: (1 + x.double().abs() ** 3) * expected.abs(),  # the exponent's error
        mutants=(("1.5957691216057", "1.7"),),
    ),
    "sum": Case(
        module=rows,
        run=lambda m, x: m.add(*(part[:, 0] for part in _halves(x))),
        reference=lambda x: sum(part[:, 0].double() for part in _halves(x)),  # type: ignore[arg-type]
        scale=lambda x, expected: sum(part[:, 0].double().abs() for part in _halves(x)),  # type: ignore[arg-type]
        mutants=(("b + other * b_row", "b + t * 0"),),
    ),
    "positions": Case(
        module=rows,
        run=lambda m, x: m.add(x, _vector(40 * x.shape[1], 3).view(40, -1).to(x.device, x.dtype), 7),
        reference=lambda x: x.double() + _vector(40 * x.shape[1], 3).view(40, -1).to(x)[7 : 7 + len(x)].double(),
        scale=lambda x, expected: x.double().abs() + 2,
        mutants=(("other = tl.minimum(first + t, rows - 1)", "other = tl.minimum(first, rows - 1)"),),
    ),
}  # fmt: skip
POSITIONED = ("positions",)  # a row alone stands elsewhere


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_values_are_within_a_derived_bound(name: str, dtype: torch.dtype, device: torch.device) -> None:
    check(name, CASES[name].module, dtype, device)


def check(name: str, module: Any, dtype: torch.dtype, device: torch.device) -> None:
    case = CASES[name]
    for count, k in ((1, 4), (5, 48), (17, 200), (2, 5000)):
        x = rows_of(count, k, dtype, device)
        with poisoned():
            y = case.run(module, first_rows(x, count) if count <= 16 else x)
        expected = case.reference(x)
        assert y.dtype == dtype
        close(y, expected, _sums(case.scale(x, expected), k, dtype))


@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_other_rows(name: str, device: torch.device) -> None:
    x = rows_of(16, 72, torch.float32, device)
    alone = () if name in POSITIONED else (0, 6, 15)
    same_for_any_rows(lambda rows: CASES[name].run(CASES[name].module, rows), x, (1, 2, 7, 16), alone)


MUTANTS = [(name, change) for name, case in CASES.items() for change in case.mutants]


@only_interpreted
@pytest.mark.parametrize(("name", "change"), MUTANTS, ids=[f"{name}: {change[1]}" for name, change in MUTANTS])
def test_mutants_are_killed(name: str, change: tuple[str, str], tmp_path: Path, device: torch.device) -> None:
    with pytest.raises(AssertionError):
        check(name, mutated(CASES[name].module, tmp_path, change), torch.float32, device)


# --- the commit of rows -----------------------------------------------------------------------------------------------


def committed(module: Any, kept: int, whole: bool, device: torch.device) -> None:
    """130 caches of both kinds, more than one program's, at different lengths and slots."""
    draw = torch.Generator().manual_seed(kept)
    table = torch.randint(0, 100, (130, 8), generator=draw)
    table[:, 3] = torch.randint(3, 18, (130,), generator=draw)
    table[:, 4] = table[:, 4] % table[:, 3]
    kinds = torch.randint(0, 2, (130,), generator=draw, dtype=torch.int32)
    expected = table.clone()
    commit.commit_rows_reference(expected, kinds, kept, whole=whole)
    found = table.to(device)
    module.commit_rows(found, kinds.to(device), kept, whole=whole)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize(("kept", "whole"), [(0, False), (1, False), (5, False), (0, True), (40, True)])
def test_commit_rows(kept: int, whole: bool, device: torch.device) -> None:
    committed(commit, kept, whole, device)


@only_interpreted
@pytest.mark.parametrize(
    "change",
    [
        ("other=0) == 1)", "other=0) >= 0)"),
        (" + steps) % slots", " + steps)"),
        ("tl.minimum(count, 1)", "count"),
        ("other=0) + count, mask=known", "other=0), mask=known"),
    ],
)
def test_mutants_of_the_commit_are_killed(change: tuple[str, str], tmp_path: Path, device: torch.device) -> None:
    mutant = mutated(commit, tmp_path, change)

    def both() -> None:
        for kept, whole in ((5, False), (40, True)):
            committed(mutant, kept, whole, device)

    with pytest.raises(AssertionError):
        both()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    table = torch.zeros(3, 8, dtype=torch.int64)
    refused: list[Callable[[], Any]] = [
        lambda: commit.commit_rows(table[:, :4], torch.zeros(3, dtype=torch.int32), 1),
        lambda: commit.commit_rows(table, torch.zeros(2, dtype=torch.int32), 1),
        lambda: norm.gated_rms_norm(torch.zeros(2, 3, 16), torch.zeros(2, 3, 8), torch.ones(16), EPS),
    ]
    for call in refused:
        with pytest.raises(ShapeError):
            call()
