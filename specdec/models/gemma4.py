"""Gemma 4, the text model of its dense variants.

Layers without a window have heads of a size of their own, of which a part is turned, and their keys may be the values
too. Values are normed, scores are not scaled, and a number multiplies the output of every layer. In the small variants
every layer has an embedding of the token of its own, and the last layers read the keys and values of earlier ones.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from specdec.backends.ops import Array, Ops
from specdec.errors import CheckpointError
from specdec.models import gemma3
from specdec.models.causal_lm import DecoderModel
from specdec.models.decoder import AttentionShape, Norm, RmsNorm
from specdec.models.family import DecoderConfig, build_decoder
from specdec.models.fields import Fields, wrong
from specdec.models.weights import Weights

ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
FULL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
NAMES = attrs.evolve(gemma3.NAMES, scale="layer_scalar")


@attrs.frozen(kw_only=True)
class LayerInputs:
    """Every layer's embedding of each token, side by side in one table, with a projection of the common embedding x:

    ``(norm(H^-0.5 projection x) + sqrt(P) embedding) / sqrt(2)``. The norm's eps stands for the first factor.
    """

    ops: Ops
    embed_tokens: Array  # [V, L * P]
    projection: Array  # [L * P, H]
    norm: Norm  # over P
    size: int  # P

    def __call__(self, x: Array, tokens: Sequence[int]) -> list[tuple[Array]]:
        ops, rows, size = self.ops, len(tokens), self.size
        projected = self.norm(ops.linear(x, self.projection).reshape(rows, -1, size)).reshape(rows, -1)
        embedded = ops.scale(ops.embed(self.embed_tokens, tokens), size**0.5)
        both = ops.scale(ops.add(projected, embedded), 0.5**0.5)
        return [(both[:, at : at + size],) for at in range(0, both.shape[1], size)]


@attrs.frozen(kw_only=True)
class TakeInput:
    """What follows a layer's MLP: ``scale(x + norm(projection(gelu(gate x) * own)))``."""

    ops: Ops
    gate: Array  # [P, H]
    projection: Array  # [H, P]
    norm: Norm
    scale: Norm

    def __call__(self, x: Array, own: Array) -> Array:
        ops = self.ops
        gated = ops.multiply(ops.gelu(ops.linear(x, self.gate)), own)
        return self.scale(ops.add(x, self.norm(ops.linear(gated, self.projection))))


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    """Read the text part of a ``config.json``. Raises: CheckpointError naming the key."""
    fields, cap = Fields(config), "final_logit_softcapping"
    unified = "unified" in str(config.get("model_type"))
    for key in ("attention_bias", "enable_moe_block"):
        fields.must_be(key, False, None)
    fields.must_be("use_bidirectional_attention", None, "vision", False)
    common = DecoderConfig.common(fields, tied=True, activation="hidden_activation")
    last = common["layers"] - 1  # it never has a window
    sliding = tuple(i for i in fields.sliding_layers(common["layers"], 6) if i < last)
    ropes = Fields(config if config.get("rope_parameters") is not None else {**config, "rope_parameters": ROPES})
    full, local = (ropes.of_layers(kind) for kind in ROPES)
    if full is None or local is None:
        raise CheckpointError(f"config.json: 'rope_parameters' takes an object each for {' and '.join(ROPES)}")
    proportional = full.rope_kind() == "proportional"
    for rope in (local,) if proportional else (local, full):
        rope.plain_rope()
    each = _each_full_layer(config, set(range(common["layers"])) - set(sliding))
    own, one_matrix = Fields(ChainMap(each, config)), fields.flag("attention_k_eq_v", False)  # type: ignore[arg-type]
    kv_heads = fields.whole("num_key_value_heads")
    windowed = AttentionShape.of(
        local,
        1e4,
        head_dim=256,
        kv_heads=kv_heads,
        scale=1.0,
        window=fields.whole("sliding_window", 1024 if unified else 512),
        normed="heads",
        normed_values=True,
    )
    own_heads, head_dim = own.whole(FULL["num_key_value_heads"], kv_heads), own.whole(FULL["head_dim"], 512)
    shape = attrs.evolve(
        windowed,
        kv_heads=own_heads if one_matrix or each else kv_heads,
        head_dim=head_dim,
        rope=full.rope(head_dim, 1e6, share=1.0 if proportional else None)[0],
        window=0,
        keys_as_values=one_matrix,
    )
    input_size, input_vocab = fields.whole("hidden_size_per_layer_input", 0 if unified else 256, low=0), 0
    if input_size:
        input_vocab = fields.whole("vocab_size_per_layer_input", 262144, low=common["vocab_size"])
    return DecoderConfig(
        **common,
        input_size=input_size,
        input_vocab=input_vocab,
        shared=_shared(fields, common["layers"], sliding),
        shared_width=2 if fields.flag("use_double_wide_mlp", False) else 1,
        attention=shape,
        alternate=windowed if sliding else None,
        alternate_layers=sliding,
        intermediate_size=fields.whole("intermediate_size"),
        embed_scale=common["hidden_size"] ** 0.5,
        logit_cap=0.0 if config.get(cap) is None else fields.real(cap),
        max_positions=full.max_positions(131072),
    )


