"""Commit rows of a pass in all caches of a sequence, on the device."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.backends.cuda.kernels.launch import COLUMNS, LENGTH, SLOT, SLOTS, launch

ROWS, STATES = 0, 1  # kinds of caches: only rows (keys and values, latent rows), or rows and state slots (delta rule)


@triton.jit(do_not_specialize=["caches", "count"])
def _commit_rows(table, kinds, count, caches, WHOLE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    cache = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = cache < caches
    at = table + cache.to(tl.int64) * COLUMNS
    tl.store(at + LENGTH, tl.load(at + LENGTH, mask=known, other=0) + count, mask=known)
    stateful = known & (tl.load(kinds + cache, mask=known, other=0) == 1)
    slots = tl.load(at + SLOTS, mask=stateful, other=1)
    steps = count
    if WHOLE:
        steps = tl.minimum(count, 1)
    tl.store(at + SLOT, (tl.load(at + SLOT, mask=stateful, other=0) + steps) % slots, mask=stateful)


def commit_rows(table: Tensor, kinds: Tensor, rows: int, *, whole: bool = False) -> None:
    """Commit the first ``rows`` rows of the last pass in every cache of ``table``, in one launch.

    LENGTH grows by ``rows``. In delta caches, SLOT also grows by ``rows``, modulo their slots, so that the state after
    the last committed row becomes the base of the next pass.

    Args:
        table: int64 ``[caches, 8]``, rows of the address table.
        kinds: int32 ``[caches]``: ROWS or STATES.
        whole: the pass was a prompt's, committed whole, which wrote one state: SLOT moves by one.
    """
    caches = table.shape[0]
    launch(
        _commit_rows,
        (triton.cdiv(caches, 128),),
        table,
        kinds,
        rows,
        caches,
        WHOLE=whole,
        COLUMNS=COLUMNS,
        BLOCK=128,
        num_warps=1,
    )
