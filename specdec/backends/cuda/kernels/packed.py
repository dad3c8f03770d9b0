"""Products with packed weights: a row-invariant kernel for up to 16 rows, and the tiles that experts multiply too.

One compiled kernel serves every T: 16 rows are one tile, and rows from T on are masked. Each output is summed by one
program over blocks of K in ascending order, whose sizes depend only on the weight and its format.
Source of the conditions: He et al. 2025, "Defeating nondeterminism in LLM inference" (batch-invariant kernels).

Codes are converted to bfloat16 by shifting bits: the sign, exponent and mantissa of an E4M3 or E2M1 code move to those
of a bfloat16. This gives the value times a power of two, also for subnormal codes, and one exact multiplication removes
the power. On a device this is inline PTX for four bytes at once, with instructions that sm_80 also has.
The E4M3 codes of NaN (0x7f, 0xff) become 480; checkpoints with such codes are rejected when they are read.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.backends.cuda.kernels.launch import RAISE, dtype_of, interpreting, launch, raised, rounded
from specdec.backends.cuda.kernels.norm import strided
from specdec.backends.cuda.weights import GROUP, DenseWeight, Fp8BlockWeight, Nvfp4Weight, Weight, parts
from specdec.errors import UnsupportedError

DENSE = tl.constexpr(0)
FP8 = tl.constexpr(1)
NVFP4 = tl.constexpr(2)

# Bytes b0..b3 of $2 become halfwords b << 8; the sign is in place, the other bits move right by 4; times 2^120.
# fma with -0 is a multiplication that keeps the sign of zero; sm_80 has it for bfloat16.
E4M3 = tl.constexpr("""{
.reg .b32 a, b, m, n, c, z;
mov.b32 c, 0x7b807b80;
mov.b32 z, 0x80008000;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
and.b32 m, a, 0x7f007f00;
and.b32 n, b, 0x7f007f00;
shr.b32 m, m, 4;
shr.b32 n, n, 4;
lop3.b32 m, a, 0x80008000, m, 0xea;
lop3.b32 n, b, 0x80008000, n, 0xea;
fma.rn.bf16x2 $0, m, c, z;
fma.rn.bf16x2 $1, n, c, z;
}""")

# Low halves to $0, $1 and high halves to $2, $3, each as its value times 2^-126: sign to bit 15, the rest to bits 8..6.
E2M1 = tl.constexpr("""{
.reg .b32 a, b, m, n, s, t;
prmt.b32 a, $4, 0, 0x1404;
prmt.b32 b, $4, 0, 0x3424;
shr.b32 m, a, 2;
shr.b32 n, b, 2;
and.b32 m, m, 0x01c001c0;
and.b32 n, n, 0x01c001c0;
shl.b32 s, a, 4;
shl.b32 t, b, 4;
lop3.b32 $0, s, 0x80008000, m, 0xea;
lop3.b32 $1, t, 0x80008000, n, 0xea;
shr.b32 m, a, 6;
shr.b32 n, b, 6;
and.b32 m, m, 0x01c001c0;
and.b32 n, n, 0x01c001c0;
lop3.b32 $2, a, 0x80008000, m, 0xea;
lop3.b32 $3, b, 0x80008000, n, 0xea;
}""")

# Two bfloat16 products at once.
TIMES = tl.constexpr("""{
.reg .b32 z;
mov.b32 z, 0x80008000;
fma.rn.bf16x2 $0, $1, $2, z;
}""")

_E4M3_POWER = tl.constexpr(2.0**120)
_E2M1_POWER = tl.constexpr(2.0**126)
_SHRUNK = tl.constexpr(2.0**-7)  # group scales reach 448; times 2^119 instead of 2^126 they stay in bfloat16's range
UNSHRUNK = tl.constexpr(2.0**7)
_LEFT = tl.constexpr(2.0**119)


@triton.jit
def e4m3(codes, dtype: tl.constexpr):
    """Decode uint8 codes to ``dtype``, or to float32 when interpreted. Exact."""
    if RAISE:
        wide = codes.to(tl.uint32)
        bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
        return bits.to(tl.float32, bitcast=True) * _E4M3_POWER
    else:
        return tl.inline_asm_elementwise(E4M3, "=&r,=&r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4).to(dtype)


@triton.jit
def e2m1(codes):
    """Decode uint8 pairs of codes to two tensors, times 2^-126 (float32 and times 1 when interpreted). Exact."""
    if RAISE:
        wide = codes.to(tl.uint32)
        low = ((wide & 0x8) << 28) | ((wide & 0x7) << 22)
        high = ((wide & 0x80) << 24) | ((wide & 0x70) << 18)
        return low.to(tl.float32, bitcast=True) * _E2M1_POWER, high.to(tl.float32, bitcast=True) * _E2M1_POWER
    else:
        return tl.inline_asm_elementwise(
            E2M1, "=&r,=&r,=&r,=&r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )


@triton.jit
def times(codes, scales, dtype: tl.constexpr):
    """Scale the result of ``e2m1``: ``dtype``, or float32 when interpreted. Exact: the product has 6 bits."""
    if RAISE:
        return codes * scales
    else:
        return tl.inline_asm_elementwise(TIMES, "=r,r,r", [codes, scales], dtype=tl.bfloat16, is_pure=True, pack=2).to(
            dtype
        )


@triton.jit
def group_scales(codes):
    """Decode E4M3 group scales to factors for the result of ``e2m1`` that give the values times 2^-7. Exact."""
    number = ((codes.to(tl.uint32) & 0x7F) << 20).to(tl.float32, bitcast=True) * _E4M3_POWER
    if RAISE:
        return number * _SHRUNK
    else:
        return (number * _LEFT).to(tl.bfloat16)


@triton.jit
def dot(x, w, acc):
    """``acc + x [16, B] @ w [BLOCK_N, B].T`` in float32.

    The interpreter's own dot is a BLAS product, whose bits depend on a row's index, so when interpreted the terms of
    every element are summed separately.
    """
    if RAISE:
        return acc + tl.sum(x.to(tl.float32)[:, None, :] * w.to(tl.float32)[None, :, :], 2)
    else:
        return tl.dot(x, tl.trans(w), acc, input_precision="ieee")


@triton.jit
def multiply(
    x,
    acc,
    w_ptr,
    scales_ptr,
    rows,
    start,
    K,
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """``acc [16, BLOCK_N] + x [16, BLOCK_K] @ W[rows, start : start + BLOCK_K].T``, float32.

    ``rows`` int64 ``[BLOCK_N]``, all inside the weight. For NVFP4, ``finish`` later multiplies by the global scale and
    2^7.
    """
    if FORMAT == DENSE:
        columns = start + tl.arange(0, BLOCK_K)
        at = w_ptr + rows[:, None] * K + columns[None, :]
        if EVEN_K:
            w = tl.load(at)
        else:
            w = tl.load(at, mask=columns[None, :] < K, other=0.0)
        return dot(x, w, acc)
    elif FORMAT == FP8:
        columns = start + tl.arange(0, BLOCK_K)
        at = w_ptr + rows[:, None] * K + columns[None, :]
        if EVEN_K:
            codes = tl.load(at)
        else:
            codes = tl.load(at, mask=columns[None, :] < K, other=0)
        across = (K + SCALE_K - 1) // SCALE_K
        scale = tl.load(scales_ptr + (rows // SCALE_N) * across + start // SCALE_K)
        part = dot(x, e4m3(codes, x.dtype), tl.zeros((16, BLOCK_N), tl.float32))
        return acc + part * scale[None, :]
    else:
        HALF: tl.constexpr = BLOCK_K // 2
        GROUPS: tl.constexpr = BLOCK_K // 16
        columns = start // 2 + tl.arange(0, HALF)
        groups = start // 16 + tl.arange(0, GROUPS)
        at = w_ptr + rows[:, None] * (K // 2) + columns[None, :]
        scales_at = scales_ptr + rows[:, None] * (K // 16) + groups[None, :]
        if EVEN_K:
            codes = tl.load(at)
            scale_codes = tl.load(scales_at)
        else:
            codes = tl.load(at, mask=columns[None, :] < K // 2, other=0)
            scale_codes = tl.load(scales_at, mask=groups[None, :] < K // 16, other=0)
        scale = tl.broadcast_to(group_scales(scale_codes)[:, :, None], (BLOCK_N, GROUPS, 8))
        scale = tl.reshape(scale, (BLOCK_N, HALF))
        low, high = e2m1(codes)
        low = times(low, scale, x.dtype)
        high = times(high, scale, x.dtype)
        even, odd = tl.split(tl.reshape(raised(x), (16, HALF, 2)))
        return dot(odd, high, dot(even, low, acc))


@triton.jit
def finish(acc, global_ptr, rows, FORMAT: tl.constexpr):
    """Finish a complete sum ``[16, BLOCK_N]``: multiply by NVFP4's scale of each row of the weight."""
    if FORMAT == NVFP4:
        return acc * (tl.load(global_ptr + rows) * UNSHRUNK)[None, :]
    else:
        return acc


