"""Qwen3 dense: grouped-query attention with q/k norm, plain RMSNorm, no gate, no MTP head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from specdec.backends.ops import Ops, Rope
from specdec.checkpoints import TensorSpec, Weights
from specdec.contract import ModelSpec
from specdec.hookspecs import hookimpl
from specdec.models.causal_lm import DecoderModel
from specdec.models.decoder import Attention
from specdec.models.dense import build_dense, dense_tensors
from specdec.models.fields import Fields


@attrs.frozen(kw_only=True)
class Qwen3Config:
    """The fields of ``config.json`` that the maths needs."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    tied: bool
    max_positions: int
    mtp_layers: int = 0

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Qwen3Config:
        """Read the text part of a ``config.json``. Raises: CheckpointError naming the key."""
        fields = Fields(config)
        fields.must_be("hidden_act", "silu")
        fields.must_be("attention_bias", False)
        fields.must_be("use_sliding_window", False)
        fields.plain_rope()
        hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
        return cls(
            vocab_size=fields.whole("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.whole("intermediate_size"),
            layers=fields.whole("num_hidden_layers"),
            heads=heads,
            kv_heads=fields.whole("num_key_value_heads", heads),
            head_dim=fields.whole("head_dim", hidden // heads),
            eps=fields.real("rms_norm_eps", 1e-6),
            theta=fields.rope_theta(1e6),
            tied=fields.flag("tie_word_embeddings", False),
            max_positions=fields.whole("max_position_embeddings", 32768),
        )

    def state_bytes(self, width: int) -> tuple[int, int]:
        """Bytes of state per token and per sequence, with ``width`` bytes per activation."""
        return self.layers * 2 * self.kv_heads * self.head_dim * width, 0


def tensors(config: Qwen3Config) -> dict[str, TensorSpec]:
    """Every tensor that the checkpoint must have, by canonical name."""
    return dense_tensors(config)


def build(config: Qwen3Config, weights: Weights, ops: Ops) -> DecoderModel:
    """The model over ``ops``; weights are taken tensor by tensor."""
    rope = Rope.of(config.theta, config.head_dim)

    def attention(prefix: str) -> Attention:
        q, k, v, o = (ops.weight(weights.stored(f"{prefix}self_attn.{name}_proj.weight")) for name in "qkvo")
        q_norm, k_norm = (ops.vector(weights[f"{prefix}self_attn.{name}_norm.weight"]) for name in "qk")
        return Attention(
            ops=ops,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            eps=config.eps,
            rope=rope,
            gated=False,
            q_proj=q,
            k_proj=k,
            v_proj=v,
            o_proj=o,
            q_norm=q_norm,
            k_norm=k_norm,
        )

    return build_dense(config, weights, ops, attention)


@hookimpl
def specdec_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="qwen3",
            model_types=("qwen3",),
            parse=Qwen3Config.parse,
            tensors=tensors,
            build=build,
            help="Qwen3 dense: grouped-query attention",
        )
    ]
