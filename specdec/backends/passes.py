"""The interface for launching passes, op by op (eagerly) or from a recording.

Every pass of a model runs the same ops over the same weights, with different tokens, caches and lengths. To save launch
overhead (function calls, CUDA launches), a backend may run the model code in advance, record the launches and replay
them as one. Other backends use the eager passes here.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from specdec.backends.caches import Array, Batched, Cache, HeadRows
from specdec.contract import Choosing
from specdec.errors import ShapeError, UnsupportedError

Body = Callable[[Sequence[Any], Sequence[int], Array | None], Array]
"""``body(caches, tokens, hidden)``: a pass over T tokens and, for some bodies, hidden states ``[T, H]``.

It returns an array ``[T, H]`` and appends provisional rows to the caches. Its launches are the same for every T, and
with the caches of several sequences (``Batched``), only larger.
"""


class Pass(abc.ABC):
    """One kind of pass over the caches of one sequence."""

    @abc.abstractmethod
    def run(self, tokens: Sequence[int], hidden: Array | None = None) -> Array:
        """Run the body on these tokens. The result stays valid after later runs."""

    @abc.abstractmethod
    def commit(self, rows: int) -> None:
        """Keep the first ``rows`` rows of the last run in all caches; 0 drops all."""

    def run_batch(self, others: Sequence[Any], tokens: Sequence[Sequence[int]], hidden: Array | None = None) -> Array:
        """Run this pass and ``others`` of its kind as one, each over its own tokens and rows of ``hidden``.

        Returns the rows of all sequences one after another ``[sum of T, H]``, provisional until each pass's ``commit``.
        """
        raise UnsupportedError(f"{type(self).__name__} has no passes over several sequences")

    def chain(
        self, tokens: Sequence[int], hidden: Array, depth: int, head: Array | HeadRows, choosing: Choosing | None = None
    ) -> tuple[int, ...] | None:
        """Draft ``depth`` >= 1 tokens with a head ``[V, H]``, or rows of one, with the same bits as single passes.

        The first pass runs over ``tokens`` and ``hidden``, each later one over the last token and the last row of the
        pass before. A pass's token is the best one of its last row, or the one of ``choosing``; there may be fewer
        tokens if none is allowed. The rows of all passes are committed. Returns None, with nothing changed, if
        unsupported for these arguments. Raises: ContractError for logits that are not finite.
        """
        return None


def fitting(hidden: Array | None, shape: tuple[int, int], dtype: Any) -> Array:
    """Return the hidden states of a pass. Raises: ShapeError if they have another shape or dtype, or for None."""
    if hidden is None or hidden.shape != shape or hidden.dtype is not dtype:
        got = "none" if hidden is None else f"{list(hidden.shape)} {hidden.dtype}"
        raise ShapeError("a pass got hidden states that do not fit", got=got, takes=f"{list(shape)} {dtype}")
    return hidden


class Passes(Protocol):
    """One kind of pass, for any sequence."""

    eager_reason: str  # why the passes run op by op; "" if they are recorded

    def bind(self, caches: Sequence[Cache]) -> Pass:
        """Return the pass over these caches."""


class EagerPass(Pass):
    """A pass that runs the ops of a body one by one."""

    def __init__(self, body: Body, caches: Sequence[Cache]) -> None:
        self.body = body
        self.caches = caches

    def run(self, tokens: Sequence[int], hidden: Array | None = None) -> Array:
        return self.body(self.caches, tokens, hidden)

    def run_batch(
        self, others: Sequence[EagerPass], tokens: Sequence[Sequence[int]], hidden: Array | None = None
    ) -> Array:
        caches = Batched.layers([self.caches, *(other.caches for other in others)], [len(own) for own in tokens])
        return self.body(caches, [token for own in tokens for token in own], hidden)

    def commit(self, rows: int) -> None:
        for cache in self.caches:
            cache.commit(rows)


class EagerPasses:
    """Passes that are not recorded."""

    def __init__(self, body: Body, eager_reason: str = "") -> None:
        self.eager_reason = eager_reason
        self._body = body

    def bind(self, caches: Sequence[Cache]) -> EagerPass:
        return EagerPass(self._body, caches)
