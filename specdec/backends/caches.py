"""The interface of caches, which hold the state of one layer of one sequence."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import attrs

Array: TypeAlias = Any  # torch.Tensor, mlx.core.array, numpy.ndarray, ...

MARKS = 4  # lengths that a recurrent state can be truncated to; each costs one copy of the state


class Cache(abc.ABC):
    """State of one layer. ``length`` counts committed rows; ops append provisional rows."""

    length: int

    @abc.abstractmethod
    def commit(self, rows: int) -> None:
        """Keep the first ``rows`` provisional rows and drop the others; 0 drops all."""

    @abc.abstractmethod
    def truncate(self, length: int) -> bool:
        """Return to ``length`` committed rows; False, with nothing changed, if the cache cannot."""

    def mark(self) -> None:  # noqa: B027
        """Save the committed state so that ``truncate`` can return to it; old marks may be dropped.

        The default does nothing: a cache with a row per token can be truncated to any length.
        """

    def marks(self) -> list[int] | None:
        """The lengths that ``truncate`` can return to, including 0 and the current length; None for any length."""
        return None

    @abc.abstractmethod
    def save(self) -> dict[str, Array]:
        """Copies of the committed contents, by name."""

    @abc.abstractmethod
    def load(self, arrays: Mapping[str, Array], length: int) -> None:
        """Restore the result of ``save``, by copying: ``arrays`` may be shared with other caches.

        They are those of ``save`` (a fork), or ``Ops.from_host`` made them of torch tensors (a session's file).
        """

    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated."""


@attrs.frozen(eq=False)
class Batched:
    """What one layer of a pass over several sequences has per sequence: caches, or the positions of their first rows.

    Attributes:
        parts: one per sequence.
        rows: the rows of each sequence in the pass.
    """

    parts: Sequence[Any]
    rows: Sequence[slice]

    @classmethod
    def layers(cls, sequences: Sequence[Sequence[Any]], rows: Sequence[int]) -> list[Batched]:
        """The caches of each layer, from those of each sequence and its number of rows."""
        ends = list(itertools.accumulate(rows))
        slices = [slice(end - count, end) for end, count in zip(ends, rows, strict=True)]
        return [cls(layer, slices) for layer in zip(*sequences, strict=True)]

    @property
    def length(self) -> Batched:
        """The lengths of the caches."""
        return attrs.evolve(self, parts=[cache.length for cache in self.parts])

    def each(self, run: Callable[[Any, slice], Any], join: Callable[[list[Any]], Any]) -> Any:
        """The results of ``run`` for the part and rows of every sequence, joined; None if it gives none."""
        results = [run(part, rows) for part, rows in zip(self.parts, self.rows, strict=True)]
        return None if results[0] is None else join(results)


class MarkedCache(Cache):
    """A cache that can be truncated only to marks: lengths at which it keeps a copy of its state."""

    def __init__(self) -> None:
        self._marks: list[tuple[int, Any]] = []

    @abc.abstractmethod
    def _copied(self) -> Any:
        """A copy of the committed state."""

    @abc.abstractmethod
    def _become(self, length: int, state: Any) -> None:
        """Restore the result of ``_copied`` at ``length``, or the empty state for None; drop provisional rows."""

    def mark(self) -> None:
        if self._marks and self._marks[-1][0] == self.length:
            return
        marks = [*self._marks, (self.length, self._copied())]
        if len(marks) > MARKS:  # the last two end a prompt; of the others, the one least behind another goes
            lengths = [0, *(length for length, _ in marks)]
            del marks[min(range(MARKS - 1), key=lambda at: lengths[at + 1] - lengths[at])]
        self._marks = marks

    def marks(self) -> list[int]:
        return [0, *(length for length, _ in self._marks), self.length]

    def truncate(self, length: int) -> bool:
        if length == self.length:
            self.commit(0)
            return True
        kept = [mark for mark in self._marks if mark[0] <= length]
        if length and (not kept or kept[-1][0] != length):
            return False
        self._marks = kept if length else []
        self._become(length, kept[-1][1] if length else None)
        return True


# A backend's ops take its own caches, from its ``new_kv``, ``new_window``, ``new_latent`` and ``new_delta``.
KVCache: TypeAlias = Any
LatentCache: TypeAlias = Any
DeltaCache: TypeAlias = Any


class HeadRows(Protocol):
    """Rows of an output head for some token ids, from ``head_rows``."""

    @property
    def tokens(self) -> Sequence[int]:
        """The ids, ascending."""
