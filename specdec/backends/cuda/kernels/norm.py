"""Layer norms, RMS norms, and RMS norms gated by another activation; any number of rows."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.backends.cuda.kernels.launch import MAX_ROWS, dtype_of, interpreting, launch, rounded
from specdec.errors import ShapeError


def block_of(k: int) -> int:
    """Columns of x that a program reads at once; depends only on K, because it affects the bits."""
    return min(4096 if interpreting() else 512, max(16, int(triton.next_power_of_2(k))))


@triton.jit(do_not_specialize=["T"])
def _rms_kernel(x_ptr, stride, T, weight_ptr, eps, out_ptr, K, BLOCK: tl.constexpr, OUT: tl.constexpr):
    rows = tl.program_id(0) * 16 + tl.arange(0, 16)
    columns = tl.arange(0, BLOCK)
    from_ptr = x_ptr + rows[:, None].to(tl.int64) * stride
    total = tl.zeros((16, BLOCK), tl.float32)
    for start in range(0, K, BLOCK):
        mask = (rows < T)[:, None] & (start + columns < K)[None, :]
        part = tl.load(from_ptr + start + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        total += part * part
    scale = tl.rsqrt(tl.sum(total, 1) / K + eps)
    for start in range(0, K, BLOCK):
        inside = start + columns < K
        mask = (rows < T)[:, None] & inside[None, :]
        part = tl.load(from_ptr + start + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + start + columns, mask=inside, other=0.0)
        y = part * scale[:, None] * weight[None, :]
        tl.store(out_ptr + rows[:, None].to(tl.int64) * K + start + columns[None, :], rounded(y, OUT), mask=mask)


@triton.jit(do_not_specialize=["T"])
def _gated_kernel(
    x_ptr, x_stride, z_ptr, z_stride, T, weight_ptr, eps, out_ptr, K, D, BLOCK: tl.constexpr, OUT: tl.constexpr
):
    rows = tl.program_id(0) * 16 + tl.arange(0, 16)
    inside = tl.arange(0, BLOCK) < D
    columns = tl.program_id(1).to(tl.int64) * D + tl.arange(0, BLOCK)
    mask = (rows < T)[:, None] & inside[None, :]
    wide_rows = rows[:, None].to(tl.int64)
    part = tl.load(x_ptr + wide_rows * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(z_ptr + wide_rows * z_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + tl.arange(0, BLOCK), mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(part * part, 1) / D + eps)
    y = part * scale[:, None] * weight[None, :] * (gate * tl.sigmoid(gate))
    tl.store(out_ptr + wide_rows * K + columns[None, :], rounded(y, OUT), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis of ``x [..., K]``, any number of rows: the same shape and dtype, contiguous.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.
    """
    return _by_rows(_rms_kernel, x, weight, eps)


@triton.jit(do_not_specialize=["T"])
def _layer_kernel(x_ptr, stride, T, weight_ptr, bias_ptr, eps, out_ptr, K, BLOCK: tl.constexpr, OUT: tl.constexpr):
    rows = tl.program_id(0) * 16 + tl.arange(0, 16)
    columns = tl.arange(0, BLOCK)
    from_ptr = x_ptr + rows[:, None].to(tl.int64) * stride
    total = tl.zeros((16, BLOCK), tl.float32)
    for start in range(0, K, BLOCK):
        mask = (rows < T)[:, None] & (start + columns < K)[None, :]
        total += tl.load(from_ptr + start + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(total, 1) / K
    total = tl.zeros((16, BLOCK), tl.float32)
    for start in range(0, K, BLOCK):
        mask = (rows < T)[:, None] & (start + columns < K)[None, :]
        part = tl.load(from_ptr + start + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        centred = tl.where(mask, part - mean[:, None], 0.0)
        total += centred * centred
    scale = tl.rsqrt(tl.sum(total, 1) / K + eps)
    for start in range(0, K, BLOCK):
        inside = start + columns < K
        mask = (rows < T)[:, None] & inside[None, :]
        part = tl.load(from_ptr + start + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + start + columns, mask=inside, other=0.0)
        bias = tl.load(bias_ptr + start + columns, mask=inside, other=0.0)
        y = tl.fma((part - mean[:, None]) * scale[:, None], weight[None, :], bias[None, :])
        tl.store(out_ptr + rows[:, None].to(tl.int64) * K + start + columns[None, :], rounded(y, OUT), mask=mask)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm over the last axis of ``x [T, K]``, any number of rows: the same shape and dtype, contiguous.

    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450.
    """
    return _by_rows(_layer_kernel, x, weight, bias, eps)


def _by_rows(kernel: Any, x: Tensor, *parameters: Any) -> Tensor:
    k = x.shape[-1]
    flat, stride = strided(x.reshape(-1, k))
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    grid = (-(-len(flat) // MAX_ROWS),)
    arguments = flat, stride, len(flat), *parameters, out, k
    launch(kernel, grid, *arguments, BLOCK=block_of(k), OUT=dtype_of(x.dtype))
    return out.view(x.shape)


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``rms_norm(x) * silu(z)`` per head of ``x, z [T, heads, D]``: ``[T, heads * D]``, any number of rows."""
    rows, heads, dim = x.shape
    if z.shape != x.shape:
        raise ShapeError(f"a gate should have the shape of what it gates, {list(x.shape)}, got {list(z.shape)}")
    flat, stride = strided(x.reshape(rows, heads * dim))
    gate, gate_stride = strided(z.reshape(rows, heads * dim))
    out = torch.empty(rows, heads * dim, dtype=x.dtype, device=x.device)
    launch(
        _gated_kernel,
        (-(-rows // MAX_ROWS), heads),
        flat,
        stride,
        gate,
        gate_stride,
        rows,
        weight,
        eps,
        out,
        heads * dim,
        dim,
        BLOCK=max(16, triton.next_power_of_2(dim)),
        OUT=dtype_of(x.dtype),
    )
    return out


def strided(x: Tensor) -> tuple[Tensor, int]:
    """Return rows ``[T, K]`` and their stride, such that kernels have the same specialisation for every T and view.

    Triton specialises on multiples of 16, so for each width either all rows are aligned to 16 bytes or none is treated
    as aligned; unaligned rows are copied. The stride of a single row is arbitrary and becomes K.
    """
    rows, k = x.shape
    if x.stride(1) != 1 and k > 1:
        return x.contiguous(), k
    stride = x.stride(0) if rows > 1 else k
    if k % 16:
        return (x, k) if stride == k else (x.contiguous(), k)
    if stride % 16 or x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format), k
    return x, stride
