"""The architectures of GGUF files: how llama.cpp's converter named a family's keys and tensors, and what it changed.

Sources: ``convert_hf_to_gguf.py`` and ``gguf-py/gguf/constants.py`` in llama.cpp.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import attrs
import numpy as np
import torch

from specdec.checkpoints.gguf.blocks import BY_NAME
from specdec.errors import CheckpointError

TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
# config.json key -> metadata key behind the architecture's name
KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}
# likewise behind "rope.scaling."
YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "attention_factor": "yarn_attn_factor",
}
# and keys that are computed from others of the metadata
DERIVED = {key: f"rope.scaling.{name}" for key, name in YARN.items()} | {
    "layer_types": "attention.recurrent_layers",
    "linear_value_head_dim": "ssm.inner_size",
    "mscale": "rope.scaling.yarn_log_multiplier",
    "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    "partial_rotary_factor": "rope.dimension_count",
    "qk_nope_head_dim": "attention.key_length_mla",
    "rope_type": "rope.scaling.type",
    "v_head_dim": "attention.value_length_mla",
}
REALS = ("_eps", "_theta", "_freq", "_multiplier", "_scaling", "_factor")  # ends of keys that take any number
REQUIRED = KEYS.keys() - {"intermediate_size", "num_key_value_heads", "head_dim", "rope_theta"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BEFORE_MLP = {"ffn_norm": "post_attention_layernorm"}
_BEHIND_ATTENTION = {"post_attention_norm": "post_attention_layernorm"}
_EXPERTS = {"ffn_gate_inp": "mlp.gate", "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj"} | {
    f"ffn_{name}_exps": f"mlp.switch_mlp.{name}_proj" for name in ("gate", "up", "down")
}
_QWEN_SHARED = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"} | {
    f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")
}
_DEEPSEEK_EXPERTS = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias", **_EXPERTS} | {
    f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")
}
_DELTA = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
# Tensors that the converter squeezed, and where the axis of size 1 was
SQUEEZED = {"linear_attn.conv1d.weight": 1, "mlp.shared_expert_gate.weight": 0}
_MOST_HEADS = 256  # in a block
# Names of an MTP head's tensors beside those of its layer
_QWEN_HEAD = {
    "eh_proj": "mtp.fc",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "shared_head_norm": "mtp.norm",
    "shared_head_head": "mtp.lm_head",
    "embed_tokens": "mtp.embed_tokens",
    "": "mtp.layers.0",
}
_GLM_HEAD = {"": "layers.{layer}"} | {
    name: "layers.{layer}." + name.replace("shared_head_", "shared_head.") for name in _QWEN_HEAD if name
}
_EXPERT_KEYS = {"num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length"}
_QWEN_KEYS = {"num_experts": "expert_count", **_EXPERT_KEYS}
_SHARED_KEYS = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length", **_QWEN_KEYS}
_DEEPSEEK_KEYS = _EXPERT_KEYS | {
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}
_DELTA_KEYS = {
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "full_attention_interval": "full_attention_interval",
}
_DELTA_SILENT = ("ssm.inner_size", "attention.recurrent_layers", "rope.dimension_sections")

Change = Callable[[torch.Tensor], torch.Tensor]


@attrs.frozen(kw_only=True)
class Architecture:
    """What the converter did to a family.

    Attributes:
        model_type: of the family.
        names: of a layer's tensors beside the usual ones, theirs -> ours; ``.weight`` and ``.bias`` behind them stay.
        keys: further keys, as ``KEYS``.
        fixed: keys of ``config.json`` that the converter leaves out.
        complete: adds to the config what several keys say together, or which tensors there are in a layer (theirs).
        changes: what undoes the converter's change of a layer's tensor: by our name, config and stored type. None for
            most.
        mtp: the key of ``config.json`` that counts MTP layers, which are behind the others; "" without any.
        head: names of the head's tensors; "" for its layer.
        silent: keys that say what the tensors or other keys say too.
        partial: a part of a head may be rotated.
    """

    model_type: str
    names: Mapping[str, str] = _BEFORE_MLP
    keys: Mapping[str, str] = {}
    fixed: Mapping[str, Any] = {}
    complete: Callable[[dict[str, Any], Mapping[str, Any], Collection[str]], None] = lambda config, metadata, parts: (
        None
    )
    changes: Callable[[str, Mapping[str, Any], str], Change | None] = lambda part, config, kind: None
    mtp: str = ""
    head: Mapping[str, str] = {}
    silent: tuple[str, ...] = ()
    partial: bool = False


# --- changes ----------------------------------------------------------------------------------------------------------


def _halves_of_heads(stored: torch.Tensor, *, heads: int, others: int) -> torch.Tensor:
    """Bring rows of rotary pairs (a0 b0 a1 b1 ...) into halves (a0 a1 ... b0 b1 ...), head by head, and leave the rows
    of ``others`` behind them."""
    rows = stored.view(heads + others, -1, 2, *stored.shape[1:])
    halves = rows[:heads].transpose(1, 2).reshape(-1, *stored.shape[1:])
    return torch.cat([halves, stored[len(halves) :]]) if others else halves


def _interleaved(part: str, config: Mapping[str, Any], kind: str) -> Change | None:
    """Rows of query and key heads are in the order of adjacent rotary pairs."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    counts = {"q_proj": (heads, 0), "k_proj": (kv_heads, 0), "qkv_proj": (heads + kv_heads, kv_heads)}
    turned, others = counts.get(part.removeprefix("self_attn.").rpartition(".")[0], (0, 0))
    return functools.partial(_halves_of_heads, heads=turned, others=others) if turned else None


