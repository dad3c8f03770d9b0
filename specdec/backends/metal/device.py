"""Numbers that the host does not know: lengths and token ids that lie on the device, and how a graph is started.

A pass whose length the host knows and one that starts where the device says run the same graph: everything that depends
on a length reads it from an int32 array, and shapes depend on the number of rows and the size of the buckets alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import mlx.core as mx

from specdec.errors import StateError


@functools.lru_cache(maxsize=256)
def number(value: int) -> mx.array:
    """An int32 ``[1]`` on the device; computed, so that any thread may use it."""
    made = mx.array([value], mx.int32)
    mx.eval(made)
    return made


def _refuse(*_: object) -> NoReturn:
    raise StateError("a length that only the device knows is calculated with on the host")


class DeviceLength:
    """A length that only the device knows; whoever calculates with it is stopped.

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

    __int__ = __index__ = __float__ = __bool__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __mod__ = __rmod__ = _refuse
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __divmod__ = __pow__ = _refuse


Length = int | DeviceLength


def on_device(length: Length) -> mx.array:
    """The length as int32 ``[1]``."""
    return length.array if isinstance(length, DeviceLength) else number(length)


class DeviceTokens(Sequence[int]):
    """Token ids that lie on the device: their number is known, and where they are."""

    def __init__(self, ids: mx.array) -> None:
        self.ids = ids  # [T] int32, all of them inside the vocabulary

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    def __getitem__(self, index: Any) -> Any:
        raise StateError("token ids that only the device knows are read on the host")

    def __iter__(self) -> Iterator[int]:
        raise StateError("token ids that only the device knows are read on the host")


def rows_from(array: mx.array, start: mx.array, rows: int) -> mx.array:
    """``rows`` rows of ``array [n, ...]`` from the row ``start``, int32 ``[1]``."""
    return mx.slice(array, start, axes=[0], slice_size=(rows, *array.shape[1:]))
