"""The block of experts that stands in for the MLP of a layer: router, routed experts, shared expert.

Routed experts are stored in one of three layouts, which may differ from layer to layer (an MTP layer often has
another one), so each prefix is looked at by itself:

* fused: ``experts.gate_up_proj [E, 2 I, H]`` (gate rows first), ``experts.down_proj [E, H, I]``, no ``.weight``;
* apart: ``experts.{e}.gate_proj.weight`` and ``up_proj [I, H]``, ``down_proj [H, I]``;
* stacked, as mlx-lm converts them: ``switch_mlp.gate_proj.weight`` and ``up_proj [E, I, H]``, ``down_proj [E, H, I]``.
"""

from __future__ import annotations

from typing import Any

import attrs

from specdec.backends.ops import Array, Ops, Routing
from specdec.checkpoints import TensorSpec, Weights
from specdec.errors import CheckpointError
from specdec.models.decoder import GatedMlp
from specdec.models.fields import Fields


@attrs.frozen(kw_only=True)
class MoeShape:
    """Sizes of one block of experts, and how it routes."""

    experts: int  # E
    intermediate: int  # I of a routed expert
    shared: str  # name of the shared expert's tensors, "" where there is none
    shared_intermediate: int
    shared_gated: bool  # the shared expert is weighted by sigmoid(shared_expert_gate . x)
    corrected: bool  # the router has an e_score_correction_bias
    routing: Routing

    @classmethod
    def qwen(cls, fields: Fields) -> MoeShape:
        """Qwen3.5's and Qwen3-Next's: softmax scores, every layer sparse, a shared expert behind a sigmoid gate."""
        fields.must_be("decoder_sparse_step", 1)
        fields.must_be("mlp_only_layers", [], None)
        fields.must_be("norm_topk_prob", True)
        experts = fields.whole("num_experts")
        return cls(
            experts=experts,
            intermediate=fields.whole("moe_intermediate_size"),
            shared="shared_expert",
            shared_intermediate=fields.whole("shared_expert_intermediate_size"),
            shared_gated=True,
            corrected=False,
            routing=Routing(top_k=_top_k(fields, experts), scores="softmax", normalised=True),
        )

    @classmethod
    def deepseek(cls, fields: Fields) -> MoeShape:
        """DeepSeek-V3's and GLM-4.5's: sigmoid scores with a correction bias, groups, shared experts without a gate."""
        fields.must_be("scoring_func", "sigmoid")
        fields.must_be("topk_method", "noaux_tc")
        fields.must_be("moe_layer_freq", 1)
        experts = fields.whole("n_routed_experts")
        groups = fields.whole("n_group", 1)
        intermediate = fields.whole("moe_intermediate_size")
        shared = fields.whole("n_shared_experts", 0, low=0)
        top_k, kept = _top_k(fields, experts), fields.whole("topk_group", 1)
        if groups > 1 and (experts % groups or experts // groups < 2 or kept > groups):
            raise CheckpointError(
                f"config.json: 'n_group' ({groups}) takes equal groups of at least 2 of the {experts} experts, and "
                f"'topk_group' ({kept}) at most that many"
            )
        if groups > 1 and top_k > kept * (experts // groups):
            raise CheckpointError(
                f"config.json: 'num_experts_per_tok' ({top_k}) is more than the experts of 'topk_group' ({kept}) groups"
            )
        return cls(
            experts=experts,
            intermediate=intermediate,
            shared="shared_experts" if shared else "",
            shared_intermediate=intermediate * shared,
            shared_gated=False,
            corrected=True,
            routing=Routing(
                top_k=top_k,
                scores="sigmoid",
                normalised=fields.flag("norm_topk_prob", True),
                scale=fields.real("routed_scaling_factor", 1.0),
                groups=groups,
                kept_groups=kept,
            ),
        )


def _top_k(fields: Fields, experts: int) -> int:
    top_k = fields.whole("num_experts_per_tok")
    if top_k > experts:
        raise CheckpointError(f"config.json: 'num_experts_per_tok' is {top_k}, there are {experts} experts")
    return top_k


@attrs.frozen(kw_only=True)
class SparseMoe:
    """``sum_j w_j expert_j(x)`` over the experts that the router chose for each row, plus the shared expert.

    Source: Shazeer et al. 2017, arXiv:1701.06538; shared experts: DeepSeekMoE, arXiv:2401.06066, equation 9.
    """

    ops: Ops
    routing: Routing
    router: Array  # [E, H]
    bias: Array | None  # [E]
    experts: tuple[Array, Array, Array]  # stacks of gate, up and down
    shared: GatedMlp | None
    shared_gate: Array | None  # [1, H]

    def __call__(self, x: Array, residual: Array) -> Array:
        chosen = self.ops.route(x, self.router, self.routing, self.bias)
        shared = self.shared
        return self.ops.moe(
            x,
            chosen,
            self.experts,
            residual,
            shared=None if shared is None else (shared.gate_proj, shared.up_proj, shared.down_proj),
            shared_gate=self.shared_gate,
        )


def moe_tensors(prefix: str, hidden: int, shape: MoeShape) -> dict[str, TensorSpec]:
    """The tensors of a block under ``prefix``; all layouts of the experts, optional, as any may be there."""
    prefix += "mlp."
    count, inner = shape.experts, shape.intermediate
    expected = {
        f"{prefix}gate.weight": TensorSpec((count, hidden)),
        f"{prefix}experts.gate_up_proj": TensorSpec((count, 2 * inner, hidden), optional=True),
        f"{prefix}experts.down_proj": TensorSpec((count, hidden, inner), optional=True),
    }
    for e in range(count):
        expected[f"{prefix}experts.{e}.gate_proj.weight"] = TensorSpec((inner, hidden), optional=True)
        expected[f"{prefix}experts.{e}.up_proj.weight"] = TensorSpec((inner, hidden), optional=True)
        expected[f"{prefix}experts.{e}.down_proj.weight"] = TensorSpec((hidden, inner), optional=True)
    for name, matrix in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
        expected[f"{prefix}switch_mlp.{name}_proj.weight"] = TensorSpec((count, *matrix), optional=True)
    if shape.corrected:
        expected[f"{prefix}gate.e_score_correction_bias"] = TensorSpec((count,))
    if shape.shared:
        wide = shape.shared_intermediate
        expected[f"{prefix}{shape.shared}.gate_proj.weight"] = TensorSpec((wide, hidden))
        expected[f"{prefix}{shape.shared}.up_proj.weight"] = TensorSpec((wide, hidden))
        expected[f"{prefix}{shape.shared}.down_proj.weight"] = TensorSpec((hidden, wide))
    if shape.shared_gated:
        expected[f"{prefix}shared_expert_gate.weight"] = TensorSpec((1, hidden))
    return expected


def build_moe(ops: Ops, weights: Weights, prefix: str, shape: MoeShape) -> SparseMoe:
    """A block of experts from the tensors under ``prefix``. Raises: CheckpointError when an expert is missing."""
    prefix += "mlp."

    def matrices(name: str) -> Any:
        if f"{prefix}switch_mlp.{name}_proj.weight" in weights:  # mlx-lm's conversion
            return weights.stored_stack(f"{prefix}switch_mlp.{name}_proj.weight")
        return weights.stored_stack([f"{prefix}experts.{e}.{name}_proj.weight" for e in range(shape.experts)])

    if f"{prefix}experts.gate_up_proj" in weights:
        both = weights.stored_stack(f"{prefix}experts.gate_up_proj")
        gates: Any = [matrix[: shape.intermediate] for matrix in both]  # views: nothing is copied
        ups: Any = [matrix[shape.intermediate :] for matrix in both]
        downs: Any = weights.stored_stack(f"{prefix}experts.down_proj")
    else:
        gates, ups, downs = matrices("gate"), matrices("up"), matrices("down")
    shared = None
    if shape.shared:
        names = (f"{prefix}{shape.shared}.{name}_proj.weight" for name in ("gate", "up", "down"))
        gate, up, last = (ops.weight(weights.stored(name)) for name in names)
        shared = GatedMlp(ops=ops, gate_proj=gate, up_proj=up, down_proj=last)
    return SparseMoe(
        ops=ops,
        routing=shape.routing,
        router=ops.weight(weights.stored(f"{prefix}gate.weight")),
        bias=ops.vector(weights[f"{prefix}gate.e_score_correction_bias"]) if shape.corrected else None,
        experts=(ops.stack(gates), ops.stack(ups), ops.stack(downs)),
        shared=shared,
        shared_gate=ops.weight(weights.stored(f"{prefix}shared_expert_gate.weight")) if shape.shared_gated else None,
    )
