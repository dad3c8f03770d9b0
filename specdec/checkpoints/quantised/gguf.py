"""The blocks of a GGUF file as one of the quantised formats of a checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

import attrs
import torch

from specdec.checkpoints.gguf.blocks import BY_NAME, Block
from specdec.checkpoints.quantised.coding import Coding, Format
from specdec.checkpoints.quantised.hints import Hints
from specdec.checkpoints.quantised.parts import Parts
from specdec.checkpoints.quantised.scales import Grid, matrices
from specdec.checkpoints.quantised.stored import RowParts, row_slabs


@attrs.frozen(kw_only=True, eq=False)
class BlockCoding(Coding):
    """Rows of blocks."""

    block: Block
    columns: Callable[[torch.Tensor], torch.Tensor] | None  # as ``StoredTensor.columns``

    @property
    def kept_as(self) -> str:
        return "gguf"

    def packed(self, index: int) -> Mapping[str, torch.Tensor]:
        _, rows, _ = matrices(self.shape)
        return self._in_order(RowParts(self._blocks(index * rows, (index + 1) * rows), self.block, self._parts))

    def _in_order(self, parts: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return parts if self.columns is None else {name: self.columns(part) for name, part in parts.items()}

    def _parts(self, stored: torch.Tensor) -> dict[str, torch.Tensor]:
        parts: dict[str, torch.Tensor] = {}
        for some in itertools.starmap(slice, row_slabs(len(stored), self.shape[-1])):
            for name, part in self.block.unpack(stored[some].reshape(-1, self.block.bytes)).items():
                part = part.reshape(len(stored[some]), -1)
                if name not in parts:
                    parts[name] = part.new_empty(len(stored), part.shape[1])
                parts[name][some] = part
        return parts

    def values(self, slabs: Iterable[tuple[int, int]] | None = None) -> Iterator[tuple[int, int, torch.Tensor]]:
        for start, stop in self.slabs() if slabs is None else slabs:
            parts = self._in_order(self._parts(self._blocks(start, stop)))
            yield start, stop, self.matrix_of(parts, stop - start, torch.float32).floats(0, stop - start)

    def check(self) -> tuple[bool, bool]:
        blocks = self.parts.checkpoint.load(self.parts.codes).view(-1, self.block.bytes)
        if not self.block.floats:  # MXFP4: above float32
            if bool((blocks[:, 0] == 255).any()):
                return False, False
        elif any(int((blocks.view(torch.int16)[:, at // 2] & 0x7C00).max()) == 0x7C00 for at in self.block.floats):
            return False, False
        return True, self.all_zero()

    def _blocks(self, start: int, stop: int) -> torch.Tensor:
        """The stored bytes of rows ``start`` to ``stop`` of all matrices, one after another."""
        stored = self.parts.checkpoint.load(self.parts.codes)
        return stored.view(-1, stored.shape[-1])[start:stop]


def _looks_like(parts: Parts) -> bool:
    return parts.dtype in BY_NAME and BY_NAME[parts.dtype].group > 0


def _coding(parts: Parts, hints: Hints) -> Coding:
    block, stored = BY_NAME[parts.dtype], parts.shape
    shape = (*stored[:-1], stored[-1] // block.bytes * block.values)
    count, rows, columns = matrices(shape)
    grid = Grid(1, block.group, (count, rows, columns // block.group))
    return BlockCoding(
        parts=parts,
        label=block.name.lower(),
        shape=shape,
        grid=grid,
        bits=block.bits,
        meanings=block.numbers,
        block=block,
        columns=parts.checkpoint.tensors[parts.codes].columns,
    )


FORMAT = Format("gguf", _looks_like, _coding)
