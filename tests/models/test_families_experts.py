"""Routing, experts, latent attention and scaled rotary embeddings: the corner cases, against loops in float64."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from specdec.backends.ops import Rope, Routing
from specdec.checkpoints import Checkpoint, StoredWeights, check_weights
from specdec.errors import CheckpointError
from specdec.models import deepseek_v3
from specdec.models.weights import dry_run
from tests import tiny
from tests.tiny_families import SHAPES

H, E, K = 24, 12, 4
DTYPES = {"float32": 1e-5, "bfloat16": 2e-2}  # a rounding of the result, and of each expert's output


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ops(kernels: str, dtype: str) -> Any:
    return tiny.make_ops(kernels, dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.float().contiguous().view(torch.int32), b.float().contiguous().view(torch.int32))


# --- routing ----------------------------------------------------------------------------------------------------------


def test_of_equal_scores_the_lower_id_is_chosen(ops: Any) -> None:
    """Rows 2, 5 and 9 of the router are one row that every x likes best; two of them fit."""
    weight = normal(E, H, std=0.1)
    weight[[2, 5, 9]] = 1.0
    x = ops.weight(normal(5, H, seed=1, std=0.1) + 1.0)
    for scores in ("softmax", "sigmoid"):
        ids, weights = ops.route(x, ops.weight(weight), Routing(top_k=2, scores=scores, normalised=True))
        assert ids.tolist() == [[2, 5]] * 5
        assert torch.equal(weights, torch.full((5, 2), 0.5))


def test_ties_between_groups_and_within_them(ops: Any) -> None:
    """All scores are equal: the first groups, and of them the first experts."""
    x = ops.weight(normal(3, H))
    routing = Routing(top_k=3, scores="sigmoid", normalised=True, scale=2.5, groups=4, kept_groups=2)
    ids, weights = ops.route(x, ops.weight(torch.zeros(E, H)), routing, torch.zeros(E))
    assert ids.tolist() == [[0, 1, 2]] * 3
    torch.testing.assert_close(weights, torch.full((3, 3), 2.5 / 3))


def test_no_expert_of_a_masked_group_is_chosen_even_when_all_others_are_negative(ops: Any) -> None:
    """With 0 in place of -inf the masked experts would beat the kept ones, whose scores + bias are below 0."""
    x, weight = ops.weight(normal(7, H)), ops.weight(normal(E, H, seed=1))
    bias = torch.full((E,), -3.0)
    bias[E // 2 :] = -9.0
    routing = Routing(top_k=K, scores="sigmoid", normalised=True, groups=2, kept_groups=1)
    ids, _ = ops.route(x, weight, routing, bias)
    assert (ids < E // 2).all()


@pytest.mark.parametrize("groups", [1, 3, 6])
def test_routing_equals_a_loop_in_float64(groups: int, ops: Any, dtype: str) -> None:
    """The bias decides who is chosen and not how much it counts; groups are worth their two best."""
    x, weight = ops.weight(normal(21, H)), ops.weight(normal(E, H, seed=1, std=0.2))
    bias = normal(E, seed=2, std=0.3) - 0.7
    kept = max(1, groups // 2)
    size = E // groups
    top_k = min(K, kept * size)
    routing = Routing(top_k=top_k, scores="sigmoid", normalised=True, scale=2.5, groups=groups, kept_groups=kept)
    ids, weights = ops.route(x, weight, routing, bias)
    for t in range(len(x)):
        scores = 1 / (1 + np.exp(-(weight.double() @ x[t].double()).numpy()))
        corrected = scores + bias.double().numpy()
        worth = [np.sort(corrected[g * size : (g + 1) * size])[-2:].sum() for g in range(groups)]
        best = sorted(range(groups), key=lambda g: -worth[g])[:kept]
        chosen = sorted((e for e in range(E) if e // size in best), key=lambda e: -corrected[e])[:top_k]
        assert ids[t].tolist() == chosen
        wanted = scores[chosen] / scores[chosen].sum() * 2.5
        np.testing.assert_allclose(weights[t].numpy(), wanted, rtol=1e-5)


# --- experts ----------------------------------------------------------------------------------------------------------


def experts(ops: Any, inner: int = 20) -> tuple[Any, ...]:
    gate, up = normal(E, inner, H, seed=3, std=0.3), normal(E, inner, H, seed=4, std=0.3)
    return tuple(ops.stack(part.unbind()) for part in (gate, up, normal(E, H, inner, seed=5, std=0.3)))


def test_experts_equal_a_loop_in_float64(ops: Any, dtype: str) -> None:
    x, residual = ops.weight(normal(21, H)), ops.weight(normal(21, H, seed=6))
    stacks = experts(ops)
    shared = tuple(ops.weight(normal(*shape, seed=7, std=0.3)) for shape in ((30, H), (30, H), (H, 30)))
    gate = ops.weight(normal(1, H, seed=8))
    routing = Routing(top_k=K, scores="softmax", normalised=True)
    chosen = ops.route(x, ops.weight(normal(E, H, seed=1)), routing)
    got = ops.moe(x, chosen, stacks, residual, shared=shared, shared_gate=gate)

    def expert(row: torch.Tensor, g: torch.Tensor, u: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return d.double() @ (torch.nn.functional.silu(g.double() @ row) * (u.double() @ row))

    for t, row in enumerate(x.double()):
        wanted = residual[t].double() + torch.sigmoid(gate[0].double() @ row) * expert(row, *shared)
        for e, weight in zip(chosen[0][t].tolist(), chosen[1][t].tolist(), strict=True):
            wanted = wanted + weight * expert(row, *(stack[e] for stack in stacks))
        assert float((got[t].double() - wanted).abs().max() / wanted.abs().max()) < DTYPES[dtype]


def test_rows_of_a_block_have_the_bits_of_single_rows(ops: Any, kernels: str) -> None:
    """The rows of an expert run together; what they give a row must not depend on it."""
    rows = 37 if kernels == "native" else 16
    x, router = ops.weight(normal(rows, H)), ops.weight(normal(E, H, seed=1))
    routing, stacks = Routing(top_k=K, scores="softmax", normalised=True), experts(ops)

    def run(part: torch.Tensor) -> torch.Tensor:
        return ops.moe(part, ops.route(part, router, routing), stacks, part)

    singly = torch.cat([run(x[t : t + 1]) for t in range(rows)])
    for size in (rows, 5, 2):
        assert same_bits(torch.cat([run(x[at : at + size]) for at in range(0, rows, size)]), singly), size


def test_an_expert_that_nobody_chose_is_not_read(ops: Any) -> None:
    x, router = ops.weight(normal(2, H)), ops.weight(normal(E, H, seed=1))
    chosen = ops.route(x, router, Routing(top_k=2, scores="softmax", normalised=True))
    idle = set(range(E)) - set(chosen[0].flatten().tolist())
    assert len(idle) >= E - 4
    stacks = experts(ops)
    wanted = ops.moe(x, chosen, stacks, x)
    poisoned = tuple(
        ops.stack([torch.full_like(matrix, torch.nan) if e in idle else matrix for e, matrix in enumerate(stack)])
        for stack in stacks
    )
    assert same_bits(ops.moe(x, chosen, poisoned, x), wanted)


def test_fused_experts_are_views_of_the_file(make_target: Callable[..., Any]) -> None:
    """A copy of all experts would double the memory of a model that barely fits."""
    target = make_target("qwen3_5_moe", **SHAPES["qwen3_5_moe"]["fused-head-apart"])
    gates, ups, downs = target.model.layers[0].mlp.experts
    inner, hidden = gates[0].shape
    assert ups[0].data_ptr() - gates[0].data_ptr() == 4 * inner * hidden
    assert gates[1].data_ptr() - gates[0].data_ptr() == 8 * inner * hidden
    assert downs[1].data_ptr() - downs[0].data_ptr() == 4 * inner * hidden


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_missing_expert_is_named(tmp_path: pathlib.Path) -> None:
    folder = tiny.WRITERS["glm4_moe"](tmp_path / "model", mtp=False)
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.3\.up_proj"):
        tiny.make_target(folder)


@pytest.mark.parametrize("mtp", [True, False])
def test_qwen3_next_has_a_head_when_its_tensors_are_there(mtp: bool, checkpoint: Callable[..., pathlib.Path]) -> None:
    """The config says nothing about it."""
    folder = checkpoint("qwen3_next", mtp=mtp)
    assert "mtp_num_hidden_layers" not in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    target = tiny.make_target(folder)
    assert target.info.mtp_layers == int(mtp)
    assert (target.model.mtp is not None) == mtp
    tiny.plain_run(target, [1, 2, 3], 2)


def test_nothing_is_unused_in_any_checkpoint(checkpoint: Callable[..., pathlib.Path]) -> None:
    from specdec.registry import registry

    for family, shapes in SHAPES.items():
        for name, shape in shapes.items():
            opened = Checkpoint.open(checkpoint(family, dtype="float32", **shape))
            spec = registry().model(family if family != "qwen3_5_moe" else "qwen3_5_moe_text")
            found = check_weights(opened, dry_run(spec, spec.parse(opened.config), StoredWeights(opened)).tensors)
            assert (found.missing, found.unused, found.misshaped) == ([], [], []), (family, name)


# --- latent attention -------------------------------------------------------------------------------------------------


def test_the_latent_cache_holds_one_compressed_row_per_token(make_target: Callable[..., Any]) -> None:
    shape = SHAPES["deepseek_v3"]["all-sparse-mixed"]
    target = make_target("deepseek_v3", **shape)
    state = target.new_state(64)
    row = shape["kv_lora"] + shape["rope"]
    assert [cache.nbytes() for cache in state.caches] == [4 * 64 * row] * shape["layers"]
    target.prefill(state, [1, 2, 3])
    saved = target.snapshot(state).arrays
    assert saved["layers.0.rows"].shape == (3, 1, row)


def test_absorbed_projections_give_the_plain_scores_and_values(kernels: str, tmp_path: pathlib.Path) -> None:
    """In float32, the module alone: keys and values of every head spelt out give the same output."""
    folder = tiny.WRITERS["deepseek_v3"](tmp_path / "model", mtp=False, layers=1, dense_layers=1)
    target = tiny.make_target(folder, kernels=kernels)
    mixer = target.model.layers[0].mixer
    opened = Checkpoint.open(folder)
    weights = StoredWeights(opened)
    shape = deepseek_v3.parse(opened.config).attention
    x = normal(9, 44)
    got = mixer(x, torch.zeros_like(x), mixer.new_cache(16)).double()

    at = "layers.0.self_attn."
    names = "q_a_proj q_a_layernorm q_b_proj kv_a_proj_with_mqa kv_a_layernorm kv_b_proj o_proj".split()
    w = {name: weights[f"{at}{name}.weight"].double() for name in names}
    wide = x.double()

    def rms(y: torch.Tensor, name: str) -> torch.Tensor:
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * w[name]

    def turned(y: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(9.0).double()[:, None] * torch.tensor(shape.rope.inv_freq).double()
        pairs = torch.view_as_complex(y.reshape(9, -1, 2).contiguous()) * torch.polar(torch.ones_like(angle), angle)
        return torch.view_as_real(pairs).flatten(1)

    q = (rms(wide @ w["q_a_proj"].T, "q_a_layernorm") @ w["q_b_proj"].T).view(9, shape.heads, -1)
    both = wide @ w["kv_a_proj_with_mqa"].T
    kv = (rms(both[:, : shape.kv_rank], "kv_a_layernorm") @ w["kv_b_proj"].T).view(9, shape.heads, -1)
    causal = torch.ones(9, 9).tril().bool()
    outs = []
    for h in range(shape.heads):
        nope = shape.nope_dim
        scores = q[:, h, :nope] @ kv[:, h, :nope].T + turned(q[:, h, nope:]) @ turned(both[:, shape.kv_rank :]).T
        scores = (scores / math.sqrt(nope + shape.rope_dim)).masked_fill(~causal, float("-inf"))
        outs.append(scores.softmax(-1) @ kv[:, h, nope:])
    torch.testing.assert_close(got, torch.cat(outs, 1) @ w["o_proj"].T, rtol=1e-4, atol=1e-4)


# --- rotary embeddings ------------------------------------------------------------------------------------------------


def test_scaled_frequencies_lie_between_the_plain_and_the_stretched_ones() -> None:
    """Both ends are reached exactly, and no frequency is higher than the one before it."""
    plain = Rope.of(1e4, 64).inv_freq
    for rope in (
        Rope.yarn(1e4, 64, factor=40, original=4096),
        Rope.yarn(1e4, 64, factor=40, original=4096, truncate=False),
        Rope.llama3(1e4, 64, factor=40, original=512),
    ):
        assert rope.inv_freq[0] == plain[0]
        assert rope.inv_freq[-1] == pytest.approx(plain[-1] / 40)
        assert all(p / 40 * (1 - 1e-12) <= f <= p for f, p in zip(rope.inv_freq, plain, strict=True))
        assert list(rope.inv_freq) == sorted(rope.inv_freq, reverse=True)
        assert hash(rope) == hash(Rope(tuple(rope.inv_freq)))


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_scaled_frequencies_equal_those_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling: dict[str, Any] = {"rope_type": kind, "factor": 8.0, "original_max_position_embeddings": 8192}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        ours = Rope.llama3(5e5, 128, factor=8, original=8192)
    else:
        ours = Rope.yarn(5e5, 128, factor=8, original=8192)
    config = transformers.LlamaConfig(
        hidden_size=1024,
        num_attention_heads=8,
        max_position_embeddings=65536,
        rope_parameters={"rope_theta": 5e5, **scaling},
    )
    theirs, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    np.testing.assert_allclose(ours.inv_freq, theirs.numpy(), rtol=1e-5)
