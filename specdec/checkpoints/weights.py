"""Access a checkpoint's weights by canonical name, mapped or decoded on request."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from specdec.checkpoints.quantised import FLOATS, StoredMatrix, TensorFormat, alike, decode, formats_of, quantisation
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
    """

    def __init__(
        self, checkpoint: Checkpoint, *, dtype: torch.dtype = torch.bfloat16, keeps: Collection[str] = frozenset()
    ) -> None:
        self.checkpoint = checkpoint
        self.formats = formats_of(checkpoint)
        self._dtype = dtype
        self._keeps = frozenset(keeps)

    def __getitem__(self, name: str) -> torch.Tensor:
        """A memory-mapped floating-point tensor, or a quantised one decoded into new memory.

        Raises: CheckpointError if the name does not exist or its format is not read.
        """
        found = self._found(name)
        if found.coding is not None:
            return decode(found.coding, self._dtype)
        error = unreadable(self.checkpoint, found)
        if error is not None:
            raise error
        return self.checkpoint.load(found.tensors[0])

    def matrix(self, name: str) -> torch.Tensor | StoredMatrix:
        """A matrix for ``Ops.weight``: packed if the backend keeps its format, else the same as ``self[name]``.

        Raises: CheckpointError as ``self[name]`` does.
        """
        coding = self._found(name).coding
        if coding is None or coding.kept_as not in self._keeps or len(coding.shape) != 2:
            return self[name]
        return coding.stored(0, self._dtype)

    def matrices(self, names: str | Sequence[str]) -> Sequence[torch.Tensor] | Sequence[StoredMatrix]:
        """Matrices for ``Ops.stack``: several weights, or the slices of one weight ``[E, N, K]``.

        Packed if the backend keeps the format of all of them, else all decoded. Raises: as ``self[name]``.
        """
        if not isinstance(names, str):
            return alike([self.matrix(name) for name in names])
        coding = self._found(names).coding
        if coding is None or coding.kept_as not in self._keeps or len(coding.shape) != 3:
            return self[names].unbind()
        return alike([coding.stored(index, self._dtype) for index in range(coding.shape[0])])

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
    stored = checkpoint.stored_dtype(found.tensors[0])
    if found.error is not None or found.quantised or stored in FLOATS:
        return found.error
    return CheckpointError(
        f"the tensor {found.tensors[0]} is stored as {stored}, which is neither a weight nor a known quantised format",
        file=checkpoint.file_of(found.tensors[0]),
        config=quantisation(checkpoint.config),
        try_="the checkpoint in bfloat16 that it was made from",
    )
