"""Decode the codes and scales of one weight into values, a few rows at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

import attrs
import torch

from specdec.checkpoints.quantised.hints import Hints
from specdec.checkpoints.quantised.parts import Parts
from specdec.checkpoints.quantised.scales import Grid, load_scales, matrices
from specdec.checkpoints.quantised.stored import StoredMatrix, decoded, row_slabs


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
class Coding:
    """One weight in one format: ``value = (code - offset) * scale + bias``.

    Each step is computed in float32; the result is rounded once to the requested dtype.

    Attributes:
        parts: the tensors.
        label: the format with its sizes, for display.
        shape: shape of the decoded weight, ``[..., N, K]``.
        grid: the layout of the scales.
        bits: bits per code.
        role: role of the scale tensor in ``parts``.
        meanings: the number that each code stands for: float32 ``[2 ** bits]``.
    """

    parts: Parts
    label: str
    shape: tuple[int, ...]
    grid: Grid
    bits: int
    meanings: torch.Tensor
    role: str = "scale"

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
        return self.matrix_of(self.packed(index), matrices(self.shape)[1], dtype)

    def matrix_of(self, parts: Mapping[str, torch.Tensor], rows: int, dtype: torch.dtype) -> StoredMatrix:
        """The parts of some rows as a matrix."""
        meta = {"block_rows": self.grid.rows, "block_columns": self.grid.columns, "bits": self.bits}
        return StoredMatrix(
            format=self.kept_as, shape=(rows, self.shape[-1]), parts=parts, meta=meta, dtype=dtype, values=self.meanings
        )

    def packed(self, index: int) -> Mapping[str, torch.Tensor]:
        """The parts of matrix ``index``, as ``StoredMatrix`` lists them."""
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
        scales, biases, offsets = self.scales(), self.biases(), self.offsets()
        self.order()
        if self.has_nan():
            return False, False
        # exact and cheap: decodes only if the largest scale and code together would overflow
        highest = _largest(scales) * (_largest(self.meanings.nan_to_num()) + _largest(offsets)) + _largest(biases)
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
        return row_slabs(count * rows, columns)

    def values(self, slabs: Iterable[tuple[int, int]] | None = None) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield ``(start, stop, values)`` for the given row ranges, or all slabs: float32 ``[stop - start, K]``."""
        given, order = {"offset": self.offsets(), "scale": self.scales(), "bias": self.biases()}, self.order()
        grids = {name: grid for name, grid in given.items() if grid is not None}
        for start, stop in self.slabs() if slabs is None else slabs:
            rows = {name: self._rows(grid, start, stop) for name, grid in grids.items()}
            codes, columns = self.raw(start, stop), self.shape[-1]
            values = decoded(codes, self.meanings, self.bits, columns, rows, self.grid.columns, order)
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


def _largest(numbers: torch.Tensor | None) -> float:
    return 0.0 if numbers is None or not numbers.numel() else float(numbers.abs().max())


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
