"""GLM-4.5 and 4.6: DeepSeek-V3's experts and MTP head around grouped-query attention.

Half of each head is rotated; q, k and v usually have biases; the larger models norm queries and keys per head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.models import deepseek_v3
from specdec.models.decoder import AttentionShape
from specdec.models.family import DecoderConfig
from specdec.models.fields import Fields


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a ``config.json``. Raises: CheckpointError naming the key."""
    fields = Fields(config)
    biased, normed = fields.flag("attention_bias", False), "heads" if fields.flag("use_qk_norm", False) else ""
    shape = AttentionShape.of(fields, 1e4, share=0.5, biased=biased, normed=normed)
    return DecoderConfig(**deepseek_v3.common(fields, eps=1e-5), attention=shape)
