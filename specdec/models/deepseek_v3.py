"""DeepSeek-V3 and R1: latent attention, experts chosen by corrected sigmoid scores, an MTP head as an extra layer.

GLM-4.5 and 4.6 have grouped-query attention instead, of which half of each head is rotated; q, k and v usually have
biases, and the larger models norm queries and keys per head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.models.causal_lm import DecoderModel
from specdec.models.decoder import AttentionShape
from specdec.models.family import DecoderConfig, MtpNames, build_decoder
from specdec.models.fields import Fields
from specdec.models.mla import LatentShape
from specdec.models.moe import MoeShape
from specdec.models.weights import Weights

MOST_MODULES = 8  # of an MTP head: a pass of all their rows still fits the rows of a verification
MTP = MtpNames(
    prefix="layers.{layers}.",
    embed_norm="enorm",
    hidden_norm="hnorm",
    fc="eh_proj",
    layer="",
    norm="shared_head.norm",
    lm_head="shared_head.head",
    embed_tokens="embed_tokens",
)


def common(fields: Fields, *, eps: float = 1e-6) -> dict[str, Any]:
    """Read all but the attention. Raises: CheckpointError naming the key."""
    found = DecoderConfig.common(fields, eps=eps)
    return {
        **found,
        "intermediate_size": fields.whole("intermediate_size"),
        "moe": MoeShape.deepseek(fields),
        "dense_layers": min(fields.whole("first_k_dense_replace", 0, low=0), found["layers"]),
        "max_positions": fields.max_positions(4096),
        "mtp_layers": fields.mtp_layers("num_nextn_predict_layers", most=MOST_MODULES),
    }


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a ``config.json``. Raises: CheckpointError naming the key."""
    fields = Fields(config)
    fields.must_be("attention_bias", False)
    return DecoderConfig(**common(fields), attention=LatentShape.of(fields))


def parse_glm4_moe(config: Mapping[str, Any]) -> DecoderConfig:
    """Read GLM's ``config.json``. Raises: CheckpointError naming the key."""
    fields = Fields(config)
    biased, normed = fields.flag("attention_bias", False), "heads" if fields.flag("use_qk_norm", False) else ""
    shape = AttentionShape.of(fields, 1e4, share=0.5, biased=biased, normed=normed)
    return DecoderConfig(**common(fields, eps=1e-5), attention=shape)


def build(config: DecoderConfig, weights: Weights) -> DecoderModel:
    """Build the model; each MTP module is one more layer, with a few tensors of its own."""
    return build_decoder(config, weights, mtp=MTP)
