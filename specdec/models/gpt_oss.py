"""gpt-oss: windows in every other layer, attention sinks, biases everywhere, experts with a clamped gating.

Source: the gpt-oss model card, arXiv:2508.10925, section 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from specdec.models.decoder import AttentionShape
from specdec.models.family import DecoderConfig
from specdec.models.fields import Fields
from specdec.models.moe import MoeShape


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a ``config.json``. Raises: CheckpointError naming the key."""
    fields = Fields(config)
    common, kv_heads = DecoderConfig.common(fields, eps=1e-5), fields.whole("num_key_value_heads")
    fields.whole("initial_context_length", 4096)  # YaRN's length of pre-training has a key of its own
    biased = fields.flag("attention_bias", True)
    shape = AttentionShape.of(
        fields, 150000.0, head_dim=64, kv_heads=kv_heads, biased=biased, biased_output=biased, sinks=True
    )
    sliding = fields.sliding_layers(common["layers"], 2)
    return DecoderConfig(
        **common,
        attention=shape,
        alternate=attrs.evolve(shape, window=fields.whole("sliding_window")) if sliding else None,
        alternate_layers=sliding,
        moe=MoeShape.gpt_oss(fields),
        max_positions=fields.max_positions(131072),
    )
