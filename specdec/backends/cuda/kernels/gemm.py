"""Row-invariant products of up to 16 rows with a weight ``[N, K]``.

One compiled kernel serves every T: 16 rows are one tile, and rows from T on are masked. The tiles, the slices of K and
the order of every sum depend only on the weight and the device (``tiles``). The slices' partial sums go to the
workspace, and the program that finishes last folds all of them in ascending order, including its own.

Source of the conditions: He et al. 2025, "Defeating nondeterminism in LLM inference" (batch-invariant kernels).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from specdec.backends.cuda.kernels import norm, packed
from specdec.backends.cuda.kernels.launch import MAX_ROWS, dtype_of, launch, rounded
from specdec.backends.cuda.kernels.norm import GATED, PLAIN, RMS, GatedRms, Prologue, Rms, strided
from specdec.backends.cuda.kernels.packed import Layout
from specdec.backends.cuda.kernels.tiles import Tile, choose
from specdec.backends.cuda.kernels.workspace import Workspace
from specdec.backends.cuda.weights import DenseWeight, Weight, runs
from specdec.errors import ShapeError, UnsupportedError


@triton.jit
def x_tile(
    x_ptr,
    x_stride,
    z_ptr,
    z_stride,
    norm_ptr,
    eps,
    scale,
    rows,
    T,
    start,
    K,
    PROLOGUE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Columns ``start : start + BLOCK_K`` of x after the prologue, in x's dtype: ``[16, BLOCK_K]``, zeros from T on."""
    columns = start + tl.arange(0, BLOCK_K)
    mask = (rows < T)[:, None]
    if not EVEN_K:
        mask = mask & (columns < K)[None, :]
    x = tl.load(x_ptr + rows[:, None].to(tl.int64) * x_stride + columns[None, :], mask=mask, other=0.0)
    if PROLOGUE == PLAIN:
        return x
    elif PROLOGUE == RMS:
        if EVEN_K:
            weight = tl.load(norm_ptr + columns)
        else:
            weight = tl.load(norm_ptr + columns, mask=columns < K, other=0.0)
        return rounded(norm.normed(x, scale, weight), x.dtype)
    else:  # one block is one head
        z = tl.load(z_ptr + rows[:, None].to(tl.int64) * z_stride + columns[None, :], mask=mask, other=0.0)
        weight = tl.load(norm_ptr + tl.arange(0, BLOCK_K))
        return rounded(norm.gated(x, z, weight, BLOCK_K, eps), x.dtype)


@triton.jit
def silu_product(gate, up):
    """``silu(gate) * up`` in float32."""
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _write(
    acc,
    second,
    globals_ptr,
    globals2_ptr,
    bias_ptr,
    residual_ptr,
    residual_stride,
    out_ptr,
    out_stride,
    rows,
    T,
    columns,
    inside,
    N,
    FORMAT: tl.constexpr,
    PAIR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OUT: tl.constexpr,
):
    """The epilogue: everything after the complete sum, rounded once."""
    acc = packed.finish(acc, globals_ptr, inside, FORMAT)
    mask = (rows < T)[:, None] & (columns < N)[None, :]
    if PAIR:
        acc = silu_product(acc, packed.finish(second, globals2_ptr, inside, FORMAT))
    if HAS_BIAS:
        acc += tl.load(bias_ptr + inside).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        at = residual_ptr + rows[:, None].to(tl.int64) * residual_stride + columns[None, :]
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at = out_ptr + rows[:, None].to(tl.int64) * out_stride + columns[None, :]
    tl.store(at, rounded(acc, OUT), mask=mask)


