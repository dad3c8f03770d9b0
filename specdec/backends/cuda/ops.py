"""The ops on a CUDA device: torch's products and Triton kernels for passes of up to 16 rows, torch for prompts.

No op reads from the device. An op whose result the next one can fuse returns a ``Deferred``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.backends.cuda import products, prompts
from specdec.backends.cuda.arrays import (
    Convolved,
    CudaHeadRows,
    CudaHidden,
    CudaLogits,
    CudaPrunedLogits,
    Rotated,
    materialised,
)
from specdec.backends.cuda.caches import CudaDeltaCache, CudaKVCache, CudaLatentCache, DeviceLength
from specdec.backends.cuda.device import CudaDevice
from specdec.backends.cuda.kernels import attention, delta, delta_chunked, latent, moe, norm, rope
from specdec.backends.cuda.kernels import rows as row_kernels
from specdec.backends.cuda.kernels.launch import MAX_ROWS, interpreting
from specdec.backends.cuda.kernels.packed import Layout
from specdec.backends.cuda.kernels.route import choose
from specdec.backends.cuda.passes import CudaPasses
from specdec.backends.cuda.weights import DenseWeight, ExpertStack, Fp8BlockWeight, Nvfp4Weight, Weight, fuse
from specdec.backends.ops import Cache, Capabilities, DeltaShape, Ops, Rope, Routing
from specdec.backends.passes import Body
from specdec.backends.placeholders import DeviceTokens
from specdec.checkpoints.quantised.stored import StoredMatrix, alike
from specdec.contract import Logits, Parity
from specdec.errors import ContractError, ShapeError, StateError, UnsupportedError
from specdec.logs import get_logger

log = get_logger(__name__)

_ALIGNED = 16  # bytes
_STILL = Rope((0.0,))  # turns nothing
_LOADING = "a smaller or quantised checkpoint; on a machine with several devices CUDA_VISIBLE_DEVICES chooses one"


class CudaOps(Ops):
    """Ops in Triton kernels and torch."""

    hidden_type = CudaHidden

    def __init__(
        self, device: CudaDevice, dtype: torch.dtype, *, eager_reason: str = "", kernels: str = "Triton kernels"
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.eager_reason = eager_reason
        self.capabilities = Capabilities(
            kernels=f"{kernels}, interpreted on the host" if interpreting() else kernels,
            parity=Parity.BITWISE,
            parity_reason=f"passes of 1 to {MAX_ROWS} rows are padded to {MAX_ROWS} for library products, and one "
            "compiled kernel serves all of them elsewhere, so that verification has the bits of decoding; longer "
            "prompt chunks are computed in bulk, so that another chunking of a prompt may round differently",
            probed_context=attention.PROBED,
            max_rows=MAX_ROWS,
            packed_formats=frozenset({"fp8-block", "nvfp4"}),
        )
        self._decoded: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()
        self._stacks: weakref.WeakKeyDictionary[ExpertStack, Tensor] = weakref.WeakKeyDictionary()
        self._frequencies: dict[Rope, Tensor] = {}

    def record_passes(self, body: Body, caches: Sequence[Cache], hidden_size: int = 0) -> CudaPasses:
        """Return passes that are captured as graphs on their first run, one per number of rows."""
        return CudaPasses(self.device, self.dtype, body, len(caches), hidden_size, self.eager_reason)

    # --- weights and storage ---------------------------------------------------------------------------------------

    def weight(self, tensor: Any) -> Weight:
        if isinstance(tensor, StoredMatrix):
            return self._packed(tensor)
        with self.device.guarded(
            f"a weight of shape {list(tensor.shape)}", tensor.numel() * self.dtype.itemsize, _LOADING
        ):
            return DenseWeight(tensor.to(self.device.place).to(self.dtype))

    def _packed(self, stored: StoredMatrix) -> Weight:
        """Convert a quantised matrix to its kernel's layout, or decode it if there is no kernel."""
        if stored.format not in self.capabilities.packed_formats:
            raise UnsupportedError(f"the cuda backend does not keep {stored.format} weights packed")
        place, meta = self.device.place, stored.meta
        with self.device.guarded(f"a weight of shape {list(stored.shape)}", stored.nbytes, _LOADING):
            parts = {name: _aligned(part.to(place)) for name, part in stored.parts.items()}
        made: Weight
        try:
            if stored.format == "fp8-block":
                block = (meta["block_rows"], meta["block_columns"])
                made = Fp8BlockWeight(parts["codes"].view(torch.uint8), parts["scale"].float(), block)
            else:
                made = Nvfp4Weight(parts["codes"], parts["scale"].view(torch.uint8), parts["global_scale"].float())
            Layout.of(made)
        except (UnsupportedError, ShapeError) as refusal:
            log.info("weight_is_decoded", format=stored.format, shape=list(stored.shape), reason=str(refusal))
            return self.weight(stored.decode())
        return made

    def stack(self, tensors: Sequence[Any]) -> ExpertStack:
        tensors = alike(tensors)
        first = tensors[0]
        if isinstance(first, StoredMatrix):
            packed: Any = [self.weight(tensor) for tensor in tensors]
            return ExpertStack(packed)
        rows, columns = first.shape
        unit = _ALIGNED // self.dtype.itemsize
        apart = -(-rows * columns // unit) * unit  # aligns every matrix for 16-byte reads
        nbytes = len(tensors) * apart * self.dtype.itemsize
        with self.device.guarded(f"{len(tensors)} weights of shape {[rows, columns]}", nbytes, _LOADING):
            memory = torch.empty(len(tensors) * apart, dtype=self.dtype, device=self.device.place)
        whole = memory.as_strided((len(tensors), rows, columns), (apart, columns, 1))
        for held, tensor in zip(whole, tensors, strict=True):
            held.copy_(tensor)
        parts: Any = [DenseWeight(part) for part in whole]
        stack = ExpertStack(parts)
        self._stacks[stack] = whole
        return stack

    def to_host(self, array: Any) -> Tensor:
        return (array.decode() if isinstance(array, Weight | ExpertStack) else materialised(array)).cpu()

    def from_host(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device.place)

    def vector(self, tensor: Tensor, *, plus: float = 0.0) -> Tensor:
        return (tensor.to(torch.float32) + plus).to(self.device.place)

    def free_bytes(self) -> int:
        return self.device.memory()[0]

    def new_kv(self, capacity: int, kv_heads: int, head_dim: int) -> CudaKVCache:
        return CudaKVCache(self.device, capacity, kv_heads, head_dim, self.dtype)

    def new_latent(self, capacity: int, dims: int) -> CudaLatentCache:
        return CudaLatentCache(self.device, capacity, dims, self.dtype)

    def new_delta(self, shape: DeltaShape) -> CudaDeltaCache:
        return CudaDeltaCache(self.device, shape, self.dtype)

    def _matrix(self, weight: Any) -> Tensor:
        """Return a weight as a matrix for row lookups; a packed one is decoded once and kept."""
        if isinstance(weight, DenseWeight):
            return weight.tensor
        if weight not in self._decoded:
            self._decoded[weight] = weight.decode().to(self.dtype)
        return self._decoded[weight]

    # --- dense -----------------------------------------------------------------------------------------------------

    def embed(self, table: Weight, tokens: Sequence[int]) -> Tensor:
        matrix = self._matrix(table)
        if isinstance(tokens, DeviceTokens):
            return row_kernels.embed(matrix, tokens.ids)
        for row, token in enumerate(tokens):
            if not 0 <= token < matrix.shape[0]:
                raise ContractError(f"token {token} of row {row} is not in the vocabulary (0..{matrix.shape[0] - 1})")
        return row_kernels.embed(matrix, self.device.upload(tokens, torch.int32))

    def project(
        self, x: Any, weights: Sequence[Weight], biases: Sequence[DenseWeight | None] = ()
    ) -> tuple[Tensor, ...]:
        if len(weights) > 1 and not weights[0].fused:
            fuse(weights)
        return products.project(materialised(x), weights, biases)

    def project_heads(self, x: Any, weights: ExpertStack) -> Tensor:
        whole = self._stacks.get(weights)
        if whole is None:
            whole = self._stacks[weights] = weights.decode().to(self.dtype)
        return products.project_heads(materialised(x), whole)

    def linear(self, x: Any, weight: Weight, residual: Any = None) -> Tensor:
        y = products.linear(materialised(x), weight)
        return y if residual is None else row_kernels.add(y, materialised(residual))

    def swiglu(self, x: Any, gate: Weight, up: Weight) -> Tensor:
        if not gate.fused:
            fuse([gate, up])
        return products.swiglu(materialised(x), gate, up)

    def rms_norm(self, x: Any, weight: Tensor, eps: float) -> Tensor:
        return norm.rms_norm(materialised(x), weight, eps)

    def layer_norm(self, x: Any, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return norm.layer_norm(materialised(x), weight, bias, eps)

    def gelu(self, x: Any) -> Tensor:
        return row_kernels.gelu(materialised(x))

    def scale(self, x: Any, factor: float) -> Tensor:
        return row_kernels.scale(materialised(x), factor)

    def scale_by_position(self, x: Any, beta: float, length: int, position: Any) -> Tensor:
        first = position.row if isinstance(position, DeviceLength) else int(position)
        return row_kernels.grow(materialised(x), beta, length, first)

    def add(self, a: Any, b: Any) -> Tensor:
        return row_kernels.add(materialised(a), materialised(b))

    def add_positions(self, x: Any, table: Weight, position: Any) -> Tensor:
        first = position.row if isinstance(position, DeviceLength) else int(position)
        return row_kernels.add(materialised(x), self._matrix(table), first)

    def concat(self, a: Any, b: Any) -> Tensor:
        return row_kernels.concat(materialised(a), materialised(b))

    # --- experts ---------------------------------------------------------------------------------------------------

    def route(self, x: Any, weight: Weight, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return choose(products.float32_product(materialised(x), weight), routing, bias)

    def moe(
        self,
        x: Any,
        chosen: tuple[Tensor, Tensor],
        experts: tuple[ExpertStack, ExpertStack, ExpertStack],
        residual: Any,
        *,
        shared: tuple[Weight, Weight, Weight] | None = None,
        shared_gate: Weight | None = None,
    ) -> Tensor:
        x, residual = materialised(x), materialised(residual)
        ids, weights = chosen
        common = None
        if shared is not None:
            gate, up, down = shared
            common = products.linear(products.swiglu(x, gate, up), down)
        if x.shape[0] <= MAX_ROWS:
            gate_row = None if shared_gate is None else self._matrix(shared_gate)
            return moe.experts(x, ids, weights, *experts, residual, shared=common, shared_gate=gate_row)
        if common is not None:
            common = common.float()
            if shared_gate is not None:
                common = common * torch.sigmoid(products.float32_product(x, shared_gate))
        return prompts.moe(x, ids, weights, experts, residual, common)

    # --- attention -------------------------------------------------------------------------------------------------

    def norm_rope(self, x: Any, weight: Tensor | None, eps: float, rope_: Rope, position: Any) -> Rotated:
        x = materialised(x)
        if x.stride(-1) != 1:
            x = x.contiguous()
        frequencies = self._inv_freq(rope_)
        place = position.row if isinstance(position, DeviceLength) else int(position)
        compute = functools.partial(rope.norm_rope, x, weight, eps, frequencies, place)
        return Rotated(compute, x, weight, eps, frequencies, position)

    def _inv_freq(self, rope_: Rope) -> Tensor:
        if rope_ not in self._frequencies:
            host = torch.tensor(rope_.inv_freq, dtype=torch.float32)
            self._frequencies[rope_] = host.to(self.device.place)
        return self._frequencies[rope_]

    def attend(self, q: Any, k: Any, v: Any, cache: Any, *, scale: float, gate: Any = None) -> Tensor:
        cache.reserve(q.shape[0])
        v, gate = materialised(v), None if gate is None else materialised(gate)
        if not isinstance(q, Rotated) and not isinstance(k, Rotated):  # a capture cannot read the length on the host
            q, k = (self.norm_rope(x, None, 0.0, _STILL, cache.length) for x in (q, k))
        if _in_place(q, cache) and _in_place(k, cache) and q.frequencies is k.frequencies and q.eps == k.eps:
            query = rope.rotate_and_write(q.x, k.x, v, q.weight, k.weight, q.eps, q.frequencies, cache.row)
        else:
            query = materialised(q)
            self._write(cache, materialised(k), v)
        rows, count, dim = query.shape
        if rows <= MAX_ROWS:
            return attention.attend(
                query, cache.row, kv_heads=cache.kv_heads, scale=scale, gate=gate, max_length=cache.bound
            )
        start = int(cache.length)
        mixed = prompts.attend(query, cache.keys[: start + rows], cache.values[: start + rows], start, scale)
        if gate is not None:
            mixed = (mixed.float() * torch.sigmoid(gate.float())).to(self.dtype)
        return mixed.reshape(rows, count * dim)

    def _write(self, cache: Any, k: Tensor, v: Tensor) -> None:
        """Write keys and values after the committed rows."""
        start = int(cache.length)
        cache.keys[start : start + len(k)] = k
        cache.values[start : start + len(v)] = v

    def append(self, k: Any, v: Any, cache: Any) -> None:
        cache.reserve(len(v))
        self._write(cache, materialised(k), materialised(v))

    def attend_from(
        self, q: Any, k: Any, v: Any, cache: Any, *, scale: float, first: Sequence[int], causal: bool = True
    ) -> Tensor:
        q, k, v = materialised(q), materialised(k), materialised(v)
        (rows, _, dim), start = q.shape, int(cache.length)
        self.append(k, v, cache)
        keys, values = cache.keys[: start + rows].float(), cache.values[: start + rows].float()
        place = torch.arange(start + rows, device=q.device)
        low = torch.tensor(list(first), device=q.device)[:, None]
        ends = torch.arange(start + 1, start + rows + 1, device=q.device)[:, None] if causal else start + rows
        groups = q.float().reshape(rows, cache.kv_heads, -1, dim)
        scores = torch.einsum("tkgd,skd->tkgs", groups, keys) * scale
        hidden = (place < low) | (place >= ends)
        weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
        return torch.einsum("tkgs,skd->tkgd", weights, values).to(self.dtype).reshape(rows, -1)

    def attend_latent(self, q: Any, row: Any, cache: Any, *, scale: float, value_dims: int) -> Tensor:
        cache.reserve(q.shape[0])
        q, row = materialised(q).contiguous(), materialised(row)
        if q.shape[0] <= MAX_ROWS:
            return latent.attend_latent(q, row, cache.row, scale=scale, value_dims=value_dims, max_length=cache.bound)
        start, end = int(cache.length), int(cache.length) + q.shape[0]
        cache.keys[start:end, 0] = row
        both = cache.keys[:end]
        return prompts.attend(q, both, both[..., :value_dims], start, scale)

    # --- gated delta rule ------------------------------------------------------------------------------------------

    def conv_window(self, x: Any, weight: Tensor, cache: Any) -> Any:
        x = materialised(x)
        cache.reserve(x.shape[0])
        compute = functools.partial(delta.conv_window, x, weight, cache.row)
        if x.shape[0] > MAX_ROWS:
            u = compute()
            cache.keep_tail(x)
            return u
        return cache.convolved(Convolved(compute, x, weight, cache))

    def gated_delta(
        self, u: Any, a: Any, b: Any, a_log: Tensor, dt_bias: Tensor, cache: Any, shape: DeltaShape
    ) -> Tensor:
        if u.shape[0] > MAX_ROWS:
            return delta_chunked.delta_chunked(u, a, b, a_log, dt_bias, cache.row, shape)
        if not isinstance(u, Convolved) or u.cache is not cache:
            raise StateError("the delta rule takes what conv_window gave for the same cache")
        return delta.delta_rows(u.x, a, b, u.weight, a_log, dt_bias, cache.row, shape)

    def gated_rms_norm(self, x: Any, z: Any, weight: Tensor, eps: float) -> Tensor:
        return norm.gated_rms_norm(materialised(x), materialised(z), weight, eps)

    # --- head ------------------------------------------------------------------------------------------------------

    def head(self, x: Any, weight: Weight) -> CudaLogits:
        x = materialised(x)
        return CudaLogits(len(x), lambda: products.logits(x, [weight]))

    def head_rows(self, weight: Weight, tokens: Sequence[int], base: Any = None) -> CudaHeadRows:
        def gather(ids: list[int]) -> tuple[DenseWeight, Tensor]:
            held = self.device.upload(ids, torch.int32)
            return DenseWeight(row_kernels.embed(self._matrix(weight), held)), held

        if base is None:
            return CudaHeadRows.of(gather, tokens, weight.shape[0])
        own: CudaHeadRows = base
        return own.extended(gather, tokens)

    def pruned_head(self, x: Any, rows: Any) -> Logits:
        x = materialised(x)
        return CudaPrunedLogits(len(x), lambda: products.logits(x, rows.parts), rows)

    # --- rows ------------------------------------------------------------------------------------------------------

    def hidden(self, x: Any) -> CudaHidden:
        return CudaHidden(materialised(x))


def _aligned(part: Tensor) -> Tensor:
    """Align ``part`` for 16-byte reads; a view of a memory-mapped file may start at any address."""
    return part.clone() if part.data_ptr() % _ALIGNED else part


def _in_place(x: Any, cache: Any) -> bool:
    """Whether ``x`` is a deferred query or key to be rotated to the position of the cache's next row."""
    if not isinstance(x, Rotated):
        return False
    if isinstance(x.position, DeviceLength):
        return x.position.row is cache.row
    return not isinstance(cache.length, DeviceLength) and int(x.position) == int(cache.length)
