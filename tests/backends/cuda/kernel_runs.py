"""What the tests of kernels share: inputs, caches as kernels see them, poisoned memory, comparisons.

Nothing here is a test.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.backends.cuda.kernels.launch import LENGTH, MAX_ROWS, SLOT
from specdec.backends.cuda.weights import DenseWeight, Fp8BlockWeight, Nvfp4Weight, Weight
from tests.backends.oracle import to_host

NAN = float("nan")
UNIT = 2.0**-24  # relative error of one rounding to float32
ROUNDING = {torch.float32: UNIT, torch.bfloat16: 2.0**-8}
FORMS = ["dense", "fp8 128x128", "fp8 per row", "fp8 32x32", "nvfp4"]
DTYPES = [torch.float32, torch.bfloat16]


# --- inputs ----------------------------------------------------------------------------------------------------------


def draw(seed: int, *shape: int, device: torch.device, dtype: torch.dtype = torch.float32, std: float = 1.0) -> Tensor:
    """Normal numbers of one seed."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std).to(device, dtype)


def rows_of(count: int, k: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """Random rows ``[count, k]`` of mixed sizes, so that the order of a sum shows in its bits."""
    some = torch.Generator().manual_seed(seed)
    x = torch.randn(count, k, generator=some) * torch.exp2(torch.randint(-6, 6, (count, k), generator=some).float())
    return x.to(dtype).to(device)


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


# --- memory ----------------------------------------------------------------------------------------------------------


def first_rows(x: Tensor, count: int) -> Tensor:
    """The first rows of x in memory that holds NaN behind them, as far as a tile of 16 rows reaches."""
    whole = torch.full((2 * MAX_ROWS, *x.shape[1:]), NAN, dtype=x.dtype, device=x.device)
    whole[:count] = x[:count]
    return whole[:count]


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory holds NaN or an impossible number while the context is open."""
    empty, empty_like = torch.empty, torch.empty_like

    def fill(tensor: Tensor) -> Tensor:
        return tensor.fill_(NAN if tensor.is_floating_point() else 77)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *args, **options: fill(empty(*args, **options)))
        patch.setattr(torch, "empty_like", lambda *args, **options: fill(empty_like(*args, **options)))
        yield


class KV:
    """A KV cache and its row of the address table; slots hold NaN until they are written."""

    def __init__(
        self, capacity: int, kv_heads: int, dim: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        self.keys, self.values = (
            torch.full((capacity, kv_heads, dim), NAN, dtype=dtype, device=device) for _ in range(2)
        )
        row = [0, self.keys.data_ptr(), self.values.data_ptr(), capacity, 0, 0, 0, 0]
        self.row = torch.tensor(row, dtype=torch.int64).to(device)

    def fill(self, seed: int, length: int) -> KV:
        """Commit ``length`` rows of normal numbers."""
        for at, held in enumerate((self.keys, self.values)):
            held[:length] = draw(seed + at, length, *held.shape[1:], device=held.device, dtype=held.dtype)
        self.row[LENGTH.value] = length
        return self


class Delta:
    """A delta cache ``[S, Hv, Dk, Dv]`` and its ring ``[W, C]``: NaN wherever nothing is committed."""

    def __init__(
        self,
        heads: int,
        key_dim: int,
        value_dim: int,
        channels: int,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        slots: int = 17,
        slot: int = 0,
        kernel: int = 4,
    ) -> None:
        self.states = torch.full((slots, heads, key_dim, value_dim), NAN, device=device)
        self.states[slot] = 0
        self.ring = torch.full((32, channels), NAN, dtype=dtype, device=device)
        row = [0, self.states.data_ptr(), self.ring.data_ptr(), slots, slot, 32, 0, 0]
        self.row = torch.tensor(row, dtype=torch.int64).to(device)
        self.kernel = kernel

    @property
    def length(self) -> int:
        return int(self.row[LENGTH.value])

    @property
    def state(self) -> Tensor:
        """The committed state."""
        return self.states[int(self.row[SLOT.value])]

    def commit(self, rows: int, *, steps: int | None = None) -> None:
        self.row[LENGTH.value] += rows
        self.row[SLOT.value] = (self.row[SLOT.value] + (rows if steps is None else steps)) % len(self.states)

    def poison(self) -> None:
        """Everything that is not committed becomes NaN: other slots, and ring rows older than the window."""
        kept = self.state.clone()
        self.states.fill_(NAN)
        self.state.copy_(kept)
        rows = [p % 32 for p in range(max(0, self.length - self.kernel + 1), self.length)]
        window = self.ring[rows].clone()
        self.ring.fill_(NAN)
        self.ring[rows] = window


# --- comparisons -----------------------------------------------------------------------------------------------------


def close(found: Tensor, expected: Any, bound: Any) -> None:
    """Every value within its own bound; prints the worst ratio."""
    ratio = np.max(np.abs(to_host(found) - to_host(expected)) / to_host(np.asarray(bound)))
    assert ratio <= 1.0, f"an error is {ratio:.3g} times its bound"


def product_bound(x: Tensor, weight: Weight, expected: Tensor, dtype: torch.dtype) -> Tensor:
    """Bound of ``x @ w.T`` summed in float32 in any order and rounded once to ``dtype``.

    Every term passes through at most K + 40 roundings of 2^-24 (K additions; products with scales; the fold of at most
    32 slices; bias and residual), so the error is at most (K + 40) 2^-24 sum |x| |w| (Higham 2002, section 3.1), and
    the last rounding adds its unit of the result.
    """
    error = (x.shape[1] + 40) * UNIT * (x.double().abs() @ weight.decode().double().abs().T)
    return error + ROUNDING[dtype] * (expected.abs() + error) + 1e-300


def same_for_any_rows(
    run: Callable[[Tensor], Tensor], x: Tensor, counts: Iterable[int] = (1, 3), alone: Iterable[int] = (6, 15)
) -> Tensor:
    """Check that row t of ``run(x[:T])`` has the bits of ``run(x)``, for T in ``counts``, and of a pass of that row
    alone for t in ``alone``; what lies behind the rows is NaN. Returns ``run(x)``."""

    def on_poison(rows: Tensor) -> Tensor:
        with poisoned():
            return run(first_rows(rows, len(rows)))

    expected = on_poison(x)
    for count in counts:
        assert torch.equal(on_poison(x[:count]), expected[:count]), f"a row of {count} rows has other bits"
    for t in alone:
        assert torch.equal(on_poison(x[t : t + 1]), expected[t : t + 1]), f"row {t} alone has other bits"
    return expected