@triton.jit(do_not_specialize=["T"])
def product_kernel(
    x_ptr,
    x_stride,
    T,
    w_ptr,
    scales_ptr,
    globals_ptr,
    w2_ptr,
    scales2_ptr,
    globals2_ptr,
    bias_ptr,
    residual_ptr,
    residual_stride,
    out_ptr,
    out_stride,
    z_ptr,
    z_stride,
    norm_ptr,
    eps,
    partials_ptr,
    counters_ptr,
    N,
    K,
    FORMAT: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    PAIR: tl.constexpr,
    PROLOGUE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,
    NORM_BLOCK: tl.constexpr,
    LINES: tl.constexpr,
):
    """Compute ``out [T, N]``. Programs: tiles of N times slices of K, the slices of a tile adjacent."""
    tile = tl.program_id(0) // SPLITS
    piece = tl.program_id(0) % SPLITS
    rows = tl.arange(0, 16)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = tl.minimum(columns, N - 1).to(tl.int64)  # past N, the last row is read again and not stored
    length = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
    if PROLOGUE == RMS:  # memory works while the norm is computed
        packed.ask(w_ptr, inside, piece * length, K, FORMAT, LINES)
        if PAIR:
            packed.ask(w2_ptr, inside, piece * length, K, FORMAT, LINES)
        scale = norm.inverse_rms(x_ptr, x_stride, rows, T, K, eps, NORM_BLOCK)
    else:
        scale = tl.zeros((16,), tl.float32)
    acc = tl.zeros((16, BLOCK_N), tl.float32)
    second = tl.zeros((16, BLOCK_N), tl.float32)
    for start in range(piece * length, tl.minimum((piece + 1) * length, K), BLOCK_K):
        x = x_tile(x_ptr, x_stride, z_ptr, z_stride, norm_ptr, eps, scale, rows, T, start, K, PROLOGUE, BLOCK_K, EVEN_K)
        acc = packed.multiply(
            x, acc, w_ptr, scales_ptr, inside, start, K, FORMAT, BLOCK_N, BLOCK_K, SCALE_N, SCALE_K, EVEN_K
        )
        if PAIR:
            second = packed.multiply(
                x, second, w2_ptr, scales2_ptr, inside, start, K, FORMAT, BLOCK_N, BLOCK_K, SCALE_N, SCALE_K, EVEN_K
            )
    if SPLITS == 1:
        _write(
            acc,
            second,
            globals_ptr,
            globals2_ptr,
            bias_ptr,
            residual_ptr,
            residual_stride,
            out_ptr,
            out_stride,
            rows,
            T,
            columns,
            inside,
            N,
            FORMAT,
            PAIR,
            HAS_BIAS,
            HAS_RESIDUAL,
            OUT,
        )
    else:
        tiles = tl.num_programs(0) // SPLITS
        place = rows[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        present = (rows < T)[:, None] & (columns < N)[None, :]
        at = partials_ptr + (piece.to(tl.int64) * tiles + tile) * (16 * BLOCK_N) + place
        apart = tiles.to(tl.int64) * (SPLITS * 16 * BLOCK_N)  # offset from the sums of gate to those of up
        tl.store(at, acc, mask=present)
        if PAIR:
            tl.store(at + apart, second, mask=present)
        tl.debug_barrier()  # order all threads' stores before one thread's release
        arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            total = tl.zeros((16, BLOCK_N), tl.float32)
            total2 = tl.zeros((16, BLOCK_N), tl.float32)
            for other in tl.static_range(SPLITS):
                at = partials_ptr + (tiles.to(tl.int64) * other + tile) * (16 * BLOCK_N) + place
                total += tl.load(at, mask=present, other=0.0, cache_modifier=".cg")
                if PAIR:
                    total2 += tl.load(at + apart, mask=present, other=0.0, cache_modifier=".cg")
            _write(
                total,
                total2,
                globals_ptr,
                globals2_ptr,
                bias_ptr,
                residual_ptr,
                residual_stride,
                out_ptr,
                out_stride,
                rows,
                T,
                columns,
                inside,
                N,
                FORMAT,
                PAIR,
                HAS_BIAS,
                HAS_RESIDUAL,
                OUT,
            )
            tl.store(counters_ptr + tile, 0)


def _product(
    x: Tensor,
    layout: Layout,
    n: int,
    *,
    second: Layout | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    prologue: Prologue | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """One launch of ``product_kernel``: ``[T, n]`` in ``dtype`` (x's by default)."""
    rows, k = x.shape[0], x[0].numel()
    check_rows(rows)
    x, most_k, prologue = before(x, prologue, layout.most_k)
    if tile is not None and most_k % tile.block_k:
        raise ShapeError(f"blocks of {tile.block_k} columns do not divide the {most_k} that share a scale or a head")
    if tile is None:
        tile = choose(n, k, layout.bits, x.device, pair=second is not None, most_k=most_k)
    x, x_stride = strided(x)
    z, z_stride, weight, eps = x, x_stride, x, 0.0
    if prologue is not None:
        weight, eps = prologue.weight, prologue.eps
        if isinstance(prologue, GatedRms):
            z, z_stride = strided(prologue.z.reshape(rows, k))
    added, added_stride = (x, x_stride) if residual is None else strided(residual)
    out = torch.empty(rows, n, dtype=dtype or x.dtype, device=x.device) if out is None else out
    other = second or layout
    tiles = -(-n // tile.block_n)
    space = Workspace.of(x.device)
    if tile.splits > 1:
        space.check((1 if second is None else 2) * tile.splits * tiles * tile.block_n, tiles)
    launch(
        product_kernel,
        (tiles * tile.splits,),
        x,
        x_stride,
        rows,
        *layout.tensors,
        *other.tensors,
        x if bias is None else bias,
        added,
        added_stride,
        out,
        n,
        z,
        z_stride,
        weight,
        eps,
        space.partials,
        space.counters,
        n,
        k,
        **layout.constexprs,
        PAIR=second is not None,
        PROLOGUE=_code(prologue),
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        OUT=dtype_of(out.dtype),
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SPLITS=tile.splits,
        EVEN_K=k % tile.block_k == 0,
        NORM_BLOCK=norm.block_of(k),
        LINES=lines(tile, layout.bits),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def lines(tile: Tile, bits: int) -> int:
    """Lines of memory of one row of a weight that a program asks for before its norm: those of its blocks in flight."""
    nbytes = (tile.stages - 1) * tile.block_k * bits // 8
    return int(triton.next_power_of_2(max(1, nbytes // packed.LINE.value)))


def before(x: Tensor, prologue: Prologue | None, most_k: int) -> tuple[Tensor, int, Prologue | None]:
    """Return x as ``[T, K]``, the bound of ``block_k``, and the prologue, which runs here if a head is not one tile."""
    if isinstance(prologue, GatedRms):
        dim = x.shape[-1]
        if norm.fusible(dim) and dim <= most_k:
            return x.reshape(len(x), -1), dim, prologue
        return norm.gated_rms_norm(x, prologue.z, prologue.weight, prologue.eps), most_k, None
    return x, most_k, prologue


def _code(prologue: Prologue | None) -> int:
    code = PLAIN if prologue is None else RMS if isinstance(prologue, Rms) else GATED
    return int(code.value)


def check_rows(rows: int) -> None:
    """Check that the rows fit one tile. Raises: ShapeError."""
    if not 0 < rows <= MAX_ROWS:
        raise ShapeError(
            f"a row-invariant product takes 1 to {MAX_ROWS} rows, got {rows}",
            try_="the library's product for longer passes (prompts)",
        )


def _check_columns(x: Tensor, weight: Weight) -> None:
    if x[0].numel() != weight.shape[1]:
        raise ShapeError(f"rows of {x[0].numel()} values do not fit a weight of {weight.shape[1]} columns")


def project(
    x: Tensor,
    weights: Sequence[Weight],
    *,
    biases: Sequence[DenseWeight | None] = (),
    prologue: Prologue | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, ...]:
    """``x [T, K] @ w.T (+ bias)`` for several weights ``[N_i, K]``: ``[T, N_i]`` each, x's dtype.

    Weights that ``fuse`` has made contiguous take one launch, if their biases are contiguous too. Their results are
    columns of one tensor ``[T, sum N_i]`` (row stride ``sum N_i``).

    Raises: ShapeError above 16 rows.
    """
    check_rows(len(x))
    biases = list(biases) or [None] * len(weights)
    if len(biases) != len(weights):
        raise ShapeError(f"{len(weights)} weights came with {len(biases)} biases; pass None for no bias")
    results: list[Tensor] = []
    at = 0
    for count in _launches(weights, biases):
        group, added = weights[at : at + count], biases[at]
        _check_columns(x, group[0])
        sizes = [w.shape[0] for w in group]
        y = _product(
            x,
            Layout.of(group[0]),
            sum(sizes),
            bias=None if added is None else added.tensor,
            prologue=prologue,
            tile=tile,
        )
        results.extend(y.split(sizes, dim=1) if count > 1 else [y])
        at += count
    return tuple(results)


def _launches(weights: Sequence[Weight], biases: Sequence[DenseWeight | None]) -> list[int]:
    """The number of weights of each launch: runs in memory, split where the biases are not also contiguous."""
    counts: list[int] = []
    at = 0
    for count in runs(weights):
        group = biases[at : at + count]
        there = [bias for bias in group if bias is not None]
        whole = not there or (len(there) == count and runs(there) == [count])
        counts.extend([count] if whole else [1] * count)
        at += count
    return counts


def linear(
    x: Tensor,
    weight: Weight,
    *,
    residual: Tensor | None = None,
    prologue: Prologue | None = None,
    bias: DenseWeight | None = None,
    tile: Tile | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``x @ w.T (+ bias) (+ residual [T, N])``, rounded once: ``[T, N]`` in x's dtype.

    x is ``[T, K]``; with ``GatedRms`` it is ``[T, heads, D]``. Raises: ShapeError above 16 rows.
    """
    check_rows(len(x))
    _check_columns(x, weight)
    added = None if bias is None else bias.tensor
    return _product(
        x, Layout.of(weight), weight.shape[0], bias=added, residual=residual, prologue=prologue, tile=tile, out=out
    )


def swiglu(
    x: Tensor,
    gate: Weight,
    up: Weight,
    *,
    prologue: Prologue | None = None,
    tile: Tile | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``silu(x @ gate.T) * (x @ up.T)``, in float32 and rounded once: ``[T, N]`` in x's dtype.

    Raises: ShapeError above 16 rows; UnsupportedError when gate and up are stored in different formats.
    """
    check_rows(len(x))
    _check_columns(x, gate)
    first, second = Layout.of(gate), Layout.of(up)
    if first.constexprs != second.constexprs or gate.shape != up.shape:
        raise UnsupportedError(
            "gate and up of one layer are stored in different formats", try_="decode them to one format when loading"
        )
    return _product(x, first, gate.shape[0], second=second, prologue=prologue, tile=tile, out=out)


def float32_product(
    x: Tensor, weight: Weight, *, prologue: Prologue | None = None, tile: Tile | None = None, out: Tensor | None = None
) -> Tensor:
    """``x @ w.T``, not rounded to x's dtype: ``[T, N]`` float32. Raises: ShapeError above 16 rows."""
    check_rows(len(x))
    _check_columns(x, weight)
    return _product(x, Layout.of(weight), weight.shape[0], prologue=prologue, dtype=torch.float32, tile=tile, out=out)


# --- in torch, float64 ------------------------------------------------------------------------------------------------


def prologue_reference(x: Tensor, prologue: Prologue | None) -> Tensor:
    """x after the prologue: rounded to x's dtype, then float64 ``[T, K]``."""
    if prologue is None:
        return x.double()
    if isinstance(prologue, Rms):
        return norm.rms_norm_reference(x, prologue.weight, prologue.eps).to(x.dtype).double()
    return norm.gated_rms_norm_reference(x, prologue.z, prologue.weight, prologue.eps).to(x.dtype).double()


def linear_reference(
    x: Tensor,
    weight: Weight,
    *,
    residual: Tensor | None = None,
    prologue: Prologue | None = None,
    bias: DenseWeight | None = None,
) -> Tensor:
    """``linear`` and ``float32_product`` in float64, not rounded."""
    y = prologue_reference(x, prologue) @ weight.decode().double().T
    if bias is not None:
        y = y + bias.tensor.double()
    return y if residual is None else y + residual.double()


def project_reference(
    x: Tensor, weights: Sequence[Weight], *, biases: Sequence[DenseWeight | None] = (), prologue: Prologue | None = None
) -> tuple[Tensor, ...]:
    """``project`` in float64, not rounded."""
    biases = list(biases) or [None] * len(weights)
    pairs = zip(weights, biases, strict=True)
    return tuple(linear_reference(x, weight, bias=bias, prologue=prologue) for weight, bias in pairs)


def swiglu_reference(x: Tensor, gate: Weight, up: Weight, *, prologue: Prologue | None = None) -> Tensor:
    """``swiglu`` in float64, not rounded."""
    return functional.silu(linear_reference(x, gate, prologue=prologue)) * linear_reference(x, up, prologue=prologue)