def _less_one(stored: torch.Tensor) -> torch.Tensor:
    if not stored.is_floating_point():
        raise RuntimeError("a quantised norm")
    return stored - 1


def _offset_norms(part: str, config: Mapping[str, Any], kind: str) -> Change | None:
    """Norms hold the factor, and the family's an offset from 1."""
    return _less_one if part.endswith("norm.weight") and part != "linear_attn.norm.weight" else None


def _logarithm(stored: torch.Tensor) -> torch.Tensor:
    return (-stored).log()


def _qwen3_next(part: str, config: Mapping[str, Any], kind: str) -> Change | None:
    """``A_log`` is stored as ``-exp``."""
    return _logarithm if part == "linear_attn.A_log" else _offset_norms(part, config, kind)


def _grouped(stored: torch.Tensor, *, key_heads: int, ratio: int, axis: int = 0, skipped: int = 0) -> torch.Tensor:
    """Bring value heads that are dealt to the key heads in turn into groups, one per key head."""
    if axis:
        return _grouped(stored.transpose(0, 1), key_heads=key_heads, ratio=ratio).transpose(0, 1).contiguous()
    dealt = stored[skipped:]
    groups = dealt.reshape(ratio, key_heads, -1, *stored.shape[1:]).transpose(0, 1).reshape(dealt.shape)
    return torch.cat([stored[:skipped], groups])


@attrs.frozen
class Columns:
    """``_grouped`` of the columns of unpacked blocks, whose bytes may hold columns of several heads."""

    key_heads: int
    ratio: int

    def __call__(self, part: torch.Tensor) -> torch.Tensor:
        """Bring codes, scales, units or values ``[N, n]`` into order; one of several heads is repeated for each."""
        heads = self.key_heads * self.ratio
        times = heads // (math.gcd(part.shape[1], heads) or 1)
        if not 0 < times <= _MOST_HEADS:
            raise CheckpointError(f"ssm_out has {part.shape[1]} columns, and the metadata say {heads} value heads")
        return _grouped(part.repeat_interleave(times, 1), key_heads=self.key_heads, ratio=self.ratio, axis=1)


