"""Tiny random checkpoints of the families beyond Qwen3.5 and Qwen3 dense, in the real layouts, and their shapes.

``tiny.py`` says how the weights are drawn. Importing this module makes the writers known to the fixtures.
"""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tests import tiny
from tests.tiny import _LAYER_NORMS, _Draw, _mlp, _norms, _under, _write, plain_attention, shape, write_llama

Tensors = dict[str, torch.Tensor]


def _experts(draw: _Draw, hidden: int, inner: int, count: int, layout: str) -> Tensors:
    """Routed experts: "fused" as two 3-D tensors without ``.weight``, "apart" as three matrices each."""
    each = [_mlp(draw, hidden, inner) for _ in range(count)]
    if layout == "apart":
        return {f"mlp.experts.{e}.{name[4:]}": tensor for e, mlp in enumerate(each) for name, tensor in mlp.items()}
    gate, up, down = (torch.stack([mlp[f"mlp.{name}_proj.weight"] for mlp in each]) for name in ("gate", "up", "down"))
    return {"mlp.experts.gate_up_proj": torch.cat([gate, up], dim=1), "mlp.experts.down_proj": down}


def _shared(draw: _Draw, name: str, hidden: int, inner: int) -> Tensors:
    return {f"mlp.{name}.{key[4:]}": tensor for key, tensor in _mlp(draw, hidden, inner).items()}


def _qwen_moe(draw: _Draw, hidden: int, moe: Mapping[str, int], layout: str) -> Tensors:
    return {
        "mlp.gate.weight": draw.matrix(moe["experts"], hidden, 1.5),
        "mlp.shared_expert_gate.weight": draw.matrix(1, hidden, 1.5),
        **_shared(draw, "shared_expert", hidden, moe["shared"]),
        **_experts(draw, hidden, moe["inner"], moe["experts"], layout),
    }


def write_qwen3_5_moe(
    folder: pathlib.Path,
    *,
    experts: int = 6,
    top_k: int = 2,
    inner: int = 20,
    shared: int = 28,
    layouts: Sequence[str] = ("fused",),  # of the main layers, in turn
    mtp_layout: str = "apart",
    grouped: bool = False,  # Qwen3-Next: in_proj_qkvz and in_proj_ba, no count of MTP layers in the config
    **settings: Any,
) -> pathlib.Path:
    """A Qwen3.5 MoE checkpoint, or a Qwen3-Next one; other settings as for the dense one."""
    usual = {"hidden": 40, "tied": False, "layer_types": ("linear_attention", "full_attention")}
    settings = {**usual, "theta": 1e4, "rotary_factor": 0.25, **settings}
    hidden, theta, share = settings["hidden"], settings["theta"], settings["rotary_factor"]
    moe = {"experts": experts, "inner": inner, "shared": shared}
    keys = {
        "architectures": ["Qwen3NextForCausalLM" if grouped else "Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_next" if grouped else "qwen3_5_moe_text",
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": shared,
        "intermediate_size": 4 * hidden,  # of dense layers: there are none
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "partial_rotary_factor": share,
        "rope_theta": theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share},
        **({"mtp_num_hidden_layers": None, "mtp_use_dedicated_embeddings": None} if grouped else {}),
    }

    def mlps(draw: _Draw, index: int) -> Tensors:
        return _qwen_moe(draw, hidden, moe, mtp_layout if index < 0 else layouts[index % len(layouts)])

    return tiny.write_qwen3_5(folder, mlps=mlps, grouped=grouped, keys=keys, **settings)


def write_qwen3_next(folder: pathlib.Path, **settings: Any) -> pathlib.Path:
    """A Qwen3-Next checkpoint: experts apart, delta-rule projections grouped per key head."""
    settings = {"layouts": ("apart",), "grouped": True} | settings
    return write_qwen3_5_moe(folder, **settings)


