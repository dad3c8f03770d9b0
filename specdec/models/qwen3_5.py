"""Qwen3.5 / 3.6 / 3.8 dense: Gated DeltaNet and gated attention layers, and the MTP head.

What the mixture-of-experts relatives share with it is here too, with the MLP as an argument.

Norms of the family are stored as an offset from 1, with one exception: ``linear_attn.norm`` holds the factor itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from specdec.backends.ops import Array, DeltaShape, Ops, Rope
from specdec.checkpoints import TensorSpec, Weights
from specdec.contract import ModelSpec
from specdec.errors import CheckpointError
from specdec.hookspecs import hookimpl
from specdec.models.causal_lm import DecoderModel
from specdec.models.decoder import Attention, DecoderLayer, GatedDeltaNet, Mixer, Mlp, MtpHead
from specdec.models.dense import attention_tensors, build_mlp, mlp_tensors
from specdec.models.fields import Fields

FULL_ATTENTION_INTERVAL = 4


@attrs.frozen(kw_only=True)
class HybridConfig:
    """The fields of ``config.json`` that the maths of all but the MLP needs."""

    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dims: int
    theta: float
    delta: DeltaShape
    eps: float
    tied: bool
    max_positions: int
    mtp_layers: int

    @staticmethod
    def common(fields: Fields) -> dict[str, Any]:
        """What ``parse`` reads for every family of this kind. Raises: CheckpointError naming the key."""
        fields.must_be("hidden_act", "silu")
        fields.must_be("attention_bias", False)
        fields.must_be("attn_output_gate", True)
        fields.must_be("output_gate_type", "swish", "silu")  # of the delta-rule norm; attention gates are sigmoids
        fields.must_be("mtp_use_dedicated_embeddings", False)
        fields.plain_rope()
        layers, head_dim = fields.whole("num_hidden_layers"), fields.whole("head_dim", 256)
        mtp_layers = fields.whole("mtp_num_hidden_layers", 0, low=0)
        if mtp_layers > 1:
            raise CheckpointError(f"config.json: 'mtp_num_hidden_layers' is 0 or 1 in this family, got {mtp_layers}")
        delta = DeltaShape(
            key_heads=fields.whole("linear_num_key_heads", 16),
            value_heads=fields.whole("linear_num_value_heads", 32),
            key_dim=fields.whole("linear_key_head_dim", 128),
            value_dim=fields.whole("linear_value_head_dim", 128),
            kernel=fields.whole("linear_conv_kernel_dim", 4, low=2),
        )
        if delta.value_heads % delta.key_heads:
            raise CheckpointError(
                f"config.json: 'linear_num_value_heads' ({delta.value_heads}) is no multiple of "
                f"'linear_num_key_heads' ({delta.key_heads})"
            )
        return {
            "vocab_size": fields.whole("vocab_size"),
            "hidden_size": fields.whole("hidden_size"),
            "layer_types": fields.layer_types(layers, fields.whole("full_attention_interval", FULL_ATTENTION_INTERVAL)),
            "heads": fields.whole("num_attention_heads"),
            "kv_heads": fields.whole("num_key_value_heads"),
            "head_dim": head_dim,
            "rotary_dims": int(head_dim * fields.partial_rotary_factor(0.25)),
            "theta": fields.rope_theta(1e7),
            "delta": delta,
            "eps": fields.real("rms_norm_eps", 1e-6),
            "tied": fields.flag("tie_word_embeddings", False),
            "max_positions": fields.whole("max_position_embeddings", 32768),
            "mtp_layers": mtp_layers,
        }

    def state_bytes(self, width: int) -> tuple[int, int]:
        """Bytes of state per token (keys and values, the MTP head's included) and per sequence (the linear layers)."""
        full = self.layer_types.count("full_attention")
        delta = self.delta
        recurrent = 4 * delta.value_heads * delta.key_dim * delta.value_dim
        window = (delta.kernel - 1) * delta.channels * width
        per_token = (full + self.mtp_layers) * 2 * self.kv_heads * self.head_dim * width
        return per_token, (len(self.layer_types) - full) * (recurrent + window)


@attrs.frozen(kw_only=True)
class Qwen35Config(HybridConfig):
    """The fields of ``config.json`` that the maths needs."""

    intermediate_size: int

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Qwen35Config:
        """Read the text part of a ``config.json``. Raises: CheckpointError naming the key."""
        fields = Fields(config)
        return cls(**cls.common(fields), intermediate_size=fields.whole("intermediate_size"))


def _delta_tensors(prefix: str, hidden: int, shape: DeltaShape) -> dict[str, TensorSpec]:
    prefix += "linear_attn."
    values = shape.value_heads * shape.value_dim
    return {
        f"{prefix}in_proj_qkv.weight": TensorSpec((shape.channels, hidden)),
        f"{prefix}in_proj_z.weight": TensorSpec((values, hidden)),
        f"{prefix}in_proj_b.weight": TensorSpec((shape.value_heads, hidden)),
        f"{prefix}in_proj_a.weight": TensorSpec((shape.value_heads, hidden)),
        f"{prefix}conv1d.weight": TensorSpec(
            (shape.channels, 1, shape.kernel), mlx_shape=(shape.channels, shape.kernel, 1)
        ),
        f"{prefix}A_log": TensorSpec((shape.value_heads,)),
        f"{prefix}dt_bias": TensorSpec((shape.value_heads,)),
        f"{prefix}norm.weight": TensorSpec((shape.value_dim,)),
        f"{prefix}out_proj.weight": TensorSpec((hidden, values)),
    }


def _layer_tensors(prefix: str, kind: str, config: HybridConfig, mlp: MlpTensors) -> dict[str, TensorSpec]:
    c, hidden = config, config.hidden_size
    if kind == "full_attention":
        mixer = attention_tensors(prefix, hidden, c.heads, c.kv_heads, c.head_dim, gated=True)
    else:
        mixer = _delta_tensors(prefix, hidden, c.delta)
    norms = {f"{prefix}{name}_layernorm.weight": TensorSpec((hidden,)) for name in ("input", "post_attention")}
    return norms | mixer | mlp(prefix)


def hybrid_tensors(config: HybridConfig, mlp: MlpTensors) -> dict[str, TensorSpec]:
    """Every tensor that the checkpoint must have, by canonical name; the head's are in group "mtp"."""
    hidden, vocab = config.hidden_size, config.vocab_size
    expected = {"embed_tokens.weight": TensorSpec((vocab, hidden)), "norm.weight": TensorSpec((hidden,))}
    if not config.tied:
        expected["lm_head.weight"] = TensorSpec((vocab, hidden))
    for i, kind in enumerate(config.layer_types):
        expected |= _layer_tensors(f"layers.{i}.", kind, config, mlp)
    if config.mtp_layers:
        head = {f"mtp.{name}.weight": TensorSpec((hidden,)) for name in _MTP_NORMS}
        head["mtp.fc.weight"] = TensorSpec((hidden, 2 * hidden))
        head["mtp.lm_head.weight"] = TensorSpec((vocab, hidden), optional=True)
        head |= _layer_tensors("mtp.layers.0.", "full_attention", config, mlp)
        expected |= {name: attrs.evolve(spec, group="mtp") for name, spec in head.items()}
    return expected


def tensors(config: Qwen35Config) -> dict[str, TensorSpec]:
    """Every tensor that the checkpoint must have, by canonical name; the head's are in group "mtp"."""
    return hybrid_tensors(config, lambda prefix: mlp_tensors(prefix, config.hidden_size, config.intermediate_size))


MlpTensors = Callable[[str], dict[str, TensorSpec]]  # prefix of a layer -> the tensors of its MLP
_MTP_NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


def build(config: Qwen35Config, weights: Weights, ops: Ops) -> DecoderModel:
    """The model over ``ops``; weights are taken tensor by tensor."""
    return build_hybrid(config, weights, ops, lambda prefix: build_mlp(ops, weights, prefix))


def build_hybrid(config: HybridConfig, weights: Weights, ops: Ops, mlp: Callable[[str], Mlp]) -> DecoderModel:
    """The model over ``ops``; ``mlp`` builds what stands behind the mixer of the layer with the given prefix.

    Without ``mtp.fc.weight`` there is no head, whatever the config promises; the audit has had its say before. Neither
    is there one where mlx-lm's conversion changed the norms: see ``_converted``.
    """
    rope = Rope.of(config.theta, config.rotary_dims)
    converted = _converted(config, weights)
    offset = 0.0 if converted else 1.0

    def matrix(name: str) -> Array:
        return ops.weight(weights.stored(name))

    def norm(name: str) -> Array:
        return ops.vector(weights[name], plus=offset)

    def attention(prefix: str) -> Attention:
        q, k, v, o = (matrix(f"{prefix}{name}_proj.weight") for name in "qkvo")
        return Attention(
            ops=ops,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            eps=config.eps,
            rope=rope,
            gated=True,
            q_proj=q,
            k_proj=k,
            v_proj=v,
            o_proj=o,
            q_norm=norm(f"{prefix}q_norm.weight"),
            k_norm=norm(f"{prefix}k_norm.weight"),
        )

    def delta_net(prefix: str) -> GatedDeltaNet:
        taps = weights[f"{prefix}conv1d.weight"].reshape(config.delta.channels, config.delta.kernel)
        return GatedDeltaNet(
            ops=ops,
            shape=config.delta,
            eps=config.eps,
            in_proj_qkv=matrix(f"{prefix}in_proj_qkv.weight"),
            in_proj_z=matrix(f"{prefix}in_proj_z.weight"),
            in_proj_a=matrix(f"{prefix}in_proj_a.weight"),
            in_proj_b=matrix(f"{prefix}in_proj_b.weight"),
            conv1d=ops.vector(taps),
            a_log=ops.vector(weights[f"{prefix}A_log"]),
            dt_bias=ops.vector(weights[f"{prefix}dt_bias"]),
            norm=ops.vector(weights[f"{prefix}norm.weight"]),
            out_proj=matrix(f"{prefix}out_proj.weight"),
        )

    def layer(prefix: str, kind: str) -> DecoderLayer:
        full = kind == "full_attention"
        mixer: Mixer = attention(f"{prefix}self_attn.") if full else delta_net(f"{prefix}linear_attn.")
        return DecoderLayer(
            ops=ops,
            eps=config.eps,
            mixer=mixer,
            mlp=mlp(prefix),
            input_norm=norm(f"{prefix}input_layernorm.weight"),
            post_norm=norm(f"{prefix}post_attention_layernorm.weight"),
        )

    mtp = None
    if config.mtp_layers and "mtp.fc.weight" in weights and not converted:
        embed_norm, hidden_norm, last_norm = (norm(f"mtp.{name}.weight") for name in _MTP_NORMS)
        mtp = MtpHead(
            ops=ops,
            eps=config.eps,
            embed_norm=embed_norm,
            hidden_norm=hidden_norm,
            norm=last_norm,
            fc=matrix("mtp.fc.weight"),
            layer=layer("mtp.layers.0.", "full_attention"),
        )
    own_head = mtp is not None and "mtp.lm_head.weight" in weights
    embed = matrix("embed_tokens.weight")
    return DecoderModel(
        ops=ops,
        eps=config.eps,
        embed_tokens=embed,
        layers=tuple(layer(f"layers.{i}.", kind) for i, kind in enumerate(config.layer_types)),
        norm=norm("norm.weight"),
        lm_head=embed if config.tied else matrix("lm_head.weight"),
        mtp=mtp,
        mtp_lm_head=matrix("mtp.lm_head.weight") if own_head else None,
    )


def _converted(config: HybridConfig, weights: Weights) -> bool:
    """Whether mlx-lm converted the weights: their convolutions are ``[C, kc, 1]`` then, and norms hold the factor.

    The two go together by mlx-lm's own rule: it adds the 1 where it turns the convolutions. It knows the norms of the
    layers alone, so that those of an MTP head that was put back may be either. Raises: CheckpointError for both layouts
    of convolutions in one checkpoint.
    """
    linear = [i for i, kind in enumerate(config.layer_types) if kind == "linear_attention"]
    names = [f"layers.{i}.linear_attn.conv1d.weight" for i in linear]
    turned = [name for name in names if weights.shape(name) == (config.delta.channels, config.delta.kernel, 1)]
    if turned and len(turned) < len(names):
        plain = next(name for name in names if name not in turned)
        raise CheckpointError(
            f"{turned[0]} is in MLX's layout and {plain} is not, which leaves open what the norms hold",
            try_="the original checkpoint",
        )
    return bool(turned)


@hookimpl
def specdec_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            name="qwen3_5",
            model_types=("qwen3_5_text", "qwen3_5"),
            parse=Qwen35Config.parse,
            tensors=tensors,
            build=build,
            help="Qwen3.5 / 3.6 / 3.8 dense: Gated DeltaNet, gated attention, MTP head",
        )
    ]