def _shared(fields: Fields, layers: int, sliding: tuple[int, ...]) -> tuple[int, ...]:
    """For each of the last layers, which share keys and values, the last one of its kind before them all."""
    count, windowed = fields.whole("num_kv_shared_layers", 0, low=0, high=layers - 1), set(sliding)
    last = {index in windowed: index for index in range(layers - count)}
    try:
        return tuple(last[index in windowed] for index in range(layers - count, layers))
    except KeyError:
        said = f"config.json: 'num_kv_shared_layers' is {count}, and 'layer_types' has a kind of layer"
        raise CheckpointError(f"{said} only among the last {count}") from None


def build(config: DecoderConfig, weights: Weights) -> DecoderModel:
    """Build the model."""
    model = build_decoder(config, weights, names=NAMES)
    ops, hidden, size, wide = weights.ops, config.hidden_size, config.input_size, config.layers * config.input_size
    if not size:
        return model

    def norm(name: str, length: int, eps: float = config.eps) -> RmsNorm:
        return RmsNorm(ops=ops, weight=weights.vector(f"{name}_norm.weight", (length,)), eps=eps)

    def taking(layer: Any, at: str) -> Any:
        gate = weights.matrix(f"{at}per_layer_input_gate.weight", (size, hidden))
        projection = weights.matrix(f"{at}per_layer_projection.weight", (hidden, size))
        after = norm(f"{at}post_per_layer_input", hidden)
        return attrs.evolve(
            layer, after=TakeInput(ops=ops, gate=gate, projection=projection, norm=after, scale=layer.after)
        )

    inputs = LayerInputs(
        ops=ops,
        embed_tokens=weights.table("embed_tokens_per_layer.weight", (config.input_vocab, wide)),
        projection=weights.matrix("per_layer_model_projection.weight", (wide, hidden)),
        norm=norm("per_layer_projection", size, config.eps * hidden),
        size=size,
    )
    layers = tuple(taking(layer, f"layers.{number}.") for number, layer in enumerate(model.layers))
    return attrs.evolve(model, layers=layers, layer_inputs=inputs)


def _each_full_layer(config: Mapping[str, Any], layers: set[int]) -> dict[str, Any]:
    """What ``per_layer_config`` says under the names of ``FULL``: transformers writes it in place of these."""
    given = config.get("per_layer_config")
    if given is None:
        return {}
    if given == {}:  # full layers are as the others
        return {name: config.get(key) for key, name in FULL.items()}
    try:
        found, (sizes, *others) = {int(index) for index in given}, given.values()
        if found == layers and others == [sizes] * len(others) and sizes.keys() <= FULL.keys():
            return {name: sizes.get(key, config.get(key)) for key, name in FULL.items()}
    except (AttributeError, TypeError, ValueError):
        pass
    raise wrong("per_layer_config", f"the same {' and '.join(FULL)} for each layer without a window", given)
