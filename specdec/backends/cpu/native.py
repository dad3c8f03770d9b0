"""Ops that run the C++ kernels, with the same arithmetic for 1 row and for a thousand.

``specdec.backends.ops`` defines the formulas, ``ReferenceOps`` is the reference for tests, and the header comment of
each C++ file states its bits contract. Tensors are passed by address, so dtype, layout and shape are checked here; a
mismatch is an error and never converted.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from specdec.backends.cpu.arrays import CPU, CpuLogits
from specdec.backends.cpu.caches import CpuDeltaCache, CpuKVCache
from specdec.backends.cpu.library import Kernels
from specdec.backends.cpu.packed import FORMATS, Packer, takes_int8
from specdec.backends.cpu.pruned import CHOICE_DRAFTED, HeadRows, NativePrunedLogits, SearchedLogits, SearchKernels
from specdec.backends.cpu.reference import ReferenceOps
from specdec.backends.cpu.tape import Kernel, RecordedTokens, Runner, current, record
from specdec.backends.cpu.threads import Threads
from specdec.backends.ops import Array, Cache, Capabilities, DeltaShape, Rope
from specdec.backends.passes import Body, EagerPasses, Passes
from specdec.checkpoints.quantised import StoredMatrix
from specdec.contract import Choosing, Parity
from specdec.errors import ContractError, ShapeError, UnsupportedError
from specdec.locks import ForkSafeLock

if TYPE_CHECKING:
    from specdec.contract import Float32

MAX_TAPS = 8  # kernels/delta.cpp
MAX_WEIGHTS = 16  # kernels/dense.cpp, project
FEATURES, WORD = 32, 4  # kernels/panels.h: weight rows of a panel, bytes of a word
BATCH_ROWS = 128  # of a pass over several sequences; bounds the memory of its logits
MAX_KNOWN = 8192  # weights whose layout is cached
SMALL = 256 * 1024  # bytes; smaller matrices also stay unpacked, because torch reads routers too

_empty = functools.partial(torch.empty, device=CPU)
_Pointers = [ctypes.c_void_p * n for n in range(MAX_WEIGHTS + 1)]
_Sizes = [ctypes.c_int64 * n for n in range(MAX_WEIGHTS + 1)]


def _new(*shape: int, dtype: torch.dtype) -> Tensor:
    """Allocate an output, from the recording while a pass is being recorded."""
    tape = current.get()
    return _empty(*shape, dtype=dtype) if tape is None else tape.empty(*shape, dtype=dtype)


def _stride(packed: Tensor) -> int:
    """How kernels are passed the layout of a packed matrix: minus K for panels, 0 for a quantised one."""
    return 0 if packed.dtype is torch.uint8 else -packed.shape[1]


class NativeLogits(SearchedLogits, CpuLogits):
    """Logits that are searched and sampled by native kernels, in one pass over the row."""

    __slots__ = ("_search",)

    def __init__(self, array: Tensor, search: SearchKernels) -> None:
        super().__init__(array)
        self._search = search

    def _memory(self) -> tuple[int, int, int, int, int]:
        rows, size = self.array.shape
        return self.array.data_ptr(), rows, size, 0, size


class NativeOps(ReferenceOps):
    """Ops in C++. The bits of a row depend only on that row and the cached rows, for any number of rows and threads."""

    def __init__(
        self,
        dtype: torch.dtype,
        kernels: Kernels,
        threads: Threads | None = None,
        *,
        eager_reason: str = "",
        int8: Set[str] = frozenset(),
    ) -> None:
        """``eager_reason`` is the reason not to record passes; "" records them. ``int8``: as in ``ReferenceOps``."""
        super().__init__(dtype, int8=int8)
        self.threads = threads or Threads()
        self.capabilities = Capabilities(
            kernels=kernels.description,
            parity=Parity.BITWISE,
            batch_rows=BATCH_ROWS,
            warms_by_rows=False,
            packed_formats=FORMATS,
            parity_reason="every output has its own accumulators, filled in an order that only its length sets",
        )
        self.eager_reason = eager_reason
        self.lock = ForkSafeLock()  # held while a pass uses the work memory
        self._work = torch.empty(0, dtype=torch.uint8, device=CPU)
        self._frequencies: dict[int, tuple[Rope, Tensor, int]] = {}
        self._groups: dict[tuple[tuple[int, int, int], ...], tuple[int, Any, Any, tuple[int, ...], Any]] = {}
        self._weights: dict[int, tuple[weakref.ref[Tensor], int, int, int, int, int]] = {}
        self._copies: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        self._parameters: dict[int, weakref.ref[Tensor]] = {}
        name = {torch.bfloat16: "bf16", torch.float32: "f32"}[dtype]

        def function(op: str, arguments: str) -> Kernel:
            return Kernel(kernels, f"{op}_{name}", arguments, threads=self.threads)

        self._project = function("project", "piiiipppppi")
        self._linear = function("linear", "piiipiipipi")
        self._gated_product = function("gated", "piiipipiiipi")
        self._head = function("head", "piiipiipi")
        self._rms_norm = function("rms_norm", "piiipfpi")
        self._layer_norm = function("layer_norm", "piiippfpi")
        self._gelu = function("gelu", "piiipi")
        self._scale = function("scale", "piiiffiipi")
        self._add, self._multiply = function("add", "pipiiipi"), function("multiply", "pipiiipi")
        self._norm_rope = function("norm_rope", "piiiiipfpiipi")
        self._gated_rms_norm = function("gated_rms_norm", "piipiiiiipfpi")
        self._attend = function("attend", "piipiipiipppiiiiiiiifppi")
        self._conv_window = function("conv_window", "ppiiipippi")
        self._gated_delta = function("gated_delta", "iiiipppppppipi")
        self._copy_rows = Kernel(kernels, "copy_rows", "pipiii")
        self._embed = Kernel(kernels, "embed_rows", "piiipiip", result=ctypes.c_int64)
        self._choose_rows = Kernel(kernels, "choose_rows", "piipippi", threads=self.threads)
        self._is_file = Kernel(kernels, "is_file", "pi", result=ctypes.c_int64)
        self._packer = Packer(kernels, self.threads, int8=self.int8)
        self._pack_panels = Kernel(kernels, "pack_panels", "piiipii", threads=self.threads)
        self._search = SearchKernels(kernels, self._choose_rows)
        self._runner = Runner(kernels)

    # --- recorded passes (specdec.backends.passes) -----------------------------------------------------------------

    def record_passes(self, body: Body, caches: Sequence[Cache], hidden_size: int = 0) -> Passes:
        if self.eager_reason:
            return EagerPasses(body, self.eager_reason)
        if type(self) is not NativeOps:  # a subclass may do what cannot be recorded
            return EagerPasses(body, f"{type(self).__name__} changes the native ops")
        return record(self, self._runner, body, caches, hidden_size)

    def parameters(self) -> list[Tensor]:
        """Return all live weights and parameters, which recorded passes may read by address."""
        found = (known() for known in list(self._parameters.values()))
        return [tensor for tensor in found if tensor is not None]

    def _own(self, tensor: Tensor) -> Tensor:
        key = id(tensor)
        self._parameters[key] = weakref.ref(tensor, lambda _: self._parameters.pop(key, None))
        return tensor

    def work(self, size: int) -> int:
        """Return the address of the work memory, at least ``size`` bytes. The caller must hold the lock."""
        if self._work.nbytes < size:
            self._work = torch.empty(size, dtype=torch.uint8, device=CPU)
        return self._work.data_ptr()

    def choice(self, choosing: Choosing, drafted: Any) -> tuple[Any, Any]:
        """Return the ``Choice`` of a chain that writes its tokens to ``drafted``, and what must live as long."""
        choice, alive = self._search.choice(choosing)
        choice[CHOICE_DRAFTED] = ctypes.addressof(drafted)
        return choice, alive

    def logits(self, array: Tensor) -> NativeLogits:
        """Wrap ``[T, V]`` float32."""
        return NativeLogits(array, self._search)

    def _pruned_logits(self, values: Float32, rows: HeadRows) -> NativePrunedLogits:
        return NativePrunedLogits(values, rows, self._search)

    # --- weights ---------------------------------------------------------------------------------------------------

    def weight(self, tensor: Tensor | StoredMatrix) -> Tensor:
        """Convert a weight and pack matrices for the kernels (docs/decisions.md).

        A quantised matrix stays packed; the result is a tensor without data, too.

        Only the packed copy of a large matrix stays resident. A matrix in a memory-mapped file is returned as it is,
        with its pages released; they are read again on access. A small matrix is also returned as it is. For any other,
        the result is a tensor without data (device "meta"), so that the memory of ``tensor`` can be freed. Weights must
        not be written to.
        """
        if isinstance(tensor, StoredMatrix):
            codes = self._packer.pack(tensor)
            if codes is None:
                return self.weight(tensor.decode())
            self.int8_matrices += tensor.format in self.int8 and takes_int8(tensor)
            return self._handle(tensor.shape, codes)
        weight = super().weight(tensor)
        if weight.ndim == 1:
            return self._own(weight.float())  # biases are added in float32
        if not self._packable(weight):
            return self._own(weight)
        in_file = bool(self._is_file(weight.data_ptr(), weight.nbytes))
        if in_file or weight.nbytes <= SMALL:
            self.pack(weight, release=in_file)
            return self._own(weight)
        return self._handle(weight.shape, self._pack_copy(weight, release=False))

    def table(self, tensor: Tensor | StoredMatrix) -> Tensor:
        return self.weight(tensor) if isinstance(tensor, StoredMatrix) else self._own(super().weight(tensor))

    def _handle(self, shape: Sequence[int], copy: Tensor) -> Tensor:
        """Return a tensor without data that represents a packed matrix of this shape."""
        handle = torch.empty(shape, dtype=self.dtype, device="meta")
        self._keep(handle, copy)
        return handle

    def bytes_of(self, w: Tensor) -> int:
        """Bytes that a product with a weight reads."""
        packed = self._panels(w)
        return w.nbytes if packed is None else packed.nbytes

    def to_host(self, array: Tensor) -> Tensor:
        return self.embed(array, range(len(array))) if array.is_meta else array

    def _packable(self, w: Tensor) -> bool:
        return w.ndim == 2 and w.is_contiguous() and w.shape[1] * w.element_size() % WORD == 0 and w.numel() > 0

    def pack(self, w: Tensor, *, release: bool = False) -> None:
        """Pack a weight ``[N, K]``; the kernels read the packed copy from now on.

        ``release`` releases the pages of ``w``, which must be mapped from a file. Raises: ShapeError unless ``w`` is a
        contiguous matrix in act dtype whose rows are whole words.
        """
        if w.dtype is not self.dtype or not self._packable(w):
            raise self._refused("pack", "weight", w, "[N, K], contiguous, rows of whole words,")
        if self._panels(w) is None:
            self._keep(w, self._pack_copy(w, release=release))

    def _pack_copy(self, w: Tensor, *, release: bool) -> Tensor:
        """Return a weight packed in panels, ``[N rounded up, K]``."""
        rows, length = w.shape
        row_bytes = length * w.element_size()
        copy = torch.empty(-(-rows // FEATURES) * FEATURES, length, dtype=self.dtype, device=CPU)
        self._pack_panels(w.data_ptr(), row_bytes, row_bytes // WORD, rows, copy.data_ptr(), release)
        return copy

    def _keep(self, w: Tensor, copy: Tensor) -> None:
        """Make the kernels read ``copy`` in place of ``w``, as long as ``w`` is alive."""
        key = id(w)
        self._copies[key] = (weakref.ref(w, lambda _: self._copies.pop(key, None)), self._own(copy))
        self._weights.pop(key, None)

    def _panels(self, w: Tensor) -> Tensor | None:
        """The packed copy of a weight, or None."""
        held = self._copies.get(id(w))
        return held[1] if held is not None and held[0]() is w else None

    def vector(self, tensor: Tensor, *, plus: float = 0.0) -> Tensor:
        return self._own(super().vector(tensor, plus=plus))

    # --- checks and addresses --------------------------------------------------------------------------------------

    # Contiguity is checked first: it nearly always holds, and costs a quarter of reading the strides.

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
        known = self._weights.get(id(w))  # weights are few and read on every pass: checked once
        if known is None or known[0]() is not w or known[1] != at:
            if w.dtype is not self.dtype or w.ndim != 2 or w.stride(1) != 1:
                raise self._refused(op, "weight", w, f"[N, {length}]")
            if len(self._weights) >= MAX_KNOWN:  # the caller makes new weights for every pass
                self._weights.clear()
            packed = self._panels(w)
            found = (at, w.stride(0)) if packed is None else (packed.data_ptr(), _stride(packed))
            known = self._weights[id(w)] = (weakref.ref(w), at, *found, w.shape[0], w.shape[1])
        if known[5] != length:
            raise self._refused(op, "weight", w, f"[N, {length}]")
        return known[2:5]

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
        at, stride, row_bytes, vocabulary = self._table(table, "embed")
        out = _new(rows, table.shape[1], dtype=self.dtype)
        ids = tokens.pointer if isinstance(tokens, RecordedTokens) else (ctypes.c_int64 * rows)(*tokens)
        bad = self._embed(at, stride, row_bytes, vocabulary, ids, 0, rows, out.data_ptr())
        if bad >= 0:
            raise ContractError(f"token {tokens[bad]} of row {bad} is not in the vocabulary (0..{vocabulary - 1})")
        return out

    def add_positions(self, x: Tensor, table: Tensor, position: int) -> Tensor:
        at, stride, row_bytes, size = self._table(table, "add_positions")
        learned = _new(x.shape[0], table.shape[1], dtype=self.dtype)
        bad = self._embed(at, stride, row_bytes, size, 0, position, x.shape[0], learned.data_ptr())
        if bad >= 0:
            raise ContractError(f"position {position + bad} has no embedding (0..{size - 1})")
        return self.add(x, learned)

    def _table(self, table: Tensor, op: str) -> tuple[int, int, int, int]:
        """Address, row stride in bytes, bytes of a row, and rows of an embedding table."""
        if table.ndim != 2 or table.dtype is not self.dtype or table.stride(1) != 1:
            raise self._refused(op, "table", table, "[V, H]")
        rows, hidden = table.shape
        size = table.element_size()
        packed = self._panels(table)
        at, stride = (table.data_ptr(), table.stride(0)) if packed is None else (packed.data_ptr(), _stride(packed))
        return at, stride * size, hidden * size, rows

    def project(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = ()) -> tuple[Tensor, ...]:
        at, stride, rows, length = self._rows(x, "project")
        matrices = [self._matrix(w, length, "project") for w in weights]
        group = self._groups.get(tuple(matrices))
        if group is None:
            group = self._group(matrices)
        count, addresses, strides, features, sizes = group
        dtype = self.dtype
        outs = tuple([_new(rows, n, dtype=dtype) for n in features])
        wide, bias_addresses = self._biases(biases, features) if biases else (None, None)
        self._project(
            at,
            stride,
            rows,
            length,
            count,
            addresses,
            strides,
            sizes,
            bias_addresses,
            _Pointers[count](*[out.data_ptr() for out in outs]),
        )
        del wide  # kept alive for the call, which used its addresses
        return outs

    def _group(self, matrices: Sequence[tuple[int, int, int]]) -> tuple[int, Any, Any, tuple[int, ...], Any]:
        """Return C arrays that describe weights: count, addresses, strides, features as integers and as an array."""
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
        """Return biases (act dtype, float32 or None) as float32, and the array of their addresses."""
        wide = [bias.float() if bias is not None and bias.dtype is not torch.float32 else bias for bias in biases]
        addresses = [
            0 if bias is None else self._floats(bias, n, "project", "bias")
            for bias, n in zip(wide, features, strict=True)
        ]
        return wide, _Pointers[len(wide)](*addresses)

    def linear(self, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
        at, stride, rows, length = self._rows(x, "linear")
        w, w_stride, features = self._matrix(weight, length, "linear")
        out = _new(rows, features, dtype=self.dtype)
        added, added_stride = 0, 0
        if residual is not None:
            if residual.shape != out.shape:
                raise self._refused("linear", "residual", residual, f"[{rows}, {features}]")
            added, added_stride, _, _ = self._rows(residual, "linear")
        self._linear(at, stride, rows, length, w, w_stride, features, added, added_stride, out.data_ptr())
        return out

    def swiglu(self, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return self._gated_by(x, gate, up, "swiglu")

    def geglu(self, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return self._gated_by(x, gate, up, "geglu")

    def _gated_by(self, x: Tensor, gate: Tensor, up: Tensor, op: str) -> Tensor:
        at, stride, rows, length = self._rows(x, op)
        g, g_stride, features = self._matrix(gate, length, op)
        u, u_stride, ups = self._matrix(up, length, op)
        if ups != features:
            raise self._refused(op, "up", up, f"[{features}, {length}]")
        out = _new(rows, features, dtype=self.dtype)
        self._gated_product(at, stride, rows, length, g, g_stride, u, u_stride, features, op == "geglu", out.data_ptr())
        return out

    def head(self, x: Tensor, weight: Tensor) -> CpuLogits:
        at, stride, rows, length = self._rows(x, "head")
        w, w_stride, features = self._matrix(weight, length, "head")
        out = _new(rows, features, dtype=torch.float32)
        self._head(at, stride, rows, length, w, w_stride, features, out.data_ptr())
        return self.logits(out)

    def softcap(self, logits: Any, cap: float) -> NativeLogits:
        return self.logits(torch.from_numpy(super().softcap(logits, cap).rows()))

    def head_rows(self, weight: Tensor, tokens: Sequence[int], base: Any = None) -> HeadRows:
        packed = self._panels(weight)
        if base is not None or packed is None or packed.dtype is not torch.uint8:
            return super().head_rows(weight, tokens, base)
        ids = np.unique(np.array(tokens, dtype=np.int32))
        rows = self._handle((len(ids), weight.shape[1]), self._packer.rows(packed, torch.from_numpy(ids)))
        return HeadRows((rows,), ids, weight.shape[0])

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.ndim != 2:
            flat = x.reshape(-1, x.shape[-1])
            return self.rms_norm(flat, weight, eps).view(x.shape)
        at, stride, rows, length = self._rows(x, "rms_norm")
        scale = self._floats(weight, length, "rms_norm", "weight")
        out = _new(rows, length, dtype=self.dtype)
        self._rms_norm(at, stride, rows, length, scale, eps, out.data_ptr())
        return out

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        at, stride, rows, length = self._rows(x, "layer_norm")
        scale, shift = (
            self._floats(one, length, "layer_norm", name) for name, one in (("weight", weight), ("bias", bias))
        )
        out = _new(rows, length, dtype=self.dtype)
        self._layer_norm(at, stride, rows, length, scale, shift, eps, out.data_ptr())
        return out

    def gelu(self, x: Tensor) -> Tensor:
        at, stride, rows, length = self._rows(x, "gelu")
        out = _new(rows, length, dtype=self.dtype)
        self._gelu(at, stride, rows, length, out.data_ptr())
        return out

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return self._scaled(x, "scale", factor, 0.0, 1, 0)

    def scale_by_position(self, x: Tensor, beta: float, length: int, position: int) -> Tensor:
        return self._scaled(x, "scale_by_position", 1.0, beta, length, position)

    def _scaled(self, x: Tensor, op: str, *how: float) -> Tensor:
        at, stride, rows, length = self._rows(x, op)
        out = _new(rows, length, dtype=self.dtype)
        self._scale(at, stride, rows, length, *how, out.data_ptr())
        return out

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return self._joined_rows(a, b, self._add, "add")

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        return self._joined_rows(a, b, self._multiply, "multiply")

    def _joined_rows(self, a: Tensor, b: Tensor, kernel: Kernel, op: str) -> Tensor:
        at, stride, rows, length = self._rows(a, op)
        if b.shape != a.shape:
            raise self._refused(op, "b", b, str(list(a.shape)))
        other, other_stride, _, _ = self._rows(b, op)
        out = _new(rows, length, dtype=self.dtype)
        kernel(at, stride, other, other_stride, rows, length, out.data_ptr())
        return out

    def concat(self, a: Tensor, b: Tensor) -> Tensor:
        left, right = self._dense_rows(a), self._dense_rows(b)
        if left is None or right is None or a.shape[:-1] != b.shape[:-1]:
            return super().concat(a, b)
        size = a.element_size()
        first, second = a.shape[-1] * size, b.shape[-1] * size
        out = _new(*a.shape[:-1], a.shape[-1] + b.shape[-1], dtype=self.dtype)
        at, rows = out.data_ptr(), left[2]
        self._copy_rows(left[0], left[1] * size, at, first + second, first, rows)
        self._copy_rows(right[0], right[1] * size, at + first, first + second, second, rows)
        return out

    def _dense_rows(self, x: Tensor) -> tuple[int, int, int] | None:
        """Address, row stride and number of rows along the last axis; None unless one stride covers them all."""
        if x.dtype is not self.dtype or x.ndim < 2:
            return None
        rows = x.numel() // x.shape[-1]
        if x.is_contiguous():
            return x.data_ptr(), x.shape[-1], rows
        strides = x.stride()
        if strides[-1] != 1 or any(strides[i] != strides[i + 1] * x.shape[i + 1] for i in range(x.ndim - 2)):
            return None
        return x.data_ptr(), strides[-2], rows

    # --- attention -------------------------------------------------------------------------------------------------

    def norm_rope(self, x: Tensor, weight: Tensor | None, eps: float, rope: Rope, position: int) -> Tensor:
        at, row_stride, head_stride = self._heads(x, "norm_rope", "x")
        rows, heads, dim = x.shape
        held = self._frequencies.get(id(rope))  # by identity: hashing 32 floats costs more than the kernel
        if held is None or held[0] is not rope:
            frequencies = self._own(torch.tensor(rope.inv_freq, dtype=torch.float32, device=CPU))
            held = self._frequencies[id(rope)] = (rope, frequencies, frequencies.data_ptr())
        half = len(rope.inv_freq)
        if 2 * half > dim:
            raise ShapeError(f"norm_rope turns {2 * half} dimensions, the heads have {dim}")
        scale = 0 if weight is None else self._floats(weight, dim, "norm_rope", "weight")
        out = _new(rows, heads, dim, dtype=self.dtype)
        self._norm_rope(
            at, row_stride, head_stride, rows, heads, dim, scale, eps, held[2], half, position, out.data_ptr()
        )
        return out

    def attend(
        self, q: Tensor, k: Array | None, v: Array | None, cache: CpuKVCache, *, scale: float, gate: Array | None = None
    ) -> Tensor:
        start, _ = cache.reserve(q.shape[0])
        self._fitting(q, k, v, cache, "attend")
        if gate is not None and gate.shape != q.shape:
            raise self._refused("attend", "gate", gate, str(list(q.shape)))
        sinks = 0 if cache.sinks is None else self._floats(cache.sinks, q.shape[1], "attend", "sinks")
        return self._attended(q, k, v, cache.keys, cache.values, start, scale, cache.window, sinks, gate)

    def _attended(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        keys: Tensor,
        values: Tensor,
        start: int,
        scale: float,
        window: int = 0,
        sinks: int = 0,
        gate: Tensor | None = None,
    ) -> Tensor:
        """Write ``k`` and ``v``, if given, to ``keys`` and ``values`` from row ``start`` on; causal attention."""
        rows, heads, dim = q.shape
        views = [
            address
            for name, x in (("q", q), ("k", k), ("v", v), ("gate", gate))
            for address in ((0, 0, 0) if x is None else self._heads(x, "attend", name))
        ]
        out = _new(rows, heads * dim, dtype=self.dtype)
        to = keys.data_ptr(), values.data_ptr()
        sizes = rows, heads, keys.shape[1], dim, start, window
        self._attend(*views[:9], *to, *views[9:], *sizes, scale, sinks, out.data_ptr())
        return out

    def _fitting(self, q: Tensor, k: Tensor | None, v: Tensor | None, cache: CpuKVCache, op: str) -> int:
        """The number of key-value heads. Raises: ShapeError if the arguments do not fit together."""
        rows, heads, dim = q.shape
        keys = cache.keys
        kv_heads = keys.shape[1]
        wrong = k is not None and v is not None and (k.shape != (rows, kv_heads, dim) or v.shape != k.shape)
        if wrong or heads % kv_heads or keys.shape[2] != dim:
            given = (("q", q), ("k", k), ("v", v), ("cache", keys))
            raise ShapeError(
                f"{op} got queries, keys, values and a cache that do not fit together",
                got=", ".join(f"{name} {list(one.shape)}" for name, one in given if one is not None),
                takes="q [T, nq, D], k and v [T, nkv, D], cache [capacity, nkv, D], nq a multiple of nkv",
            )
        if keys.dtype is not self.dtype:
            raise self._refused(op, "cache", keys, "[capacity, nkv, D]")
        return kv_heads

    def attend_from(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: CpuKVCache,
        *,
        scale: float,
        first: Sequence[int],
        causal: bool = True,
    ) -> Tensor:
        rows, heads, dim = q.shape
        kv_heads = self._fitting(q, k, v, cache, "attend_from")
        start = self._written(k, v, cache)
        if not causal and len(set(first)) == 1:  # rows that see the same keys are one row with more heads
            split, joined = (rows, kv_heads, -1, dim), (kv_heads, rows, -1, dim)
            row = q.reshape(split).transpose(0, 1).reshape(1, rows * heads, dim)
            out = self._attend_span(row, cache, first[0], start + rows, scale)
            return out.reshape(joined).transpose(0, 1).reshape(rows, heads * dim)
        ends = range(start + 1, start + rows + 1) if causal else [start + rows] * rows
        spans = enumerate(zip(first, ends, strict=True))
        return torch.cat([self._attend_span(q[t : t + 1], cache, low, end, scale) for t, (low, end) in spans])

    def _attend_span(self, q: Tensor, cache: CpuKVCache, low: int, end: int, scale: float) -> Tensor:
        """Attention of one row ``[1, nq, D]`` over the cached rows ``low`` to ``end - 1``: ``[1, nq * D]``."""
        keys, values = cache.keys[low:end], cache.values[low:end]
        return self._attended(q, None, None, keys, values, end - low - 1, scale)

    # --- gated delta rule ------------------------------------------------------------------------------------------

    def conv_window(self, x: Tensor, weight: Tensor, cache: CpuDeltaCache) -> Tensor:
        at, stride, rows, channels = self._rows(x, "conv_window")
        taps = weight.shape[1]
        if taps > MAX_TAPS:
            raise UnsupportedError(f"the native convolution has up to {MAX_TAPS} taps, got {taps}")
        window = self._packed(cache.window, (taps - 1, channels), "conv_window", "window")
        scale = self._floats(weight, channels * taps, "conv_window", "weight")
        raw = _new(taps - 1 + rows, channels, dtype=self.dtype)
        out = _new(rows, channels, dtype=self.dtype)
        self._conv_window(window, at, stride, rows, channels, scale, taps, raw.data_ptr(), out.data_ptr())
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
        out = _new(rows, heads, shape.value_dim, dtype=self.dtype)
        kernel = self._gated_delta
        kernel(*sizes, *inputs, cache.state.data_ptr(), cache.after.data_ptr(), rows, out.data_ptr())
        keep = (u, a, b, a_log, dt_bias)  # the replay reads them by address

        def replay(kept_rows: int) -> None:
            assert keep
            kernel(*sizes, *inputs, cache.state.data_ptr(), cache.after.data_ptr(), kept_rows, 0)

        cache.replay = replay
        return out

    def gated_rms_norm(self, x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        if z.shape != x.shape:
            raise self._refused("gated_rms_norm", "z", z, str(list(x.shape)))
        rows, heads, dim = x.shape
        out = _new(rows, heads * dim, dtype=self.dtype)
        self._gated_rms_norm(
            *self._heads(x, "gated_rms_norm", "x"),
            *self._heads(z, "gated_rms_norm", "z"),
            rows,
            heads,
            dim,
            self._floats(weight, dim, "gated_rms_norm", "weight"),
            eps,
            out.data_ptr(),
        )
        return out
