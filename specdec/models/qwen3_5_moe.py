"""Qwen3.5 / 3.6 / 3.8 mixture of experts: the dense family with a block of experts in every layer and in the head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from specdec.backends.ops import Ops
from specdec.checkpoints import TensorSpec, Weights
from specdec.contract import ModelSpec
from specdec.hookspecs import hookimpl
from specdec.models.causal_lm import DecoderModel
from specdec.models.fields import Fields
from specdec.models.moe import MoeShape, build_moe, moe_tensors
from specdec.models.qwen3_5 import HybridConfig, build_hybrid, hybrid_tensors


@attrs.frozen(kw_only=True)
class Qwen35MoeConfig(HybridConfig):
    """The fields of ``config.json`` that the maths needs."""

    moe: MoeShape

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Qwen35MoeConfig:
        """Read the text part of a ``config.json``. Raises: CheckpointError naming the key."""
        fields = Fields(config)
        return cls(**cls.common(fields), moe=MoeShape.qwen(fields))


def tensors(config: Qwen35MoeConfig) -> dict[str, TensorSpec]:
    """Every tensor that the checkpoint must or may have, by canonical name; the head's are in group "mtp"."""
    return hybrid_tensors(config, lambda prefix: moe_tensors(prefix, config.hidden_size, config.moe))


def build(config: Qwen35MoeConfig, weights: Weights, ops: Ops) -> DecoderModel:
    """The model over ``ops``; weights are taken tensor by tensor."""
    return build_hybrid(config, weights, ops, lambda prefix: build_moe(ops, weights, prefix, config.moe))


@hookimpl
def specdec_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="qwen3_5_moe",
            model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
            parse=Qwen35MoeConfig.parse,
            tensors=tensors,
            build=build,
            help="Qwen3.5 / 3.6 / 3.8 mixture of experts, MTP head",
        )
    ]