def _qwen3_5(part: str, config: Mapping[str, Any], kind: str) -> Change | None:
    """Value heads are dealt to the key heads in turn, unlike in the original, where each has a group of them."""
    sizes = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    key_heads, value_heads, key_dim, value_dim = (config.get(size, 0) for size in sizes)
    keys = 2 * key_heads * key_dim
    name = part.removesuffix(".weight").removeprefix("linear_attn.")
    skipped = {"in_proj_qkv": keys, "conv1d": keys, "in_proj_z": 0, "in_proj_a": 0, "in_proj_b": 0, "dt_bias": 0}
    change = _qwen3_next(part, config, kind)
    if not part.startswith("linear_attn.") or key_heads == value_heads or not key_heads:
        return change
    group = functools.partial(_grouped, key_heads=key_heads, ratio=value_heads // key_heads)
    if name == "out_proj" and (width := BY_NAME[kind].group):
        if value_dim % width:
            raise CheckpointError(
                f"ssm_out is stored as {kind}, in which {width} columns have one scale, and a head has {value_dim}",
                try_="a file in which it is stored as F16 or BF16",
            )
        return Columns(key_heads, value_heads // key_heads)
    if name == "out_proj":
        return functools.partial(group, axis=1)
    if name == "A_log":
        return lambda stored: _logarithm(group(stored))
    return functools.partial(group, skipped=skipped[name]) if name in skipped else change


# --- configs ----------------------------------------------------------------------------------------------------------


def _gemma3(config: dict[str, Any], metadata: Mapping[str, Any], parts: Collection[str]) -> None:
    """The scale of attention scores follows from the size: the largest model has one of its own."""
    heads = config["num_attention_heads"]
    if heads and (config["num_hidden_layers"] == 62 or "head_dim" not in config):
        config["query_pre_attn_scalar"] = config["hidden_size"] // heads
    else:
        config["query_pre_attn_scalar"] = config.get("head_dim")


def _delta(config: dict[str, Any], metadata: Mapping[str, Any], parts: Collection[str]) -> None:
    heads, inner = config.get("linear_num_value_heads"), metadata.get("ssm.inner_size")
    if heads and isinstance(inner, int):
        config["linear_value_head_dim"] = inner // heads
    recurrent = metadata.get("attention.recurrent_layers")
    if isinstance(recurrent, np.ndarray):
        kinds = ["linear_attention" if one else "full_attention" for one in recurrent.tolist()]
        config["layer_types"] = kinds[: config["num_hidden_layers"]]


def _glm4_moe(config: dict[str, Any], metadata: Mapping[str, Any], parts: Collection[str]) -> None:
    biased = not {"attn_q.bias", "attn_qkv.bias"}.isdisjoint(parts)
    config |= {"attention_bias": biased, "use_qk_norm": "attn_q_norm.weight" in parts}
    _gating(config, metadata, usual=2)


def _gpt_oss(config: dict[str, Any], metadata: Mapping[str, Any], parts: Collection[str]) -> None:
    if "rope_scaling" in config:
        config["rope_scaling"]["truncate"] = False


def _mistral3(config: dict[str, Any], metadata: Mapping[str, Any], parts: Collection[str]) -> None:
    """Mistral Small 3.1 has the name too, without the scale of queries. The multiplier is not a tenth here."""
    beta, rope = metadata.get("attention.temperature_scale"), config.get("rope_scaling", {})
    if "mscale_all_dim" in rope:
        rope |= {"mscale": 1.0, "mscale_all_dim": metadata["rope.scaling.yarn_log_multiplier"]}
    if beta is not None:
        config |= {"model_type": "ministral3", "rope_scaling": {**rope, "llama_4_scaling_beta": beta}}


def _gating(config: dict[str, Any], metadata: Mapping[str, Any], *, usual: int) -> None:
    kind = metadata.get("expert_gating_func", usual)
    config["scoring_func"] = "sigmoid" if type(kind) is int and kind == 2 else "softmax"


def _deepseek2(config: dict[str, Any], metadata: Mapping[str, Any], parts: Collection[str]) -> None:
    """Sizes of a head: the keys of other families describe the absorbed form here."""
    width, rotary = config.pop("head_dim", None), config.get("qk_rope_head_dim")
    width = metadata.get("attention.key_length_mla", width)
    config["v_head_dim"] = metadata.get("attention.value_length_mla", metadata.get("attention.value_length"))
    if isinstance(width, int) and isinstance(rotary, int):
        config["qk_nope_head_dim"] = width - rotary
    config["num_key_value_heads"] = config["num_attention_heads"]
    _gating(config, metadata, usual=2 if "exp_probs_b.bias" in parts else 1)


_HYBRID: dict[str, Any] = {
    "complete": _delta,
    "partial": True,
    "mtp": "mtp_num_hidden_layers",
    "head": _QWEN_HEAD,
    "silent": _DELTA_SILENT,
}
ARCHITECTURES = {
    "deepseek2": Architecture(
        model_type="deepseek_v3",
        names={
            **_BEFORE_MLP,
            **_DEEPSEEK_EXPERTS,
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b": "self_attn.embed_q",
            "attn_v_b": "self_attn.unembed_out",
        },
        keys={
            **_DEEPSEEK_KEYS,
            "q_lora_rank": "attention.q_lora_rank",
            "kv_lora_rank": "attention.kv_lora_rank",
            "qk_rope_head_dim": "rope.dimension_count",
        },
        complete=_deepseek2,
        silent=("attention.key_length_mla", "attention.value_length_mla", "expert_gating_func"),
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        names={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        keys={"sliding_window": "attention.sliding_window", "rope_local_base_freq": "rope.freq_base_swa"},
        fixed={"hidden_activation": "gelu_pytorch_tanh"},
        complete=_gemma3,
        changes=_offset_norms,
    ),
    "glm4moe": Architecture(
        model_type="glm4_moe",
        names={**_BEHIND_ATTENTION, **_DEEPSEEK_EXPERTS},
        keys=_DEEPSEEK_KEYS,
        complete=_glm4_moe,
        partial=True,
        mtp="num_nextn_predict_layers",
        head=_GLM_HEAD,
        silent=("expert_gating_func",),
    ),
    "gpt-oss": Architecture(
        model_type="gpt_oss",
        names={**_BEHIND_ATTENTION, **_EXPERTS, "attn_sinks.weight": "self_attn.sinks", "ffn_gate_inp": "mlp.router"},
        keys={
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
            "sliding_window": "attention.sliding_window",
        },
        complete=_gpt_oss,
    ),
    "granite": Architecture(
        model_type="granite",
        keys={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        changes=_interleaved,
    ),
    "llama": Architecture(model_type="llama", changes=_interleaved),
    "mistral3": Architecture(
        model_type="mistral", complete=_mistral3, changes=_interleaved, silent=("attention.temperature_scale",)
    ),
    "olmo2": Architecture(
        model_type="olmo2", names={**_BEHIND_ATTENTION, "post_ffw_norm": "post_feedforward_layernorm"}
    ),
    "phi3": Architecture(
        model_type="phi3",
        names={**_BEFORE_MLP, "ffn_up": "mlp.gate_up_proj"},
        keys={"sliding_window": "attention.sliding_window"},
        partial=True,
    ),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen3": Architecture(model_type="qwen3"),
    "qwen3moe": Architecture(
        model_type="qwen3_moe", names={**_BEFORE_MLP, **_EXPERTS}, keys=_QWEN_KEYS, fixed={"norm_topk_prob": True}
    ),
    "qwen3next": Architecture(
        model_type="qwen3_next",
        names={**_BEHIND_ATTENTION, **_EXPERTS, **_QWEN_SHARED, **_DELTA},
        keys={**_SHARED_KEYS, **_DELTA_KEYS},
        changes=_qwen3_next,
        **_HYBRID,
    ),
    "qwen35": Architecture(
        model_type="qwen3_5_text", names={**_BEHIND_ATTENTION, **_DELTA}, keys=_DELTA_KEYS, changes=_qwen3_5, **_HYBRID
    ),
    "qwen35moe": Architecture(
        model_type="qwen3_5_moe_text",
        names={**_BEHIND_ATTENTION, **_EXPERTS, **_QWEN_SHARED, **_DELTA},
        keys={**_SHARED_KEYS, **_DELTA_KEYS},
        changes=_qwen3_5,
        **_HYBRID,
    ),
    "smollm3": Architecture(model_type="smollm3", changes=_interleaved),
}
