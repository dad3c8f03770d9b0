"""specdec-gpt2: runs GPT-2 checkpoints on every backend of specdec.

Entry point, group ``specdec``: ``gpt2 = "specdec_gpt2"``. Architecture: Radford et al. 2019, "Language Models are
Unsupervised Multitask Learners", section 2.3. A layer norm with bias before every mixer, learned position embeddings,
GELU with tanh, biases everywhere, and matrices stored as ``[inputs, outputs]`` (transformers' ``Conv1D``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from specdec import ModelSpec, hookimpl
from specdec.backends.ops import Array, Cache, Ops
from specdec.errors import CheckpointError
from specdec.models import DecoderLayer, DecoderModel, Fields, LayerNorm, Weights

__all__ = ["Gpt2Config", "build", "parse", "specdec_models"]


@attrs.frozen(kw_only=True)
class Gpt2Config:
    """The fields of ``config.json`` that the computation needs; a ``specdec.FamilyConfig``."""

    vocab_size: int
    hidden_size: int
    layers: int
    max_positions: int
    tied: bool
    heads: int
    inner: int
    eps: float
    scale: float  # of attention scores, in every layer unless ``by_layer``
    by_layer: bool  # the scale of layer i is divided by i + 1
    mtp_layers: int = 0
    expert_share: float = 1.0

    def state_bytes(self, width: int, *, mtp: bool = True) -> tuple[int, int]:
        """Bytes of state per token and per sequence."""
        return 2 * self.layers * self.hidden_size * width, 0


def parse(config: Mapping[str, Any]) -> Gpt2Config:
    """Read ``config.json``. Raises: CheckpointError naming the key."""
    fields = Fields(config)
    fields.must_be("activation_function", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")  # three names of one formula
    fields.must_be("add_cross_attention", False)
    fields.must_be("reorder_and_upcast_attn", False, True)  # scores are always in float32
    hidden, heads = fields.whole("n_embd"), fields.whole("n_head")
    if hidden % heads:
        raise CheckpointError(f"config.json: 'n_embd' ({hidden}) is not a multiple of 'n_head' ({heads})")
    return Gpt2Config(
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden,
        layers=fields.whole("n_layer"),
        max_positions=fields.whole("n_positions", 1024),
        tied=fields.flag("tie_word_embeddings", True),
        heads=heads,
        inner=fields.whole("n_inner", 4 * hidden),
        eps=fields.real("layer_norm_epsilon", 1e-5),
        scale=(hidden // heads) ** -0.5 if fields.flag("scale_attn_weights", True) else 1.0,
        by_layer=fields.flag("scale_attn_by_inverse_layer_idx", False),
    )


Linear = tuple[tuple[Array, ...], tuple[Array, ...]]
"""Weights ``[N_i, H]`` and biases ``[N_i]``: what ``Ops.project`` takes."""


def conv1d(weights: Weights, name: str, inputs: int, outputs: int, *, parts: int = 1) -> Linear:
    """A matrix stored as ``[inputs, outputs]`` with its bias, cut into ``parts`` of equally many outputs."""
    matrix = weights.tensor(f"{name}.weight", (inputs, outputs)).T
    bias = weights.tensor(f"{name}.bias", (outputs,))
    weight = weights.ops.weight
    return (
        tuple(weight(part.contiguous()) for part in matrix.chunk(parts)),
        tuple(weight(part) for part in bias.chunk(parts)),
    )


@attrs.frozen(kw_only=True)
class Attention:
    """Attention with as many key-value heads as query heads; positions are in the residual stream."""

    ops: Ops
    heads: int
    head_dim: int
    scale: float
    c_attn: Linear  # queries, keys and values
    c_proj: Linear

    @classmethod
    def of(cls, weights: Weights, config: Gpt2Config, layer: int) -> Attention:
        """Build from the weights under ``attn.``."""
        hidden = config.hidden_size
        return cls(
            ops=weights.ops,
            heads=config.heads,
            head_dim=hidden // config.heads,
            scale=config.scale / (layer + 1) if config.by_layer else config.scale,
            c_attn=conv1d(weights, "c_attn", hidden, 3 * hidden, parts=3),
            c_proj=conv1d(weights, "c_proj", hidden, hidden),
        )

    def new_cache(self, capacity: int) -> Cache:
        return self.ops.new_kv(capacity, self.heads, self.head_dim)

    def __call__(self, x: Array, residual: Array, cache: Cache) -> Array:
        ops, shape = self.ops, (x.shape[0], self.heads, self.head_dim)
        q, k, v = (part.reshape(shape) for part in ops.project(x, *self.c_attn))
        mixed = ops.attend(q, k, v, cache, scale=self.scale)
        return ops.add(residual, ops.project(mixed, *self.c_proj)[0])


@attrs.frozen(kw_only=True)
class Mlp:
    """``c_proj(gelu(c_fc(x)))``."""

    ops: Ops
    c_fc: Linear
    c_proj: Linear

    @classmethod
    def of(cls, weights: Weights, config: Gpt2Config) -> Mlp:
        """Build from the weights under ``mlp.``."""
        hidden, inner = config.hidden_size, config.inner
        return cls(
            ops=weights.ops,
            c_fc=conv1d(weights, "c_fc", hidden, inner),
            c_proj=conv1d(weights, "c_proj", inner, hidden),
        )

    def __call__(self, x: Array, residual: Array) -> Array:
        ops = self.ops
        return ops.add(residual, ops.project(ops.gelu(ops.project(x, *self.c_fc)[0]), *self.c_proj)[0])


def build(config: Gpt2Config, weights: Weights) -> DecoderModel:
    """Build the model from names with or without ``transformer.`` in front."""
    hidden, eps = config.hidden_size, config.eps
    text = weights.under("transformer.") if "transformer.wte.weight" in weights else weights

    def layer(index: int) -> DecoderLayer:
        own = text.under(f"h.{index}.")
        return DecoderLayer(
            input_norm=LayerNorm.of(own.under("ln_1."), hidden, eps),
            mixer=Attention.of(own.under("attn."), config, index),
            post_norm=LayerNorm.of(own.under("ln_2."), hidden, eps),
            mlp=Mlp.of(own.under("mlp."), config),
        )

    embed = text.matrix("wte.weight", (config.vocab_size, hidden))
    return DecoderModel(
        ops=weights.ops,
        embed_tokens=embed,
        positions=text.matrix("wpe.weight", (config.max_positions, hidden)),
        layers=tuple(map(layer, range(config.layers))),
        norm=LayerNorm.of(text.under("ln_f."), hidden, eps),
        lm_head=embed if config.tied else weights.matrix("lm_head.weight", (config.vocab_size, hidden)),
    )


@hookimpl
def specdec_models() -> list[ModelSpec]:
    return [ModelSpec(name="gpt2", model_types=("gpt2",), parse=parse, build=build, help="GPT-2: learned positions")]
