"""Building blocks of decoder families: mixers, the gated MLP and the pre-norm layer around them.

Each block's ``of`` builds it from weights whose names appear only there. Mixers are called with ``(x [T, H], residual,
cache)``; the position of row 0 is the cache's committed length, ``cache.length``, which a recorded pass hands to an
operation as it is: it cannot be calculated with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, Self

import attrs
import torch

from specdec.backends.ops import Array, Cache, DeltaCache, DeltaShape, KVCache, Ops, Rope
from specdec.errors import CheckpointError
from specdec.models.fields import Fields
from specdec.models.weights import Weights


class Mixer(Protocol):
    """A layer that mixes token positions: attention or a recurrent layer."""

    def new_cache(self, capacity: int) -> Cache:
        """An empty cache for one sequence."""

    def __call__(self, x: Array, residual: Array | None, cache: Any) -> Array:
        """``residual + mixer(x)``, or ``mixer(x)`` without one; ``cache`` comes from ``new_cache`` of the same mixer.

        The class that defines it may also define ``fill(x, cache)``, which leaves the same bits in the cache without
        any output. It is for rows of a prompt that only later rows will look at.
        """


class Mlp(Protocol):
    """A layer that treats every position alone: a gated MLP or a block of experts."""

    def __call__(self, x: Array, residual: Array) -> Array:
        """``residual + mlp(x)``."""


class Norm(Protocol):
    """A norm over the last axis."""

    def __call__(self, x: Array) -> Array:
        """``x [T, H]``, normed: ``[T, H]``."""


@attrs.frozen(kw_only=True)
class RmsNorm:
    """``Ops.rms_norm`` with its weight."""

    ops: Ops
    weight: Array  # [H], from ``Weights.vector``
    eps: float

    def __call__(self, x: Array) -> Array:
        return self.ops.rms_norm(x, self.weight, self.eps)


@attrs.frozen(kw_only=True)
class LayerNorm:
    """``Ops.layer_norm`` with its weight and bias."""

    ops: Ops
    weight: Array  # [H], from ``Weights.vector``
    bias: Array  # [H], likewise
    eps: float

    @classmethod
    def of(cls, weights: Weights, hidden: int, eps: float) -> LayerNorm:
        """Build from ``weight`` and ``bias`` under its name."""
        weight, bias = (weights.vector(name, (hidden,)) for name in ("weight", "bias"))
        return cls(ops=weights.ops, weight=weight, bias=bias, eps=eps)

    def __call__(self, x: Array) -> Array:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)


def as_is(x: Array) -> Array:
    """A norm that does nothing, for layers without one at its place."""
    return x


@attrs.frozen(kw_only=True)
class Scale:
    """``Ops.scale`` by a constant, in the place of a norm."""

    ops: Ops
    factor: float

    def __call__(self, x: Array) -> Array:
        return self.ops.scale(x, self.factor)


@attrs.frozen(kw_only=True)
class AttentionShape:
    """Sizes and variants of a grouped-query attention layer."""

    heads: int  # nq
    kv_heads: int  # nkv
    head_dim: int  # D
    rope: Rope | None  # None: positions are not encoded
    scale: float  # of the scores
    window: int = 0  # cached rows that a row attends to, its own included; 0: all
    gated: bool = False  # the output is multiplied by the sigmoid of q_proj's gate half
    normed: Literal["", "heads", "whole"] = ""  # an RMSNorm on every query and key head, or on all of them together
    biased: bool = False  # q, k and v have biases,
    biased_output: bool = False  # and the output projection
    normed_values: bool = False  # values have an RMSNorm without a weight
    keys_as_values: bool = False  # values are the projected keys, before their norm
    sinks: bool = False  # a learned score per head joins every softmax
    growth: tuple[float, int] | None = None  # beta and length of ``Ops.scale_by_position``, for the queries

    @classmethod
    def of(
        cls,
        fields: Fields,
        theta: float,
        *,
        share: float | None = None,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        scale: float | None = None,
        **variant: Any,
    ) -> AttentionShape:
        """Read the keys of most families. Raises: CheckpointError naming the key.

        Args:
            fields: the config's.
            theta, share: the family's defaults, as ``Fields.rope`` takes them.
            head_dim: likewise; a head's part of the hidden size by default.
            kv_heads: their number, if a config that does not say it means another than that of heads.
            scale: of the scores; one over the root of the head's size by default.
            variant: further fields.
        """
        heads = fields.whole("num_attention_heads")
        dim = fields.whole("head_dim", head_dim or fields.whole("hidden_size") // heads)
        rope, factor = fields.rope(dim, theta, share=share)
        return cls(
            heads=heads,
            kv_heads=kv_heads or fields.whole("num_key_value_heads", heads),
            head_dim=dim,
            rope=rope,
            scale=(dim**-0.5 if scale is None else scale) * factor**2,  # queries and keys both carry the factor
            **variant,
        )

    @property
    def row(self) -> int:
        """Values cached per token."""
        return 2 * self.kv_heads * self.head_dim


@attrs.frozen(kw_only=True)
class Attention:
    """Grouped-query attention with optional biases, q/k norm and sigmoid output gate.

    With a gate the query projection is twice as wide, query and gate interleaved **per head**:
    ``q_proj(y).view(T, nq, 2, D)``. The gate is always a sigmoid; ``output_gate_type`` describes the delta-rule layers.
    """

    ops: Ops
    shape: AttentionShape
    eps: float
    q_proj: Array
    k_proj: Array | None  # None: keys and values are those of an earlier layer, which the cache holds already
    v_proj: Array | None  # None: likewise, or ``shape.keys_as_values``
    o_proj: Array
    q_norm: Array | None
    k_norm: Array | None
    biases: tuple[Array, ...]  # of q, k and v, or ()
    o_bias: Array | None = None
    sinks: Array | None = None  # [nq]
    v_norm: Array | None = None  # ones

    @classmethod
    def of(
        cls,
        weights: Weights,
        hidden: int,
        shape: AttentionShape,
        eps: float,
        *,
        plus: float = 0.0,
        width: int | None = None,
        fused: bool = False,
        reads: bool = False,
    ) -> Self:
        """Build from the weights under ``self_attn.``.

        Args:
            weights, hidden, shape, eps: as the fields.
            plus: added to its norms.
            width: that of x if not H.
            fused: q, k and v are rows of one weight, ``qkv_proj``, also without a checkpoint to show it.
            reads: it has no keys and values of its own.

        Raises: CheckpointError if the query heads are not a multiple of the key heads.
        """
        if shape.heads % shape.kv_heads:
            raise CheckpointError(
                f"config.json: 'num_attention_heads' ({shape.heads}) is not a multiple of 'num_key_value_heads' "
                f"({shape.kv_heads})"
            )
        dim, mixed, kv = shape.head_dim, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        sizes = {"q": 2 * mixed if shape.gated else mixed, "k": kv, "v": kv}
        for name in "kv" if reads else "v" * shape.keys_as_values:
            del sizes[name]

        def projections(kind: str, *columns: int) -> list[Array]:
            if fused or f"qkv_proj.{kind}" in weights:
                return weights.split(f"qkv_proj.{kind}", tuple(sizes.values()), *columns)
            return [weights.matrix(f"{name}_proj.{kind}", (size, *columns)) for name, size in sizes.items()]

        q, k, v, *_ = *projections("weight", width or hidden), None, None
        normed = {"": None, "heads": (dim, dim), "whole": (mixed, kv)}[shape.normed]
        q_norm, k_norm = (
            weights.vector(f"{name}_norm.weight", (size,), plus=plus) if normed and name in sizes else None
            for name, size in zip("qk", normed or (0, 0), strict=True)
        )
        return cls(
            ops=weights.ops,
            shape=shape,
            eps=eps,
            q_proj=q,
            k_proj=k,
            v_proj=v,
            o_proj=weights.matrix("o_proj.weight", (hidden, mixed)),
            q_norm=q_norm,
            k_norm=k_norm,
            biases=tuple(projections("bias")) if shape.biased else (),
            o_bias=weights.matrix("o_proj.bias", (hidden,)) if shape.biased_output else None,
            sinks=weights.vector("sinks", (shape.heads,)) if shape.sinks else None,
            v_norm=weights.ops.vector(torch.ones(dim)) if shape.normed_values and not reads else None,
        )

    def new_cache(self, capacity: int) -> KVCache:
        size = self.shape.kv_heads, self.shape.head_dim
        if self.sinks is not None:
            return self.ops.new_window(capacity, self.shape.window, *size, self.sinks)
        if self.shape.window:
            return self.ops.new_window(capacity, self.shape.window, *size)
        return self.ops.new_kv(capacity, *size)

    def __call__(
        self,
        x: Array,
        residual: Array | None,
        cache: KVCache,
        first: Sequence[int] | None = None,
        *,
        causal: bool = True,
    ) -> Array:
        """See ``Mixer.__call__``; ``first`` and ``causal`` as in ``Ops.attend_from``, for the layers of draft heads."""
        ops, shape, rows, dim = self.ops, self.shape, x.shape[0], self.shape.head_dim
        q, *entries = ops.project(x, (self.q_proj, *self._of_entries), self.biases)
        gate = None
        if shape.gated:
            pair = q.reshape(rows, shape.heads, 2, dim)
            q, gate = pair[:, :, 0], pair[:, :, 1]
        if shape.growth is not None:
            q = ops.scale_by_position(q, *shape.growth, cache.length)
        q = self._placed(q, self.q_norm, cache)
        k, v = self._entries(cache, *entries) if entries else (None, None)
        if not entries:
            mixed = ops.attend_cached(q, cache, scale=shape.scale)
        elif first is None and causal:
            mixed = ops.attend(q, k, v, cache, scale=shape.scale, gate=gate)
        else:
            mixed = ops.attend_from(q, k, v, cache, scale=shape.scale, first=first or [0] * rows, causal=causal)
        if self.o_bias is None:
            return ops.linear(mixed, self.o_proj, residual)
        (out,) = ops.project(mixed, (self.o_proj,), (self.o_bias,))
        return out if residual is None else ops.add(residual, out)

    def fill(self, x: Array, cache: KVCache) -> None:
        """See ``Mixer.__call__``."""
        self.ops.append(*self._entries(cache, *self.ops.project(x, self._of_entries, self.biases[1:])), cache)

    @property
    def _of_entries(self) -> tuple[Array, ...]:
        return tuple(one for one in (self.k_proj, self.v_proj) if one is not None)

    def _entries(self, cache: KVCache, k: Array, v: Array | None = None) -> tuple[Array, Array]:
        """What the cache holds of projected keys and values ``[T, nkv * D]``: each ``[T, nkv, D]``."""
        v = (k if v is None else v).reshape(k.shape[0], self.shape.kv_heads, self.shape.head_dim)
        if self.v_norm is not None:
            v = self.ops.rms_norm(v, self.v_norm, self.eps)
        return self._placed(k, self.k_norm, cache), v

    def _placed(self, x: Array, norm: Array | None, cache: KVCache) -> Array:
        """Queries or keys ``[T, n * D]`` or ``[T, n, D]``, normed and rotated to their positions: ``[T, n, D]``."""
        ops, shape = self.ops, self.shape
        if shape.normed == "whole":
            x, norm = ops.rms_norm(x, norm, self.eps), None
        if x.ndim == 2:
            x = x.reshape(x.shape[0], -1, shape.head_dim)
        if shape.rope is not None:
            return ops.norm_rope(x, norm, self.eps, shape.rope, cache.length)
        return x if norm is None else ops.rms_norm(x, norm, self.eps)


@attrs.frozen(kw_only=True)
class GatedDeltaNet:
    """The Gated DeltaNet mixer: convolution, gated delta rule, gated norm.

    Source: Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464. The norm's gate is silu. Its weight is stored as it is,
    unlike the family's other norms, which are stored as an offset from 1.
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

    @classmethod
    def of(
        cls,
        weights: Weights,
        hidden: int,
        shape: DeltaShape,
        eps: float,
        *,
        mlx: bool = False,
        projections: tuple[Array, ...] | None = None,
    ) -> GatedDeltaNet:
        """Build from the weights under ``linear_attn.``.

        Args:
            weights, hidden, shape, eps: as the fields.
            mlx: the convolution is stored as ``[C, kc, 1]``.
            projections: qkv, z, a and b, for a family that stores them differently.
        """
        heads, channels, values = shape.value_heads, shape.channels, shape.value_heads * shape.value_dim
        qkv, z, a, b = projections or (
            weights.matrix(f"in_proj_{name}.weight", (size, hidden), exact=name in "ab")
            for name, size in (("qkv", channels), ("z", values), ("a", heads), ("b", heads))
        )
        taps = weights.tensor("conv1d.weight", (channels, shape.kernel, 1) if mlx else (channels, 1, shape.kernel))
        return cls(
            ops=weights.ops,
            shape=shape,
            eps=eps,
            in_proj_qkv=qkv,
            in_proj_z=z,
            in_proj_a=a,
            in_proj_b=b,
            conv1d=weights.ops.vector(taps.reshape(channels, shape.kernel)),
            a_log=weights.vector("A_log", (heads,)),
            dt_bias=weights.vector("dt_bias", (heads,)),
            norm=weights.vector("norm.weight", (shape.value_dim,)),
            out_proj=weights.matrix("out_proj.weight", (hidden, values)),
        )

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
    """``down(activation(gate(x)) * up(x))``."""

    ops: Ops
    gate_proj: Array
    up_proj: Array
    down_proj: Array
    activation: Literal["silu", "gelu"] = "silu"

    @classmethod
    def of(cls, weights: Weights, hidden: int, intermediate: int, *, fused: bool = False) -> GatedMlp:
        """Build from the weights under its name; ``fused``: gate and up are rows of one, ``gate_up_proj``."""
        if fused:
            gate, up = weights.split("gate_up_proj.weight", (intermediate, intermediate), hidden)
        else:
            gate, up = (weights.matrix(f"{name}_proj.weight", (intermediate, hidden)) for name in ("gate", "up"))
        down = weights.matrix("down_proj.weight", (hidden, intermediate))
        return cls(ops=weights.ops, gate_proj=gate, up_proj=up, down_proj=down)

    def __call__(self, x: Array, residual: Array | None) -> Array:
        gated = self.ops.swiglu if self.activation == "silu" else self.ops.geglu
        return self.ops.linear(gated(x, self.gate_proj, self.up_proj), self.down_proj, residual)


