"""Qwen3-Next: Qwen3.5's mixture of experts with the delta-rule projections fused and grouped per key head.

The config has no count of MTP layers: the head is there when ``mtp.*`` is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from specdec.backends.ops import Array
from specdec.contract import ModelSpec
from specdec.hookspecs import hookimpl
from specdec.models import qwen3_5
from specdec.models.causal_lm import DecoderModel
from specdec.models.fields import Fields
from specdec.models.moe import MoeShape
from specdec.models.weights import Weights


@attrs.frozen(kw_only=True)
class Qwen3NextConfig(qwen3_5.HybridConfig):
    """Qwen3.5's config, and where the number of MTP layers is from."""

    mtp_counted: bool  # the config says how many MTP layers there are; otherwise the tensors do


def parse(config: Mapping[str, Any]) -> Qwen3NextConfig:
    """Read a ``config.json``. Raises: CheckpointError naming the key."""
    counted = config.get("mtp_num_hidden_layers") is not None
    fields = Fields(config if counted else {**config, "mtp_num_hidden_layers": 1})
    return Qwen3NextConfig(**Qwen3NextConfig.hybrid(fields), moe=MoeShape.qwen(fields), mtp_counted=counted)


def build(config: Qwen3NextConfig, weights: Weights) -> DecoderModel:
    """The model from its weights."""

    def projections(layer: Weights) -> tuple[Array, ...]:
        """Qwen3.5's qkv, z, a and b.

        The rows of ``in_proj_qkvz`` belong to one key head after the other, each with its q, k, v and z rows; those of
        ``in_proj_ba`` likewise, with b and a. Qwen3.5 has all q rows, then all k rows, and so on, key heads ascending.
        """
        delta, ratio = config.delta, config.delta.value_heads // config.delta.key_heads
        values = ratio * delta.value_dim

        def taken(name: str, sizes: tuple[int, ...], *groups: tuple[int, ...]) -> list[Array]:
            """One weight per group of pieces, out of the fused one whose key heads have pieces of these sizes."""
            count = delta.key_heads * sum(sizes)
            fused = layer.host_matrix(name, (count, config.hidden_size))
            pieces = torch.split(torch.arange(count).reshape(delta.key_heads, -1), list(sizes), dim=1)
            return [layer.ops.weight(fused[torch.cat([pieces[i].flatten() for i in group])]) for group in groups]

        qkv, z = taken("in_proj_qkvz.weight", (delta.key_dim, delta.key_dim, values, values), (0, 1, 2), (3,))
        b, a = taken("in_proj_ba.weight", (ratio, ratio), (0,), (1,))
        return qkv, z, a, b

    return qwen3_5.build(config, weights, projections=projections, promised=config.mtp_counted)


@hookimpl
def specdec_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="qwen3_next",
            model_types=("qwen3_next",),
            parse=parse,
            build=build,
            help="Qwen3-Next: Gated DeltaNet, gated attention, mixture of experts, MTP head",
        )
    ]
