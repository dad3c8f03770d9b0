"""The mixture-of-experts block that replaces a layer's MLP: router, routed experts, shared expert.

Routed experts are stored in one of three layouts, detected per layer (an MTP layer often has a different one):

* fused: ``experts.gate_up_proj [E, 2 I, H]`` (gate rows first), ``experts.down_proj [E, H, I]``, no ``.weight``;
* separate: ``experts.{e}.gate_proj.weight`` and ``up_proj [I, H]``, ``down_proj [H, I]``;
* stacked (mlx-lm conversions): ``switch_mlp.gate_proj.weight`` and ``up_proj [E, I, H]``, ``down_proj [E, H, I]``; in
  GGUF files too, where gate and up may be fused all the same.

gpt-oss fuses gate and up rows in turn, and its checkpoints in BF16 hold every matrix transposed: ``[E, H, 2 I]`` and
``[E, I, H]``.
"""

from __future__ import annotations

import attrs
import torch

from specdec.backends.ops import Array, Clamp, Ops, Routing
from specdec.errors import CheckpointError
from specdec.models.decoder import GatedMlp
from specdec.models.fields import MOST_EXPERTS, Fields
from specdec.models.weights import Weights


@attrs.frozen(kw_only=True)
class MoeShape:
    """Sizes and routing of a block of experts."""

    experts: int  # E
    intermediate: int  # I of a routed expert
    routing: Routing
    shared: str = ""  # name of the shared expert's tensors; "" without one
    shared_intermediate: int = 0
    shared_gated: bool = False  # the shared expert is weighted by sigmoid(shared_expert_gate . x)
    corrected: bool = False  # the router has an e_score_correction_bias
    clamp: Clamp | None = None  # the gating of experts with biases, behind a router with one

    @classmethod
    def gpt_oss(cls, fields: Fields) -> MoeShape:
        """gpt-oss: a softmax over the chosen experts, which have biases and a clamped gating."""
        experts = fields.whole(fields.either("num_local_experts", "num_experts"), high=MOST_EXPERTS)
        top_k = _top_k(fields, experts)
        fields.must_be("experts_per_token", top_k, None)
        return cls(
            experts=experts,
            intermediate=fields.whole("intermediate_size"),
            routing=Routing(top_k=top_k, scores="softmax", normalised=True),
            clamp=Clamp(alpha=fields.real("swiglu_alpha", 1.702), limit=fields.real("swiglu_limit", 7.0)),
        )

    @classmethod
    def qwen(cls, fields: Fields, *, shared: bool = True) -> MoeShape:
        """Qwen3.5 and Qwen3-Next: softmax scores, every layer sparse, a shared expert behind a sigmoid gate.

        Qwen3 has no ``shared`` expert, and ``norm_topk_prob`` may be false.
        """
        fields.must_be("decoder_sparse_step", 1)
        fields.must_be("mlp_only_layers", [], None)
        if shared:
            fields.must_be("norm_topk_prob", True)
        experts = fields.whole(fields.either("num_experts", "num_local_experts"), high=MOST_EXPERTS)
        return cls(
            experts=experts,
            intermediate=fields.whole("moe_intermediate_size"),
            shared="shared_expert" if shared else "",
            shared_intermediate=fields.whole("shared_expert_intermediate_size") if shared else 0,
            shared_gated=shared,
            routing=Routing(
                top_k=_top_k(fields, experts),
                scores="softmax",
                normalised=shared or fields.flag("norm_topk_prob", False),
            ),
        )

    @classmethod
    def deepseek(cls, fields: Fields) -> MoeShape:
        """DeepSeek-V3 and GLM-4.5: sigmoid scores with a correction bias, groups, ungated shared experts."""
        fields.must_be("scoring_func", "sigmoid")
        fields.must_be("topk_method", "noaux_tc")
        fields.must_be("moe_layer_freq", 1)
        experts = fields.whole("n_routed_experts", high=MOST_EXPERTS)
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
    """``sum_j w_j expert_j(x)`` over the experts chosen for each row, plus the shared expert.

    Source: Shazeer et al. 2017, arXiv:1701.06538; shared experts: DeepSeekMoE, arXiv:2401.06066, equation 9.
    """

    ops: Ops
    routing: Routing
    router: Array  # [E, H]
    bias: Array | None  # [E]
    experts: tuple[Array, Array, Array]  # stacks of gate, up and down
    shared: GatedMlp | None
    shared_gate: Array | None  # [1, H]

    @classmethod
    def of(cls, weights: Weights, hidden: int, shape: MoeShape) -> SparseMoe:
        """Build from the weights under ``mlp.``."""
        count, inner = shape.experts, shape.intermediate
        shared = None
        if shape.shared:
            shared = GatedMlp.of(weights.under(f"{shape.shared}."), hidden, shape.shared_intermediate)
        return cls(
            ops=weights.ops,
            routing=shape.routing,
            router=weights.matrix("gate.weight", (count, hidden), exact=True),
            bias=weights.vector("gate.e_score_correction_bias", (count,)) if shape.corrected else None,
            experts=_experts(weights, hidden, count, inner),
            shared=shared,
            shared_gate=weights.matrix("shared_expert_gate.weight", (1, hidden), exact=True)
            if shape.shared_gated
            else None,
        )

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


