"""Numbers that the host does not know: lengths and token ids that lie on the device, and how a graph is started.

A pass whose length the host knows and one that starts where the device says run the same graph: everything that depends
on a length reads it from an int32 array, and shapes depend on the number of rows and the size of the buckets alone.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from specdec.backends.placeholders import PlaceholderInteger, PlaceholderTokens


@functools.lru_cache(maxsize=256)
def number(value: int) -> mx.array:
    """An int32 ``[1]`` on the device; computed, so that any thread may use it."""
    made = mx.array([value], mx.int32)
    mx.eval(made)
    return made


class DeviceLength(PlaceholderInteger):
    """A length that only the device knows.

    Attributes:
        array: int32 ``[1]``.
        bound: it is this at most.
        kept: what layers of one pass compute from it once, by a key of their own.
    """

    __slots__ = ("array", "bound", "kept")

    def __init__(self, array: mx.array, bound: int) -> None:
        self.array = array
        self.bound = bound
        self.kept: dict[Any, Any] = {}


Length = int | DeviceLength


def on_device(length: Length) -> mx.array:
    """The length as int32 ``[1]``."""
    return length.array if isinstance(length, DeviceLength) else number(length)


class DeviceTokens(PlaceholderTokens):
    """Token ids that lie on the device: their number is known, and where they are."""

    def __init__(self, ids: mx.array) -> None:
        super().__init__(int(ids.shape[0]))
        self.ids = ids  # [T] int32, all of them inside the vocabulary


def rows_from(array: mx.array, start: mx.array, rows: int) -> mx.array:
    """``rows`` rows of ``array [n, ...]`` from the row ``start``, int32 ``[1]``."""
    return mx.slice(array, start, axes=[0], slice_size=(rows, *array.shape[1:]))
