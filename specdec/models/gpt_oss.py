"""gpt-oss: windows in every other layer, attention sinks, biases everywhere, experts with a clamped gating.

Source: the gpt-oss model card, arXiv:2508.10925, section 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from specdec.contract import ModelSpec
from specdec.hookspecs import hookimpl
from specdec.models.decoder import AttentionShape
from specdec.models.family import DecoderConfig, build_decoder
from specdec.models.fields import Fields
from specdec.models.moe import MoeShape


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a ``config.json``. Raises: CheckpointError naming the key."""
    fields = Fields(config)
    common, head_dim = DecoderConfig.common(fields, eps=1e-5), fields.whole("head_dim", 64)
    rope, factor = fields.rope(head_dim, 150000.0)
    fields.whole("initial_context_length", 4096)  # YaRN's length of pre-training has a key of its own
    biased = fields.flag("attention_bias", True)
    shape = AttentionShape(
        heads=fields.whole("num_attention_heads"),
        kv_heads=fields.whole("num_key_value_heads"),
        head_dim=head_dim,
        rope=rope,
        scale=head_dim**-0.5 * factor**2,  # queries and keys both carry the factor
        biased=biased,
        biased_output=biased,
        sinks=True,
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


@hookimpl
def specdec_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="gpt_oss",
            model_types=("gpt_oss",),
            parse=parse,
            build=build_decoder,
            help="gpt-oss, mixture of experts in MXFP4: sliding windows, attention sinks",
        )
    ]
