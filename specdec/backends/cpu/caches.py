"""Caches on the CPU: keys and values, and the convolution window and recurrent matrix of the delta rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from specdec.backends.caches import Cache, MarkedCache
from specdec.backends.cpu.arrays import CPU
from specdec.backends.ops import DeltaShape
from specdec.errors import StateError


class CpuKVCache(Cache):
    """Keys and values ``[capacity, nkv, D]`` in act dtype; rows from ``length`` on are stale or provisional.

    A row attends to the last ``window`` rows, its own included, or to all if it is 0, and to ``sinks`` if there are.

    Memory is reserved up front; its pages become resident as rows are written.
    """

    def __init__(
        self,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> None:
        self.length = 0
        self.window = window
        self.sinks = sinks  # [nq] float32
        self.keys = torch.empty(capacity, kv_heads, head_dim, dtype=dtype, device=CPU)
        self.values = torch.empty(capacity, kv_heads, head_dim, dtype=dtype, device=CPU)

    def reserve(self, rows: int) -> tuple[int, int]:
        """Return the range ``start, end`` of rows that a pass of ``rows`` rows writes."""
        end = self.length + rows
        if end > self.keys.shape[0]:
            raise StateError(f"the KV cache holds {self.keys.shape[0]} tokens, {end} are needed")
        return self.length, end

    def commit(self, rows: int) -> None:
        self.length += rows

    advance = commit
    """Count rows that the replay of a recorded pass has already committed."""

    def truncate(self, length: int) -> bool:
        self.length = length
        return True

    def save(self) -> dict[str, Tensor]:
        return {"keys": self.keys[: self.length].clone(), "values": self.values[: self.length].clone()}

    def load(self, arrays: Mapping[str, Tensor], length: int) -> None:
        self.keys[:length] = arrays["keys"]
        self.values[:length] = arrays["values"]
        self.length = length

    def nbytes(self) -> int:
        return 2 * self.keys.nbytes


class CpuLatentCache(CpuKVCache):
    """Rows of latent attention ``[capacity, 1, D]``; keys and values share this memory.

    The values are the first entries of a row. Attention also mixes the entries that are only keys (the rotary part)
    and then drops them.
    """

    def __init__(self, capacity: int, dims: int, dtype: torch.dtype) -> None:
        super().__init__(0, 1, dims, dtype)
        self.keys = self.values = torch.empty(capacity, 1, dims, dtype=dtype, device=CPU)

    def save(self) -> dict[str, Tensor]:
        return {"rows": self.keys[: self.length].clone()}

    def load(self, arrays: Mapping[str, Tensor], length: int) -> None:
        self.keys[:length] = arrays["rows"]
        self.length = length

    def nbytes(self) -> int:
        return self.keys.nbytes


class CpuDeltaCache(MarkedCache):
    """Recurrent matrix ``S [Hv, Dk, Dv]`` float32 and the last kc-1 raw convolution rows.

    ``window`` and the memory of the two matrices never move, because recorded passes hold their addresses.

    A pass reads ``state`` and writes the matrix after all of its T rows to ``after``, so committing all rows is a swap.
    Committing a < T rows computes the first a rows again from ``state``, using ``replay``, which the op prepared with
    the inputs of the pass. The arithmetic and its order are the same, so the bits are too.
    """

    def __init__(self, shape: DeltaShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.length = 0
        size = (shape.value_heads, shape.key_dim, shape.value_dim)
        self.state = torch.zeros(size, dtype=torch.float32, device=CPU)
        self.after = torch.empty(size, dtype=torch.float32, device=CPU)
        self.window = torch.zeros(shape.kernel - 1, shape.channels, dtype=dtype, device=CPU)  # oldest first
        self.raw: Tensor | None = None  # window and the rows of the last pass, [kc-1+T, C]
        self.replay: Callable[[int], None] | None = None  # replay(a): ``after`` becomes the matrix after a rows

    def commit(self, rows: int) -> None:
        if rows == 0:
            self.raw = self.replay = None
            return
        if self.raw is None or self.replay is None:
            raise StateError("commit without a pass before it")
        taps = self.shape.kernel - 1
        if rows < self.raw.shape[0] - taps:
            self.replay(rows)
        self.window.copy_(self.raw[rows : rows + taps])
        self.advance(rows)

    def advance(self, rows: int) -> None:
        """Count ``rows`` rows that ``after`` and ``window`` already include."""
        self.raw = self.replay = None
        if rows:
            self.state, self.after = self.after, self.state
            self.length += rows

    def _copied(self) -> tuple[Tensor, Tensor]:
        return self.state.clone(), self.window.clone()

    def _become(self, length: int, state: tuple[Tensor, Tensor] | None) -> None:
        self.raw = self.replay = None
        if state is None:
            self.state.zero_()
            self.window.zero_()
        else:
            self.state.copy_(state[0])
            self.window.copy_(state[1])
        self.length = length

    def save(self) -> dict[str, Tensor]:
        return {"state": self.state.clone(), "window": self.window.clone()}

    def load(self, arrays: Mapping[str, Tensor], length: int) -> None:
        self._become(length, (arrays["state"], arrays["window"]))
        self._marks = []

    def nbytes(self) -> int:
        marks: int = sum(state.nbytes + window.nbytes for _, (state, window) in self._marks)
        return self.state.nbytes + self.after.nbytes + self.window.nbytes + marks
