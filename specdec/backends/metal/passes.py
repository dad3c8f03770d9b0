"""Passes on MLX: build the graph op by op, then start it without waiting for the device.

A draft chain is one lazy graph over all of its passes: the choice of a token stays on the device, and the host reads
the drafted tokens at its end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import mlx.core as mx

from specdec.backends.arrays import read_tokens
from specdec.backends.metal.caches import MetalDeltaCache
from specdec.backends.ops import Array, Cache, HeadRows
from specdec.backends.passes import Body, EagerPass
from specdec.backends.placeholders import DeviceTokens
from specdec.contract import Choosing
from specdec.errors import UnsupportedError

Best = Callable[[mx.array, Any], mx.array]  # ``MetalOps.best``


class MetalPass(EagerPass):
    """A body over the caches of one sequence.

    The contents of the caches are started together with the result. Otherwise a prompt, whose logits are not read,
    would build one graph over all its chunks and keep their intermediate results. A commit adds nothing to compute.
    """

    caches: Sequence[Any]

    def __init__(self, body: Body, best: Best, caches: Sequence[Any]) -> None:
        super().__init__(body, caches)
        self._best = best

    def run(self, tokens: Sequence[int], hidden: Array | None = None) -> Array:
        with explained():
            x = super().run(tokens, hidden)
            self._start(x)
        return x

    def chain(
        self, tokens: Sequence[int], hidden: Array, depth: int, head: Array | HeadRows, choosing: Choosing | None = None
    ) -> tuple[int, ...] | None:
        end = len(tokens) + depth - 1
        for cache in self.caches:
            # a recurrent state cannot drop its drafted rows; the pass that does not fit raises the error
            if isinstance(cache, MetalDeltaCache) or cache.length + end > cache.capacity:
                return None
        if choosing is not None:
            return None
        drafted: list[mx.array] = []
        with explained():
            x = self.body(self.caches, tokens, hidden)[-1:]
            self.commit(len(tokens))
            drafted.append(self._best(x, head))
            while len(drafted) < depth:
                x = self.body(self.caches, DeviceTokens(mx.maximum(drafted[-1], 0)), x)
                self.commit(1)
                drafted.append(self._best(x, head))
            found = mx.concatenate(drafted)
            self._start(found)
        return tuple(read_tokens(found))

    def _start(self, result: mx.array) -> None:
        """Start computing the result and the contents of the caches; afterwards any thread may use them."""
        mx.async_eval(result, *(array for cache in self.caches for array in cache.arrays()))


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


@attrs.define
class MetalPasses:
    """One kind of pass, for any sequence."""

    body: Body
    best: Best
    eager_reason: str = ""

    def bind(self, caches: Sequence[Cache]) -> MetalPass:
        return MetalPass(self.body, self.best, caches)
