"""State of one layer of one sequence: what the ops read and append to."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

Array: TypeAlias = Any  # torch.Tensor, mlx.core.array, numpy.ndarray, ...


class Cache(abc.ABC):
    """State of one layer. ``length`` counts committed rows; ops append provisional rows behind them."""

    length: int

    @abc.abstractmethod
    def commit(self, rows: int) -> None:
        """Keep the first ``rows`` provisional rows and drop the others; 0 drops all."""

    @abc.abstractmethod
    def truncate(self, length: int) -> bool:
        """Return to ``length`` committed rows; False (and nothing changed) when the cache cannot."""

    def mark(self) -> None:  # noqa: B027
        """Keep the committed state as a point that ``truncate`` can return to; old points may be dropped.

        The default does nothing: a cache with a row per token can be cut anywhere.
        """

    def marks(self) -> list[int] | None:
        """The lengths that ``truncate`` can return to, 0 and the present length among them; None for any length."""
        return None

    @abc.abstractmethod
    def save(self) -> dict[str, Array]:
        """Copies of the committed contents, by name."""

    @abc.abstractmethod
    def load(self, arrays: Mapping[str, Array], length: int) -> None:
        """Become what ``save`` gave. ``arrays`` may also come from ``Ops.from_host``."""

    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated."""


# A backend's ops take its own caches: what its ``new_kv``, ``new_latent`` and ``new_delta`` returned.
KVCache: TypeAlias = Any
LatentCache: TypeAlias = Any
DeltaCache: TypeAlias = Any


class HeadRows(Protocol):
    """Rows of an output head for some token ids, as ``head_rows`` gathered them."""

    @property
    def tokens(self) -> Sequence[int]:
        """The ids, ascending."""
