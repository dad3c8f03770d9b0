"""Passes over several sequences: one pass whose rows belong to several caches.

Products, norms, MLP, experts and the head treat every row alone, so they run over all rows at once. Only the operations
that read a cache or a position run sequence by sequence, over the rows of each. Row invariance then gives every row the
bits that it has in a pass of its own sequence.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import attrs

from specdec.backends.caches import Array, Cache
from specdec.backends.delegating import DelegatingOps
from specdec.backends.ops import Ops
from specdec.backends.passes import Pass

_ROWS = {  # operation -> its arguments with a row per token
    "add_positions": ("x",),
    "append": ("k", "v"),
    "attend": ("q", "k", "v", "gate"),
    "attend_latent": ("q", "row"),
    "conv_window": ("x",),
    "gated_delta": ("u", "a", "b"),
    "norm_rope": ("x",),
    "scale_by_position": ("x",),
}


@attrs.frozen(eq=False)
class Batched:
    """What one layer of a batched pass has per sequence: caches, or the positions of their first rows.

    Attributes:
        parts: one per sequence.
        rows: the rows of each sequence in the pass.
    """

    parts: Sequence[Any]
    rows: Sequence[slice]

    @property
    def length(self) -> Batched:
        """The lengths of the caches."""
        return Batched([cache.length for cache in self.parts], self.rows)


class BatchingOps(DelegatingOps):
    """Ops that take ``Batched`` caches and positions as well."""

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        if name not in _ROWS or not any(isinstance(value, Batched) for value in (*arguments, *named.values())):
            return super().call(name, *arguments, **named)
        values = _signature(name).bind(self.inner, *arguments, **named).arguments
        del values["self"]
        of_rows = [key for key in _ROWS[name] if values.get(key) is not None]
        key, batched = next((key, value) for key, value in values.items() if isinstance(value, Batched))
        results = []
        for part, rows in zip(batched.parts, batched.rows, strict=True):
            own = {argument: values[argument][rows] for argument in of_rows}
            results.append(super().call(name, **values | own | {key: part}))
        return None if results[0] is None else self.inner.hidden_type.concatenate(results)


@functools.cache
def _signature(name: str) -> inspect.Signature:
    return inspect.signature(vars(Ops)[name])


def run_batch(passes: Sequence[Pass], tokens: Sequence[Sequence[int]]) -> tuple[Array, list[slice]]:
    """Run passes of one kind over several sequences as one, op by op.

    Returns the result, the rows of all sequences one after another ``[sum of T, H]``, and the rows of each. They are
    provisional until each pass's own ``commit``.
    """
    eager = [one.eager() for one in passes]
    rows, at = [], 0
    for of_one in tokens:
        rows.append(slice(at, at + len(of_one)))
        at += len(of_one)
    layers: list[Sequence[Cache]] = list(zip(*(one.caches for one in eager), strict=True))
    caches = [Batched(layer, rows) for layer in layers]
    return eager[0].body(caches, [token for of_one in tokens for token in of_one], None), rows
