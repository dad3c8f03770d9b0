"""The C++ kernels behind the Ops protocol: the same arithmetic for 1 row and for a thousand.

Each method names no formula: ``specdec.backends.ops`` says what it computes, ``ReferenceOps`` is the reference it is
tested against, and the head of each C++ file states its contract on bits. Tensors are passed by address, so everything
that would make an address mean something else (dtype, layout, shape) is checked here and refused, never converted.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.backends.cpu.arrays import CpuLogits
from specdec.backends.cpu.caches import CpuDeltaCache, CpuKVCache
from specdec.backends.cpu.compiler import Kernels
from specdec.backends.cpu.reference import ReferenceOps
from specdec.backends.ops import DeltaShape, Rope
from specdec.errors import ContractError, ShapeError, UnsupportedError
from specdec.sampling import Purpose

MAX_TAPS = 8  # kernels/delta.cpp
MAX_WEIGHTS = 16  # kernels/dense.cpp, project
MAX_KNOWN = 8192  # weights whose layout is remembered

_empty = torch.empty
_threads = torch.get_num_threads
_Pointers = [ctypes.c_void_p * n for n in range(MAX_WEIGHTS + 1)]
_Sizes = [ctypes.c_int64 * n for n in range(MAX_WEIGHTS + 1)]


class NativeLogits(CpuLogits):
    """Logits that are sampled where they lie, in one pass over the row."""

    __slots__ = ("_array", "_choose")

    def __init__(self, array: Tensor, choose: ctypes._NamedFuncPointer) -> None:
        super().__init__(array)
        self._array = array
        self._choose = choose

    def noisy_argmax(self, row: int, scale: float, seed: int, position: int) -> int:
        size = self._array.shape[1]
        at = self._array.data_ptr() + 4 * size * row
        token: int = self._choose(at, size, scale, seed, position, int(Purpose.TOKEN))
        if token < 0:
            raise ContractError(
                f"the target's logits of row {row} are not finite",
                try_="specdec info MODEL (the weight audit), or dtype = float32",
            )
        return token


class NativeOps(ReferenceOps):
    """Ops in C++. Bits of a row depend on that row and the cached rows only, for any number of rows and threads."""

    def __init__(self, dtype: torch.dtype, kernels: Kernels) -> None:
        super().__init__(dtype, kernels=kernels.description)
        self.parity_reason = "every output has its own accumulators, filled in an order that only its length sets"
        self._frequencies: dict[int, tuple[Rope, Tensor, int]] = {}
        self._groups: dict[tuple[tuple[int, int, int], ...], tuple[int, Any, Any, tuple[int, ...], Any]] = {}
        self._weights: dict[int, tuple[weakref.ref[Tensor], int, int, int, int]] = {}
        name = {torch.bfloat16: "bf16", torch.float32: "f32"}[dtype]

        def function(op: str, arguments: str) -> ctypes._NamedFuncPointer:
            found: ctypes._NamedFuncPointer = kernels.function(f"{op}_{name}", arguments)
            return found

        self._project = function("project", "piiiipppppi")
        self._linear = function("linear", "piiipiipipi")
        self._swiglu = function("swiglu", "piiipipiipi")
        self._head = function("head", "piiipiipi")
        self._rms_norm = function("rms_norm", "piiipfpi")
        self._norm_rope = function("norm_rope", "piiiiipfpiipi")
        self._gated_rms_norm = function("gated_rms_norm", "piipiiiiipfpi")
        self._attend = function("attend", "piipiipiipppiiiiiiifpi")
        self._conv_window = function("conv_window", "ppiiipippi")
        self._gated_delta = function("gated_delta", "iiiipppppppipi")
        self._embed = kernels.function("embed_rows", "piiipip", ctypes.c_int64)
        self._noisy_argmax = kernels.function("noisy_argmax", "pifiii", ctypes.c_int64)

    # --- what an address must mean ---------------------------------------------------------------------------------

    # Contiguity is asked first because it is what nearly always holds and costs a quarter of reading the strides.

    def _rows(self, x: Tensor, op: str) -> tuple[int, int, int, int]:
        """Address, row stride, rows and length of ``[T, H]`` activations."""
        shape = x.shape
        if x.dtype is self.dtype and len(shape) == 2:
            rows, length = shape
            if x.is_contiguous():
                return x.data_ptr(), length, rows, length
            row_stride, stride = x.stride()
            if stride == 1:
                return x.data_ptr(), row_stride, rows, length
        raise self._refused(op, "x", x, "[T, H]")

    def _matrix(self, w: Tensor, length: int, op: str) -> tuple[int, int, int]:
        """Address, row stride and output features of a weight ``[N, length]``."""
        at = w.data_ptr()
        known = self._weights.get(id(w))  # weights are few and read on every pass: what they are is asked once
        if known is None or known[0]() is not w or known[1] != at:
            if w.dtype is not self.dtype or w.ndim != 2 or w.stride(1) != 1:
                raise self._refused(op, "weight", w, f"[N, {length}]")
            if len(self._weights) >= MAX_KNOWN:  # somebody makes new weights for every pass
                self._weights.clear()
            known = self._weights[id(w)] = (weakref.ref(w), at, w.stride(0), w.shape[0], w.shape[1])
        if known[4] != length:
            raise self._refused(op, "weight", w, f"[N, {length}]")
        return at, known[2], known[3]

    def _heads(self, x: Tensor, op: str, name: str) -> tuple[int, int, int]:
        """Address, row stride and head stride of ``[T, n, D]`` activations."""
        shape = x.shape
        if x.dtype is self.dtype and len(shape) == 3:
            if x.is_contiguous():
                return x.data_ptr(), shape[1] * shape[2], shape[2]
            row_stride, head_stride, stride = x.stride()
            if stride == 1:
                return x.data_ptr(), row_stride, head_stride
        raise self._refused(op, name, x, "[T, n, D]")

    def _floats(self, x: Tensor, size: int, op: str, name: str) -> int:
        """Address of a contiguous float32 parameter of ``size`` elements."""
        if x.dtype is not torch.float32 or x.numel() != size or not x.is_contiguous():
            raise self._refused(op, name, x, f"{size} contiguous elements", torch.float32)
        return x.data_ptr()

    def _packed(self, x: Tensor, shape: tuple[int, ...], op: str, name: str) -> int:
        """Address of a contiguous activation of exactly this shape."""
        if x.dtype is not self.dtype or x.shape != shape or not x.is_contiguous():
            raise self._refused(op, name, x, f"{list(shape)}, contiguous")
        return x.data_ptr()

    def _refused(self, op: str, name: str, x: Tensor, layout: str, dtype: torch.dtype | None = None) -> ShapeError:
        return ShapeError(
            f"{op} cannot read {name}",
            got=f"{list(x.shape)} {x.dtype}, strides {list(x.stride())}",
            takes=f"{layout} {dtype or self.dtype}, last axis dense",
        )

    # --- dense -----------------------------------------------------------------------------------------------------

    def embed(self, table: Tensor, tokens: Sequence[int]) -> Tensor:
        rows = len(tokens)
        if table.ndim != 2 or table.dtype is not self.dtype or table.stride(1) != 1:
            raise self._refused("embed", "table", table, "[V, H]")
        vocabulary, hidden = table.shape
        out = _empty(rows, hidden, dtype=self.dtype)
        size = table.element_size()
        ids = (ctypes.c_int64 * rows)(*tokens)
        bad = self._embed(
            table.data_ptr(), table.stride(0) * size, hidden * size, vocabulary, ids, rows, out.data_ptr()
        )  # fmt: skip
        if bad >= 0:
            raise ContractError(f"token {tokens[bad]} of row {bad} is not in the vocabulary (0..{vocabulary - 1})")
        return out

    def project(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = ()) -> tuple[Tensor, ...]:
        at, stride, rows, length = self._rows(x, "project")
        matrices = [self._matrix(w, length, "project") for w in weights]
        group = self._groups.get(tuple(matrices))
        if group is None:
            group = self._group(matrices)
        count, addresses, strides, features, sizes = group
        dtype = self.dtype
        outs = tuple([_empty(rows, n, dtype=dtype) for n in features])
        wide, bias_addresses = self._biases(biases, features) if biases else (None, None)
        self._project(
            at, stride, rows, length, count, addresses, strides, sizes, bias_addresses,
            _Pointers[count](*[out.data_ptr() for out in outs]), _threads(),
        )  # fmt: skip
        del wide  # whose addresses the call has used
        return outs

    def _group(self, matrices: Sequence[tuple[int, int, int]]) -> tuple[int, Any, Any, tuple[int, ...], Any]:
        """The C arrays that describe weights: count, addresses, strides, features as integers and as an array."""
        count = len(matrices)
        if not 0 < count <= MAX_WEIGHTS:
            raise UnsupportedError(f"project takes 1 to {MAX_WEIGHTS} weights, got {count}")
        addresses, strides, features = zip(*matrices, strict=True)
        if len(self._groups) >= MAX_KNOWN:
            self._groups.clear()
        group = (count, _Pointers[count](*addresses), _Sizes[count](*strides), features, _Sizes[count](*features))
        self._groups[tuple(matrices)] = group
        return group

    def _biases(self, biases: Sequence[Tensor | None], features: Sequence[int]) -> tuple[list[Tensor | None], Any]:
        """Biases (act dtype or float32, None for none) as float32, and the array of their addresses."""
        wide = [None if bias is None else bias.float() for bias in biases]
        addresses = [
            0 if bias is None else self._floats(bias, n, "project", "bias")
            for bias, n in zip(wide, features, strict=True)
        ]
        return wide, _Pointers[len(wide)](*addresses)

    def linear(self, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
        at, stride, rows, length = self._rows(x, "linear")
        w, w_stride, features = self._matrix(weight, length, "linear")
        out = _empty(rows, features, dtype=self.dtype)
        added, added_stride = 0, 0
        if residual is not None:
            if residual.shape != out.shape:
                raise self._refused("linear", "residual", residual, f"[{rows}, {features}]")
            added, added_stride, _, _ = self._rows(residual, "linear")
        self._linear(
            at, stride, rows, length, w, w_stride, features, added, added_stride, out.data_ptr(), _threads()
        )  # fmt: skip
        return out

    def swiglu(self, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        at, stride, rows, length = self._rows(x, "swiglu")
        g, g_stride, features = self._matrix(gate, length, "swiglu")
        u, u_stride, ups = self._matrix(up, length, "swiglu")
        if ups != features:
            raise self._refused("swiglu", "up", up, f"[{features}, {length}]")
        out = _empty(rows, features, dtype=self.dtype)
        self._swiglu(at, stride, rows, length, g, g_stride, u, u_stride, features, out.data_ptr(), _threads())
        return out

    def head(self, x: Tensor, weight: Tensor) -> CpuLogits:
        at, stride, rows, length = self._rows(x, "head")
        w, w_stride, features = self._matrix(weight, length, "head")
        out = _empty(rows, features, dtype=torch.float32)
        self._head(at, stride, rows, length, w, w_stride, features, out.data_ptr(), _threads())
        return NativeLogits(out, self._noisy_argmax)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.ndim != 2:
            flat = x.reshape(-1, x.shape[-1])
            return self.rms_norm(flat, weight, eps).view(x.shape)
        at, stride, rows, length = self._rows(x, "rms_norm")
        scale = self._floats(weight, length, "rms_norm", "weight")
        out = _empty(rows, length, dtype=self.dtype)
        self._rms_norm(at, stride, rows, length, scale, eps, out.data_ptr(), _threads())
        return out

    # --- attention -------------------------------------------------------------------------------------------------

    def norm_rope(self, x: Tensor, weight: Tensor | None, eps: float, rope: Rope, position: int) -> Tensor:
        at, row_stride, head_stride = self._heads(x, "norm_rope", "x")
        rows, heads, dim = x.shape
        held = self._frequencies.get(id(rope))  # by identity: hashing 32 floats costs more than the kernel
        if held is None or held[0] is not rope:
            frequencies = torch.tensor(rope.inv_freq, dtype=torch.float32)
            held = self._frequencies[id(rope)] = (rope, frequencies, frequencies.data_ptr())
        half = len(rope.inv_freq)
        if 2 * half > dim:
            raise ShapeError(f"norm_rope turns {2 * half} dimensions, the heads have {dim}")
        scale = 0 if weight is None else self._floats(weight, dim, "norm_rope", "weight")
        out = _empty(rows, heads, dim, dtype=self.dtype)
        self._norm_rope(
            at, row_stride, head_stride, rows, heads, dim, scale, eps, held[2], half, position,
            out.data_ptr(), _threads(),
        )  # fmt: skip
        return out

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, cache: CpuKVCache, *, scale: float, gate: Tensor | None = None
    ) -> Tensor:
        rows, heads, dim = q.shape
        keys, values = cache.keys, cache.values
        kv_heads = keys.shape[1]
        if k.shape != (rows, kv_heads, dim) or v.shape != k.shape or heads % kv_heads or keys.shape[2] != dim:
            raise ShapeError(
                "attend got queries, keys, values and a cache that do not fit together",
                got=f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}, cache {list(keys.shape)}",
                takes="q [T, nq, D], k and v [T, nkv, D], cache [capacity, nkv, D], nq a multiple of nkv",
            )
        if keys.dtype is not self.dtype:
            raise self._refused("attend", "cache", keys, "[capacity, nkv, D]")
        start, _ = cache.reserve(rows)
        gate_view = (0, 0, 0)
        if gate is not None:
            if gate.shape != q.shape:
                raise self._refused("attend", "gate", gate, str(list(q.shape)))
            gate_view = self._heads(gate, "attend", "gate")
        out = _empty(rows, heads * dim, dtype=self.dtype)
        self._attend(
            *self._heads(q, "attend", "q"), *self._heads(k, "attend", "k"), *self._heads(v, "attend", "v"),
            keys.data_ptr(), values.data_ptr(), *gate_view, rows, heads, kv_heads, dim, start, scale,
            out.data_ptr(), _threads(),
        )  # fmt: skip
        return out

    # --- gated delta rule ------------------------------------------------------------------------------------------

    def conv_window(self, x: Tensor, weight: Tensor, cache: CpuDeltaCache) -> Tensor:
        at, stride, rows, channels = self._rows(x, "conv_window")
        taps = weight.shape[1]
        if taps > MAX_TAPS:
            raise UnsupportedError(f"the native convolution has up to {MAX_TAPS} taps, got {taps}")
        window = self._packed(cache.window, (taps - 1, channels), "conv_window", "window")
        scale = self._floats(weight, channels * taps, "conv_window", "weight")
        raw = _empty(taps - 1 + rows, channels, dtype=self.dtype)
        out = _empty(rows, channels, dtype=self.dtype)
        self._conv_window(
            window, at, stride, rows, channels, scale, taps, raw.data_ptr(), out.data_ptr(), _threads()
        )  # fmt: skip
        cache.raw = raw
        return out

    def gated_delta(
        self, u: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, cache: CpuDeltaCache, shape: DeltaShape
    ) -> Tensor:
        rows = u.shape[0]
        heads = shape.value_heads
        inputs = (
            self._packed(u, (rows, shape.channels), "gated_delta", "u"),
            self._packed(a, (rows, heads), "gated_delta", "a"),
            self._packed(b, (rows, heads), "gated_delta", "b"),
            self._floats(a_log, heads, "gated_delta", "a_log"),
            self._floats(dt_bias, heads, "gated_delta", "dt_bias"),
        )
        sizes = (shape.key_heads, heads, shape.key_dim, shape.value_dim)
        out = _empty(rows, heads, shape.value_dim, dtype=self.dtype)
        kernel = self._gated_delta
        kernel(
            *sizes, *inputs, cache.state.data_ptr(), cache.after.data_ptr(), rows, out.data_ptr(), _threads()
        )  # fmt: skip
        keep = (u, a, b, a_log, dt_bias)  # the replay reads them by address

        def replay(kept_rows: int) -> None:
            assert keep
            kernel(*sizes, *inputs, cache.state.data_ptr(), cache.after.data_ptr(), kept_rows, 0, _threads())

        cache.replay = replay
        return out

    def gated_rms_norm(self, x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        if z.shape != x.shape:
            raise self._refused("gated_rms_norm", "z", z, str(list(x.shape)))
        rows, heads, dim = x.shape
        out = _empty(rows, heads * dim, dtype=self.dtype)
        self._gated_rms_norm(
            *self._heads(x, "gated_rms_norm", "x"), *self._heads(z, "gated_rms_norm", "z"), rows, heads, dim,
            self._floats(weight, dim, "gated_rms_norm", "weight"), eps, out.data_ptr(), _threads(),
        )  # fmt: skip
        return out
