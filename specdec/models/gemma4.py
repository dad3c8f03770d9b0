"""Gemma 4, the text model of its dense variants.

Layers without a window have heads of a size of their own, of which a part is turned, and their keys may be the values
too. Values are normed, scores are not scaled, and a number multiplies the output of every layer.
"""

from __future__ import annotations

import functools
from collections import ChainMap
from collections.abc import Mapping
from typing import Any

import attrs

from specdec.contract import ModelSpec
from specdec.errors import CheckpointError, shown
from specdec.hookspecs import hookimpl
from specdec.models import gemma3
from specdec.models.decoder import AttentionShape
from specdec.models.family import DecoderConfig, build_decoder
from specdec.models.fields import Fields

ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
FULL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
NAMES = attrs.evolve(gemma3.NAMES, scale="layer_scalar")


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    """Read the text part of a ``config.json``. Raises: CheckpointError naming the key."""
    fields, cap = Fields(config), "final_logit_softcapping"
    for key in ("attention_bias", "enable_moe_block"):
        fields.must_be(key, False, None)
    for key in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        fields.must_be(key, 0, None)
    fields.must_be("use_bidirectional_attention", None, "vision", False)
    common = DecoderConfig.common(fields, tied=True, activation="hidden_activation")
    types = fields.layer_types(common["layers"], 6, "sliding_attention")
    sliding = tuple(i for i, kind in enumerate(types[:-1]) if kind == "sliding_attention")  # the last is never one
    ropes = Fields(config if config.get("rope_parameters") is not None else {**config, "rope_parameters": ROPES})
    full, local = (ropes.of_layers(kind) for kind in ROPES)
    if full is None or local is None:
        raise CheckpointError(f"config.json: 'rope_parameters' takes an object each for {' and '.join(ROPES)}")
    proportional = full.rope_kind() == "proportional"
    for rope in (local,) if proportional else (local, full):
        rope.plain_rope()
    each = _each_full_layer(config, set(range(common["layers"])) - set(sliding))
    own, one_matrix = Fields(ChainMap(each, config)), fields.flag("attention_k_eq_v", False)  # type: ignore[arg-type]
    kv_heads, head_dim = fields.whole("num_key_value_heads"), fields.whole("head_dim", 256)
    windowed = AttentionShape(
        heads=fields.whole("num_attention_heads"),
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=local.rope(head_dim, 1e4)[0],
        scale=1.0,
        window=fields.whole("sliding_window", 1024 if "unified" in str(config.get("model_type")) else 512),
        normed="heads",
        normed_values=True,
    )
    own_heads, head_dim = own.whole(FULL["num_key_value_heads"], kv_heads), own.whole(FULL["head_dim"], 512)
    shape = attrs.evolve(
        windowed,
        kv_heads=own_heads if one_matrix or each else kv_heads,
        head_dim=head_dim,
        rope=full.rope(head_dim, 1e6, share=1.0 if proportional else None)[0],
        window=0,
        keys_as_values=one_matrix,
    )
    return DecoderConfig(
        **common,
        attention=shape,
        alternate=windowed if sliding else None,
        alternate_layers=sliding,
        intermediate_size=fields.whole("intermediate_size"),
        embed_scale=common["hidden_size"] ** 0.5,
        logit_cap=0.0 if config.get(cap) is None else fields.real(cap),
        max_positions=full.max_positions(131072),
    )


def _each_full_layer(config: Mapping[str, Any], layers: set[int]) -> dict[str, Any]:
    """What ``per_layer_config`` says under the names of ``FULL``: transformers writes it in place of these."""
    given = config.get("per_layer_config")
    if given is None:
        return {}
    if given == {}:  # full layers are as the others
        return {name: config.get(key) for key, name in FULL.items()}
    try:
        found, (sizes, *others) = {int(index) for index in given}, given.values()
        if found == layers and others == [sizes] * len(others) and sizes.keys() <= FULL.keys():
            return {name: sizes.get(key, config.get(key)) for key, name in FULL.items()}
    except (AttributeError, TypeError, ValueError):
        pass
    wanted = f"the same {' and '.join(FULL)} for each layer without a window"
    raise CheckpointError(f"config.json: 'per_layer_config' takes {wanted}, got {shown(given)}")


@hookimpl
def specdec_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="gemma4",
            model_types=("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"),
            parse=parse,
            build=functools.partial(build_decoder, names=NAMES),
            help="Gemma 4, dense, text: heads of two sizes, keys as values, a number for every layer",
        )
    ]
