"""What decoder-only families share: the sizes in their configs, and the model around their layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import attrs

from specdec.models.causal_lm import DecoderModel
from specdec.models.decoder import (
    Adjusted,
    Attention,
    AttentionShape,
    DecoderLayer,
    GatedMlp,
    Mixer,
    Mlp,
    MtpHead,
    Norm,
    RmsNorm,
    Scale,
    as_is,
)
from specdec.models.fields import LARGEST_EPS, MOST_LAYERS, Fields
from specdec.models.mla import LatentAttention, LatentShape
from specdec.models.moe import ClampedMoe, MoeShape, SparseMoe
from specdec.models.weights import Weights


@attrs.frozen(kw_only=True)
class DecoderConfig:
    """The fields of ``config.json`` that the computation needs; a ``specdec.contract.FamilyConfig``."""

    vocab_size: int
    hidden_size: int
    layers: int
    attention: AttentionShape | LatentShape
    alternate: AttentionShape | None = None  # of the layers ``alternate_layers``, where there are two kinds
    alternate_layers: tuple[int, ...] = ()
    intermediate_size: int = 0  # of dense MLPs
    moe: MoeShape | None = None
    dense_layers: int = 0  # leading layers with a dense MLP in a model with experts
    activation: Literal["silu", "gelu"] = "silu"
    fused: bool = False  # q, k and v are stored as one weight, and gate and up as one
    embed_scale: float = 1.0  # multiplies embeddings,
    branch_scale: float = 1.0  # the output of every mixer and MLP,
    logit_scale: float = 1.0  # and logits
    logit_cap: float = 0.0  # what ``Ops.softcap`` limits logits to; 0: nothing
    eps: float
    tied: bool
    max_positions: int
    mtp_layers: int = 0
    shared: tuple[int, ...] = ()  # layers whose keys and values the last layers read, which have none of their own
    shared_width: int = 1  # of the dense MLPs of these last layers, in ``intermediate_size``
    input_size: int = 0  # of every layer's own embedding of a token,
    input_vocab: int = 0  # and how many tokens have one

    @staticmethod
    def common(
        fields: Fields, *, eps: float = 1e-6, tied: bool = False, activation: str = "hidden_act"
    ) -> dict[str, Any]:
        """Read the keys that all families share; ``eps`` and ``tied`` are defaults, ``activation`` a key.

        Raises: CheckpointError naming the key.
        """
        kind = {"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"}[activation]
        fields.must_be(activation, kind)
        return {
            "vocab_size": fields.whole("vocab_size"),
            "hidden_size": fields.whole("hidden_size"),
            "layers": fields.whole("num_hidden_layers", high=MOST_LAYERS),
            "activation": "silu" if activation == "hidden_act" else "gelu",
            "eps": fields.real("rms_norm_eps", eps, high=LARGEST_EPS),
            "tied": fields.flag("tie_word_embeddings", tied),
        }

    @property
    def expert_share(self) -> float:
        """The share of the routed experts that one row reads."""
        return 1.0 if self.moe is None else self.moe.routing.top_k / self.moe.experts

    def state_bytes(self, width: int, *, mtp: bool = True) -> tuple[int, int]:
        """Bytes of state per token (including the MTP head's with ``mtp``) and per sequence.

        ``width``: bytes of an activation.
        """
        caches, other = self.layers - len(self.shared) + self.mtp_layers * mtp, self.alternate or self.attention
        others = sum(not self.reads(index) for index in self.alternate_layers)
        return (caches * self.attention.row + others * (other.row - self.attention.row)) * width, 0

    def reads(self, index: int) -> bool:
        """Whether a layer has no keys and values of its own."""
        return self.layers - len(self.shared) <= index < self.layers


@attrs.frozen(kw_only=True)
class MtpNames:
    """Names of a family's MTP tensors: those under ``prefix``, without ``.weight``."""

    prefix: str  # "{layers}" is replaced by the number of decoder layers
    embed_norm: str
    hidden_norm: str
    fc: str
    layer: str
    norm: str
    lm_head: str  # optional in the checkpoint; the main head by default
    embed_tokens: str = ""  # likewise; "" if the family never has one
    dedicated: bool = False  # the embedding is not optional, and in a tied model it is the head's output matrix too
    plus: float = 0.0  # added to its norm weights


@attrs.frozen(kw_only=True)
class LayerNames:
    """Names of a layer's norms, and of the number that its output is multiplied by; "" for one that it has not."""

    mixer: str = "input_layernorm"
    after_mixer: str = ""
    mlp: str = "post_attention_layernorm"
    after_mlp: str = ""
    scale: str = ""


def build_decoder(
    config: DecoderConfig,
    weights: Weights,
    *,
    mixer: Callable[[Weights, int], Mixer] | None = None,
    plus: float = 0.0,
    names: LayerNames = LayerNames(),
    mtp: MtpNames | None = None,
    promised: bool = True,
    unusable: str = "",
) -> DecoderModel:
    """Build the model of a family.

    Args:
        config: the family's.
        weights: the checkpoint's, or a dry run's.
        mixer: builds a layer's mixer from the layer's weights and number (``config.layers`` for the MTP head's);
            attention of ``config.attention`` by default.
        plus: added to norm weights except the MTP head's; 1.0 if they are stored as an offset from 1.
        names: of the norms in a layer.
        mtp: names of the MTP head; without it the family has none.
        promised, unusable: see ``Weights.mtp_head``.
    """
    hidden, eps, table = config.hidden_size, config.eps, (config.vocab_size, config.hidden_size)

    def norm(weights: Weights, name: str) -> RmsNorm:
        offset = mtp.plus if mtp is not None and weights.group == "mtp" else plus
        return RmsNorm(ops=weights.ops, weight=weights.vector(f"{name}.weight", (hidden,), plus=offset), eps=eps)

    def mlp(weights: Weights, index: int) -> Mlp:
        if config.moe is not None and index >= config.dense_layers:
            block = SparseMoe if config.moe.clamp is None else ClampedMoe
            return block.of(weights.under("mlp."), hidden, config.moe)
        width = config.intermediate_size * (config.shared_width if config.reads(index) else 1)
        dense = GatedMlp.of(weights.under("mlp."), hidden, width, fused=config.fused)
        return attrs.evolve(dense, activation=config.activation)

    def adjusted(branch: Any, weights: Weights, after: str) -> Any:
        adjust: Norm | None = norm(weights, after) if after else None
        if config.branch_scale != 1.0:
            adjust = Scale(ops=weights.ops, factor=config.branch_scale)
        return branch if adjust is None else Adjusted(ops=weights.ops, branch=branch, adjust=adjust)

    def layer(weights: Weights, index: int) -> DecoderLayer:
        mixed = mixer(weights, index) if mixer else attention(config, weights, plus, index)
        return DecoderLayer(
            input_norm=norm(weights, names.mixer) if names.mixer else as_is,
            mixer=adjusted(mixed, weights, names.after_mixer),
            post_norm=norm(weights, names.mlp) if names.mlp else as_is,
            mlp=adjusted(mlp(weights, index), weights, names.after_mlp),
            after=Scale(ops=weights.ops, factor=weights.number(names.scale)) if names.scale else as_is,
        )

    embed = weights.matrix("embed_tokens.weight", table)
    model = DecoderModel(
        ops=weights.ops,
        embed_tokens=embed,
        embed_scale=config.embed_scale,
        logit_scale=config.logit_scale,
        logit_cap=config.logit_cap,
        layers=tuple(layer(weights.under(f"layers.{i}."), i) for i in range(config.layers)),
        norm=norm(weights, "norm"),
        lm_head=embed if config.tied else weights.matrix("lm_head.weight", table),
        shared=config.shared,
    )
    if mtp is None or not config.mtp_layers:
        return model

    def module(head: Weights) -> MtpHead:
        own_embed, own_head = None, head.optional(f"{mtp.lm_head}.weight", table)
        if mtp.embed_tokens:
            own_embed = (head.matrix if mtp.dedicated else head.optional)(f"{mtp.embed_tokens}.weight", table)
        if own_head is None and mtp.dedicated and config.tied:
            own_head = own_embed
        return MtpHead(
            ops=weights.ops,
            embed_norm=norm(head, mtp.embed_norm),
            hidden_norm=norm(head, mtp.hidden_norm),
            fc=head.matrix(f"{mtp.fc}.weight", (hidden, 2 * hidden)),
            layer=layer(head.under(mtp.layer), config.layers),
            norm=norm(head, mtp.norm),
            lm_head=own_head,
            embed_tokens=own_embed,
        )

    prefixes = [mtp.prefix.format(layers=config.layers + number) for number in range(config.mtp_layers)]
    heads = [weights.mtp_head(prefix, promised=promised, unusable=unusable) for prefix in prefixes]
    modules = [module(head) for head in heads if head is not None]
    if len(modules) < len(heads):
        return model
    return attrs.evolve(model, mtp=tuple(modules))


def attention(config: DecoderConfig, weights: Weights, plus: float = 0.0, index: int = 0) -> Mixer:
    """Build the attention of layer ``index`` from the layer's weights; ``plus`` is added to its norms."""
    weights, shape = weights.under("self_attn."), config.attention
    if config.alternate is not None and index in config.alternate_layers:
        shape = config.alternate
    if isinstance(shape, LatentShape):
        return LatentAttention.of(weights, config.hidden_size, shape, config.eps)
    how: dict[str, Any] = {"plus": plus, "fused": config.fused, "reads": config.reads(index)}
    return Attention.of(weights, config.hidden_size, shape, config.eps, **how)
