"""Qwen3-Next: Qwen3.5's mixture of experts, with delta-rule projections fused and grouped per key head.

The config does not count MTP layers: the head exists if ``mtp.*`` tensors do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from specdec.backends.ops import Array
from specdec.models import qwen3_5
from specdec.models.causal_lm import DecoderModel
from specdec.models.fields import Fields
from specdec.models.moe import MoeShape
from specdec.models.weights import Weights


@attrs.frozen(kw_only=True)
class Qwen3NextConfig(qwen3_5.HybridConfig):
    """Qwen3.5's config, and the source of the number of MTP layers."""

    mtp_counted: bool  # the config counts MTP layers; otherwise the tensors decide


def parse(config: Mapping[str, Any]) -> Qwen3NextConfig:
    """Read a ``config.json``. Raises: CheckpointError naming the key."""
    counted = config.get("mtp_num_hidden_layers") is not None
    fields = Fields(config)
    shared = Qwen3NextConfig.hybrid(fields, mtp_layers=1)
    return Qwen3NextConfig(**shared, moe=MoeShape.qwen(fields), mtp_counted=counted)


def build(config: Qwen3NextConfig, weights: Weights) -> DecoderModel:
    """Build the model."""

    def projections(layer: Weights) -> tuple[Array, ...]:
        """Return Qwen3.5's qkv, z, a and b.

        ``in_proj_qkvz`` is grouped by key head, each with its q, k, v and z rows; ``in_proj_ba`` likewise with b and a.
        Qwen3.5 has all q rows, then all k rows, and so on, with ascending key heads.
        """
        delta, ratio = config.delta, config.delta.value_heads // config.delta.key_heads
        values = ratio * delta.value_dim

        def taken(name: str, sizes: tuple[int, ...], *groups: tuple[int, ...], exact: bool = False) -> list[Array]:
            """Split a fused weight whose key heads have pieces of these sizes into one weight per group of pieces."""
            count = delta.key_heads * sum(sizes)
            fused = layer.host_matrix(name, (count, config.hidden_size), exact=exact)
            pieces = torch.split(torch.arange(count).reshape(delta.key_heads, -1), list(sizes), dim=1)
            return [layer.ops.weight(fused[torch.cat([pieces[i].flatten() for i in group])]) for group in groups]

        if "in_proj_qkv.weight" in layer:  # as llama.cpp's converter writes them
            sizes = {"qkv": delta.channels, "z": delta.value_heads * delta.value_dim}
            qkv, z = (layer.matrix(f"in_proj_{name}.weight", (n, config.hidden_size)) for name, n in sizes.items())
        else:
            qkv, z = taken("in_proj_qkvz.weight", (delta.key_dim, delta.key_dim, values, values), (0, 1, 2), (3,))
        b, a = taken("in_proj_ba.weight", (ratio, ratio), (0,), (1,), exact=True)
        return qkv, z, a, b

    return qwen3_5.build(config, weights, projections=projections, promised=config.mtp_counted)
