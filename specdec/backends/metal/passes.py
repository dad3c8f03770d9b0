"""Passes on MLX: build the graph op by op, then start it without waiting for the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from specdec.backends.ops import Array, Cache
from specdec.backends.passes import Body, Pass
from specdec.errors import UnsupportedError


class MetalPass(Pass):
    """A body over the caches of one sequence.

    The contents of the caches are started together with the result. Otherwise a prompt, whose logits are not read,
    would build one graph over all its chunks and keep their intermediate results. A commit adds nothing to compute.
    """

    def __init__(self, body: Body, caches: Sequence[Any]) -> None:
        self.body = body
        self.caches = caches

    def run(self, tokens: Sequence[int], hidden: Array | None = None) -> Array:
        with explained():
            x = self.body(self.caches, tokens, hidden)
            start([x], self.caches)
        return x

    def commit(self, rows: int) -> None:
        for cache in self.caches:
            cache.commit(rows)


def start(arrays: Iterable[mx.array], caches: Iterable[Any]) -> None:
    """Start computing the arrays and the contents of the caches; afterwards any thread may use them."""
    mx.async_eval(*arrays, *(array for cache in caches for array in cache.arrays()))


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """A context for building and starting a graph. Raises: UnsupportedError if MLX cannot build a specdec kernel."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not text.startswith(("[metal::Device]", "[metal_kernel]")):
            raise
        raise UnsupportedError(
            f"MLX {mx.__version__} cannot run one of specdec's Metal kernels here: {text[:400]}",
            try_="-s target.backend_options.mode=fast, which uses MLX's own kernels; please report it with this text",
        ) from error


class MetalPasses:
    """One kind of pass, for any sequence."""

    eager_reason = ""

    def __init__(self, body: Body) -> None:
        self._body = body

    def bind(self, caches: Sequence[Cache]) -> MetalPass:
        return MetalPass(self._body, caches)
