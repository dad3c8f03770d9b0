"""What the tests of dense kernels share: weights in every format, poisoned memory, row checks, mutated kernels."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.backends.cuda.kernels.launch import MAX_ROWS, interpreting
from specdec.backends.cuda.weights import DenseWeight, Fp8BlockWeight, Nvfp4Weight, Weight

FORMS = ["dense", "fp8 128x128", "fp8 per row", "fp8 32x32", "nvfp4"]
U = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}  # unit roundoff
DTYPES = [torch.float32, torch.bfloat16]


def weight_of(form: str, n: int, k: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Weight:
    """A random weight; every finite code can occur."""
    some = torch.Generator().manual_seed(seed + 1000 * n + k)
    if form == "dense":
        return DenseWeight(torch.randn(n, k, generator=some).to(dtype).to(device))
    codes = torch.randint(0, 256, (n, k if "fp8" in form else k // 2), generator=some, dtype=torch.uint8)
    if form == "nvfp4":
        scales = torch.randint(0, 127, (n, k // 16), generator=some, dtype=torch.uint8)
        return Nvfp4Weight(codes.to(device), scales.to(device), torch.rand(n, generator=some).to(device))
    codes[(codes & 127) == 127] = 0  # NaN
    block = {"fp8 128x128": (128, 128), "fp8 per row": (1, k), "fp8 32x32": (32, 32)}[form]
    scales = torch.rand(-(-n // block[0]), -(-k // block[1]), generator=some)
    return Fp8BlockWeight(codes.to(device), scales.to(device), block)


def rows_of(count: int, k: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """Random rows ``[count, k]`` of mixed sizes, so that the order of a sum shows in its bits."""
    some = torch.Generator().manual_seed(seed)
    x = torch.randn(count, k, generator=some) * torch.exp2(torch.randint(-6, 6, (count, k), generator=some).float())
    return x.to(dtype).to(device)


def first_rows(x: Tensor, count: int) -> Tensor:
    """The first rows of x in memory that holds NaN behind them, as far as a tile of 16 rows reaches."""
    whole = torch.full((2 * MAX_ROWS, *x.shape[1:]), float("nan"), dtype=x.dtype, device=x.device)
    whole[:count] = x[:count]
    return whole[:count]


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory holds NaN or an impossible number while the context is open."""
    empty, empty_like = torch.empty, torch.empty_like

    def fill(tensor: Tensor) -> Tensor:
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 77)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *args, **options: fill(empty(*args, **options)))
        patch.setattr(torch, "empty_like", lambda *args, **options: fill(empty_like(*args, **options)))
        yield


def same_for_any_rows(
    run: Callable[[Tensor], Tensor],
    x: Tensor,
    counts: tuple[int, ...] = (1, 3, 16),
    alone: tuple[int, ...] = (0, 6, 15),
) -> Tensor:
    """Check that row t of ``run(x[:T])`` has the bits of ``run(x)``, for T in ``counts``, and of a pass of that row
    alone, for t in ``alone``: ``run(x)``."""

    def poisoned_run(rows: Tensor, count: int) -> Tensor:
        with poisoned():
            return run(first_rows(rows, count))

    expected = poisoned_run(x, len(x))
    assert not expected.isnan().any()
    for count in counts:
        assert torch.equal(poisoned_run(x, count), expected[:count]), f"a pass of {count} rows has other bits"
    for t in alone:
        assert torch.equal(poisoned_run(x[t:], 1), expected[t : t + 1]), f"row {t} alone has other bits"
    return expected


def close(found: Tensor, expected: Tensor, bound: Tensor) -> None:
    """Every value within its own bound; prints the worst ratio."""
    ratio = ((found.double() - expected).abs() / bound).max().item()
    assert ratio <= 1.0, f"an error is {ratio:.3g} times its bound"


def product_bound(x: Tensor, weight: Weight, expected: Tensor, dtype: torch.dtype, extra: Tensor | float = 0) -> Tensor:
    """Bound of ``x @ w.T`` summed in float32 in any order and rounded once to ``dtype``.

    Every term passes through at most K + 40 roundings of 2^-24 (K additions; products with scales; the fold of at most
    32 slices; bias and residual), so the error is at most (K + 40) 2^-24 sum |x| |w| (Higham 2002, section 3.1), and
    the last rounding adds its unit of the result. ``extra`` joins the sum of magnitudes.
    """
    magnitude = x.double().abs() @ weight.decode().double().abs().T + extra
    error = (x.shape[1] + 40) * 2.0**-24 * magnitude
    return error + U[dtype] * (expected.abs() + error) + 1e-300


@contextlib.contextmanager
def program_order(seed: int | None) -> Iterator[None]:
    """Interpret the programs of every launch in a shuffled order (None: backwards)."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    plain_dim, plain_idx = builder.set_grid_dim, builder.set_grid_idx
    order: dict[tuple[int, ...], tuple[int, ...]] = {}

    def set_dim(*grid: int) -> None:
        places = list(itertools.product(*map(range, grid)))
        if seed is None:
            shuffled = places[::-1]
        else:
            at = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed)).tolist()
            shuffled = [places[i] for i in at]
        order.clear()
        order.update(zip(places, shuffled, strict=True))
        plain_dim(*grid)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "set_grid_dim", set_dim)
        patch.setattr(builder, "set_grid_idx", lambda *at: plain_idx(*order[at]))
        yield


def mutated(module: ModuleType, folder: Path, *changes: tuple[str, str]) -> Any:
    """A second copy of a kernel module with changed source."""
    source = Path(str(module.__file__)).read_text()
    for old, new in changes:
        assert source.count(old) >= 1, f"nothing to mutate: {old!r}"
        source = source.replace(old, new)
    name = f"mutated_{folder.name}_{module.__name__.rpartition('.')[2]}"
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made  # triton looks a kernel's module up by its name
    spec.loader.exec_module(made)
    return made


only_interpreted = pytest.mark.skipif(not interpreting(), reason="mutants and orders are tried when interpreting")
