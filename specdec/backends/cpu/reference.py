"""The torch reference of every op, written for clarity; also the fallback without a C++ compiler.

In passes of up to ``max_rows`` rows, every product is computed row by row, because neither MKL (float32) nor oneDNN
(bfloat16) guarantees the same bits for 1 row and for many. So is every exponential and cosine, because torch computes
the end of an array with different code than its body. Longer passes (prompts) are computed in bulk.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own convention)
from torch import Tensor

from specdec.backends.cpu.arrays import CPU, CpuHidden, CpuLogits, write_serially
from specdec.backends.cpu.caches import CpuDeltaCache, CpuKVCache, CpuLatentCache
from specdec.backends.cpu.packed import takes_int8
from specdec.backends.cpu.pruned import HeadRows, PrunedLogits
from specdec.backends.ops import Array, Capabilities, Clamp, DeltaShape, Ops, Rope, Routing
from specdec.checkpoints.quantised import StoredMatrix
from specdec.contract import Parity

if TYPE_CHECKING:
    from specdec.contract import Float32

MAX_ROWS = 16
GROUP_COLUMNS = 32  # of activations in int8: QUANTUM of kernels/integers.cpp
_ATTEND_BLOCK = 128  # query rows whose scores are computed at once: a long prompt never builds a T x T matrix


class ReferenceOps(Ops):
    """Ops in plain torch."""

    hidden_type = CpuHidden

    def __init__(self, dtype: torch.dtype, kernels: str = "torch reference", *, int8: Set[str] = frozenset()) -> None:
        """``int8``: products with weights of these formats take ``int8_rows`` of their activations."""
        self.dtype = dtype
        self.int8 = int8
        self._integers: dict[int, weakref.ref[Tensor]] = {}  # weights whose products take int8 activations
        self.capabilities = Capabilities(
            kernels=kernels,
            parity=Parity.BITWISE,
            parity_reason=f"rows of passes of up to {MAX_ROWS} rows are multiplied one by one; longer prompt chunks in "
            "bulk, so that another chunking of a prompt may round differently",
            max_rows=MAX_ROWS,
            batch_rows=MAX_ROWS,
            warms_by_rows=False,
            packed_formats=frozenset(self.int8),
            slow=True,
        )

    # --- weights and storage ---------------------------------------------------------------------------------------

    def weight(self, tensor: Tensor | StoredMatrix) -> Tensor:
        if not isinstance(tensor, StoredMatrix):
            return tensor.to(self.dtype)  # no copy if the dtype matches: the memory map itself is used
        weight = tensor.decode()
        if takes_int8(tensor):
            self.int8_matrices += 1
            key = id(weight)
            self._integers[key] = weakref.ref(weight, lambda _: self._integers.pop(key, None))
        return weight

    def to_host(self, array: Tensor) -> Tensor:
        return array

    def from_host(self, tensor: Tensor) -> Tensor:
        return tensor

    def vector(self, tensor: Tensor, *, plus: float = 0.0) -> Tensor:
        return tensor.to(torch.float32) + plus

    def new_kv(self, capacity: int, kv_heads: int, head_dim: int) -> CpuKVCache:
        return CpuKVCache(capacity, kv_heads, head_dim, self.dtype)

    def new_window(
        self, capacity: int, window: int, kv_heads: int, head_dim: int, sinks: Tensor | None = None
    ) -> CpuKVCache:
        return CpuKVCache(capacity, kv_heads, head_dim, self.dtype, window, sinks)

    def new_latent(self, capacity: int, dims: int) -> CpuLatentCache:
        return CpuLatentCache(capacity, dims, self.dtype)

    def new_delta(self, shape: DeltaShape) -> CpuDeltaCache:
        return CpuDeltaCache(shape, self.dtype)

    # --- dense -----------------------------------------------------------------------------------------------------

    def embed(self, table: Tensor, tokens: Sequence[int]) -> Tensor:
        return table[torch.tensor(tokens, dtype=torch.long, device=CPU)]

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if id(weight) in self._integers:
            product = self._float_product(int8_rows(x), weight.float(), None if bias is None else bias.float())
            return product.to(x.dtype)
        return self._float_product(x, weight, bias)

    def _float_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        bias = None if bias is None else bias.to(x.dtype)
        if x.shape[0] > MAX_ROWS:
            return F.linear(x, weight, bias)
        # MKL's bits depend on the address too: a copy has the alignment of a single row
        return torch.cat([F.linear(x[t : t + 1].clone(), weight, bias) for t in range(x.shape[0])])

    def project(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = ()) -> tuple[Tensor, ...]:
        biases = biases or [None] * len(weights)
        return tuple(self._product(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    def project_heads(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        return torch.stack([self.linear(x[:, h], weight) for h, weight in enumerate(weights)], dim=1)

    def linear(self, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
        y = self._product(x, weight)
        return y if residual is None else y + residual

    def swiglu(self, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return self._gated(F.silu, x, gate, up)

    def geglu(self, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return self._gated(functools.partial(F.gelu, approximate="tanh"), x, gate, up)

    def _gated(self, activation: Callable[[Tensor], Tensor], x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        gated = _by_row(activation, self._product(x, gate).float()) * self._product(x, up).float()
        return gated.to(self.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(self.dtype)

    def scale_by_position(self, x: Tensor, beta: float, length: int, position: int) -> Tensor:
        grown = [1 + beta * math.log1p((position + t) // length) for t in range(x.shape[0])]
        return (x.float() * torch.tensor(grown, dtype=torch.float32, device=CPU)[:, None]).to(self.dtype)

    def concat(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a, b], dim=-1)

    # --- experts ---------------------------------------------------------------------------------------------------
    #
    # These use the products above, so a subclass with faster products has faster experts. Sorting, adding and
    # multiplying in float32 are row-invariant; exponentials are computed row by row in every subclass.

    def _float32_product(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x @ w.T`` not rounded to act."""
        if type(self).head is not ReferenceOps.head:  # a kernel that sums in float32, for any number of rows
            return torch.from_numpy(self.head(x, weight).rows())
        return self._product(x.float(), weight if id(weight) in self._integers else weight.float())

    def route(self, x: Tensor, weight: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._route(self._float32_product(x, weight), routing, bias)

    def _route(self, logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        squash = torch.sigmoid if routing.scores == "sigmoid" else functools.partial(torch.softmax, dim=-1)
        scores = _each_row(squash, logits)
        choice = scores if bias is None else scores + bias
        if routing.groups > 1:
            grouped = choice.view(len(logits), routing.groups, -1)
            two = grouped.sort(dim=-1, descending=True).values[..., :2]
            kept = _best(two[..., 0] + two[..., 1], routing.kept_groups)
            masked = torch.full_like(grouped, float("-inf"))
            at = kept[..., None].expand(-1, -1, grouped.shape[-1])
            choice = masked.scatter(1, at, grouped.gather(1, at)).flatten(1)
        ids = _best(choice, routing.top_k)
        weights = scores.gather(1, ids)
        if routing.normalised:
            weights = weights / (_sum_in_order(weights) + 1e-20)[:, None]
        return ids, weights * routing.scale

    def moe(
        self,
        x: Tensor,
        chosen: tuple[Tensor, Tensor],
        experts: tuple[Sequence[Tensor], ...],
        residual: Tensor,
        *,
        shared: tuple[Tensor, Tensor, Tensor] | None = None,
        shared_gate: Tensor | None = None,
    ) -> Tensor:
        gates, ups, downs = experts
        total = self._mixed(x, chosen, lambda part, e: self.linear(self.swiglu(part, gates[e], ups[e]), downs[e]))
        if shared is not None:
            gate, up, down = shared
            common = self.linear(self.swiglu(x, gate, up), down).float()
            if shared_gate is not None:
                common = common * _each_row(torch.sigmoid, self._float32_product(x, shared_gate))
            total = total + common
        return (total + residual.float()).to(self.dtype)

    def clamped_moe(
        self,
        x: Tensor,
        router: tuple[Tensor, Tensor],
        routing: Routing,
        experts: tuple[Sequence[Tensor], ...],
        biases: tuple[Tensor, Tensor, Tensor],
        clamp: Clamp,
        residual: Tensor,
    ) -> Tensor:
        gates, ups, downs = experts
        of_gate, of_up, of_down = biases

        def expert(part: Tensor, e: int) -> Tensor:
            gate, up = self.project(part, (gates[e], ups[e]), (of_gate[e], of_up[e]))
            gate, up = gate.float().clamp(max=clamp.limit), up.float().clamp(-clamp.limit, clamp.limit)
            gated = (up + 1) * gate * _each_row(torch.sigmoid, clamp.alpha * gate)
            return self.project(gated.to(self.dtype), (downs[e],), (of_down[e],))[0]

        weight, bias = router
        chosen = self._route(self._float32_product(x, weight) + bias, routing)
        return (self._mixed(x, chosen, expert) + residual.float()).to(self.dtype)

    def _mixed(self, x: Tensor, chosen: tuple[Tensor, Tensor], run: Callable[[Tensor, int], Tensor]) -> Tensor:
        """The weighted sum of every row's experts, float32; ``run`` computes some rows of one."""
        ids, weights = chosen
        rows, slots = ids.shape
        places: dict[int, list[int]] = {}  # expert -> places t * k + slot that chose it, ascending
        for place, expert in enumerate(ids.flatten().tolist()):
            places.setdefault(expert, []).append(place)
        out = torch.empty(rows * slots, x.shape[1], dtype=self.dtype, device=CPU)
        for expert, at in sorted(places.items()):
            out[at] = run(x if rows == 1 else x[[place // slots for place in at]], expert)
        parts = out.view(rows, slots, -1)
        total = weights[:, :1] * parts[:, 0].float()
        for slot in range(1, slots):
            total = total + weights[:, slot : slot + 1] * parts[:, slot].float()
        return total

    # --- attention -------------------------------------------------------------------------------------------------

    def norm_rope(self, x: Tensor, weight: Tensor | None, eps: float, rope: Rope, position: int) -> Tensor:
        if weight is not None:
            x = self.rms_norm(x, weight, eps)
        half = len(rope.inv_freq)
        positions = torch.arange(position, position + x.shape[0], dtype=torch.float32, device=CPU)
        angles = positions[:, None] * _frequencies(rope)
        cos, sin = _by_row(torch.cos, angles)[:, None], _by_row(torch.sin, angles)[:, None]  # the same for all heads
        wide = x.float()
        left, right, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
        turned = torch.cat([left * cos - right * sin, right * cos + left * sin, rest], dim=-1)
        return turned.to(self.dtype)

    def attend(
        self, q: Tensor, k: Array | None, v: Array | None, cache: CpuKVCache, *, scale: float, gate: Array | None = None
    ) -> Tensor:
        rows, heads, dim = q.shape
        start = cache.length if k is None or v is None else self._written(k, v, cache)
        step = 1 if rows <= MAX_ROWS else _ATTEND_BLOCK
        out = torch.cat(
            [_attend_block(q[at : at + step].clone(), cache, start + at, scale) for at in range(0, rows, step)]
        )
        if gate is not None:
            out = out * _by_row(torch.sigmoid, gate.float())
        return out.to(self.dtype).reshape(rows, heads * dim)

    def attend_cached(self, q: Tensor, cache: CpuKVCache, *, scale: float) -> Tensor:
        return self.attend(q, None, None, cache, scale=scale)

    def append(self, k: Tensor, v: Tensor, cache: CpuKVCache) -> None:
        self._written(k, v, cache)

    def _written(self, k: Tensor, v: Tensor, cache: CpuKVCache) -> int:
        """Write provisional rows; returns where they start."""
        start, end = cache.reserve(k.shape[0])
        write_serially([k], [end - start], cache.keys[start:end])
        write_serially([v], [end - start], cache.values[start:end])
        return start

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
        start = self._written(k, v, cache)
        ends = range(start + 1, start + rows + 1) if causal else [start + rows] * rows
        spans = enumerate(zip(first, ends, strict=True))
        out = [_attend_block(q[t : t + 1].clone(), cache, end - 1, scale, end - low) for t, (low, end) in spans]
        return torch.cat(out).to(self.dtype).reshape(rows, heads * dim)

    def attend_latent(self, q: Tensor, row: Tensor, cache: CpuLatentCache, *, scale: float, value_dims: int) -> Tensor:
        both = row[:, None]  # one key-value head that all query heads read
        out = self.attend(q, both, both, cache, scale=scale)
        return out.view(q.shape)[..., :value_dims]

    # --- gated delta rule ------------------------------------------------------------------------------------------

    def conv_window(self, x: Tensor, weight: Tensor, cache: CpuDeltaCache) -> Tensor:
        cache.raw = torch.cat([cache.window, x])
        taps = cache.raw.float().unfold(0, weight.shape[1], 1)  # [T, C, kc]
        return _by_row(F.silu, (taps * weight).sum(-1)).to(self.dtype)

    def gated_delta(
        self, u: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, cache: CpuDeltaCache, shape: DeltaShape
    ) -> Tensor:
        out = torch.empty(u.shape[0], shape.value_heads, shape.value_dim, dtype=self.dtype, device=CPU)

        def run(rows: int) -> None:
            cache.after.copy_(cache.state)
            for t in range(rows):
                out[t] = _delta_row(u[t], a[t], b[t], a_log, dt_bias, cache.after, shape)

        cache.replay = run
        run(u.shape[0])
        return out

    def gated_rms_norm(self, x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
        return (normed * _by_row(F.silu, z.float())).to(self.dtype).flatten(1)

    # --- head and rows ---------------------------------------------------------------------------------------------

    def head(self, x: Tensor, weight: Tensor) -> CpuLogits:
        return CpuLogits(self._product(x, weight).float())

    def head_rows(self, weight: Tensor, tokens: Sequence[int], base: Any = None) -> HeadRows:
        # embed can read packed weights
        if base is None:
            ids = np.unique(np.array(tokens, dtype=np.int32))
            return HeadRows((self.embed(weight, ids.tolist()),), ids, weight.shape[0])
        own: HeadRows = base
        missing = own.missing(tokens)
        return own.extended(missing, self.embed(weight, missing)) if missing else own

    def pruned_head(self, x: Tensor, rows: Any) -> PrunedLogits:
        values = [self.head(x, part).rows() for part in rows.parts]
        return self._pruned_logits(values[0] if len(values) == 1 else np.concatenate(values, axis=1), rows)

    def pruned_heads(self, x: Tensor, heads: Sequence[Any]) -> list[PrunedLogits]:
        bases: dict[int, list[int]] = {}  # rows of x whose heads extend the same one share the product with that
        for t, rows in enumerate(heads):
            bases.setdefault(id(rows.base), []).append(t)
        found: dict[int, PrunedLogits] = {}
        for group in bases.values():
            shared = self.head(x[group], heads[group[0]].base.parts[0]).rows()
            for t, values in zip(group, shared[:, None], strict=True):
                own = [self.head(x[t : t + 1], part).rows() for part in heads[t].parts[1:]]
                found[t] = self._pruned_logits(np.concatenate([values, *own], axis=1), heads[t])
        return [found[t] for t in range(len(heads))]

    def _pruned_logits(self, values: Float32, rows: HeadRows) -> PrunedLogits:
        return PrunedLogits(values, rows.ids, rows.vocab_size)


def int8_rows(x: Tensor) -> Tensor:
    """Round rows ``[T, H]`` to int8 in groups of 32 columns and return the rounded values, float32.

    A group's unit is its largest magnitude over 127; ties are rounded to even. A group with a value that is not finite
    becomes NaN.
    """
    wide = F.pad(x.float(), (0, -x.shape[1] % GROUP_COLUMNS)).view(len(x), -1, GROUP_COLUMNS)
    largest = wide.abs().amax(-1, keepdim=True).clamp(min=2.0**-119)  # so that the inverse is finite
    inverse = largest.new_tensor(127.0) / largest  # 127 / largest would take a reciprocal, which rounds twice
    rounded = (wide * inverse).round() * (largest / 127)
    finite = wide.isfinite().all(-1, keepdim=True)
    return rounded.where(finite, torch.nan).view(len(x), -1)[:, : x.shape[1]]


def _by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an elementwise ``function`` to ``x [T, ...]``, with the bits of single rows for up to ``MAX_ROWS`` rows."""
    if x.shape[0] > MAX_ROWS:
        return function(x)
    return torch.cat([function(x[t : t + 1]) for t in range(x.shape[0])])


def _each_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply ``function`` to ``x [T, ...]`` with the bits of single rows, for any T."""
    return function(x) if x.shape[0] == 1 else torch.cat([function(x[t : t + 1]) for t in range(x.shape[0])])


def _best(values: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest values of each row, in descending order; ties go to the lower index."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _sum_in_order(x: Tensor) -> Tensor:
    """Sum over the last axis from left to right: torch's own order depends on the shape."""
    total = x[..., 0]
    for i in range(1, x.shape[-1]):
        total = total + x[..., i]
    return total


@functools.cache
def _frequencies(rope: Rope) -> Tensor:
    return torch.tensor(rope.inv_freq, dtype=torch.float32, device=CPU)


def _attend_block(q: Tensor, cache: CpuKVCache, position: int, scale: float, window: int | None = None) -> Tensor:
    """Causal attention of T rows from ``position`` on, in this window or the cache's: ``[T, nq, D]`` float32."""
    rows, heads, dim = q.shape
    end = position + rows
    window = cache.window if window is None else window
    low = max(0, position + 1 - window) if window else 0
    keys, values = cache.keys[low:end].float(), cache.values[low:end].float()  # [S, nkv, D]
    groups = q.float().reshape(rows, keys.shape[1], -1, dim)  # [T, nkv, nq/nkv, D]
    scores = torch.einsum("tkgd,skd->tkgs", groups, keys) * scale
    ages = torch.arange(position, end, device=CPU)[:, None] - torch.arange(low, end, device=CPU)  # [T, S]
    unseen = (ages < 0) | (ages >= (window or end))
    scores = scores.masked_fill(unseen[:, None, None], float("-inf"))
    if cache.sinks is not None:
        scores = torch.cat([scores, cache.sinks.view(1, *groups.shape[1:3], 1).expand(rows, -1, -1, 1)], -1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("tkgs,skd->tkgd", weights, values).reshape(rows, heads, dim)


def _delta_row(
    u: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, shape: DeltaShape
) -> Tensor:
    """One token of the gated delta rule: update ``state [Hv, Dk, Dv]`` in place, return o ``[Hv, Dv]`` float32."""
    keys = shape.key_heads * shape.key_dim
    wide = u.float()
    q, k, v = wide[:keys], wide[keys : 2 * keys], wide[2 * keys :]
    repeats = shape.value_heads // shape.key_heads
    q = _unit(q.view(shape.key_heads, -1)).repeat_interleave(repeats, 0) * shape.key_dim**-0.5
    k = _unit(k.view(shape.key_heads, -1)).repeat_interleave(repeats, 0)
    decay = torch.exp(-torch.exp(a_log) * F.softplus(a.float() + dt_bias))
    state *= decay[:, None, None]
    error = v.view(shape.value_heads, -1) - torch.einsum("hkv,hk->hv", state, k)
    delta = torch.sigmoid(b.float())[:, None] * error
    state += k[:, :, None] * delta[:, None, :]
    return torch.einsum("hkv,hk->hv", state, q)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
