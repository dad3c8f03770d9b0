"""EAGLE-3 and P-EAGLE: one or more decoder layers over pairs of a target's state and the token after it.

Entry i joins token t_{i+1} with the states of token i:

    s   = [h_i^(k1); ...; h_i^(kn)]        normed as a whole or each by itself, where the head has such norms
    g_i = fc s
    e   = RMS(embed(t_{i+1}); input_layernorm),   u = RMS(g_i; hidden_norm)
    r   = u or g_i                         the residual, by ``norm_before_residual``
    x   = r + attention([e; u]);   x = x + mlp(RMS(x; post_attention_layernorm))
    y   = RMS(x; norm);   logits = lm_head y

A chained step takes x, or y with ``norm_output``, in place of g. P-EAGLE drafts in one pass instead: after the true
entries it has rows of a mask token, whose states are a trained vector.

Sources: Li et al. 2025, "EAGLE-3", arXiv:2503.01840, section 3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import attrs

from specdec.backends.ops import Array
from specdec.drafters.heads.layout import Layout
from specdec.drafters.heads.network import HeadLayer, Network, norm
from specdec.models.decoder import RmsNorm
from specdec.models.weights import Weights


@attrs.frozen(kw_only=True)
class EagleNetwork(Network):
    """The head's own weights.

    Attributes:
        state_norms: norms of the states before ``fc``: none, one over all of them, or one for each.
        fc: ``[H_d, n * H_t]``; None if the head reads the target's final state as it is.
        norm: ``logit_norm`` without the scale of the logits, of the output that a chained step may start from.
        masked: a table with one row, the state of masked rows ``[1, n * H_t]``; None for EAGLE-3.
    """

    state_norms: tuple[RmsNorm, ...]
    fc: Array | None
    fc_bias: Array | None
    norm: RmsNorm
    masked: Array | None

    @classmethod
    def of(cls, weights: Weights, layout: Layout) -> EagleNetwork:
        """Build from the head's weights, or record their names in a dry run."""
        g, ops = layout.geometry, weights.ops
        count = 0 if layout.states is None else layout.states.count
        width = count * layout.target_hidden
        norms: list[RmsNorm] = []
        if "input_norm.weight" in weights:
            norms = [norm(weights, "input_norm", width, g.eps)]
        else:
            old = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
            names = [f"fc_norm.{i}" for i in range(count)] if "fc_norm.0.weight" in weights else list(old[:count])
            if names and f"{names[0]}.weight" in weights:
                norms = [norm(weights, name, layout.target_hidden, g.eps) for name in names]
        masked = None
        if layout.mask_token is not None:
            shape = weights.shape_of("mask_hidden") or ()
            shape = shape if math.prod(shape) == width else (1, 1, width)
            masked = ops.weight(weights.tensor("mask_hidden", shape).reshape(1, width))
        return cls(
            ops=ops,
            state_norms=tuple(norms),
            fc=weights.matrix("fc.weight", (g.hidden, width)) if count else None,
            fc_bias=weights.optional("fc.bias", (g.hidden,)),
            layers=tuple(HeadLayer.of(weights, layout, number) for number in range(g.layers)),
            norm=norm(weights, "norm", g.hidden, g.eps),
            logit_norm=norm(weights, "norm", g.hidden, g.eps, scale=layout.logit_scale),
            masked=masked,
        )

    def fused(self, states: Array) -> Array:
        """g ``[T, H_d]`` of states ``[T, n * H_t]``."""
        if self.fc is None:
            return states
        if len(self.state_norms) == 1 and self.state_norms[0].weight.shape[0] == states.shape[1]:
            states = self.state_norms[0](states)
        elif self.state_norms:
            size = states.shape[1] // len(self.state_norms)
            parts = (part(states[:, i * size : (i + 1) * size]) for i, part in enumerate(self.state_norms))
            states = functools.reduce(self.ops.concat, parts)
        biases = () if self.fc_bias is None else (self.fc_bias,)
        (g,) = self.ops.project(states, (self.fc,), biases)
        return g

    def __call__(
        self, caches: Sequence[Any], embedded: Array, hidden: Array, true: int = 0, *, fill: bool = False
    ) -> Array:
        """x ``[T, H_d]``, before the final norm; ``hidden`` is g, or what an earlier step fed back.

        ``fill``: only the caches are filled, and what is returned means nothing.
        """
        x, last = hidden, len(self.layers) - 1
        for number, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            if fill and number == last:
                layer.fill(x, embedded, cache)
            else:
                x = layer(x, embedded, cache, true)
        return x
