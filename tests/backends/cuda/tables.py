"""Caches as kernels see them: tensors and a row of the address table; and mutated copies of kernel modules.

Nothing here is a test.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from specdec.backends.cuda.kernels.launch import LENGTH, SLOT

NAN = float("nan")
EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float64: 2.0**-53}  # relative error of one rounding


def draw(seed: int, *shape: int, device: torch.device, dtype: torch.dtype = torch.float32, std: float = 1.0) -> Tensor:
    """Normal numbers of one seed."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std).to(device, dtype)


def address_row(device: torch.device, *values: int) -> Tensor:
    """A row of the address table, zeros behind ``values``."""
    return torch.tensor([*values, *[0] * (8 - len(values))], dtype=torch.int64).to(device)


class KV:
    """A KV cache whose slots all hold NaN until they are written."""

    def __init__(
        self, capacity: int, kv_heads: int, dim: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        self.keys = torch.full((capacity, kv_heads, dim), NAN, dtype=dtype, device=device)
        self.values = torch.full((capacity, kv_heads, dim), NAN, dtype=dtype, device=device)
        self.row = address_row(device, 0, self.keys.data_ptr(), self.values.data_ptr(), capacity)

    @property
    def length(self) -> int:
        return int(self.row[LENGTH.value])

    def fill(self, seed: int, length: int) -> KV:
        """Commit ``length`` rows of normal numbers."""
        shape = (length, *self.keys.shape[1:])
        self.keys[:length] = draw(seed, *shape, device=self.keys.device, dtype=self.keys.dtype)
        self.values[:length] = draw(seed + 1, *shape, device=self.keys.device, dtype=self.keys.dtype)
        self.row[LENGTH.value] = length
        return self

    def commit(self, rows: int) -> None:
        self.row[LENGTH.value] += rows

    def poison(self) -> None:
        """Stale slots hold what no row may read."""
        self.keys[self.length :], self.values[self.length :] = NAN, NAN


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
        ring: int = 32,
        slot: int = 0,
        kernel: int = 4,
    ) -> None:
        self.states = torch.full((slots, heads, key_dim, value_dim), NAN, device=device)
        self.states[slot] = 0
        self.ring = torch.full((ring, channels), NAN, dtype=dtype, device=device)
        self.row = address_row(device, 0, self.states.data_ptr(), self.ring.data_ptr(), slots, slot, ring)
        self.kernel = kernel

    @property
    def length(self) -> int:
        return int(self.row[LENGTH.value])

    @property
    def state(self) -> Tensor:
        """The committed state."""
        return self.states[int(self.row[SLOT.value])]

    def window(self, rows: int) -> Tensor:
        """The last ``rows`` committed raw rows, zeros before the first token: ``[rows, C]``."""
        kept = [
            self.ring[p % len(self.ring)] if p >= 0 else torch.zeros_like(self.ring[0])
            for p in range(self.length - rows, self.length)
        ]
        return torch.stack(kept)

    def commit(self, rows: int, *, steps: int | None = None) -> None:
        self.row[LENGTH.value] += rows
        self.row[SLOT.value] = (self.row[SLOT.value] + (rows if steps is None else steps)) % len(self.states)

    def poison(self) -> None:
        """Everything that is not committed becomes NaN: other slots, and ring rows older than the window."""
        kept = self.state.clone()
        self.states.fill_(NAN)
        self.state.copy_(kept)
        rows = [p % len(self.ring) for p in range(max(0, self.length - self.kernel + 1), self.length)]
        window = self.ring[rows].clone()
        self.ring.fill_(NAN)
        self.ring[rows] = window


def mutated(module: ModuleType, folder: pathlib.Path, *changes: tuple[str, str]) -> Any:
    """A copy of a kernel module in which each text (found exactly once) is replaced by another."""
    assert module.__file__ is not None
    source = pathlib.Path(module.__file__).read_text()
    for old, new in changes:
        assert source.count(old) == 1, f"{source.count(old)} times in {module.__name__}: {old}"
        source = source.replace(old, new)
    name = f"mutant_of_{module.__name__.rsplit('.', 1)[1]}"
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[name] = copy
    spec.loader.exec_module(copy)
    return copy