@attrs.frozen
class Layout:
    """A weight as kernel arguments: tensors (the first replaces those that the format lacks) and constexprs."""

    tensors: tuple[Tensor, Tensor, Tensor]
    format: tl.constexpr
    bits: int
    most_k: int  # upper bound of ``Tile.block_k``
    scale_n: int = 1
    scale_k: int = 1

    @property
    def constexprs(self) -> dict[str, int]:
        return {"FORMAT": self.format.value, "SCALE_N": self.scale_n, "SCALE_K": self.scale_k}

    @classmethod
    def of(cls, weight: Weight) -> Layout:
        """Describe a weight. Raises: UnsupportedError for scale blocks that no tile divides."""
        there = parts(weight)
        codes, scales, globals_ = (*there, *there[:1] * (3 - len(there)))
        tensors = (codes, scales, globals_)
        match weight:
            case DenseWeight():
                size = weight.tensor.element_size()  # float32 uses no tensor cores and has registers for 32 columns
                return cls(tensors, DENSE, 8 * size, 128 if size == 2 or interpreting() else 32)
            case Nvfp4Weight():
                return cls(tensors, NVFP4, 4, 256)
            case Fp8BlockWeight(block=(scale_n, scale_k)):
                whole = scale_k >= weight.shape[1]
                step = 128 if whole else scale_k & -scale_k
                if step < 16:
                    raise UnsupportedError(
                        f"FP8 weights with one scale per {scale_k} columns are not run in place",
                        try_="blocks of a multiple of 16 columns, or decode the weight when loading",
                    )
                return cls(tensors, FP8, 8, min(step, 128), scale_n, max(scale_k, 1))


