"""Passes over several sequences: one pass whose rows belong to several caches.

Products, norms, MLP, experts and the head treat every row alone, so they run over all rows at once. Only the operations
that read a cache or a position run sequence by sequence, over the rows of each. Row invariance then gives every row the
bits that it has in a pass of its own sequence.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from specdec.backends.caches import Batched
from specdec.backends.delegating import DelegatingOps
from specdec.backends.ops import Ops

_ROWS = {  # operation -> its arguments with a row per token
    "add_positions": ("x",),
    "append": ("k", "v"),
    "attend": ("q", "k", "v", "gate"),
    "attend_cached": ("q",),
    "attend_latent": ("q", "row"),
    "conv_window": ("x",),
    "gated_delta": ("u", "a", "b"),
    "norm_rope": ("x",),
    "scale_by_position": ("x",),
}


class BatchingOps(DelegatingOps):
    """Ops that take ``Batched`` caches and positions as well."""

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        if name not in _ROWS or not any(isinstance(value, Batched) for value in (*arguments, *named.values())):
            return super().call(name, *arguments, **named)
        values = _signature(name).bind(self.inner, *arguments, **named).arguments
        del values["self"]
        of_rows = [key for key in _ROWS[name] if values.get(key) is not None]
        key, batched = next((key, value) for key, value in values.items() if isinstance(value, Batched))

        def run(part: Any, rows: slice) -> Any:
            own = {argument: values[argument][rows] for argument in of_rows}
            return DelegatingOps.call(self, name, **values | own | {key: part})

        return batched.each(run, self.inner.hidden_type.concatenate)


def batching(ops: Ops) -> Ops:
    """These ops, for passes over several sequences too if their backend has any."""
    return BatchingOps(ops) if ops.capabilities.batch_rows else ops  # type: ignore[abstract]


@functools.cache
def _signature(name: str) -> inspect.Signature:
    return inspect.signature(vars(Ops)[name])