@attrs.frozen(kw_only=True)
class Adjusted:
    """A mixer or MLP whose output is normed or scaled before it joins the residual stream."""

    ops: Ops
    branch: Any  # Attention or GatedMlp
    adjust: Norm

    def new_cache(self, capacity: int) -> Cache:
        cache: Cache = self.branch.new_cache(capacity)
        return cache

    def __call__(self, x: Array, residual: Array, *cache: Cache) -> Array:
        return self.ops.add(residual, self.adjust(self.branch(x, None, *cache)))

    def fill(self, x: Array, cache: Cache) -> None:
        """See ``Mixer.__call__``."""
        self.branch.fill(x, cache)


class Layer(Protocol):
    """A decoder layer. Most families use ``DecoderLayer``."""

    def new_cache(self, capacity: int) -> Cache:
        """An empty cache for one sequence."""

    def __call__(self, x: Array, cache: Any) -> Array:
        """The residual stream after this layer, from the one before it; ``cache`` comes from ``new_cache``."""


@attrs.frozen(kw_only=True)
class DecoderLayer:
    """``x + mixer(norm(x))``, then ``x + mlp(norm(x))``, then ``after(x)``, with ``own`` of ``DecoderModel.inputs``."""

    input_norm: Norm
    mixer: Mixer
    post_norm: Norm
    mlp: Mlp
    after: Callable[..., Array] = as_is

    def new_cache(self, capacity: int) -> Cache:
        return self.mixer.new_cache(capacity)

    def __call__(self, x: Array, cache: Cache, *own: Array) -> Array:
        x = self.mixer(self.input_norm(x), x, cache)
        return self.after(self.mlp(self.post_norm(x), x), *own)

    def fill(self, x: Array, cache: Cache) -> None:
        """Append what ``__call__`` appends to the cache, at less cost where the mixer can."""
        calls = next(kind for kind in type(self.mixer).__mro__ if "__call__" in vars(kind))
        if "fill" in vars(calls):
            self.mixer.fill(self.input_norm(x), cache)  # type: ignore[attr-defined]
        else:
            self(x, cache)