@attrs.frozen
class Tile:
    """The work of one program: ``[16, block_n]`` outputs, over blocks of ``block_k`` columns."""

    block_n: int
    block_k: int
    stages: int = 3  # blocks in flight
    warps: int = 4

    @classmethod
    def of(cls, layout: Layout, block_n: int) -> Tile:
        """The tile of a weight's format, never of T: the size of a block decides the order of sums."""
        if interpreting():
            return cls(256, min(layout.most_k, 128))
        step = block_n * layout.most_k * layout.bits // 8
        return cls(block_n, layout.most_k, min(max(3, 1 + -(-_FLIGHT // step)), 6))


_FLIGHT = 16_000  # bytes of a weight that a program should have in flight; an estimate
_BLOCK_N = 32  # narrow, so that matrices of a few thousand rows fill a device


@triton.jit(do_not_specialize=["T"])
def product_kernel(
    x_ptr,
    x_stride,
    T,
    w_ptr,
    scales_ptr,
    globals_ptr,
    out_ptr,
    N,
    K,
    FORMAT: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Compute ``out [T, N]``, one tile of N per program."""
    rows = tl.arange(0, 16)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = tl.minimum(columns, N - 1).to(tl.int64)  # past N, the last row is read again and not stored
    acc = tl.zeros((16, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        mask = (rows < T)[:, None]
        if not EVEN_K:
            mask = mask & (at < K)[None, :]
        x = tl.load(x_ptr + rows[:, None].to(tl.int64) * x_stride + at[None, :], mask=mask, other=0.0)
        acc = multiply(x, acc, w_ptr, scales_ptr, inside, start, K, FORMAT, BLOCK_N, BLOCK_K, SCALE_N, SCALE_K, EVEN_K)
    acc = finish(acc, globals_ptr, inside, FORMAT)
    mask = (rows < T)[:, None] & (columns < N)[None, :]
    tl.store(out_ptr + rows[:, None].to(tl.int64) * N + columns[None, :], rounded(acc, OUT), mask=mask)


def product(x: Tensor, weight: Weight, size: int, dtype: torch.dtype) -> Tensor:
    """``x [T, K] @ w.T`` of up to 16 rows and the first ``size`` rows from ``weight``'s memory on: ``[T, size]``."""
    layout, k = Layout.of(weight), weight.shape[1]
    tile = Tile.of(layout, _BLOCK_N)
    x, stride = strided(x)
    out = torch.empty(len(x), size, dtype=dtype, device=x.device)
    launch(
        product_kernel,
        (triton.cdiv(size, tile.block_n),),
        x,
        stride,
        len(x),
        *layout.tensors,
        out,
        size,
        k,
        **layout.constexprs,
        OUT=dtype_of(dtype),
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        EVEN_K=k % tile.block_k == 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


@triton.jit
def silu_product(gate, up):
    """``silu(gate) * up`` in float32."""
    return gate * tl.sigmoid(gate) * up


assert GROUP == 16  # written out in ``multiply``
