"""DFlash: a block of masked rows drafted in one pass over keys that are computed from the target's states.

    c_i = RMS(fc [h_i^(k1); ...; h_i^(kn)]; hidden_norm)        context feature of token i, once
    K_i = RoPE_i(RMS(W_k c_i; k_norm)),  V_i = W_v c_i          of every layer, without any input norm

These are all the context; they are cached, and no layer runs over it. A block has B rows: the pending token (the
anchor) at position n, then B - 1 rows of the mask token. They go through ordinary decoder layers, whose keys are the
cached context and the block's own; row j >= 1 predicts the token at its own position. With ``from_anchor`` each row
predicts the token after it.

Source: DFlash, arXiv:2602.06036, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from specdec.backends.ops import Array, Cache, Ops
from specdec.drafters.heads.layout import Layout
from specdec.drafters.heads.network import HeadAttention, mlp, norm
from specdec.models.decoder import GatedMlp, RmsNorm
from specdec.models.weights import Weights


@attrs.frozen(kw_only=True)
class BlockLayer:
    """A decoder layer of a block head."""

    input_norm: RmsNorm
    mixer: HeadAttention
    post_norm: RmsNorm
    mlp: GatedMlp
    window: int | None
    from_anchor: bool  # the window counts from the first row of the block
    bidirectional: bool

    def __call__(self, x: Array, cache: Any) -> Array:
        rows, anchor = x.shape[0], int(cache.length)
        first = [0] * rows
        if self.window is not None and self.from_anchor:
            first = [max(0, anchor - self.window)] * rows
        elif self.window is not None:
            first = [max(0, anchor + row - self.window + 1) for row in range(rows)]
        x = self.mixer(self.input_norm(x), x, cache, first, causal=not self.bidirectional)
        return self.mlp(self.post_norm(x), x)

    def extend(self, features: Array, cache: Any) -> None:
        """Append the keys and values of context features ``[T, H_d]``; they are committed."""
        self.mixer.fill(features, cache)
        cache.commit(features.shape[0])


@attrs.frozen(kw_only=True)
class BlockNetwork:
    """The head's own weights. ``logit_norm``: the final norm, whose output the head's logits and a refiner read."""

    ops: Ops
    fc: Array
    hidden_norm: RmsNorm
    layers: tuple[BlockLayer, ...]
    logit_norm: RmsNorm
    masked: None = None  # the rows' states: none

    @classmethod
    def of(cls, weights: Weights, layout: Layout) -> BlockNetwork:
        """Build from the head's weights, or record their names in a dry run."""
        g, states = layout.geometry, layout.states
        assert states is not None
        encoder = "encoder.fc.weight" in weights
        layers = []
        for number in range(g.layers):
            layer = weights.under(f"layers.{number}.")
            layers.append(
                BlockLayer(
                    input_norm=norm(layer, "input_layernorm", g.hidden, g.eps),
                    mixer=HeadAttention.trained(layer, g, g.hidden, normed=True),
                    post_norm=norm(layer, "post_attention_layernorm", g.hidden, g.eps),
                    mlp=mlp(layer, g),
                    window=g.windows[number],
                    from_anchor=layout.window_from_anchor,
                    bidirectional=layout.bidirectional[number],
                )
            )
        width = states.count * layout.target_hidden
        return cls(
            ops=weights.ops,
            fc=weights.matrix("encoder.fc.weight" if encoder else "fc.weight", (g.hidden, width)),
            hidden_norm=norm(weights, "encoder.output_norm_enc" if encoder else "hidden_norm", g.hidden, g.eps),
            layers=tuple(layers),
            logit_norm=norm(weights, "norm", g.hidden, g.eps),
        )

    def new_caches(self, capacity: int) -> list[Cache]:
        """Empty caches, one per layer."""
        return [layer.mixer.new_cache(capacity) for layer in self.layers]

    def fused(self, states: Array) -> Array:
        """Context features ``[T, H_d]`` of states ``[T, n * H_t]``."""
        return self.hidden_norm(self.ops.linear(states, self.fc))

    def extend(self, caches: Sequence[Any], features: Array) -> None:
        """Append context features to every layer's cache."""
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.extend(features, cache)

    def __call__(self, caches: Sequence[Any], embedded: Array) -> Array:
        """The normed output ``[B, H_d]`` of a block; its keys are provisional."""
        x = embedded
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache)
        return self.logit_norm(x)
