"""Qwen3 dense: grouped-query attention with q/k norm, plain RMSNorm, no gate, no MTP head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from specdec.backends.ops import Array, Ops, Rope
from specdec.checkpoints import TensorSpec, Weights
from specdec.contract import ModelSpec
from specdec.hookspecs import hookimpl
from specdec.models.causal_lm import DecoderModel
from specdec.models.decoder import Attention, DecoderLayer, GatedMlp
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


def mlp_tensors(prefix: str, hidden: int, intermediate: int) -> dict[str, TensorSpec]:
    """The three projections of a gated MLP."""
    return {
        f"{prefix}mlp.gate_proj.weight": TensorSpec((intermediate, hidden)),
        f"{prefix}mlp.up_proj.weight": TensorSpec((intermediate, hidden)),
        f"{prefix}mlp.down_proj.weight": TensorSpec((hidden, intermediate)),
    }


def build_mlp(ops: Ops, weights: Weights, prefix: str) -> GatedMlp:
    """A gated MLP from the tensors under ``prefix``."""
    gate, up, down = (ops.weight(weights[f"{prefix}mlp.{name}_proj.weight"]) for name in ("gate", "up", "down"))
    return GatedMlp(ops=ops, gate_proj=gate, up_proj=up, down_proj=down)


def attention_tensors(
    prefix: str, hidden: int, heads: int, kv_heads: int, head_dim: int, *, gated: bool = False, normed: bool = True,
    biased: bool = False,
) -> dict[str, TensorSpec]:  # fmt: skip
    """The projections of an attention layer, with its head norms and the biases of q, k and v where it has them.

    A gated layer has a doubled query projection.
    """
    prefix += "self_attn."
    expected = {
        f"{prefix}q_proj.weight": TensorSpec(((2 if gated else 1) * heads * head_dim, hidden)),
        f"{prefix}k_proj.weight": TensorSpec((kv_heads * head_dim, hidden)),
        f"{prefix}v_proj.weight": TensorSpec((kv_heads * head_dim, hidden)),
        f"{prefix}o_proj.weight": TensorSpec((hidden, heads * head_dim)),
    }
    if normed:
        expected |= {f"{prefix}{name}_norm.weight": TensorSpec((head_dim,)) for name in "qk"}
    if biased:
        for name in "qkv":
            expected[f"{prefix}{name}_proj.bias"] = TensorSpec(expected[f"{prefix}{name}_proj.weight"].shape[:1])
    return expected


def tensors(config: Qwen3Config) -> dict[str, TensorSpec]:
    """Every tensor that the checkpoint must have, by canonical name."""
    c, hidden = config, config.hidden_size
    expected = {"embed_tokens.weight": TensorSpec((c.vocab_size, hidden)), "norm.weight": TensorSpec((hidden,))}
    if not c.tied:
        expected["lm_head.weight"] = TensorSpec((c.vocab_size, hidden))
    for i in range(c.layers):
        prefix = f"layers.{i}."
        expected[f"{prefix}input_layernorm.weight"] = TensorSpec((hidden,))
        expected[f"{prefix}post_attention_layernorm.weight"] = TensorSpec((hidden,))
        expected |= attention_tensors(prefix, hidden, c.heads, c.kv_heads, c.head_dim)
        expected |= mlp_tensors(prefix, hidden, c.intermediate_size)
    return expected


def build(config: Qwen3Config, weights: Weights, ops: Ops) -> DecoderModel:
    """The model over ``ops``; weights are taken tensor by tensor."""
    rope = Rope.of(config.theta, config.head_dim)

    def vector(name: str) -> Array:
        return ops.vector(weights[name])

    def layer(prefix: str) -> DecoderLayer:
        q, k, v, o = (ops.weight(weights[f"{prefix}self_attn.{name}_proj.weight"]) for name in "qkvo")
        attention = Attention(
            ops=ops, heads=config.heads, kv_heads=config.kv_heads, head_dim=config.head_dim, eps=config.eps,
            rope=rope, gated=False, q_proj=q, k_proj=k, v_proj=v, o_proj=o,
            q_norm=vector(f"{prefix}self_attn.q_norm.weight"), k_norm=vector(f"{prefix}self_attn.k_norm.weight"),
        )  # fmt: skip
        return DecoderLayer(
            ops=ops, eps=config.eps, mixer=attention, mlp=build_mlp(ops, weights, prefix),
            input_norm=vector(f"{prefix}input_layernorm.weight"),
            post_norm=vector(f"{prefix}post_attention_layernorm.weight"),
        )  # fmt: skip

    embed = ops.weight(weights["embed_tokens.weight"])
    return DecoderModel(
        ops=ops,
        eps=config.eps,
        embed_tokens=embed,
        layers=tuple(layer(f"layers.{i}.") for i in range(config.layers)),
        norm=vector("norm.weight"),
        lm_head=embed if config.tied else ops.weight(weights["lm_head.weight"]),
        mtp=None,
        mtp_lm_head=None,
    )


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
