"""Access a checkpoint's weights by canonical name, mapped or decoded on request."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import attrs
import torch

from specdec.checkpoints.quantised import (
    FLOATS,
    ROUNDED_BITS,
    ROUNDED_GROUP,
    StoredMatrix,
    TensorFormat,
    alike,
    decode,
    formats_of,
    quantisation,
    rounded,
    rounds,
)
from specdec.checkpoints.reader import Checkpoint
from specdec.errors import CheckpointError, nearest


class StoredWeights:
    """Weights by canonical name. Nothing returned is cached.

    A weight stored in several tensors (``weight_packed``, ``weight_scale``, ...) has one name, ``X.weight``.

    Args:
        checkpoint: an open checkpoint.
        dtype: dtype of decoded quantised weights: computed in float32, rounded once. Floating-point tensors keep their
            own.
        keeps: formats that ``matrix`` and ``matrices`` leave packed (``Capabilities.packed_formats``).
        weights: as ``target.weights``: "auto", "decoded" (nothing stays packed), or "int8" or "int4", to which plain
            matrices are rounded.

    Attributes:
        used: how many matrices were taken, by format and whether they are decoded.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype = torch.bfloat16,
        keeps: Collection[str] = frozenset(),
        weights: str = "auto",
    ) -> None:
        self.checkpoint = checkpoint
        self.formats = formats_of(checkpoint)
        self._dtype = dtype
        self._keeps = frozenset() if weights == "decoded" else frozenset(keeps)
        self._bits = ROUNDED_BITS.get(weights, 0)
        self.used: Counter[tuple[str, bool]] = Counter()

    def __getitem__(self, name: str) -> torch.Tensor:
        """A memory-mapped floating-point tensor, or a quantised one decoded into new memory.

        Raises: CheckpointError if the name does not exist or its format is not read.
        """
        found = self._found(name)
        if found.coding is not None:
            self._decoded(found.format)
            return decode(found.coding, self._dtype)
        return self._plain(found)

    def _plain(self, found: TensorFormat) -> torch.Tensor:
        error = unreadable(self.checkpoint, found)
        if error is not None:
            raise error
        return self.checkpoint.load(found.tensors[0])

    def matrix(self, name: str, *, exact: bool = False) -> torch.Tensor | StoredMatrix:
        """A matrix for ``Ops.weight``: packed if the backend keeps its format, else the same as ``self[name]``.

        An ``exact`` one is not rounded. Raises: CheckpointError as ``self[name]`` does.
        """
        found = self._found(name)
        if len(found.shape) != 2:
            return self[name]
        if found.coding is not None:
            return self._kept(found, 0) if found.coding.kept_as in self._keeps else self[name]
        return self._rounded(self._plain(found), exact=exact)

    def matrices(self, names: str | Sequence[str]) -> Sequence[torch.Tensor] | Sequence[StoredMatrix]:
        """Matrices for ``Ops.stack``: several weights, or the slices of one weight ``[E, N, K]``.

        Packed if the backend keeps the format of all of them, else all decoded. Raises: as ``self[name]``.
        """
        if not isinstance(names, str):
            return alike([self.matrix(name) for name in names])
        found = self._found(names)
        if found.coding is None:
            return alike([self._rounded(one) for one in self._plain(found).unbind()])
        if found.coding.kept_as not in self._keeps or len(found.shape) != 3:
            return self[names].unbind()
        return alike([self._kept(found, index) for index in range(found.shape[0])])

    def _kept(self, found: TensorFormat, index: int) -> StoredMatrix:
        """Matrix ``index`` of a quantised weight, packed; counted as decoded if it is decoded later."""
        assert found.coding is not None
        self.used[found.format, False] += 1
        return attrs.evolve(
            found.coding.stored(index, self._dtype), on_decode=functools.partial(self._decoded, found.format, 1)
        )

    def _decoded(self, format: str, kept: int = 0) -> None:
        self.used[format, False] -= kept
        self.used[format, True] += 1

    def _rounded(self, matrix: torch.Tensor, *, exact: bool = False) -> torch.Tensor | StoredMatrix:
        """A plain matrix, rounded if ``target.weights`` asks for it; decoded again if the backend keeps no integers."""
        if not self._bits or exact or not rounds(tuple(matrix.shape)):
            self.used[str(matrix.dtype).removeprefix("torch."), False] += 1
            return matrix
        format = f"int{self._bits} g{ROUNDED_GROUP}"
        self.used[format, False] += 1
        noted = functools.partial(self._decoded, format, 1)
        stored = attrs.evolve(rounded(matrix, self._bits, self._dtype), on_decode=noted)
        return stored if stored.format in self._keeps else stored.decode()

    def summary(self) -> str:
        """How the matrices that were taken are held: "int4 g64 (186 matrices), bfloat16 (37)"."""
        dtype = str(self._dtype).removeprefix("torch.")
        parts = [
            f"{format}{f' decoded to {dtype}' if decoded else ''} ({count})"
            for (format, decoded), count in self.used.most_common()
            if count
        ]
        return ", ".join(parts).replace(")", " matrices)", 1)

    def shape(self, name: str) -> tuple[int, ...]:
        """The decoded shape of a weight. Raises: CheckpointError if the name does not exist."""
        return self._found(name).shape

    def _found(self, name: str) -> TensorFormat:
        if name not in self.formats:
            raise CheckpointError(
                f"the checkpoint has no tensor {name}", folder=self.checkpoint.path, nearest=nearest(name, self.formats)
            )
        return self.formats[name]

    def __contains__(self, name: object) -> bool:
        return name in self.formats

    def __iter__(self) -> Iterator[str]:
        return iter(self.formats)

    def __len__(self) -> int:
        return len(self.formats)


def unreadable(checkpoint: Checkpoint, found: TensorFormat) -> CheckpointError | None:
    """Why a weight cannot be read: its format, or integers of no known format. None for a readable one."""
    stored = checkpoint.tensors[found.tensors[0]].dtype
    if found.error is not None or found.quantised or stored in FLOATS:
        return found.error
    return CheckpointError(
        f"the tensor {found.tensors[0]} is stored as {stored}, which is neither a weight nor a known quantised format",
        file=checkpoint.tensors[found.tensors[0]].file,
        config=quantisation(checkpoint.config),
        try_="the checkpoint in bfloat16 that it was made from",
    )
