"""Device memory of caches: their first size, their growth, and the error when memory runs out."""

from __future__ import annotations

from specdec.errors import SpecdecError

FIRST_ROWS = 1024  # rows of an empty cache of keys and values; the full capacity is not allocated up front
GROWTH = 4  # growth factor of a full cache; each stage needs new graphs


class OutOfMemory(SpecdecError):
    """The device has no memory for weights or for the state of a sequence."""


def rows_for(needed: int, held: int, capacity: int) -> int:
    """The size of a cache of ``held`` rows that needs ``needed``: a stage of growth, at most ``capacity``."""
    return min(stage(max(held, needed)), capacity)


def stage(rows: int) -> int:
    """The smallest stage of growth with at least ``rows`` rows."""
    found = FIRST_ROWS
    while found < rows:
        found *= GROWTH
    return found


def out_of_memory(what: str, nbytes: int | None, free: int, total: int, setting: str) -> OutOfMemory:
    """Return the error for a failed allocation of ``nbytes`` (None: unknown)."""
    return OutOfMemory(
        f"the CUDA device has no room for {what}",
        asked_for=None if nbytes is None else f"{nbytes / 1e6:.1f} MB",
        free=f"{free / 1e6:.1f} of {total / 1e6:.1f} MB",
        try_=setting,
    )