def write_qwen2(folder: pathlib.Path, **settings: Any) -> pathlib.Path:
    """A Qwen2.5 checkpoint."""
    return write_llama(folder, model_type="qwen2", **{"kv_heads": 2, **settings})


def _with_norms(draw: _Draw, layer: Tensors, *names: str) -> Tensors:
    hidden = layer["self_attn.o_proj.weight"].shape[0]
    return layer | _norms(draw, hidden, *names, mean=1.0)


def _gemma3_layer(draw: _Draw, layer: Tensors) -> Tensors:
    return _with_norms(draw, layer, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def _gpt_oss_layer(draw: _Draw, layer: Tensors) -> Tensors:
    """Attention with sinks and biases; experts as in the checkpoints in BF16, gate and up columns in turn."""
    inner, hidden = layer["mlp.gate_proj.weight"].shape
    kept = {name: tensor for name, tensor in layer.items() if not name.startswith("mlp.")}
    rows = {name: layer[f"self_attn.{name}_proj.weight"].shape[0] for name in "qkvo"}
    biases = {f"self_attn.{name}_proj.bias": draw.normal(size, std=0.3) for name, size in rows.items()}
    stacks = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    matrices = {name: torch.stack([draw.matrix(*size, 1.5) for _ in range(5)]) for name, size in stacks.items()}
    experts = {
        **{f"experts.{name}_proj": stack.transpose(1, 2) for name, stack in matrices.items()},
        **{f"experts.{name}_proj_bias": draw.normal(5, size[0], std=0.3) for name, size in stacks.items()},
        "router.weight": draw.matrix(5, hidden, 1.5),
        "router.bias": draw.normal(5, std=0.5),
    }
    return kept | biases | {"self_attn.sinks": draw.normal(rows["q"] // 12, std=2.0)} | _under("mlp.", experts)


def _olmo2_layer(draw: _Draw, layer: Tensors) -> Tensors:
    """Norms behind attention and MLP, and over all heads."""
    rows = {name: layer[f"self_attn.{name}_proj.weight"].shape[0] for name in "qk"}
    norms = {f"self_attn.{name}_norm.weight": draw.normal(size, mean=1.2, std=0.4) for name, size in rows.items()}
    del layer["input_layernorm.weight"]
    return _with_norms(draw, layer | norms, "post_feedforward_layernorm")


def _phi3_layer(draw: _Draw, layer: Tensors) -> Tensors:
    """Projections that read the same rows are one."""
    for parts, fused in (("self_attn.q self_attn.k self_attn.v", "self_attn.qkv"), ("mlp.gate mlp.up", "mlp.gate_up")):
        matrices = [layer.pop(f"{part}_proj.weight") for part in parts.split()]
        layer[f"{fused}_proj.weight"] = torch.cat(matrices)
    return layer


def _qwen3_moe_layer(draw: _Draw, layer: Tensors) -> Tensors:
    hidden = layer["self_attn.o_proj.weight"].shape[0]
    dense = {name: tensor for name, tensor in layer.items() if not name.startswith("mlp.")}
    return dense | {"mlp.gate.weight": draw.matrix(6, hidden, 1.5), **_experts(draw, hidden, 20, 6, "apart")}


GEMMA3_KEYS = {"hidden_act": None, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 20}
GEMMA4_KEYS: dict[str, Any] = {
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_k_eq_v": True,
    "global_head_dim": 20,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 4.0,
    "rope_theta": None,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.4, "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    },
}
MOE_KEYS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LIKE_LLAMA: dict[str, dict[str, Any]] = {
    "gemma3": {"model_type": "gemma3_text", "edit": _gemma3_layer, "keys": GEMMA3_KEYS, "logit_spread": 0.5},
    "gpt_oss": {
        "edit": _gpt_oss_layer,
        "keys": {"attention_bias": True, "mlp_bias": None, "num_local_experts": 5, "num_experts_per_tok": 2},
    },
    "granite": {"keys": {"attention_multiplier": 0.3}},
    "ministral3": {},
    "mistral": {},
    "olmo2": {"edit": _olmo2_layer},
    "phi3": {"edit": _phi3_layer, "keys": {"pad_token_id": 0}},
    "qwen3_moe": {"edit": _qwen3_moe_layer, "keys": MOE_KEYS},
    "smollm3": {"keys": {"pad_token_id": 0}},
}


def _writer(family: str) -> Callable[..., pathlib.Path]:
    """Writes a checkpoint of a family like Llama."""

    def write(folder: pathlib.Path, *, keys: Mapping[str, Any] | None = None, **settings: Any) -> pathlib.Path:
        usual = {"model_type": family} | LIKE_LLAMA[family]
        return write_llama(folder, **usual | settings | {"keys": {**usual.get("keys", {}), **(keys or {})}})

    return write


def write_gemma4(
    folder: pathlib.Path, *, layer_types: Sequence[str], keys: Mapping[str, Any] | None = None, **settings: Any
) -> pathlib.Path:
    """A Gemma 4 checkpoint: layers without a window have other heads, and maybe no values of their own.

    The small variants have embeddings of every layer, and layers that read the keys and values of others: some of these
    have some of their own in the files, which nobody reads.
    """
    keys, kinds = {**GEMMA4_KEYS, "layer_types": layer_types, **(keys or {})}, enumerate(layer_types)
    size, own = keys["hidden_size_per_layer_input"], len(layer_types) - keys.get("num_kv_shared_layers", 0)

    def edit(draw: _Draw, layer: Tensors) -> Tensors:
        layer = _gemma3_layer(draw, layer) | {"layer_scalar": draw.normal(1, mean=0.8, std=0.2)}
        (number, kind), (hidden, rows) = next(kinds), layer["self_attn.o_proj.weight"].shape
        if kind == "full_attention":
            layer |= plain_attention(draw, hidden, rows // 12, 1, 20, bias=False, normed=True)
            if keys["attention_k_eq_v"]:
                del layer["self_attn.v_proj.weight"]
        if number >= own and number % 2:
            layer = {name: one for name, one in layer.items() if not name.startswith(("self_attn.k", "self_attn.v"))}
        if number >= own and keys.get("use_double_wide_mlp"):
            layer |= _mlp(draw, hidden, 2 * len(layer["mlp.up_proj.weight"]))
        if size:
            layer["per_layer_input_gate.weight"] = draw.matrix(size, hidden, 1.5)
            layer["per_layer_projection.weight"] = draw.matrix(hidden, size, 1.5)
            layer = _with_norms(draw, layer, "post_per_layer_input_norm")
        return layer

    def more(draw: _Draw) -> Tensors:
        wide, hidden = size * len(layer_types), settings.get("hidden", 48)
        return {
            "embed_tokens_per_layer.weight": draw.matrix(keys["vocab_size_per_layer_input"], wide, size**-0.5),
            "per_layer_model_projection.weight": draw.matrix(wide, hidden, 0.02),  # so small that eps counts
            "per_layer_projection_norm.weight": draw.normal(size, mean=1.2, std=0.4),
        }

    usual = {"model_type": "gemma4_text", "edit": edit, "layers": len(layer_types), "logit_spread": 0.5}
    usual["more"] = more if size else None
    return write_llama(folder, **usual, **settings, keys=keys)


def _deepseek_moe(draw: _Draw, hidden: int, moe: Mapping[str, int], layout: str) -> Tensors:
    return {
        "mlp.gate.weight": draw.matrix(moe["experts"], hidden, 1.5),
        # wide enough to change choices and to make scores + bias negative
        "mlp.gate.e_score_correction_bias": draw.normal(moe["experts"], mean=-0.5, std=0.3),
        **(_shared(draw, "shared_experts", hidden, moe["inner"] * moe["shared"]) if moe["shared"] else {}),
        **_experts(draw, hidden, moe["inner"], moe["experts"], layout),
    }


def _latent_attention(draw: _Draw, hidden: int, heads: int, sizes: Mapping[str, int]) -> Tensors:
    nope, rope, value, kv, q = (sizes[name] for name in ("nope", "rope", "value", "kv_lora", "q_lora"))
    tensors = {
        "kv_a_proj_with_mqa.weight": draw.matrix(kv + rope, hidden, 1.5),
        "kv_a_layernorm.weight": draw.normal(kv, mean=1.1, std=0.4),
        "kv_b_proj.weight": draw.matrix(heads * (nope + value), kv, 1.5),
        "o_proj.weight": draw.matrix(hidden, heads * value, 1.5),
    }
    if q:
        tensors["q_a_proj.weight"] = draw.matrix(q, hidden, 1.5)
        tensors["q_a_layernorm.weight"] = draw.normal(q, mean=1.1, std=0.4)
        tensors["q_b_proj.weight"] = draw.matrix(heads * (nope + rope), q, 1.5)
    else:
        tensors["q_proj.weight"] = draw.matrix(heads * (nope + rope), hidden, 1.5)
    return _under("self_attn.", tensors)


def write_extra_layer_family(
    folder: pathlib.Path,
    *,
    family: str,
    seed: int = 0,
    hidden: int = 44,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 12,
    bias: bool = True,
    normed: bool = False,
    nope: int = 10,
    rope: int = 8,
    value: int = 14,
    kv_lora: int = 20,
    q_lora: int = 24,
    intermediate: int = 60,
    dense_layers: int = 1,
    experts: int = 8,
    top_k: int = 3,
    inner: int = 18,
    shared: int = 1,
    groups: int = 1,
    kept_groups: int = 1,
    scale: float = 1.5,
    layouts: Sequence[str] = ("apart",),
    mtp_layout: str = "apart",
    vocab: int = 277,
    tied: bool = False,
    mtp: int = 1,  # modules
    mtp_embed: bool = False,
    mtp_lm_head: bool = False,
    dtype: str = "float32",
    theta: float = 1e4,
    rope_scaling: Mapping[str, Any] | None = None,
    max_positions: int = 512,
    shards: int = 1,
    logit_spread: float = 3.0,
) -> pathlib.Path:
    """A GLM-4.5 ("glm4_moe") or DeepSeek-V3 ("deepseek_v3") checkpoint; the MTP head is the layer behind the last."""
    draw = _Draw(seed)
    latent = family == "deepseek_v3"
    moe = {"experts": experts, "inner": inner, "shared": shared}
    sizes = {"nope": nope, "rope": rope, "value": value, "kv_lora": kv_lora, "q_lora": q_lora}

    def decoder_layer(layout: str | None) -> Tensors:
        layer = _norms(draw, hidden, *_LAYER_NORMS, mean=1.0)
        if latent:
            layer |= _latent_attention(draw, hidden, heads, sizes)
        else:
            layer |= plain_attention(draw, hidden, heads, kv_heads, head_dim, bias=bias, normed=normed)
        return layer | (
            _mlp(draw, hidden, intermediate) if layout is None else _deepseek_moe(draw, hidden, moe, layout)
        )

    tensors: Tensors = {"model.embed_tokens.weight": draw.matrix(vocab, hidden, logit_spread)}
    tensors |= _under("model.", _norms(draw, hidden, "norm", mean=1.2))
    for i in range(layers):
        layer = decoder_layer(None if i < dense_layers else layouts[i % len(layouts)])
        tensors |= _under(f"model.layers.{i}.", layer)
    if not tied:
        tensors["lm_head.weight"] = draw.matrix(vocab, hidden, logit_spread)
    for module in range(mtp):
        head = _norms(draw, hidden, "enorm", "hnorm", "shared_head.norm", mean=1.2)
        head["eh_proj.weight"] = draw.matrix(hidden, 2 * hidden, 1.5)
        if mtp_embed:
            head["embed_tokens.weight"] = draw.matrix(vocab, hidden, logit_spread)
        if mtp_lm_head:
            head["shared_head.head.weight"] = draw.matrix(vocab, hidden, logit_spread)
        tensors |= _under(f"model.layers.{layers + module}.", head | decoder_layer(mtp_layout))
    config = {
        "architectures": ["DeepseekV3ForCausalLM" if latent else "Glm4MoeForCausalLM"],
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if latent else kv_heads,
        "intermediate_size": intermediate,
        "first_k_dense_replace": dense_layers,
        "n_routed_experts": experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": inner,
        "n_shared_experts": shared,
        "n_group": groups,
        "topk_group": kept_groups,
        "norm_topk_prob": True,
        "routed_scaling_factor": scale,
        "num_nextn_predict_layers": int(mtp),
        "vocab_size": vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6 if latent else 1e-5,
        "max_position_embeddings": max_positions,
        "rope_theta": theta,
        "rope_scaling": None if rope_scaling is None else dict(rope_scaling),
        "tie_word_embeddings": tied,
        "dtype": dtype,
    }
    if latent:
        config |= {
            "attention_bias": False,
            "kv_lora_rank": kv_lora,
            "q_lora_rank": q_lora or None,
            "qk_nope_head_dim": nope,
            "qk_rope_head_dim": rope,
            "v_head_dim": value,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
        }
    else:
        config |= {"attention_bias": bias, "head_dim": head_dim, "partial_rotary_factor": 0.5, "use_qk_norm": normed}
    return _write(folder, config, tensors, vocab, dtype, shards)


def write_glm4_moe(folder: pathlib.Path, **settings: Any) -> pathlib.Path:
    """A GLM-4.5 checkpoint."""
    return write_extra_layer_family(folder, family="glm4_moe", **settings)


def write_deepseek_v3(folder: pathlib.Path, **settings: Any) -> pathlib.Path:
    """A DeepSeek-V3 checkpoint."""
    return write_extra_layer_family(folder, family="deepseek_v3", **settings)


def yarn(original: int, factor: float, **more: Any) -> dict[str, Any]:
    """``rope_scaling`` of YaRN as older files have it."""
    return {"type": "yarn", "factor": factor, "original_max_position_embeddings": original, **more}


def llama3(factor: float, high: float, original: int) -> dict[str, Any]:
    """``rope_scaling`` of Llama 3."""
    factors = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high}
    return {"rope_type": "llama3", **factors, "original_max_position_embeddings": original}


def yarn_parameters(original: int, factor: float, **more: Any) -> dict[str, Any]:
    """``rope_parameters`` of YaRN, as newer files have them, and no ``rope_theta`` at the top."""
    parameters = {**yarn(original, factor, **more), "rope_theta": 1e4}
    return {"rope_theta": None, "rope_parameters": parameters | {"rope_type": parameters.pop("type")}}


_DEEPSEEK_YARN = yarn(24, 8.0, beta_fast=4, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)  # 83 tokens are far beyond it

# Odd sizes throughout; every expert layout, also mixed; more than one shape of each branch.
SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3_5_moe": {
        "fused-head-apart": {"mtp_layout": "apart"},
        "apart-head-fused": shape(
            "hidden=36 heads=3 kv_heads=3 key_heads=1 value_heads=3 key_dim=8 value_dim=10 top_k=3",
            layouts=("apart",),
            mtp_layout="fused",
            tied=True,
        ),
        "mixed-layouts": shape(
            "experts=11 top_k=4 inner=14 shared=18 rotary_factor=0.5 shards=3",
            layouts=("fused", "apart"),
            layer_types=["linear_attention"] * 2 + ["full_attention"],
        ),
        "one-expert-each": {"experts": 5, "top_k": 1, "layer_types": ["full_attention", "full_attention"]},
        "all-experts": {"experts": 3, "top_k": 3, "hidden": 52, "head_dim": 20, "rotary_factor": 0.5},
    },
    "qwen3_next": {
        "r2": {},
        "r1": {"key_heads": 3, "value_heads": 3, "key_dim": 20, "value_dim": 12, "hidden": 48, "tied": True},
        "r3-fused": shape(
            "key_heads=2 value_heads=6 key_dim=8 value_dim=10 experts=9 top_k=4 kernel=3 heads=6 kv_heads=2",
            layouts=("fused",),
        ),
    },
    "llama": {
        "plain": {"theta": 5e5},
        "llama3-rope": shape("head_dim=20 theta=5e5", tied=False, rope_scaling=llama3(8.0, 4.0, 64)),
        "llama3-short": shape(
            "hidden=36 heads=3 kv_heads=1 head_dim=16 theta=1e4 shards=2", rope_scaling=llama3(4.0, 2.0, 30)
        ),
    },
    "qwen2": {
        "gqa2": {},
        "gqa7-untied": {"hidden": 56, "heads": 7, "kv_heads": 1, "head_dim": 8, "tied": False, "vocab": 283},
        "yarn": shape(
            "hidden=48 heads=3 kv_heads=1 head_dim=16 max_positions=128", rope_scaling=yarn(32, 4.0, beta_fast=8)
        ),
    },
    "gemma3": {
        "patterned": shape(
            "layers=4",
            keys={
                "sliding_window": 7,
                "sliding_window_pattern": 3,
                "rope_local_base_freq": 100.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
        "as-converted": shape(layers=7, theta=1e6, keys={"sliding_window": 5, "query_pre_attn_scalar": 12}),
        "typed": shape(
            "head_dim=20 heads=3 kv_heads=1 hidden=36",
            keys={
                "layer_types": ["full_attention", "sliding_attention"],
                "sliding_window": 40,
                "rope_theta": None,
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                },
            },
        ),
    },
    "gemma4": {
        "released": shape(layer_types=["sliding_attention", "full_attention"] * 2, keys={"sliding_window": 7}),
        "small": shape(
            "seed=7",
            layer_types=["full_attention", *["sliding_attention"] * 3, "full_attention"],
            keys={
                "sliding_window": 7,
                "hidden_size_per_layer_input": 10,
                "vocab_size_per_layer_input": 280,
                "num_kv_shared_layers": 3,
                "use_double_wide_mlp": True,
            },
        ),
        "inputs-alone": shape(
            "hidden=36 heads=3 kv_heads=3",
            layer_types=["sliding_attention", "full_attention"],
            keys={"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 277, "sliding_window": 40},
        ),
        "shared-alone": shape(
            "kv_heads=1",
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            keys={"attention_k_eq_v": False, "num_kv_shared_layers": 1, "sliding_window": 3},
        ),
        "as-transformers-writes": shape(
            "hidden=36 kv_heads=4",
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            keys={
                "attention_k_eq_v": False,
                "global_head_dim": None,
                "num_global_key_value_heads": None,
                "per_layer_config": {str(i): {"head_dim": 20, "num_key_value_heads": 1} for i in (0, 2)},
                "final_logit_softcapping": None,
                "sliding_window": 40,
                "rope_parameters": {
                    "full_attention": {"rope_type": "proportional", "rope_theta": 5e5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
        ),
    },
    "granite": {
        "factors": shape(keys={"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 6.0}),
        "untied": shape(tied=False, heads=3, kv_heads=3, head_dim=16, keys={"logits_scaling": 0.5}),
    },
    "gpt_oss": {
        "released": shape(
            "layers=3 hidden=36 intermediate=22",
            tied=False,
            keys={"sliding_window": 7, **yarn_parameters(24, 8.0, beta_fast=4, truncate=False)},
        ),
        "typed": shape(
            "heads=6 kv_heads=6",
            tied=False,
            keys={
                "sliding_window": 40,
                "layer_types": ["full_attention", "sliding_attention"],
                "swiglu_limit": 0.8,
                **yarn_parameters(24, 4.0),
            },
        ),
    },
    "ministral3": {
        "released": shape(
            keys=yarn_parameters(24, 8.0, beta_fast=4, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5)
        ),
        "window": shape(
            "head_dim=20 heads=3 kv_heads=1",
            tied=False,
            keys={"sliding_window": 11, **yarn_parameters(9, 3.0, beta_fast=4, llama_4_scaling_beta=0.1)},
        ),
    },
    "mistral": {
        "window": shape(tied=False, keys={"sliding_window": 11}, head_dim=20),
        "none": shape(tied=False, keys={"sliding_window": None}, heads=6, kv_heads=2, head_dim=8),
    },
    "olmo2": {"gqa2": {}, "untied": shape(tied=False, kv_heads=4, head_dim=16, hidden=64)},
    "phi3": {
        "window": shape(tied=False, keys={"sliding_window": 17}),
        "longrope": shape(
            "hidden=64 head_dim=16",
            tied=False,
            keys={
                "original_max_position_embeddings": 128,
                "rope_scaling": {
                    "type": "longrope",
                    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5, 3.0, 3.5],
                    "long_factor": [8.0] * 8,
                },
            },
        ),
        "partial": shape(tied=False, hidden=64, head_dim=16, keys={"partial_rotary_factor": 0.5}),
    },
    "qwen3_moe": {"normed": {}, "as-they-are": shape(tied=False, kv_heads=1, keys={"norm_topk_prob": False})},
    "smollm3": {
        "every-second": shape(layers=4, keys={"no_rope_layer_interval": 2}),
        "every-fourth": {"layers": 5},
        "listed": shape(layers=3, tied=False, keys={"no_rope_layers": [0, 1, 1]}),
    },
    "glm4_moe": {
        "air": {},
        "qk-norm": shape(
            "layers=3 dense_layers=2 scale=2.5 heads=6 kv_heads=1",
            normed=True,
            layouts=("fused",),
            mtp_lm_head=True,
            mtp_embed=True,
        ),
        "no-bias-groups": shape(
            "groups=4 kept_groups=2 shared=2 head_dim=20 shards=2 mtp=2", bias=False, mtp_layout="fused"
        ),
    },
    "deepseek_v3": {
        "yarn-groups": {"groups": 4, "kept_groups": 2, "rope_scaling": _DEEPSEEK_YARN, "max_positions": 192},
        "no-q-lora": shape(
            "q_lora=0 dense_layers=0 experts=6 top_k=2 shared=2 value=10 nope=14",
            layouts=("fused",),
            mtp_embed=True,
            mtp_lm_head=True,
        ),
        "all-sparse-mixed": shape(
            "dense_layers=0 layers=3 groups=2 kept_groups=1 heads=3 rope=12 kv_lora=28 theta=5e3 mtp=3",
            layouts=("apart", "fused"),
            mtp_layout="fused",
            mtp_embed=True,
            mtp_lm_head=True,
        ),
        "dense": {"dense_layers": 2, "heads": 2, "mtp": 0, "rope_scaling": _DEEPSEEK_YARN, "shards": 2},
    },
}
tiny.WRITERS |= {
    "qwen3_5_moe": write_qwen3_5_moe,
    "qwen3_next": write_qwen3_next,
    "llama": write_llama,
    "qwen2": write_qwen2,
    "gemma4": write_gemma4,
    "glm4_moe": write_glm4_moe,
    "deepseek_v3": write_deepseek_v3,
    **{family: _writer(family) for family in LIKE_LLAMA},
}
ALL_SHAPES = {"qwen3_5": tiny.QWEN3_5_SHAPES, "qwen3": tiny.QWEN3_SHAPES, **SHAPES}
