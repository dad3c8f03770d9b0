"""Lengths and token ids that only the device knows.

A pass runs the same graph whether or not the host knows the length: everything that depends on a length reads it from
an int32 array, and shapes depend only on the number of rows and the size of the buckets.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from specdec.backends.placeholders import PlaceholderInteger, PlaceholderTokens


@functools.lru_cache(maxsize=256)
def number(value: int) -> mx.array:
    """Make an int32 ``[1]`` on the device, already computed so that any thread may use it."""
    made = mx.array([value], mx.int32)
    mx.eval(made)
    return made


class DeviceLength(PlaceholderInteger):
    """Placeholder of a length that only the device knows.

    Attributes:
        array: int32 ``[1]``.
        bound: an upper bound of the length.
        kept: values derived from the length, cached for all layers of a pass.
    """

    __slots__ = ("array", "bound", "kept")

    def __init__(self, array: mx.array, bound: int) -> None:
        self.array = array
        self.bound = bound
        self.kept: dict[Any, Any] = {}


Length = int | DeviceLength


def on_device(length: Length) -> mx.array:
    """Return the length as int32 ``[1]``."""
    return length.array if isinstance(length, DeviceLength) else number(length)


class DeviceTokens(PlaceholderTokens):
    """Token ids on the device; the host knows only their number."""

    def __init__(self, ids: mx.array) -> None:
        super().__init__(int(ids.shape[0]))
        self.ids = ids  # [T] int32, all in the vocabulary


def rows_from(array: mx.array, start: mx.array, rows: int) -> mx.array:
    """Slice ``rows`` rows of ``array [n, ...]`` from row ``start``, int32 ``[1]``."""
    return mx.slice(array, start, axes=[0], slice_size=(rows, *array.shape[1:]))