@attrs.frozen(kw_only=True)
class MtpHead:
    """A multi-token-prediction head: one decoder layer over pairs (hidden h_i, token x_{i+1}) that predicts x_{i+2}.

        u = fc [norm_e(embed(x_{i+1})) ; norm_h(h_i)]     embedding first, h_i after the final norm
        m = norm(layer(u));  logits = head m;  a chained step feeds m in place of h

    Source: DeepSeek-V3, arXiv:2412.19437, section 2.2 (equations 21 to 24); order and norms as the Qwen3.5
    checkpoints were trained. ``lm_head`` and ``embed_tokens``: the model's own unless the checkpoint has others.
    """

    ops: Ops
    embed_norm: Norm
    hidden_norm: Norm
    fc: Array
    layer: DecoderLayer
    norm: Norm
    lm_head: Array | None = None
    embed_tokens: Array | None = None

    def __call__(self, embedded: Array, hidden: Array, cache: Cache) -> Array:
        return self.norm(self.layer(self._pairs(embedded, hidden), cache))

    def fill(self, embedded: Array, hidden: Array, cache: Cache) -> Array:
        """Append the pairs to the cache without drafting from any; returns u ``[T, H]``."""
        pairs = self._pairs(embedded, hidden)
        self.layer.fill(pairs, cache)
        return pairs

    def _pairs(self, embedded: Array, hidden: Array) -> Array:
        pair = self.ops.concat(self.embed_norm(embedded), self.hidden_norm(hidden))
        return self.ops.linear(pair, self.fc)
