"""GLM-4.5 and 4.6: DeepSeek-V3's frame of experts and MTP head around grouped-query attention.

Half of each head is rotated; q, k and v usually have biases; the larger models norm queries and keys per head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from specdec.backends.ops import Ops, Rope
from specdec.checkpoints import TensorSpec, Weights
from specdec.contract import ModelSpec
from specdec.errors import CheckpointError
from specdec.hookspecs import hookimpl
from specdec.models.causal_lm import DecoderModel
from specdec.models.decoder import Attention
from specdec.models.deepseek_v3 import ExtraLayerConfig, build_frame, frame_tensors
from specdec.models.dense import attention_tensors
from specdec.models.fields import Fields
from specdec.models.llama import projections


@attrs.frozen(kw_only=True)
class Glm4MoeConfig(ExtraLayerConfig):
    """The fields of ``config.json`` that the maths needs."""

    heads: int
    kv_heads: int
    head_dim: int
    biased: bool
    normed: bool
    rope: Rope

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Glm4MoeConfig:
        """Read a ``config.json``. Raises: CheckpointError naming the key."""
        fields = Fields(config)
        heads = fields.whole("num_attention_heads")
        head_dim = fields.whole("head_dim", fields.whole("hidden_size") // heads)
        rope, factor = fields.rope(int(head_dim * fields.partial_rotary_factor(0.5)), 1e4)
        if factor != 1.0:  # it would scale the rotated half of a head alone
            raise CheckpointError(f"config.json: an 'attention_factor' of {factor:.4f} is not supported in this family")
        return cls(
            **cls.common(fields, 1e-5),
            heads=heads,
            kv_heads=fields.whole("num_key_value_heads", heads),
            head_dim=head_dim,
            biased=fields.flag("attention_bias", False),
            normed=fields.flag("use_qk_norm", False),
            rope=rope,
        )

    def state_bytes(self, width: int) -> tuple[int, int]:
        """Bytes of state per token (the MTP head's included) and per sequence."""
        return (self.layers + self.mtp_layers) * 2 * self.kv_heads * self.head_dim * width, 0


def tensors(config: Glm4MoeConfig) -> dict[str, TensorSpec]:
    """Every tensor that the checkpoint must or may have, by canonical name; the head's are in group "mtp"."""
    c = config
    return frame_tensors(
        c,
        lambda prefix: attention_tensors(
            prefix, c.hidden_size, c.heads, c.kv_heads, c.head_dim, normed=c.normed, biased=c.biased
        ),
    )


def build(config: Glm4MoeConfig, weights: Weights, ops: Ops) -> DecoderModel:
    """The model over ``ops``; weights are taken tensor by tensor."""

    def attention(prefix: str) -> Attention:
        q_norm, k_norm = (
            ops.vector(weights[f"{prefix}self_attn.{name}_norm.weight"]) if config.normed else None for name in "qk"
        )
        return Attention(
            ops=ops,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            eps=config.eps,
            rope=config.rope,
            gated=False,
            q_norm=q_norm,
            k_norm=k_norm,
            **projections(ops, weights, prefix, biased=config.biased),
        )

    return build_frame(config, weights, ops, attention)


@hookimpl
def specdec_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="glm4_moe",
            model_types=("glm4_moe",),
            parse=Glm4MoeConfig.parse,
            tensors=tensors,
            build=build,
            help="GLM-4.5 / 4.6 mixture of experts: grouped-query attention, MTP head",
        )
    ]