@attrs.frozen(kw_only=True)
class ClampedMoe:
    """``Ops.clamped_moe`` with its weights."""

    ops: Ops
    routing: Routing
    clamp: Clamp
    router: tuple[Array, Array]  # [E, H] and [E]
    experts: tuple[Array, Array, Array]  # stacks of gate, up and down
    biases: tuple[Array, Array, Array]  # [E, I] twice, [E, H]

    @classmethod
    def of(cls, weights: Weights, hidden: int, shape: MoeShape) -> ClampedMoe:
        """Build from the weights under ``mlp.``."""
        assert shape.clamp is not None
        count, inner = shape.experts, shape.intermediate
        if _stacked(weights):
            sizes = {"gate": inner, "up": inner, "down": hidden}
            gate, up, down = (
                weights.vector(f"{_stacked(weights)}.{name}_proj.bias", (count, size)) for name, size in sizes.items()
            )
            experts = _experts(weights, hidden, count, inner)
        else:
            both = weights.tensor("experts.gate_up_proj_bias", (count, 2 * inner))
            gate, up = (weights.ops.vector(both[:, first::2].contiguous()) for first in (0, 1))
            down = weights.vector("experts.down_proj_bias", (count, hidden))
            experts = _experts_in_turn(weights, hidden, count, inner)
        return cls(
            ops=weights.ops,
            routing=shape.routing,
            clamp=shape.clamp,
            router=(
                weights.matrix("router.weight", (count, hidden), exact=True),
                weights.vector("router.bias", (count,)),
            ),
            experts=experts,
            biases=(gate, up, down),
        )

    def __call__(self, x: Array, residual: Array) -> Array:
        return self.ops.clamped_moe(x, self.router, self.routing, self.experts, self.biases, self.clamp, residual)


def _stacked(weights: Weights) -> str:
    """The name of the module with the matrices of all experts in stacks; "" without one."""
    return next((name for name in ("switch_mlp", "experts") if f"{name}.gate_proj.weight" in weights), "")


def _experts_in_turn(weights: Weights, hidden: int, count: int, inner: int) -> tuple[Array, Array, Array]:
    """Stacks of gate, up and down of gpt-oss's fused layouts; that of its release without a checkpoint."""
    ops, turned = weights.ops, (count, hidden, 2 * inner)
    if weights.shape_of("experts.gate_up_proj") != turned:
        both = weights.host_matrices("experts.gate_up_proj", (count, 2 * inner, hidden))
        every_other = torch.arange(0, 2 * inner, 2)
        gate, up = (ops.stack([matrix[every_other + first] for matrix in both]) for first in (0, 1))
        return gate, up, weights.stack("experts.down_proj", (count, hidden, inner))
    if hidden == 2 * inner:
        raise CheckpointError(
            f"config.json: 'hidden_size' ({hidden}) is twice 'intermediate_size', so that the experts' matrices may be "
            "stored either way round"
        )
    whole = weights.tensor("experts.gate_up_proj", turned)
    down = weights.tensor("experts.down_proj", (count, inner, hidden))
    gate, up, down = (
        ops.stack([matrix.t().contiguous() for matrix in part]) for part in (whole[:, :, ::2], whole[:, :, 1::2], down)
    )
    return gate, up, down


def _experts(weights: Weights, hidden: int, count: int, inner: int) -> tuple[Array, Array, Array]:
    """Stacks of gate, up and down in the checkpoint's layout; fused without a checkpoint."""
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    if module := _stacked(weights):
        gate, up, down = (
            weights.stack(f"{module}.{name}_proj.weight", (count, *shape)) for name, shape in shapes.items()
        )
    elif any(f"experts.{e}.gate_proj.weight" in weights for e in range(count)):
        gate, up, down = (
            weights.stack([f"experts.{e}.{name}_proj.weight" for e in range(count)], shape)
            for name, shape in shapes.items()
        )
    else:
        both = weights.host_matrices("experts.gate_up_proj", (count, 2 * inner, hidden))
        gate, up = (weights.ops.stack([matrix[rows] for matrix in both]) for rows in (slice(inner), slice(inner, None)))
        down_proj = "switch_mlp.down_proj.weight"
        down = weights.stack(down_proj if down_proj in weights else "experts.down_proj", (count, hidden, inner))
    return gate, up, down
