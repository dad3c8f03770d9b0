"""Qwen3-Next: Qwen3.5's mixture of experts with the delta-rule projections fused and grouped per key head.

The rows of ``in_proj_qkvz`` and ``in_proj_ba`` are put into Qwen3.5's order once at load; all else is shared. The
config has no count of MTP layers: the head is there when ``mtp.*`` is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch

from specdec.backends.ops import DeltaShape, Ops
from specdec.checkpoints import TensorSpec, Weights
from specdec.checkpoints.quantised import StoredMatrix
from specdec.contract import ModelSpec
from specdec.hookspecs import hookimpl
from specdec.models.causal_lm import DecoderModel
from specdec.models.fields import Fields
from specdec.models.moe import MoeShape, build_moe, moe_tensors
from specdec.models.qwen3_5 import HybridConfig, build_hybrid, hybrid_tensors

_FUSED = {  # Qwen3.5's projections, and where Qwen3-Next has their rows
    "linear_attn.in_proj_qkv.weight": "linear_attn.in_proj_qkvz.weight",
    "linear_attn.in_proj_z.weight": "linear_attn.in_proj_qkvz.weight",
    "linear_attn.in_proj_b.weight": "linear_attn.in_proj_ba.weight",
    "linear_attn.in_proj_a.weight": "linear_attn.in_proj_ba.weight",
}


@attrs.frozen(kw_only=True)
class Qwen3NextConfig(HybridConfig):
    """The fields of ``config.json`` that the maths needs."""

    moe: MoeShape
    mtp_counted: bool  # the config says how many MTP layers there are; otherwise the tensors do

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Qwen3NextConfig:
        """Read a ``config.json``. Raises: CheckpointError naming the key."""
        counted = config.get("mtp_num_hidden_layers") is not None
        fields = Fields(config if counted else {**config, "mtp_num_hidden_layers": 1})
        return cls(**cls.common(fields), moe=MoeShape.qwen(fields), mtp_counted=counted)


def tensors(config: Qwen3NextConfig) -> dict[str, TensorSpec]:
    """Every tensor that the checkpoint must or may have, by canonical name; the head's are in group "mtp"."""
    expected = hybrid_tensors(config, lambda prefix: moe_tensors(prefix, config.hidden_size, config.moe))
    for i in range(len(config.layer_types)):
        for plain, fused in _FUSED.items():
            spec = expected.pop(f"layers.{i}.{plain}", None)
            if spec is not None:
                rows, hidden = spec.shape
                known = expected.get(f"layers.{i}.{fused}", TensorSpec((0, hidden)))
                expected[f"layers.{i}.{fused}"] = TensorSpec((known.shape[0] + rows, hidden))
    if config.mtp_counted:
        return expected
    return {name: attrs.evolve(spec, optional=True) if spec.group == "mtp" else spec for name, spec in expected.items()}


class _Ungrouped(Weights):
    """The weights under Qwen3.5's names.

    A row of ``in_proj_qkvz`` belongs to a key head, which has its q, k, v and z rows one after the other; one of
    ``in_proj_ba`` likewise, with b and a. Qwen3.5 has all q rows, then all k rows, and so on, key heads ascending.
    """

    def __init__(self, weights: Weights, shape: DeltaShape) -> None:
        self._weights = weights
        self._shape = shape

    def __getitem__(self, name: str) -> torch.Tensor:
        fused, rows = self._place(name)
        return self._weights[fused] if rows is None else self._weights[fused][rows]

    def shape(self, name: str) -> tuple[int, ...]:
        fused, rows = self._place(name)
        return self._weights.shape(fused) if rows is None else (len(rows), *self._weights.shape(fused)[1:])

    def stored(self, name: str) -> torch.Tensor | StoredMatrix:
        fused, rows = self._place(name)
        return self._weights.stored(fused) if rows is None else self._weights.stored(fused)[rows]

    def _place(self, name: str) -> tuple[str, torch.Tensor | None]:
        """Where a weight is: the name of what holds it, and which rows of that, int64; None for all."""
        parts = name.split(".", 2)
        last = _FUSED.get(parts[-1])
        if last is None:
            return name, None
        fused, shape = f"{parts[0]}.{parts[1]}.{last}", self._shape
        ratio = shape.value_heads // shape.key_heads
        values = ratio * shape.value_dim
        sizes = [shape.key_dim, shape.key_dim, values, values] if "qkvz" in fused else [ratio, ratio]
        heads = torch.arange(self._weights.shape(fused)[0]).reshape(shape.key_heads, -1)
        pieces = [piece.reshape(-1) for piece in torch.split(heads, sizes, dim=1)]
        if name.endswith("in_proj_qkv.weight"):
            return fused, torch.cat(pieces[:3])
        return fused, pieces[3 if name.endswith("in_proj_z.weight") else 0 if name.endswith("in_proj_b.weight") else 1]

    def get(self, name: str) -> torch.Tensor | None:
        return self[name] if name in self else None

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def build(config: Qwen3NextConfig, weights: Weights, ops: Ops) -> DecoderModel:
    """The model over ``ops``; weights are taken tensor by tensor."""
    ungrouped = _Ungrouped(weights, config.delta)
    return build_hybrid(config, ungrouped, ops, lambda prefix: build_moe(ops, weights, prefix, config.moe))


@hookimpl
def specdec_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="qwen3_next",
            model_types=("qwen3_next",),
            parse=Qwen3NextConfig.parse,
            tensors=tensors,
            build=build,
            help="Qwen3-Next: Gated DeltaNet, gated attention, mixture of experts, MTP head",
        )
    ]
