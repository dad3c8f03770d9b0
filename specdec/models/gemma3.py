"""Gemma 3, the text model: layers with a sliding window and layers without, each kind with its rotary embedding.

Norms are stored as an offset from 1, and stand on both sides of attention and MLP.
"""

from __future__ import annotations

import functools
from collections import ChainMap
from collections.abc import Mapping
from typing import Any

import attrs

from specdec.backends.ops import Rope
from specdec.models.decoder import AttentionShape
from specdec.models.family import DecoderConfig, LayerNames, build_decoder
from specdec.models.fields import Fields

DEFAULTS = {  # released configs leave them out
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
NAMES = LayerNames(
    after_mixer="post_attention_layernorm", mlp="pre_feedforward_layernorm", after_mlp="post_feedforward_layernorm"
)


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    """Read the text part of a ``config.json``. Raises: CheckpointError naming the key."""
    fields = Fields(ChainMap(config, DEFAULTS))  # type: ignore[arg-type]
    fields.must_be("attention_bias", False)
    common = DecoderConfig.common(fields, tied=True, activation="hidden_activation")
    full, local = fields.of_layers("full_attention") or fields, fields.of_layers("sliding_attention")
    scale = fields.real("query_pre_attn_scalar") ** -0.5
    shape = AttentionShape.of(full, 1e6, scale=scale, normed="heads")
    sliding = fields.sliding_layers(common["layers"], fields.whole("sliding_window_pattern", 6))
    dim = shape.head_dim
    rope = local.rope(dim, 1e4)[0] if local else Rope.of(fields.real("rope_local_base_freq", 1e4), dim)
    return DecoderConfig(
        **common,
        attention=shape,
        alternate=attrs.evolve(shape, rope=rope, scale=scale, window=fields.whole("sliding_window"))
        if sliding
        else None,
        alternate_layers=sliding,
        intermediate_size=fields.whole("intermediate_size"),
        embed_scale=common["hidden_size"] ** 0.5,
        max_positions=full.max_positions(131072),
    )


build = functools.partial(build_decoder, plus=1.0, names=NAMES)
