"""Latent attention: right by a float64 reference, and each row's bits its own."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from torch import Tensor

from specdec.backends.cuda.kernels import latent
from specdec.errors import ShapeError
from tests.backends.cuda.tables import EPS, KV, draw, mutated

pytestmark = pytest.mark.interpreter


class Layer:
    """Latent attention over fixed rows behind ``start`` committed ones, in passes of any size."""

    def __init__(
        self,
        device: torch.device,
        start: int,
        rows: int,
        *,
        heads: int = 3,
        dims: int = 24,
        values: int = 20,
        dtype: torch.dtype = torch.float32,
        module: ModuleType = latent,
    ) -> None:
        self.q = draw(1, rows, heads, dims, device=device, dtype=dtype)
        self.rows = draw(2, rows, dims + 3, device=device, dtype=dtype)[:, 3:]
        self.start, self.values, self.module = start, values, module
        self.cache = KV(start + rows + 5, 1, dims, device, dtype).fill(3, start)

    def run(self, at: int, T: int) -> Tensor:
        self.cache.poison()
        rows = slice(at, at + T)
        return self.module.attend_latent(
            self.q[rows],
            self.rows[rows],
            self.cache.row,
            scale=0.2,
            value_dims=self.values,
            max_length=len(self.cache.keys),
        )

    def alone(self, rows: int) -> Tensor:
        out = []
        for at in range(rows):
            out.append(self.run(at, 1))
            self.cache.commit(1)
        self.cache.row[0] = self.start
        return torch.cat(out)


def bound(q: Tensor, rows: Tensor, scale: float, dtype: torch.dtype) -> float:
    """As ``test_attention.attend_bound`` derives it; keys are whole rows, values no larger than they."""
    unit = EPS[torch.float32]
    largest = float((q.abs().flatten(0, 1) @ rows.abs().T).max()) * scale
    rounding = 2 * EPS[dtype] if dtype != torch.float32 else 0.0
    return float(rows.abs().max()) * (unit * (2 * largest * (q.shape[-1] / 8 + 16) + 64) + rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "dims", "values", "start", "T"),
    [(3, 24, 20, 0, 1), (16, 48, 32, 126, 3), (5, 40, 40, 301, 2), (2, 576, 512, 130, 2), (1, 9, 1, 3, 16)],
)
def test_attend_latent(
    heads: int, dims: int, values: int, start: int, T: int, dtype: torch.dtype, device: torch.device
) -> None:
    """DeepSeek's row of 576, rows without a rotary part, one value; stale slots are poisoned."""
    layer = Layer(device, start, T, heads=heads, dims=dims, values=values, dtype=dtype)
    out = layer.run(0, T)
    rows = layer.cache.keys[: start + T, 0]
    assert torch.equal(rows[start:], layer.rows)
    assert layer.cache.keys[start + T :].isnan().all()
    wide = layer.q.double(), rows.double()
    expected = latent.attend_latent_reference(*wide, start, scale=0.2, value_dims=values)
    assert out.shape == (T, heads, values)
    assert (out - expected).abs().max() <= bound(*wide, 0.2, dtype)


def check_rows_are_their_own(module: ModuleType, device: torch.device, start: int, sizes: Sequence[int]) -> None:
    layer = Layer(device, start, max(sizes), module=module)
    expected = layer.alone(max(sizes))
    keys = layer.cache.keys.clone()
    for T in sizes:
        assert torch.equal(layer.run(0, T), expected[:T]), f"{T} rows from {start}"
        assert torch.equal(layer.cache.keys[: start + T], keys[: start + T])


def test_rows_are_their_own(device: torch.device) -> None:
    """1 to 16 rows against one at a time, across the end of the first split and of tiles of 16 pairs."""
    check_rows_are_their_own(latent, device, 121, range(1, 17))


@pytest.mark.gpu
@pytest.mark.parametrize("start", [0, 500])
def test_rows_are_their_own_at_real_size(start: int, device: torch.device) -> None:
    layer = Layer(device, start, 16, heads=128, dims=576, values=512, dtype=torch.bfloat16)
    expected = layer.alone(16)
    for T in range(1, 17):
        assert torch.equal(layer.run(0, T), expected[:T])


@pytest.mark.sample
def test_shapes_are_checked(device: torch.device) -> None:
    layer = Layer(device, 4, 2)
    with pytest.raises(ShapeError, match="25 value dimensions"):
        latent.attend_latent(layer.q, layer.rows, layer.cache.row, scale=1.0, value_dims=25, max_length=9)


MUTANTS = {
    "a stale row is read": [("written = (at < last)[:, None]", "written = (at < last + 1)[:, None]")],
    "rows see later rows": [("at[None, :] <= position[:, None]", "at[None, :] < end + 0 * position[:, None]")],
    "tiles from T": [("BLOCK_N=max(16,", "BLOCK_N=16 if T > 4 else max(16,")],
    "rows a slot off": [("slot = tl.load(row + LENGTH) + t\n", "slot = tl.load(row + LENGTH) + t + 1\n")],
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_killed(name: str, device: torch.device, tmp_path: pathlib.Path) -> None:
    copy = mutated(latent, tmp_path, *MUTANTS[name])
    with pytest.raises(AssertionError):
        check_rows_are_their_own(copy, device, 121, (1, 5, 10))
