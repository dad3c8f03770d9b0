"""Multi-head latent attention (MLA): keys and values of all heads are up-projections of one short row per token.

Only that row is cached: the compressed ``c`` (kv_lora_rank values, normed) and the rotated ``k_rope``, shared by all
heads. The up-projections are never applied to cached rows; they are absorbed into the query and the output:

    q'_h = W_uk_h^T q_nope_h;   score_h = (q'_h . c + q_rope_h . k_rope) * scale;   o_h = W_uv_h (sum_s p_h,s c_s)

so attention has one key-value head of ``kv_lora_rank + rope_dim`` dimensions, for prompts and single tokens alike.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1 and appendix C (equations 37 to 47).
"""

from __future__ import annotations

import attrs

from specdec.backends.ops import Array, LatentCache, Ops, Rope
from specdec.errors import CheckpointError
from specdec.models.fields import Fields
from specdec.models.weights import Weights


@attrs.frozen(kw_only=True)
class LatentShape:
    """Sizes and scales of a latent-attention layer."""

    heads: int
    nope_dim: int  # unrotated part of a query head
    rope_dim: int  # rotated part, in interleaved pairs (x0, x1), (x2, x3), ...
    value_dim: int
    kv_rank: int
    q_rank: int  # 0: queries are projected in one step
    rope: Rope
    scale: float  # of the scores, YaRN's factor included
    interleaved: bool  # False: half-split pairs, as in some conversions

    @property
    def row(self) -> int:
        """Values cached per token."""
        return self.kv_rank + self.rope_dim

    @classmethod
    def of(cls, fields: Fields) -> LatentShape:
        """Read DeepSeek's keys. Raises: CheckpointError naming the key."""
        nope, rope_dim = fields.whole("qk_nope_head_dim"), fields.whole("qk_rope_head_dim")
        rope, factor = fields.rope(rope_dim, 1e4)
        if abs(factor - 1) > 1e-6:  # it would scale only q_rope . k_rope
            raise CheckpointError(
                f"config.json: 'mscale' and 'mscale_all_dim' that differ (factor {factor:.4f}) are not supported"
            )
        return cls(
            heads=fields.whole("num_attention_heads"),
            nope_dim=nope,
            rope_dim=rope_dim,
            value_dim=fields.whole("v_head_dim"),
            kv_rank=fields.whole("kv_lora_rank"),
            q_rank=fields.whole("q_lora_rank", 0, low=0),
            rope=rope,
            scale=(nope + rope_dim) ** -0.5 * fields.yarn_all_dim(),
            interleaved=fields.flag("rope_interleave", True),
        )


@attrs.frozen(kw_only=True)
class LatentAttention:
    """The mixer. See the module docstring."""

    ops: Ops
    shape: LatentShape
    eps: float
    q_a: Array | None  # [q_rank, H]
    q_norm: Array | None  # [q_rank]
    q_b: Array  # [n (nope + rope), q_rank], or [..., H] without a rank
    kv_a: Array  # [kv_rank + rope, H]
    kv_norm: Array  # [kv_rank]
    key_up: Array  # a stack of n [kv_rank, nope]: W_uk transposed
    value_up: Array  # a stack of n [value, kv_rank]
    o_proj: Array  # [H, n value]

    @classmethod
    def of(cls, weights: Weights, hidden: int, shape: LatentShape, eps: float) -> LatentAttention:
        """Build from the weights under ``self_attn.``.

        ``kv_b_proj`` holds, per head, the rows of k_nope, then those of v. The k_nope rows are transposed here, which
        copies them. mlx-lm's conversion has already done so, as ``embed_q`` and ``unembed_out``.
        """
        heads, nope, value, rank = shape.heads, shape.nope_dim, shape.value_dim, shape.kv_rank
        queries, q_a, q_norm = heads * (nope + shape.rope_dim), None, None
        if shape.q_rank:
            q_a = weights.matrix("q_a_proj.weight", (shape.q_rank, hidden))
            q_norm = weights.vector("q_a_layernorm.weight", (shape.q_rank,))
            q_b = weights.matrix("q_b_proj.weight", (queries, shape.q_rank))
        else:
            q_b = weights.matrix("q_proj.weight", (queries, hidden))
        if "embed_q.weight" in weights:
            key_up = weights.stack("embed_q.weight", (heads, rank, nope))
            value_up = weights.stack("unembed_out.weight", (heads, value, rank))
        else:
            both = weights.tensor("kv_b_proj.weight", (heads * (nope + value), rank)).reshape(heads, -1, rank)
            key_up = weights.ops.stack(both[:, :nope].transpose(1, 2).contiguous().unbind())
            value_up = weights.ops.stack(both[:, nope:].unbind())
        return cls(
            ops=weights.ops,
            shape=shape,
            eps=eps,
            q_a=q_a,
            q_norm=q_norm,
            q_b=q_b,
            kv_a=weights.matrix("kv_a_proj_with_mqa.weight", (shape.row, hidden)),
            kv_norm=weights.vector("kv_a_layernorm.weight", (rank,)),
            key_up=key_up,
            value_up=value_up,
            o_proj=weights.matrix("o_proj.weight", (hidden, heads * value)),
        )

    def new_cache(self, capacity: int) -> LatentCache:
        return self.ops.new_latent(capacity, self.shape.row)

    def __call__(self, x: Array, residual: Array, cache: LatentCache) -> Array:
        ops, shape, rows, rank = self.ops, self.shape, x.shape[0], self.shape.kv_rank
        if self.q_a is None:
            q, latent = ops.project(x, (self.q_b, self.kv_a))
        else:
            q, latent = ops.project(x, (self.q_a, self.kv_a))
            assert self.q_norm is not None
            q = ops.linear(ops.rms_norm(q, self.q_norm, self.eps), self.q_b)
        q = q.reshape(rows, shape.heads, shape.nope_dim + shape.rope_dim)
        compressed = ops.rms_norm(latent[:, :rank], self.kv_norm, self.eps)
        shared = self._rotate(latent[:, rank:].reshape(rows, 1, shape.rope_dim), cache.length)
        row = ops.concat(compressed, shared.reshape(rows, shape.rope_dim))
        absorbed = ops.project_heads(q[..., : shape.nope_dim], self.key_up)
        query = ops.concat(absorbed, self._rotate(q[..., shape.nope_dim :], cache.length))
        mixed = ops.attend_latent(query, row, cache, scale=shape.scale, value_dims=rank)
        out = ops.project_heads(mixed, self.value_up).reshape(rows, shape.heads * shape.value_dim)
        return ops.linear(out, self.o_proj, residual)

    def _rotate(self, x: Array, position: int) -> Array:
        """Rotate ``x [T, n, rope]``, evens before odds: queries and the cache agree, so the order does not matter."""
        if self.shape.interleaved:
            x = self.ops.concat(x[..., 0::2], x[..., 1::2])
        return self.ops.norm_rope(x, None, self.eps, self.shape.rope, position)
