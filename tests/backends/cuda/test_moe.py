"""Mixtures of experts: float64 within a derived bound, each expert read once, bits independent of the company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.backends.cuda import prompts
from specdec.backends.cuda.kernels import moe
from specdec.backends.cuda.kernels.launch import recording
from specdec.backends.cuda.weights import ExpertStack
from specdec.errors import ShapeError
from tests.backends.cuda.dense import first_rows, mutated, only_interpreted, poisoned, program_order, rows_of, weight_of

pytestmark = pytest.mark.interpreter

H, INNER, E, CHOSEN = 48, 32, 5, 3


def _stacks(form: str, dtype: torch.dtype, device: torch.device) -> tuple[ExpertStack, ExpertStack, ExpertStack]:
    def stack(n: int, k: int, seed: int) -> ExpertStack:
        return ExpertStack(tuple(weight_of(form, n, k, dtype, device, seed + e) for e in range(E)))

    return stack(INNER, H, 0), stack(INNER, H, 100), stack(H, INNER, 200)


def _choices(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    some = torch.Generator().manual_seed(rows)
    ids = torch.stack([torch.randperm(E, generator=some)[:CHOSEN] for _ in range(rows)])
    return ids.int().to(device), torch.rand(rows, CHOSEN, generator=some).to(device)


def _shared(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    return {"shared": rows_of(16, H, dtype, device, seed=8), "shared_gate": rows_of(1, H, dtype, device, seed=9) / 10}


def _part(options: dict[str, Any], rows: Any) -> dict[str, Any]:
    return {**options, "shared": options["shared"][rows]} if options else {}


@pytest.mark.parametrize("form", ["dense", "fp8 128x128", "fp8 32x32", "nvfp4"])
@pytest.mark.parametrize("with_shared", [False, True])
def test_experts(form: str, with_shared: bool, device: torch.device) -> None:
    dtype = torch.float32
    scale = 1.0 if form == "dense" else 1e-3  # codes reach 448
    x, residual = rows_of(3, H, dtype, device) * scale, rows_of(3, H, dtype, device, seed=1)
    (ids, weights), stacks = _choices(3, device), _stacks(form, dtype, device)
    options = _part(_shared(dtype, device) if with_shared else {}, slice(3))
    with poisoned():
        y = moe.experts(first_rows(x, 3), ids, weights, *stacks, first_rows(residual, 3), **options)
    expected = moe.experts_reference(x, ids, weights, *stacks, residual, **options)
    # two chained sums of H and INNER terms in float32: (H + INNER + 100) 2^-24 of the magnitudes that meet, bounded by
    # the same experts on absolute values (silu and its slope are at most 1.1 |z| + 0.3 and 1.1)
    magnitude = residual.double().abs()
    for t in range(3):
        for slot, e in enumerate(ids[t].tolist()):
            gate, up, down = (stack[e].decode().double().abs() for stack in stacks)
            g, u = gate @ x[t].double().abs(), up @ x[t].double().abs()
            magnitude[t] += weights[t, slot].double() * (down @ (1.1 * 2 * g * u + u))
    if with_shared:
        shared, gate = options["shared"].double().abs(), options["shared_gate"].double().abs()
        magnitude += shared * (1 + x.double().abs() @ gate.T)
    ratio = ((y.double() - expected).abs() / ((H + INNER + 100) * 2.0**-24 * magnitude)).max().item()
    assert ratio <= 1.0, f"an error is {ratio:.3g} times its bound"


@pytest.mark.sample
def test_bits_do_not_depend_on_the_company(device: torch.device) -> None:
    dtype = torch.float32
    x, residual = rows_of(16, H, dtype, device), rows_of(16, H, dtype, device, seed=1)
    (ids, weights), stacks, options = _choices(16, device), _stacks("dense", dtype, device), _shared(dtype, device)

    def run(rows: list[int]) -> Tensor:
        with poisoned():
            part = first_rows(x[rows], len(rows))
            return moe.experts(
                part, ids[rows], weights[rows], *stacks, first_rows(residual[rows], len(rows)), **_part(options, rows)
            )

    whole = run(list(range(16)))
    for rows in ([0], [15], [3, 9], list(range(7)), list(range(15, 4, -1))):
        assert torch.equal(run(rows), whole[rows]), f"rows {rows} have other bits"


class _Counting:
    """Counts the programs of ``experts_kernel`` that find themselves first with their expert."""

    def __init__(self) -> None:
        self.places: list[tuple[Any, ...]] = []

    def launch(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.places.append((kernel.__name__, grid))


@pytest.mark.parametrize("form", ["dense", "fp8 128x128", "nvfp4"])
@pytest.mark.parametrize("unused", [(), (0,), (2, E - 1)])
def test_experts_of_a_prompt(form: str, unused: tuple[int, ...], device: torch.device) -> None:
    """Rows that share an expert, slots of one row with the same expert, and experts that no row chose."""
    rows = 19
    scale = 1.0 if form == "dense" else 1e-3
    x, residual = rows_of(rows, H, torch.float32, device) * scale, rows_of(rows, H, torch.float32, device, seed=1)
    stacks, some = _stacks(form, torch.float32, device), torch.Generator().manual_seed(3)
    left = torch.tensor([e for e in range(E) if e not in unused])
    ids = left[torch.randint(len(left), (rows, CHOSEN), generator=some)].int().to(device)
    weights = torch.rand(rows, CHOSEN, generator=some).to(device)
    y = prompts.moe(x, ids, weights, stacks, residual, None)
    expected = moe.experts_reference(x, ids, weights, *stacks, residual)
    assert (y.double() - expected.double()).abs().max() <= 1e-5 * expected.abs().max()


def test_the_host_reads_nothing(device: torch.device) -> None:
    """The launches are a function of shapes: a graph may hold them."""
    dtype, stacks = torch.float32, _stacks("dense", torch.float32, device)
    found = []
    for fill in (0, 4):
        counting = _Counting()
        ids = torch.full((2, CHOSEN), fill, dtype=torch.int32, device=device)
        x = rows_of(2, H, dtype, device)
        with recording(counting):
            moe.experts(x, ids, torch.ones(2, CHOSEN, device=device), *stacks, x)
        found.append(counting.places)
    assert found[0] == found[1]


_FIRST = "if first == place:"


def _read_once(module: Any, device: torch.device) -> None:
    """Experts whose weights are destroyed after the first program that reads them: nobody may come back for more."""
    stacks = _stacks("dense", torch.float32, device)
    x = rows_of(4, H, torch.float32, device)
    ids = torch.tensor([[1, 2], [2, 1], [1, 3], [3, 2]], dtype=torch.int32, device=device)
    weights = torch.rand(4, 2, device=device)
    expected = moe.experts(x, ids, weights, *stacks, x)
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    plain, wanted = builder.set_grid_idx, {0: 1, 1: 2, 5: 3}  # place -> expert that is first there

    def set_idx(place: int, tile: int, last: int) -> None:
        plain(place, tile, last)
        if place not in wanted:  # every expert has been read by its first place; what follows must not need it
            stashed.append([expert.tensor.clone() for expert in stacks[0].experts])  # type: ignore[union-attr]
            for expert in stacks[0].experts:
                expert.tensor.fill_(float("nan"))  # type: ignore[union-attr]
        elif stashed:
            for expert, before in zip(stacks[0].experts, stashed.pop(0), strict=True):
                expert.tensor.copy_(before)  # type: ignore[union-attr]
            stashed.clear()

    stashed: list[list[Tensor]] = []
    inner = torch.empty(4, 2, INNER, device=device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "set_grid_idx", set_idx)
        module._experts(x, ids, stacks[0], stacks[1], inner)
    assert not inner.isnan().any(), "an expert was read twice"
    assert expected.shape == x.shape


@only_interpreted
def test_each_expert_is_read_once(device: torch.device) -> None:
    _read_once(moe, device)


@only_interpreted
def test_mutant_that_reads_experts_for_every_place(tmp_path: Path, device: torch.device) -> None:
    with pytest.raises(AssertionError, match="read twice"):
        _read_once(mutated(moe, tmp_path, (_FIRST, "if first <= place:")), device)


@only_interpreted
def test_bits_do_not_depend_on_the_order_of_programs(device: torch.device) -> None:
    stacks, x = _stacks("dense", torch.float32, device), rows_of(4, H, torch.float32, device)
    ids, weights = _choices(4, device)
    found = []
    for seed in (None, 1):
        with program_order(seed), poisoned():
            found.append(moe.experts(x, ids, weights, *stacks, x))
    assert torch.equal(found[0], found[1])


def test_what_is_refused(device: torch.device) -> None:
    stacks, x = _stacks("dense", torch.float32, device), rows_of(2, H, torch.float32, device)
    ids, weights = _choices(2, device)
    with pytest.raises(ShapeError, match="do not fit rows of 40"):
        moe.experts(x[:, :40], ids, weights, *stacks, x)
    with pytest.raises(ShapeError, match="ids should be int32"):
        moe.experts(x, ids.long(), weights, *stacks, x)
