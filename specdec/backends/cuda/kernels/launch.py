"""Kernel launches, the columns of the address table, and rounding that is also correct in Triton's interpreter."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernels have no annotations except tl.constexpr, since triton's compiler interprets them.
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from specdec.errors import UnsupportedError

# --- the address table: one row of 8 int64 per cache ------------------------------------------------------------------

COLUMNS = 8
LENGTH = tl.constexpr(0)  # committed rows
FIRST = tl.constexpr(1)  # address of keys, of latent rows, or of recurrent states
SECOND = tl.constexpr(2)  # address of values, or of the ring of raw convolution rows
CAPACITY = tl.constexpr(3)  # rows
SLOTS = tl.constexpr(3)  # of a delta cache: state slots
SLOT = tl.constexpr(4)  # of a delta cache: the slot with the committed state
RING = tl.constexpr(5)  # of a delta cache: rows of the ring

MAX_ROWS = 16  # rows of a pass that the row-invariant kernels take: one tile


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter; fixed when the first kernel module is imported."""
    return _INTERPRETING


_INTERPRETING: bool = bool(triton.knobs.runtime.interpret)
if _INTERPRETING == isinstance(tl.sum, triton.runtime.JITFunction):  # triton has already bound its functions
    raise UnsupportedError(
        "TRITON_INTERPRET was changed after triton had been imported",
        try_="set it before anything imports triton, or not at all",
    )

# In the interpreter, bfloat16 arithmetic is wrong and conversion to it truncates (triton 3.9), so operands are raised
# to float32 before every operation and rounded explicitly.
RAISE = tl.constexpr(_INTERPRETING)


@triton.jit
def raised(x):
    """Operand of ``tl.dot``: unchanged on a device, float32 in the interpreter (exact for bfloat16 products)."""
    if RAISE:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 ``x`` rounded to nearest even in ``dtype``, on a device and in the interpreter."""
    if RAISE and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        bits = tl.where(x == x, even, 0x7FC00000).to(tl.uint32)
        return bits.to(tl.float32, bitcast=True).to(dtype)
    else:
        return x.to(dtype)


# --- launching --------------------------------------------------------------------------------------------------------


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, num_stages: int = 3, **constexprs: Any
) -> None:
    """Launch ``kernel`` over ``grid`` with positional ``args``, on the current device's current stream.

    Fused multiply-add is enabled explicitly, because triton's default is about to change and bits must not.
    """
    options = {**constexprs, "num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    execute(kernel, grid, args, options)


_DEVICE_OPTIONS = frozenset({"num_warps", "num_stages", "enable_fp_fusion"})


def execute(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Run a launch now. Tests replace this, to run it later or only compile it."""
    if _INTERPRETING:
        options = {name: value for name, value in options.items() if name not in _DEVICE_OPTIONS}
    kernel[grid](*args, **options)


def dtype_of(dtype: torch.dtype) -> Any:
    """The triton dtype of an activation dtype, for constexpr arguments."""
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
