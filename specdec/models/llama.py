"""Llama 3 and Qwen2.5 dense: grouped-query attention, plain RMSNorm, no q/k norm, no gate, no MTP head.

They differ in the biases of q, k and v (Qwen2.5 has them) and in the usual kind of rotary embedding.
"""

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
class LlamaConfig:
    """The fields of ``config.json`` that the maths needs."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    biased: bool  # q, k and v have biases
    eps: float
    rope: Rope
    scale: float  # of the scores
    tied: bool
    max_positions: int
    mtp_layers: int = 0

    @classmethod
    def _parse(cls, fields: Fields, *, biased: bool, theta: float) -> LlamaConfig:
        fields.must_be("hidden_act", "silu")
        hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
        head_dim = fields.whole("head_dim", hidden // heads)
        rope, scale = fields.full_rope(head_dim, theta)
        return cls(
            vocab_size=fields.whole("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.whole("intermediate_size"),
            layers=fields.whole("num_hidden_layers"),
            heads=heads,
            kv_heads=fields.whole("num_key_value_heads", heads),
            head_dim=head_dim,
            biased=biased,
            eps=fields.real("rms_norm_eps", 1e-6),
            rope=rope,
            scale=scale,
            tied=fields.flag("tie_word_embeddings", False),
            max_positions=fields.max_positions(32768),
        )

    @classmethod
    def parse_llama(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Read Llama's ``config.json``. Raises: CheckpointError naming the key."""
        fields = Fields(config)
        fields.must_be("attention_bias", False)
        fields.must_be("mlp_bias", False)
        return cls._parse(fields, biased=False, theta=1e4)

    @classmethod
    def parse_qwen2(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Read Qwen2.5's ``config.json``. Raises: CheckpointError naming the key."""
        fields = Fields(config)
        fields.must_be("use_sliding_window", False)
        return cls._parse(fields, biased=True, theta=1e4)

    def state_bytes(self, width: int) -> tuple[int, int]:
        """Bytes of state per token and per sequence, with ``width`` bytes per activation."""
        return self.layers * 2 * self.kv_heads * self.head_dim * width, 0


def tensors(config: LlamaConfig) -> dict[str, TensorSpec]:
    """Every tensor that the checkpoint must have, by canonical name."""
    return dense_tensors(config, normed=False, biased=config.biased)


def build(config: LlamaConfig, weights: Weights, ops: Ops) -> DecoderModel:
    """The model over ``ops``; weights are taken tensor by tensor."""

    def attention(prefix: str) -> Attention:
        return Attention(
            ops=ops,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            eps=config.eps,
            rope=config.rope,
            gated=False,
            q_norm=None,
            k_norm=None,
            scale=config.scale,
            **projections(ops, weights, prefix, biased=config.biased),
        )

    return build_dense(config, weights, ops, attention)


def projections(ops: Ops, weights: Weights, prefix: str, *, biased: bool) -> dict[str, Any]:
    """The fields of ``Attention`` that hold projections and their biases."""
    prefix += "self_attn."
    found: dict[str, Any] = {
        f"{name}_proj": ops.weight(weights.stored(f"{prefix}{name}_proj.weight")) for name in "qkvo"
    }
    if biased:
        found["biases"] = tuple(ops.weight(weights[f"{prefix}{name}_proj.bias"]) for name in "qkv")
    return found


@hookimpl
def specdec_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="llama",
            model_types=("llama",),
            parse=LlamaConfig.parse_llama,
            tensors=tensors,
            build=build,
            help="Llama 3 dense: grouped-query attention, Llama 3 rotary scaling",
        ),
        ModelSpec(
            name="qwen2",
            model_types=("qwen2",),
            parse=LlamaConfig.parse_qwen2,
            tensors=tensors,
            build=build,
            help="Qwen2.5 dense: grouped-query attention with biases",
        ),
    ]
