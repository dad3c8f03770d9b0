"""Llama and families like it: grouped-query attention and a gated MLP, or experts, in every layer, no MTP head.

| family | what is its own |
|---|---|
| granite | factors on embeddings, the outputs of layers' parts, attention scores and logits |
| ministral3 | as mistral; queries grow with the position beyond the length of pre-training |
| mistral | a sliding window in every layer, if any |
| olmo2 | norms behind attention and MLP instead of before them; one norm over all query heads, and all key heads |
| phi3 | fused projections, LongRoPE, a sliding window |
| qwen2 | q, k and v biases |
| qwen3, qwen3_moe | a norm on every query and key head |
| smollm3 | no rotary embedding in every fourth layer |
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import attrs

from specdec.models.decoder import AttentionShape
from specdec.models.family import DecoderConfig, LayerNames, build_decoder
from specdec.models.fields import MOST_LAYERS, Fields, wrong
from specdec.models.moe import MoeShape

OLMO2_NAMES = LayerNames(
    mixer="", after_mixer="post_attention_layernorm", mlp="", after_mlp="post_feedforward_layernorm"
)


def parse_granite(config: Mapping[str, Any]) -> DecoderConfig:
    """Read Granite's ``config.json``. Raises: CheckpointError naming the key."""
    fields = _without(config, "attention_bias", "mlp_bias")
    parsed = _parse(fields, scale=fields.real("attention_multiplier", 1.0))
    return attrs.evolve(
        parsed,
        embed_scale=fields.real("embedding_multiplier", 1.0),
        branch_scale=fields.real("residual_multiplier", 1.0),
        logit_scale=1 / fields.real("logits_scaling", 1.0),
    )


def parse_mistral(config: Mapping[str, Any]) -> DecoderConfig:
    """Read Mistral's ``config.json``. Raises: CheckpointError naming the key."""
    fields = Fields(config)
    return _parse(fields, window=fields.whole("sliding_window", 0, low=0))


def parse_ministral3(config: Mapping[str, Any]) -> DecoderConfig:
    """Read the text part of Ministral 3's ``config.json``. Raises: CheckpointError naming the key."""
    fields = Fields(config)
    window, growth = fields.whole("sliding_window", 0, low=0), fields.query_growth()
    return _parse(fields, theta=1e6, eps=1e-5, window=window, growth=growth)


def parse_phi3(config: Mapping[str, Any]) -> DecoderConfig:
    """Read the ``config.json`` of Phi-3 and Phi-4. Raises: CheckpointError naming the key."""
    fields = Fields(config)
    fields.whole("original_max_position_embeddings", 4096)  # only LongRoPE uses it
    parsed = _parse(fields, eps=1e-5, share=1.0, window=fields.whole("sliding_window", 0, low=0))
    return attrs.evolve(parsed, fused=True)


def parse_plain(config: Mapping[str, Any], *, without: tuple[str, ...], **variant: Any) -> DecoderConfig:
    """Read a ``config.json`` that has none of the switches ``without``; ``variant`` as for ``_parse``.

    Raises: CheckpointError naming the key.
    """
    return _parse(_without(config, *without), **variant)


parse_llama = functools.partial(parse_plain, without=("attention_bias", "mlp_bias"))
parse_olmo2 = functools.partial(parse_plain, without=("attention_bias",), eps=1e-5, normed="whole")
parse_qwen2 = functools.partial(parse_plain, without=("use_sliding_window",), biased=True)
build_olmo2 = functools.partial(build_decoder, names=OLMO2_NAMES)


def parse_qwen3(config: Mapping[str, Any], *, moe: bool = False) -> DecoderConfig:
    """Read Qwen3's ``config.json``; ``moe``: with experts. Raises: CheckpointError naming the key."""
    fields = _without(config, "attention_bias", "use_sliding_window")
    fields.must_be("use_qk_norm", True)
    fields.plain_rope()
    return _parse(fields, theta=1e6, normed="heads", moe=MoeShape.qwen(fields, shared=False) if moe else None)


parse_qwen3_moe = functools.partial(parse_qwen3, moe=True)


def parse_smollm3(config: Mapping[str, Any]) -> DecoderConfig:
    """Read SmolLM3's ``config.json``. Raises: CheckpointError naming the key."""
    fields = _without(config, "attention_bias", "mlp_bias", "use_sliding_window")
    layers, interval = fields.whole("num_hidden_layers", high=MOST_LAYERS), fields.whole("no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers")  # 1: the layer has a rotary embedding
    if rotated is None:
        rotated = [int((i + 1) % interval != 0) for i in range(layers)]
    if not isinstance(rotated, list) or len(rotated) < layers or any(one not in (0, 1) for one in rotated):
        raise wrong("no_rope_layers", "0 or 1 for every layer", rotated)
    return _parse(fields, theta=2e6, tied=True, unrotated=tuple(i for i in range(layers) if not rotated[i]))


def _without(config: Mapping[str, Any], *keys: str) -> Fields:
    """The fields of a config in which these keys are false or absent."""
    fields = Fields(config)
    for key in keys:
        fields.must_be(key, False)
    return fields


def _parse(
    fields: Fields,
    *,
    theta: float = 1e4,
    share: float | None = None,
    eps: float = 1e-6,
    tied: bool = False,
    scale: float | None = None,
    moe: MoeShape | None = None,
    unrotated: tuple[int, ...] = (),
    **variant: Any,
) -> DecoderConfig:
    """Read the common keys.

    Args:
        fields: the config's.
        theta, share, eps, tied, scale: as ``AttentionShape.of`` and ``DecoderConfig.common`` take them.
        moe: the experts in place of dense MLPs.
        unrotated: layers without a rotary embedding.
        variant: further fields of ``AttentionShape``.
    """
    shape = AttentionShape.of(fields, theta, share=share, scale=scale, **variant)
    return DecoderConfig(
        **DecoderConfig.common(fields, eps=eps, tied=tied),
        attention=shape,
        alternate=attrs.evolve(shape, rope=None) if unrotated else None,
        alternate_layers=unrotated,
        moe=moe,
        intermediate_size=0 if moe else fields.whole("intermediate_size"),
        max_positions=fields.max_positions(32768),
    )
