"""The pieces that decoder families share: mixers, the gated MLP and the pre-norm layer around them.

Each piece is built once from weights and then called with ``(x [T, H], cache)``; the position of row 0 is the cache's
committed length.
"""

from __future__ import annotations

from typing import Any, Protocol

import attrs

from specdec.backends.ops import Array, Cache, DeltaCache, DeltaShape, KVCache, Ops, Rope


class Mixer(Protocol):
    """What mixes token positions: attention or a recurrent layer."""

    def new_cache(self, capacity: int) -> Cache:
        """An empty cache for one sequence."""

    def __call__(self, x: Array, residual: Array, cache: Any) -> Array:
        """``residual + mixer(x)``; ``cache`` is one that ``new_cache`` of the same mixer made."""


class Mlp(Protocol):
    """What works on every position alone: a gated MLP or a block of experts."""

    def __call__(self, x: Array, residual: Array) -> Array:
        """``residual + mlp(x)``."""


@attrs.frozen(kw_only=True)
class Attention:
    """Grouped-query attention with optional biases, q/k norm and sigmoid output gate.

    With ``gated`` the query projection is twice as wide, query and gate interleaved **per head**:
    ``q_proj(y).view(T, nq, 2, D)``. The gate is always a sigmoid, whatever ``output_gate_type`` says (that field
    is about the delta-rule layers).
    """

    ops: Ops
    heads: int  # nq
    kv_heads: int  # nkv
    head_dim: int  # D
    eps: float
    rope: Rope
    gated: bool
    q_proj: Array
    k_proj: Array
    v_proj: Array
    o_proj: Array
    q_norm: Array | None
    k_norm: Array | None
    biases: tuple[Array, Array, Array] | tuple[()] = ()  # of q, k and v
    scale: float | None = None  # of the scores; D^-0.5 unless given

    def new_cache(self, capacity: int) -> KVCache:
        return self.ops.new_kv(capacity, self.kv_heads, self.head_dim)

    def __call__(self, x: Array, residual: Array, cache: KVCache) -> Array:
        ops, rows, dim = self.ops, x.shape[0], self.head_dim
        q, k, v = ops.project(x, (self.q_proj, self.k_proj, self.v_proj), self.biases)
        gate = None
        if self.gated:
            pair = q.reshape(rows, self.heads, 2, dim)
            q, gate = pair[:, :, 0], pair[:, :, 1]
        else:
            q = q.reshape(rows, self.heads, dim)
        q = ops.norm_rope(q, self.q_norm, self.eps, self.rope, cache.length)
        k = ops.norm_rope(k.reshape(rows, self.kv_heads, dim), self.k_norm, self.eps, self.rope, cache.length)
        v = v.reshape(rows, self.kv_heads, dim)
        scale = dim**-0.5 if self.scale is None else self.scale
        mixed = ops.attend(q, k, v, cache, scale=scale, gate=gate)
        return ops.linear(mixed, self.o_proj, residual)


@attrs.frozen(kw_only=True)
class GatedDeltaNet:
    """The Gated DeltaNet mixer: convolution, gated delta rule, gated norm.

    Source: Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464. The gate of the norm is silu; its weight is stored as
    it is, while the other norms of the family are stored as an offset from 1.
    """

    ops: Ops
    shape: DeltaShape
    eps: float
    in_proj_qkv: Array
    in_proj_z: Array
    in_proj_a: Array
    in_proj_b: Array
    conv1d: Array  # [C, kc]
    a_log: Array  # [Hv]
    dt_bias: Array  # [Hv]
    norm: Array  # [Dv]
    out_proj: Array

    def new_cache(self, capacity: int) -> DeltaCache:
        return self.ops.new_delta(self.shape)

    def __call__(self, x: Array, residual: Array, cache: DeltaCache) -> Array:
        ops, shape = self.ops, self.shape
        qkv, z, a, b = ops.project(x, (self.in_proj_qkv, self.in_proj_z, self.in_proj_a, self.in_proj_b))
        u = ops.conv_window(qkv, self.conv1d, cache)
        o = ops.gated_delta(u, a, b, self.a_log, self.dt_bias, cache, shape)
        z = z.reshape(x.shape[0], shape.value_heads, shape.value_dim)
        return ops.linear(ops.gated_rms_norm(o, z, self.norm, self.eps), self.out_proj, residual)


@attrs.frozen(kw_only=True)
class GatedMlp:
    """``down(silu(gate(x)) * up(x))``."""

    ops: Ops
    gate_proj: Array
    up_proj: Array
    down_proj: Array

    def __call__(self, x: Array, residual: Array) -> Array:
        return self.ops.linear(self.ops.swiglu(x, self.gate_proj, self.up_proj), self.down_proj, residual)


@attrs.frozen(kw_only=True)
class DecoderLayer:
    """``x + mixer(norm(x))``, then ``x + mlp(norm(x))``."""

    ops: Ops
    eps: float
    input_norm: Array
    mixer: Mixer
    post_norm: Array
    mlp: Mlp

    def __call__(self, x: Array, cache: Cache) -> Array:
        x = self.mixer(self.ops.rms_norm(x, self.input_norm, self.eps), x, cache)
        return self.mlp(self.ops.rms_norm(x, self.post_norm, self.eps), x)


@attrs.frozen(kw_only=True)
class MtpHead:
    """A multi-token-prediction head: one decoder layer over pairs (hidden h_i, token x_{i+1}) that predicts x_{i+2}.

        u = fc [norm_e(embed(x_{i+1})) ; norm_h(h_i)]     embedding first, h_i after the final norm
        m = norm(layer(u));  logits = head m;  a chained step feeds m in place of h

    Source: DeepSeek-V3, arXiv:2412.19437, section 2.2 (equations 21 to 24); order and norms as the Qwen3.5
    checkpoints were trained.
    """

    ops: Ops
    eps: float
    embed_norm: Array
    hidden_norm: Array
    fc: Array
    layer: DecoderLayer
    norm: Array

    def before_norm(self, embedded: Array, hidden: Array, cache: Cache) -> Array:
        """``layer(u)``, the rows ``[T, H]`` before the head's own norm."""
        ops = self.ops
        embedded = ops.rms_norm(embedded, self.embed_norm, self.eps)
        hidden = ops.rms_norm(hidden, self.hidden_norm, self.eps)
        return self.layer(ops.linear(ops.concat(embedded, hidden), self.fc), cache)

    def __call__(self, embedded: Array, hidden: Array, cache: Cache) -> Array:
        return self.ops.rms_norm(self.before_norm(embedded, hidden, cache), self.norm, self.eps)
