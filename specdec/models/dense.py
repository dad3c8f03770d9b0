"""What dense decoders share: the tensors of attention and MLP, and the frame of attention and a gated MLP per layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from specdec.backends.ops import Array, Ops
from specdec.checkpoints import TensorSpec, Weights
from specdec.models.causal_lm import DecoderModel
from specdec.models.decoder import Attention, DecoderLayer, GatedMlp


def mlp_tensors(prefix: str, hidden: int, intermediate: int) -> dict[str, TensorSpec]:
    """The three projections of a gated MLP."""
    return {
        f"{prefix}mlp.gate_proj.weight": TensorSpec((intermediate, hidden)),
        f"{prefix}mlp.up_proj.weight": TensorSpec((intermediate, hidden)),
        f"{prefix}mlp.down_proj.weight": TensorSpec((hidden, intermediate)),
    }


def build_mlp(ops: Ops, weights: Weights, prefix: str) -> GatedMlp:
    """A gated MLP from the tensors under ``prefix``."""
    gate, up, down = (ops.weight(weights.stored(f"{prefix}mlp.{name}_proj.weight")) for name in ("gate", "up", "down"))
    return GatedMlp(ops=ops, gate_proj=gate, up_proj=up, down_proj=down)


def attention_tensors(
    prefix: str,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    gated: bool = False,
    normed: bool = True,
    biased: bool = False,
) -> dict[str, TensorSpec]:
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


class DenseConfig(Protocol):
    """What the frame needs of a family's config."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def eps(self) -> float: ...
    @property
    def tied(self) -> bool: ...


def dense_tensors(config: DenseConfig, *, normed: bool = True, biased: bool = False) -> dict[str, TensorSpec]:
    """Every tensor of a plain dense decoder, by canonical name; ``normed`` and ``biased`` are about q, k and v."""
    c, hidden = config, config.hidden_size
    expected = {"embed_tokens.weight": TensorSpec((c.vocab_size, hidden)), "norm.weight": TensorSpec((hidden,))}
    if not c.tied:
        expected["lm_head.weight"] = TensorSpec((c.vocab_size, hidden))
    for i in range(c.layers):
        prefix = f"layers.{i}."
        expected[f"{prefix}input_layernorm.weight"] = TensorSpec((hidden,))
        expected[f"{prefix}post_attention_layernorm.weight"] = TensorSpec((hidden,))
        expected |= attention_tensors(prefix, hidden, c.heads, c.kv_heads, c.head_dim, normed=normed, biased=biased)
        expected |= mlp_tensors(prefix, hidden, c.intermediate_size)
    return expected


def build_dense(config: DenseConfig, weights: Weights, ops: Ops, attention: Callable[[str], Attention]) -> DecoderModel:
    """A model whose norms hold the factor itself, with no MTP head.

    ``attention(prefix)`` builds the mixer of the layer whose tensors start with ``prefix``.
    """

    def vector(name: str) -> Array:
        return ops.vector(weights[name])

    def layer(prefix: str) -> DecoderLayer:
        return DecoderLayer(
            ops=ops,
            eps=config.eps,
            input_norm=vector(f"{prefix}input_layernorm.weight"),
            mixer=attention(prefix),
            post_norm=vector(f"{prefix}post_attention_layernorm.weight"),
            mlp=build_mlp(ops, weights, prefix),
        )

    embed = ops.weight(weights.stored("embed_tokens.weight"))
    return DecoderModel(
        ops=ops,
        eps=config.eps,
        embed_tokens=embed,
        layers=tuple(layer(f"layers.{i}.") for i in range(config.layers)),
        norm=vector("norm.weight"),
        lm_head=embed if config.tied else ops.weight(weights.stored("lm_head.weight")),
        mtp=None,
        mtp_lm_head=None,
    )
