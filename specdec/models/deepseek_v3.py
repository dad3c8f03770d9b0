"""DeepSeek-V3 and R1: latent attention, experts chosen by corrected sigmoid scores, an MTP head behind the last layer.

The frame (dense layers first, then experts; the head as one more ``layers.{L}``) is GLM-4.5's too; only the mixer is
an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from specdec.backends.ops import Array, Ops
from specdec.checkpoints import TensorSpec, Weights
from specdec.contract import ModelSpec
from specdec.errors import CheckpointError
from specdec.hookspecs import hookimpl
from specdec.models.causal_lm import DecoderModel
from specdec.models.decoder import DecoderLayer, Mixer, MtpHead
from specdec.models.dense import build_mlp, mlp_tensors
from specdec.models.fields import Fields
from specdec.models.mla import LatentShape, build_latent, latent_tensors
from specdec.models.moe import MoeShape, build_moe, moe_tensors

_MTP_NORMS = ("enorm", "hnorm", "shared_head.norm")


@attrs.frozen(kw_only=True)
class ExtraLayerConfig:
    """The fields of ``config.json`` that the maths of all but the mixer needs."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    dense_layers: int  # the first ones have an ordinary MLP
    moe: MoeShape
    eps: float
    tied: bool
    max_positions: int
    mtp_layers: int

    @staticmethod
    def common(fields: Fields, eps: float) -> dict[str, Any]:
        """What ``parse`` reads for every family of this kind. Raises: CheckpointError naming the key."""
        fields.must_be("hidden_act", "silu")
        layers = fields.whole("num_hidden_layers")
        mtp_layers = fields.whole("num_nextn_predict_layers", 0, low=0)
        if mtp_layers > 1:
            raise CheckpointError(f"config.json: 'num_nextn_predict_layers' is 0 or 1 here, got {mtp_layers}")
        return {
            "vocab_size": fields.whole("vocab_size"),
            "hidden_size": fields.whole("hidden_size"),
            "intermediate_size": fields.whole("intermediate_size"),
            "layers": layers,
            "dense_layers": min(fields.whole("first_k_dense_replace", 0, low=0), layers),
            "moe": MoeShape.deepseek(fields),
            "eps": fields.real("rms_norm_eps", eps),
            "tied": fields.flag("tie_word_embeddings", False),
            "max_positions": fields.max_positions(4096),
            "mtp_layers": mtp_layers,
        }


@attrs.frozen(kw_only=True)
class DeepseekV3Config(ExtraLayerConfig):
    """The fields of ``config.json`` that the maths needs."""

    latent: LatentShape

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DeepseekV3Config:
        """Read a ``config.json``. Raises: CheckpointError naming the key."""
        fields = Fields(config)
        fields.must_be("attention_bias", False)
        return cls(**cls.common(fields, 1e-6), latent=LatentShape.of(fields))

    def state_bytes(self, width: int) -> tuple[int, int]:
        """Bytes of state per token (the MTP head's included) and per sequence."""
        return (self.layers + self.mtp_layers) * self.latent.row * width, 0


def frame_tensors(config: ExtraLayerConfig, mixer: Callable[[str], dict[str, TensorSpec]]) -> dict[str, TensorSpec]:
    """Every tensor that the checkpoint must or may have; ``mixer`` gives those of the layer with the given prefix."""
    hidden, vocab = config.hidden_size, config.vocab_size
    expected = {"embed_tokens.weight": TensorSpec((vocab, hidden)), "norm.weight": TensorSpec((hidden,))}
    if not config.tied:
        expected["lm_head.weight"] = TensorSpec((vocab, hidden))

    def layer(i: int) -> dict[str, TensorSpec]:
        prefix = f"layers.{i}."
        norms = {f"{prefix}{name}_layernorm.weight": TensorSpec((hidden,)) for name in ("input", "post_attention")}
        if i < config.dense_layers:
            return norms | mixer(prefix) | mlp_tensors(prefix, hidden, config.intermediate_size)
        return norms | mixer(prefix) | moe_tensors(prefix, hidden, config.moe)

    for i in range(config.layers):
        expected |= layer(i)
    if config.mtp_layers:
        prefix = f"layers.{config.layers}."
        head = {f"{prefix}{name}.weight": TensorSpec((hidden,)) for name in _MTP_NORMS}
        head[f"{prefix}eh_proj.weight"] = TensorSpec((hidden, 2 * hidden))
        head[f"{prefix}embed_tokens.weight"] = TensorSpec((vocab, hidden), optional=True)
        head[f"{prefix}shared_head.head.weight"] = TensorSpec((vocab, hidden), optional=True)
        head |= layer(config.layers)
        expected |= {name: attrs.evolve(spec, group="mtp") for name, spec in head.items()}
    return expected


def build_frame(config: ExtraLayerConfig, weights: Weights, ops: Ops, mixer: Callable[[str], Mixer]) -> DecoderModel:
    """The model over ``ops``; ``mixer`` builds that of the layer with the given prefix."""

    def matrix(name: str) -> Array:
        return ops.weight(weights.stored(name))

    def vector(name: str) -> Array:
        return ops.vector(weights[name])

    def optional(name: str) -> Array | None:
        return matrix(name) if name in weights else None

    def layer(i: int) -> DecoderLayer:
        prefix = f"layers.{i}."
        dense = i < config.dense_layers
        return DecoderLayer(
            ops=ops,
            eps=config.eps,
            mixer=mixer(prefix),
            mlp=build_mlp(ops, weights, prefix) if dense else build_moe(ops, weights, prefix, config.moe),
            input_norm=vector(f"{prefix}input_layernorm.weight"),
            post_norm=vector(f"{prefix}post_attention_layernorm.weight"),
        )

    mtp, extra = None, f"layers.{config.layers}."
    if config.mtp_layers and f"{extra}eh_proj.weight" in weights:
        embed_norm, hidden_norm, last_norm = (vector(f"{extra}{name}.weight") for name in _MTP_NORMS)
        mtp = MtpHead(
            ops=ops,
            eps=config.eps,
            embed_norm=embed_norm,
            hidden_norm=hidden_norm,
            norm=last_norm,
            fc=matrix(f"{extra}eh_proj.weight"),
            layer=layer(config.layers),
        )
    embed = matrix("embed_tokens.weight")
    return DecoderModel(
        ops=ops,
        eps=config.eps,
        embed_tokens=embed,
        layers=tuple(layer(i) for i in range(config.layers)),
        norm=vector("norm.weight"),
        lm_head=embed if config.tied else matrix("lm_head.weight"),
        mtp=mtp,
        mtp_lm_head=optional(f"{extra}shared_head.head.weight") if mtp else None,
        mtp_embed_tokens=optional(f"{extra}embed_tokens.weight") if mtp else None,
    )


def tensors(config: DeepseekV3Config) -> dict[str, TensorSpec]:
    """Every tensor that the checkpoint must or may have, by canonical name; the head's are in group "mtp"."""
    return frame_tensors(config, lambda prefix: latent_tensors(prefix, config.hidden_size, config.latent))


def build(config: DeepseekV3Config, weights: Weights, ops: Ops) -> DecoderModel:
    """The model over ``ops``; weights are taken tensor by tensor."""
    return build_frame(
        config, weights, ops, lambda prefix: build_latent(ops, weights, prefix, config.latent, config.eps)
    )


@hookimpl
def specdec_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="deepseek_v3",
            model_types=("deepseek_v3",),
            parse=DeepseekV3Config.parse,
            tensors=tensors,
            build=build,
            help="DeepSeek-V3 / R1: latent attention, grouped experts, MTP head",
        )
    ]
