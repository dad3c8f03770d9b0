"""Qwen3.5 / 3.6 / 3.8, dense and mixture of experts: Gated DeltaNet and gated attention layers, and the MTP head.

The family's norms are stored as an offset from 1, except ``linear_attn.norm``, which holds the factor itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from specdec.backends.ops import Array, DeltaShape
from specdec.errors import CheckpointError
from specdec.models.causal_lm import DecoderModel
from specdec.models.decoder import AttentionShape, GatedDeltaNet, Mixer
from specdec.models.family import DecoderConfig, MtpNames, attention, build_decoder
from specdec.models.fields import Fields
from specdec.models.moe import MoeShape
from specdec.models.weights import Weights

FULL_ATTENTION_INTERVAL = 4
MTP = MtpNames(
    prefix="mtp.",
    embed_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    fc="fc",
    layer="layers.0.",
    norm="norm",
    lm_head="lm_head",
    plus=1.0,
)


@attrs.frozen(kw_only=True)
class HybridConfig(DecoderConfig):
    """A config with two kinds of mixer layers."""

    attention: AttentionShape
    layer_types: tuple[str, ...]
    delta: DeltaShape
    mtp_embeddings: bool = False  # the MTP head has an embedding of its own, and perhaps an output head

    @staticmethod
    def hybrid(fields: Fields, *, mtp_layers: int = 0) -> dict[str, Any]:
        """Read the keys that these families share; ``mtp_layers`` is for a config that does not count them.

        Raises: CheckpointError naming the key.
        """
        fields.must_be("attention_bias", False)
        fields.must_be("attn_output_gate", True)
        fields.must_be("use_qk_norm", True)
        fields.must_be("output_gate_type", "swish", "silu")  # of the delta-rule norm; attention gates are sigmoids
        fields.plain_rope()
        common, kv_heads = DecoderConfig.common(fields), fields.whole("num_key_value_heads")
        delta = DeltaShape(
            key_heads=fields.whole("linear_num_key_heads", 16),
            value_heads=fields.whole("linear_num_value_heads", 32),
            key_dim=fields.whole("linear_key_head_dim", 128),
            value_dim=fields.whole("linear_value_head_dim", 128),
            kernel=fields.whole("linear_conv_kernel_dim", 4, low=2),
        )
        if delta.value_heads % delta.key_heads:
            raise CheckpointError(
                f"config.json: 'linear_num_value_heads' ({delta.value_heads}) is not a multiple of "
                f"'linear_num_key_heads' ({delta.key_heads})"
            )
        interval = fields.whole("full_attention_interval", FULL_ATTENTION_INTERVAL)
        return {
            **common,
            "attention": AttentionShape.of(
                fields, 1e7, share=0.25, head_dim=256, kv_heads=kv_heads, gated=True, normed="heads"
            ),
            "layer_types": fields.layer_types(common["layers"], interval),
            "delta": delta,
            "max_positions": fields.max_positions(32768),
            "mtp_layers": fields.mtp_layers("mtp_num_hidden_layers", mtp_layers),
            "mtp_embeddings": fields.flag("mtp_use_dedicated_embeddings", False),
        }

    def state_bytes(self, width: int, *, mtp: bool = True) -> tuple[int, int]:
        """Bytes of state per token (keys and values) and per sequence (the linear layers)."""
        full, delta = self.layer_types.count("full_attention"), self.delta
        recurrent = 4 * delta.value_heads * delta.key_dim * delta.value_dim
        window = (delta.kernel - 1) * delta.channels * width
        per_token = (full + self.mtp_layers * mtp) * self.attention.row * width
        return per_token, (self.layers - full) * (recurrent + window)


def parse_dense(config: Mapping[str, Any]) -> HybridConfig:
    """Read the text part of a dense model's ``config.json``. Raises: CheckpointError naming the key."""
    fields = Fields(config)
    return HybridConfig(**HybridConfig.hybrid(fields), intermediate_size=fields.whole("intermediate_size"))


def parse_moe(config: Mapping[str, Any]) -> HybridConfig:
    """Read the text part of a sparse model's ``config.json``. Raises: CheckpointError naming the key."""
    fields = Fields(config)
    return HybridConfig(**HybridConfig.hybrid(fields), moe=MoeShape.qwen(fields))


def build(
    config: HybridConfig,
    weights: Weights,
    *,
    projections: Callable[[Weights], tuple[Array, ...]] | None = None,
    promised: bool = True,
) -> DecoderModel:
    """Build the model.

    Args:
        config, weights: as for every family.
        projections: returns qkv, z, a and b of a delta-rule layer from the weights under ``linear_attn.``, for a family
            that stores them differently.
        promised: the config says whether there is an MTP head.
    """
    mlx = _converted(config, weights)
    plus = 0.0 if mlx else 1.0

    def mixer(layer: Weights, index: int) -> Mixer:
        if index == config.layers or config.layer_types[index] == "full_attention":
            return attention(config, layer, MTP.plus if index == config.layers else plus)
        layer = layer.under("linear_attn.")
        found = projections(layer) if projections else None
        return GatedDeltaNet.of(layer, config.hidden_size, config.delta, config.eps, mlx=mlx, projections=found)

    unusable = (
        "the MTP head is not used: mlx-lm's conversion adds 1 to the norms of the layers, and nothing in the files "
        "shows whether the head's norms were changed too"
    )
    return build_decoder(
        config,
        weights,
        mixer=mixer,
        plus=plus,
        mtp=attrs.evolve(MTP, embed_tokens="embed_tokens", dedicated=True) if config.mtp_embeddings else MTP,
        promised=promised,
        unusable=unusable if weights.head_converted(mlx) else "",
    )


def _converted(config: HybridConfig, weights: Weights) -> bool:
    """Whether mlx-lm converted the weights: then convolutions are ``[C, kc, 1]`` and norms hold the factor.

    mlx-lm adds the 1 to norms exactly when it transposes the convolutions. It does so only in the layers, so the norms
    of an MTP head that was restored later may be either. A checkpoint with both layouts of convolutions fails the
    weight check.
    """
    names = (f"layers.{i}.linear_attn.conv1d.weight" for i in range(config.layers))
    return any(weights.shape_of(name) == (config.delta.channels, config.delta.kernel, 1) for name in names)
