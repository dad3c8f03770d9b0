"""GLM-4.5 and 4.6: DeepSeek-V3's experts and MTP head around grouped-query attention.

Half of each head is rotated; q, k and v usually have biases; the larger models norm queries and keys per head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.contract import ModelSpec
from specdec.hookspecs import hookimpl
from specdec.models import deepseek_v3
from specdec.models.decoder import AttentionShape
from specdec.models.family import DecoderConfig
from specdec.models.fields import Fields


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a ``config.json``. Raises: CheckpointError naming the key."""
    fields = Fields(config)
    common, heads = deepseek_v3.common(fields, eps=1e-5), fields.whole("num_attention_heads")
    head_dim = fields.whole("head_dim", common["hidden_size"] // heads)
    shape = AttentionShape(
        heads=heads,
        kv_heads=fields.whole("num_key_value_heads", heads),
        head_dim=head_dim,
        rope=fields.rope(head_dim, 1e4, share=0.5)[0],
        scale=head_dim**-0.5,
        biased=fields.flag("attention_bias", False),
        normed="heads" if fields.flag("use_qk_norm", False) else "",
    )
    return DecoderConfig(**common, attention=shape)


@hookimpl
def specdec_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="glm4_moe",
            model_types=("glm4_moe",),
            parse=parse,
            build=deepseek_v3.build,
            help="GLM-4.5 / 4.6 mixture of experts: grouped-query attention, MTP head",
        )
    ]
