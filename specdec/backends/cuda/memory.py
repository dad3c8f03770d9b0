"""Memory of the device: how much a sequence takes at first, how it grows, and the error when there is none left."""

from __future__ import annotations

from specdec.errors import SpecdecError

FIRST_ROWS = 1024  # rows of keys and values that an empty cache has room for; a capacity is not paid for before its use
GROWTH = 4  # a full cache becomes this many times as long: graphs are captured again for a longer one


class OutOfMemory(SpecdecError):
    """The device has no room for weights, or for the state of a sequence."""


def rows_for(needed: int, held: int, capacity: int) -> int:
    """Rows that a cache of ``held`` rows should have when ``needed`` are used: at most ``capacity``, by stages."""
    return min(stage(max(held, needed)), capacity)


def stage(rows: int) -> int:
    """The size of a cache that outgrew the ones before it, or more: at least ``rows``."""
    found = FIRST_ROWS
    while found < rows:
        found *= GROWTH
    return found


def out_of_memory(what: str, nbytes: int | None, free: int, total: int, setting: str) -> OutOfMemory:
    """The error for an allocation of ``nbytes`` (None: unknown) that failed."""
    return OutOfMemory(
        f"the CUDA device has no room for {what}",
        asked_for=None if nbytes is None else size(nbytes),
        free=f"{size(free)} of {size(total)}",
        try_=setting,
    )


def size(nbytes: int) -> str:
    """Bytes for people: ``1.5 GiB``."""
    value = float(nbytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{nbytes} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
