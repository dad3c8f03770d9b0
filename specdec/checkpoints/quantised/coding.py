"""Decode the codes and scales of one weight into values, a few rows at a time."""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

import attrs
import torch

from specdec.checkpoints.quantised.hints import Hints
from specdec.checkpoints.quantised.parts import Parts
from specdec.checkpoints.quantised.scales import Grid, load_scales, matrices
from specdec.checkpoints.quantised.stored import StoredMatrix

_SLAB = 2**20  # values decoded per step: 4 MB of float32, which fits the CPU cache


@attrs.frozen
class Format:
    """A storage format for weights. ``formats.FORMATS`` lists them.

    Attributes:
        name: short name without sizes: "fp8".
        looks_like: whether a weight's parts have this format's names and dtypes; at most one format matches.
        coding: builds the decoder. Raises: CheckpointError if shapes, siblings and hints contradict each other.
    """

    name: str
    looks_like: Callable[[Parts], bool]
    coding: Callable[[Parts, Hints], Coding]


@attrs.frozen(kw_only=True, eq=False)
class Coding(ABC):
    """One weight in one format: ``value = (code - offset) * scale + bias``.

    Each step is computed in float32; the result is rounded once to the requested dtype.

    Attributes:
        parts: the tensors.
        label: the format with its sizes, for display.
        shape: shape of the decoded weight, ``[..., N, K]``.
        grid: the layout of the scales.
        bits: bits per code.
        role: role of the scale tensor in ``parts``.
        largest: bound of ``|code - offset|``.
    """

    parts: Parts
    label: str
    shape: tuple[int, ...]
    grid: Grid
    bits: int
    role: str = "scale"
    largest: ClassVar[float]

    @property
    @abstractmethod
    def numbers(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Convert rows of stored codes ``[R, W]`` to float32 ``[R, K]``."""

    @property
    @abstractmethod
    def meanings(self) -> torch.Tensor:
        """The number that each code stands for: float32 ``[2 ** bits]``."""

    def scales(self) -> torch.Tensor:
        """All scales combined: float32 ``[M or 1, A, B]``, as ``grid``. Raises: CheckpointError for bad values."""
        return load_scales(self.parts, self.role).reshape(self.grid.shape)

    @property
    def stands_for(self) -> str:
        """The weight's dtype before quantisation, as far as the format shows it."""
        return "bfloat16"

    @property
    def kept_as(self) -> str:
        """The format's name for backends that keep it packed (see ``StoredMatrix``); "" if none can."""
        return ""

    def stored(self, index: int, dtype: torch.dtype) -> StoredMatrix:
        """Matrix ``index`` as stored; ``dtype`` is the dtype it would be decoded to.

        Raises: CheckpointError for bad scales.
        """
        _, rows, columns = matrices(self.shape)
        parts = self.packed(index)
        divisor = parts.pop("divisor", None)
        group = self.grid.columns
        meta = {"block_rows": self.grid.rows, "block_columns": group, "group": group, "bits": self.bits}
        return StoredMatrix(
            format=self.kept_as,
            shape=(rows, columns),
            parts=parts,
            meta=meta,
            dtype=dtype,
            values=self.meanings,
            numbers=self.numbers,
            divisor=divisor,
        )

    def packed(self, index: int) -> dict[str, torch.Tensor]:
        """The parts of matrix ``index``, as ``StoredMatrix`` lists them, and its "divisor" if it has one."""
        raise AssertionError(f"{self.label} is not kept packed")

    def matrix(self, name: str, index: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Matrix ``index`` ``[N, ...]`` of a stored tensor, its bytes read as ``dtype``."""
        tensor = self.parts.checkpoint.load(name)
        count, rows, _ = matrices(self.shape)
        return (tensor if dtype is None else tensor.view(dtype)).view(count, rows, -1)[index]

    @staticmethod
    def of_matrix(grid: torch.Tensor, index: int) -> torch.Tensor:
        """The entries ``[A, B]`` of one matrix, from a grid ``[M or 1, A, B]``."""
        return grid[index if len(grid) > 1 else 0]

    def biases(self) -> torch.Tensor | None:
        """Biases, float32 in the shape of the scales, or None. Raises: CheckpointError for bad values."""
        return None

    def offsets(self) -> torch.Tensor | None:
        """Zero points, float32 in the shape of the scales, or None. Raises: CheckpointError for bad values."""
        return None

    def order(self) -> torch.Tensor | None:
        """The grid column of every weight column, int64 ``[K]``; None if blocks are consecutive."""
        return None

    def has_nan(self) -> bool:
        """Whether any code is NaN."""
        return False

    def check(self) -> tuple[bool, bool]:
        """Whether every value is finite, and whether every value is zero.

        Reads every scale, and every code if a code can be NaN. Does not keep the decoded weight.
        Raises: CheckpointError naming the tensor if a scale is NaN, infinite or negative (MLX's affine ones may be).
        """
        scales, biases = self.scales(), self.biases()
        self.offsets()
        self.order()
        if self.has_nan():
            return False, False
        # exact and cheap: decodes only if the largest scale and code together would overflow
        highest = float(scales.abs().max()) * self.largest if scales.numel() else 0.0
        if biases is not None and biases.numel():
            highest += float(biases.abs().max())
        if highest > torch.finfo(torch.bfloat16).max:
            for _, _, values in self.values():
                if not bool(torch.isfinite(values.to(torch.bfloat16)).all()):
                    return False, False
        return True, self.all_zero()

    def all_zero(self) -> bool:
        """Whether every value is zero; the first row usually settles it."""
        if not all(self.shape):
            return False
        ranges = itertools.chain([(0, 1)], self.slabs())
        return not any(bool(values.any()) for _, _, values in self.values(ranges))

    def slabs(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows of ``[M * N, K]``, one per decoding step."""
        count, rows, columns = matrices(self.shape)
        step = max(1, _SLAB // max(columns, 1))
        for start in range(0, count * rows, step):
            yield start, min(start + step, count * rows)

    def values(self, slabs: Iterable[tuple[int, int]] | None = None) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield ``(start, stop, values)`` for the given row ranges, or all slabs: float32 ``[stop - start, K]``."""
        scales, offsets, biases, order = self.scales(), self.offsets(), self.biases(), self.order()
        for start, stop in self.slabs() if slabs is None else slabs:
            values = self.numbers(self.raw(start, stop))
            if offsets is not None:
                self._combine(values, self._rows(offsets, start, stop), order, torch.Tensor.sub_)
            self._combine(values, self._rows(scales, start, stop), order, torch.Tensor.mul_)
            if biases is not None:
                self._combine(values, self._rows(biases, start, stop), order, torch.Tensor.add_)
            yield start, stop, values

    def raw(self, start: int, stop: int) -> torch.Tensor:
        """The stored codes of rows ``start`` to ``stop`` of ``[M * N, K]``: ``[stop - start, W]``."""
        raw = self.parts.checkpoint.rows(self.parts.codes, start, stop, axes=len(self.shape) - 1)
        return raw.view(stop - start, -1)

    def _rows(self, grid: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """The entries ``[R, B]`` of a ``[M or 1, A, B]`` grid for rows start to stop; ``[1, 1]`` for a single value."""
        if grid.numel() == 1:
            return grid.view(1, 1)
        _, rows, _ = matrices(self.shape)
        row = torch.arange(start, stop)
        matrix = row // rows if grid.shape[0] > 1 else torch.zeros_like(row)
        return grid[matrix, row % rows // self.grid.rows]

    def _combine(
        self,
        values: torch.Tensor,
        grid: torch.Tensor,
        order: torch.Tensor | None,
        apply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        """Subtract, multiply or add ``grid [R, B]`` in place, block of columns by block."""
        if order is not None:
            apply(values, grid[:, order])
            return
        if grid.shape[1] == 1:
            apply(values, grid)
            return
        whole = values.shape[1] // self.grid.columns
        edge = whole * self.grid.columns
        blocks = values[:, :edge].view(values.shape[0], whole, self.grid.columns)  # a view, also of a part of each row
        apply(blocks, grid[:, :whole, None])
        if edge < values.shape[1]:
            apply(values[:, edge:], grid[:, whole:])


def look_up(table: torch.Tensor, octets: torch.Tensor) -> torch.Tensor:
    """Look up the values of bytes: ``table [256, W]`` float32 by uint8 ``[n]``, giving float32 ``[n * W]``.

    Ten times as fast as torch's conversion of e4m3, which is not vectorised.
    """
    index = octets.int()
    if table.shape[1] == 1:
        return table.view(-1).index_select(0, index)
    if table.shape[1] == 2:  # copy both values as one word; torch would copy them one by one
        return table.view(torch.int64).view(-1).index_select(0, index).view(torch.float32)
    return table.index_select(0, index).view(-1)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack little-endian 32-bit words ``[..., W]`` into unsigned codes: float32 ``[..., W * 32 / bits]``."""
    octets = words.reshape(-1).view(torch.uint8)  # little-endian, as safetensors is
    shape = (*words.shape[:-1], words.shape[-1] * 32 // bits)
    if 8 % bits == 0:
        return look_up(_codes_of_bytes(bits), octets).view(shape)
    # eight codes fill `bits` bytes
    parts = octets.view(-1, bits).to(torch.int64)
    stream = (parts << 8 * torch.arange(bits)).sum(-1, keepdim=True)
    codes: torch.Tensor = stream >> bits * torch.arange(8) & (2**bits - 1)
    return codes.to(torch.float32).view(shape)


@functools.cache
def _codes_of_bytes(bits: int) -> torch.Tensor:
    """The codes of each byte value: float32 ``[256, 8 / bits]``, lowest bits first."""
    codes: torch.Tensor = torch.arange(256).unsqueeze(1) >> torch.arange(0, 8, bits) & (2**bits - 1)
    return codes.to(torch.float32)


def decode(coding: Coding, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Decode the weight to ``dtype``, in new memory. Needs only a few extra megabytes, whatever the weight's size.

    Raises: CheckpointError for a bad scale (as ``check``).
    """
    out = torch.empty(coding.shape, dtype=dtype)
    count, rows, columns = matrices(coding.shape)
    flat = out.view(count * rows, columns)
    for start, stop, values in coding.values():
        flat[start:stop] = values
    return out
