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

from specdec.backends.ops import Array
from specdec.drafters.heads.layout import Layout
from specdec.drafters.heads.network import HeadLayer, Network, norm
from specdec.models.decoder import RmsNorm
from specdec.models.weights import Weights


@attrs.frozen(kw_only=True)
class BlockNetwork(Network):
    """The head's own weights; a refiner reads the output of ``logit_norm``."""

    fc: Array
    hidden_norm: RmsNorm
    masked: None = None  # the rows' states: none

    @classmethod
    def of(cls, weights: Weights, layout: Layout) -> BlockNetwork:
        """Build from the head's weights, or record their names in a dry run."""
        g, states = layout.geometry, layout.states
        assert states is not None
        encoder = "encoder.fc.weight" in weights
        width = states.count * layout.target_hidden
        return cls(
            ops=weights.ops,
            fc=weights.matrix("encoder.fc.weight" if encoder else "fc.weight", (g.hidden, width)),
            hidden_norm=norm(weights, "encoder.output_norm_enc" if encoder else "hidden_norm", g.hidden, g.eps),
            layers=tuple(HeadLayer.of(weights, layout, number) for number in range(g.layers)),
            logit_norm=norm(weights, "norm", g.hidden, g.eps),
        )

    def fused(self, states: Array) -> Array:
        """Context features ``[T, H_d]`` of states ``[T, n * H_t]``."""
        return self.hidden_norm(self.ops.linear(states, self.fc))

    def extend(self, caches: Sequence[Any], features: Array) -> None:
        """Append the keys and values of context features ``[T, H_d]`` to every layer's cache; they are committed."""
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.mixer.fill(features, cache)
            cache.commit(features.shape[0])

    def __call__(self, caches: Sequence[Any], embedded: Array) -> Array:
        """The normed output ``[B, H_d]`` of a block; its keys are provisional."""
        x = embedded
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, embedded, cache, int(cache.length))
        return self.logit_norm(x)
