"""Placeholders for numbers that the host does not know while a pass is recorded or captured.

They are passed from op to op and end up in a kernel's arguments. Calculating with one on the host would fix its value
for all later passes, so it raises an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NoReturn

from specdec.errors import StateError


def _refuse(placeholder: PlaceholderInteger, *_: object) -> NoReturn:
    raise placeholder.error("a cache's length is used outside the kernels, so its value would be fixed")


class PlaceholderInteger:
    """An integer that cannot be calculated with, compared or hashed. Raises: ``error``."""

    __slots__ = ()
    error: ClassVar[type[Exception]] = StateError

    __int__ = __index__ = __float__ = __bool__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __mod__ = __rmod__ = _refuse
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __divmod__ = __pow__ = _refuse


class PlaceholderTokens(Sequence[int]):
    """Token ids whose values the host does not know; it knows their number. Raises: ``error`` when they are read."""

    error: ClassVar[type[Exception]] = StateError

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: Any) -> Any:
        raise self.error("token ids are read outside embed: the host does not know them")

    def __iter__(self) -> Iterator[int]:
        raise self.error("token ids are read outside embed: the host does not know them")


class DeviceTokens(PlaceholderTokens):
    """Token ids on a device; the host knows only their number."""

    def __init__(self, ids: Any) -> None:
        super().__init__(int(ids.shape[0]))
        self.ids = ids  # [T] int32
