"""Llama 3, Qwen2.5 and Qwen3 dense: grouped-query attention and a gated MLP in every layer, no MTP head.

Qwen2.5 has q, k and v biases; Qwen3 norms every query and key head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.contract import ModelSpec
from specdec.hookspecs import hookimpl
from specdec.models.decoder import AttentionShape
from specdec.models.family import DecoderConfig, build_decoder
from specdec.models.fields import Fields


def parse_llama(config: Mapping[str, Any]) -> DecoderConfig:
    """Read Llama's ``config.json``. Raises: CheckpointError naming the key."""
    fields = Fields(config)
    fields.must_be("attention_bias", False)
    fields.must_be("mlp_bias", False)
    return _parse(fields)


def parse_qwen2(config: Mapping[str, Any]) -> DecoderConfig:
    """Read Qwen2.5's ``config.json``. Raises: CheckpointError naming the key."""
    fields = Fields(config)
    fields.must_be("use_sliding_window", False)
    return _parse(fields, biased=True)


def parse_qwen3(config: Mapping[str, Any]) -> DecoderConfig:
    """Read Qwen3's ``config.json``. Raises: CheckpointError naming the key."""
    fields = Fields(config)
    fields.must_be("attention_bias", False)
    fields.must_be("use_sliding_window", False)
    fields.must_be("use_qk_norm", True)
    fields.plain_rope()
    return _parse(fields, theta=1e6, normed=True)


def _parse(fields: Fields, *, theta: float = 1e4, biased: bool = False, normed: bool = False) -> DecoderConfig:
    common, heads = DecoderConfig.common(fields), fields.whole("num_attention_heads")
    head_dim = fields.whole("head_dim", common["hidden_size"] // heads)
    rope, factor = fields.rope(head_dim, theta)
    shape = AttentionShape(
        heads=heads,
        kv_heads=fields.whole("num_key_value_heads", heads),
        head_dim=head_dim,
        rope=rope,
        scale=head_dim**-0.5 * factor**2,  # queries and keys both carry the factor
        biased=biased,
        normed=normed,
    )
    return DecoderConfig(
        **common,
        attention=shape,
        intermediate_size=fields.whole("intermediate_size"),
        max_positions=fields.max_positions(32768),
    )


@hookimpl
def specdec_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="llama",
            model_types=("llama",),
            parse=parse_llama,
            build=build_decoder,
            help="Llama 3 dense: grouped-query attention, Llama 3 rotary scaling",
        ),
        ModelSpec(
            name="qwen2",
            model_types=("qwen2",),
            parse=parse_qwen2,
            build=build_decoder,
            help="Qwen2.5 dense: grouped-query attention with biases",
        ),
        ModelSpec(
            name="qwen3",
            model_types=("qwen3",),
            parse=parse_qwen3,
            build=build_decoder,
            help="Qwen3 dense: grouped-query attention",
        ),
    ]
