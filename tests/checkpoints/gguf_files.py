"""Write GGUF files from tiny safetensors checkpoints with the `gguf` package, as llama.cpp's converter would."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

ARCHITECTURES = {
    "deepseek_v3": "deepseek2",
    "gemma3_text": "gemma3",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "ministral3": "mistral3",
    "mistral": "llama",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
}
_KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "v_head_dim": "attention.value_length_mla",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
}
_NEXTN = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head_norm",
    "lm_head": "shared_head_head",
    "shared_head.norm": "shared_head_norm",
    "shared_head.head": "shared_head_head",
    **{name: name for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
}
_KINDS = {"<|endoftext|>": 3, "<|im_start|>": 3, "<|im_end|>": 3}
Tensors = dict[str, torch.Tensor]


def write_gguf(
    file: pathlib.Path,
    folder: pathlib.Path,
    *,
    matrices: str = "F32",
    fused: bool = False,
    part: str = "whole",
    without: str = "nothing",
    **metadata: Any,
) -> pathlib.Path:
    """``folder`` as a GGUF file; its matrices as ``matrices`` where their rows allow it, all else in float32.

    ``fused``: as with the converter's ``--fuse-qkv`` and ``--fuse-gate-up-exps``. ``part``: "trunk" as with
    ``--no-mtp``, "head" as with ``--mtp``. Tensors with ``without`` in their name are left out.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES.get(config["model_type"], config["model_type"])
    tensors = load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(file, arch)
    _add_tokenizer(writer, folder)
    own = {f"{arch}.{key}": value for key, value in _metadata(config, arch, tensors).items()}
    layers = config["num_hidden_layers"]
    if part == "trunk":
        own |= {f"{arch}.nextn_predict_layers": None, f"{arch}.block_count": layers}
    for key, value in (own | metadata).items():
        for values in writer.kv_data:
            values.pop(key, None)
        if value is None:
            continue
        kind = gguf.GGUFValueType.ARRAY if isinstance(value, list) else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)
    theirs = dict(converted(config, arch, {name: tensor.to(torch.float32) for name, tensor in tensors.items()}))
    for name, values in (_fused(theirs) if fused else theirs).items():
        block = int(name.split(".")[1]) if name.startswith("blk.") else None
        if without in name or (block is not None and part == ("trunk" if block >= layers else "head")):
            continue
        kind = gguf.GGMLQuantizationType[matrices]
        whole = values.ndim >= 2 and values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        whole = whole and "ssm_conv" not in name and not name.endswith(".bias")
        kind = kind if whole else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values.contiguous().numpy(), kind), raw_dtype=kind)
    return saved(writer, file)


def saved(writer: gguf.GGUFWriter, file: pathlib.Path) -> pathlib.Path:
    """The file, written."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def copied(reader: gguf.GGUFReader, file: pathlib.Path, *, fields: bool = True, arch: str = "llama") -> gguf.GGUFWriter:
    """A writer of another file of the same architecture, with the metadata of this one if ``fields``."""
    writer = gguf.GGUFWriter(file, arch)
    for field in reader.fields.values() if fields else ():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            kinds = [*field.types, None]
            writer.add_key_value(field.name, field.contents(), kinds[0], sub_type=kinds[1])
    return writer


def _metadata(config: dict[str, Any], arch: str, tensors: Tensors) -> dict[str, Any]:
    unused = ("sliding_window",) if arch == "qwen2" else ()
    found = {_KEYS[key]: value for key, value in config.items() if key in _KEYS and value is not None}
    found = {key: value for key, value in found.items() if key.split(".")[-1] not in unused}
    width = config.get("head_dim")
    rotary = None if width is None else int(width * config.get("partial_rotary_factor", 1.0))
    if arch.startswith("qwen3") and "full_attention_interval" not in found and "linear_num_key_heads" in config:
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        found |= {"ssm.inner_size": values, "rope.dimension_sections": [rotary // 2, 0, 0, 0]}
        found["attention.recurrent_layers"] = [kind == "linear_attention" for kind in config["layer_types"]]
        rotary = int(width * config["rope_parameters"]["partial_rotary_factor"])
    if rotary is not None:
        found |= {"rope.dimension_count": rotary, "attention.value_length": width}
    heads = [name for name in tensors if name.endswith(("mtp.fc.weight", "eh_proj.weight"))]
    if heads and arch != "deepseek2":  # which drops the head
        found |= {"nextn_predict_layers": len(heads), "block_count": config["num_hidden_layers"] + len(heads)}
    if arch in ("glm4moe", "deepseek2"):
        found |= {"expert_weights_norm": True, "expert_gating_func": 2}
    if arch == "deepseek2":
        nope, rope, rank = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["kv_lora_rank"]
        found |= {"attention.key_length_mla": nope + rope, "rope.dimension_count": rope, "attention.head_count_kv": 1}
        found |= {"attention.key_length": rank + rope, "attention.value_length": rank}
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if "rope_theta" in scaling:
        found["rope.freq_base"] = scaling["rope_theta"]
    if arch == "gpt-oss":
        found["expert_feed_forward_length"] = config["intermediate_size"]
    if arch == "mistral3":
        found["attention.temperature_scale"] = scaling["llama_4_scaling_beta"]
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": scaling["factor"]}
    if kind in ("yarn", "longrope"):
        original = scaling.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
        found["rope.scaling.original_context_length"] = original
    if kind == "yarn":
        for key in ("beta_fast", "beta_slow"):
            if key in scaling:
                found[f"rope.scaling.yarn_{key}"] = float(scaling[key])
        if "mscale_all_dim" in scaling:
            tenth = 1.0 if arch == "mistral3" else 0.1
            found["rope.scaling.yarn_log_multiplier"] = tenth * scaling["mscale_all_dim"]
    return found


def converted(config: dict[str, Any], arch: str, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """The converter's tensors, by its names."""
    layers, experts = config["num_hidden_layers"], {}
    table = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[arch.upper().replace("GLM4MOE", "GLM4_MOE").replace("-", "_")], layers + 9
    )
    for name, values in tensors.items():
        name = name.removeprefix("model.")
        if name.startswith("mtp."):
            rest = name.removeprefix("mtp.")
            layer = f"layers.{layers}."
            name = rest.replace("layers.0.", layer) if rest.startswith("layers.") else f"{layer}{rest}"
        number = int(name.split(".")[1]) if name.startswith("layers.") else -1
        if number >= layers and arch == "deepseek2":
            continue
        if ".experts." in name:
            experts[name] = values
            continue
        rest = ".".join(name.split(".")[2:]).removesuffix(".weight") if number >= layers else ""
        if rest in _NEXTN:
            yield f"blk.{number}.nextn.{_NEXTN[rest]}.weight", _normed(name, values, arch)
            continue
        for part, value in _changed(config, arch, name, values):
            theirs = table.get_name(f"model.{part}", try_suffixes=(".weight", ".bias")) or table.get_name(
                part, try_suffixes=(".weight", ".bias")
            )
            assert theirs is not None, (arch, part)
            yield theirs, value
    for length in ("short", "long"):
        factors = (config.get("rope_scaling") or {}).get(f"{length}_factor")
        if factors:
            yield f"rope_factors_{length}.weight", torch.tensor(factors)
    yield from (_in_turn if arch == "gpt-oss" else _stacked)(experts)


def _normed(name: str, values: torch.Tensor, arch: str) -> torch.Tensor:
    offset = arch in ("gemma3", "qwen3next", "qwen35", "qwen35moe")
    names = ("norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
    return values + 1 if offset and name.endswith(names) and "linear_attn" not in name else values


def _changed(config: dict[str, Any], arch: str, name: str, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """What the converter makes of a tensor, still by the original's names."""
    values = _normed(name, values, arch)
    heads = {"q": config["num_attention_heads"], "k": config.get("num_key_value_heads")}
    if arch in ("llama", "granite", "mistral3", "smollm3") and name[-14:] in (".q_proj.weight", ".k_proj.weight"):
        rows = values.view(heads[name[-13]], 2, -1, values.shape[1])
        values = rows.transpose(1, 2).reshape(values.shape)
    if name.endswith("kv_b_proj.weight"):
        nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
        both = values.view(config["num_attention_heads"], nope + value, -1)
        yield name.replace("kv_b_proj", "k_b_proj"), both[:, :nope].transpose(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), both[:, nope:]
        return
    if ".linear_attn." in name:
        yield from _delta(config, arch, name, values)
        return
    if name.endswith("shared_expert_gate.weight"):
        values = values.squeeze()
    if name.endswith("sinks"):
        name = f"{name}.weight"
    yield name.replace("correction_bias", "correction.bias"), values


def _delta(config: dict[str, Any], arch: str, name: str, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width, ratio = config["linear_value_head_dim"], heads // keys
    part = name.split(".linear_attn.")[1].removesuffix(".weight")
    if part == "in_proj_qkvz":
        sizes = [config["linear_key_head_dim"]] * 2 + [ratio * width] * 2
        q, k, v, z = values.view(keys, sum(sizes), -1).split(sizes, dim=1)
        yield name.replace("qkvz", "qkv"), torch.cat([one.flatten(0, 1) for one in (q, k, v)])
        yield name.replace("qkvz", "z"), z.flatten(0, 1)
        return
    values = {"A_log": lambda x: -x.exp(), "conv1d": lambda x: x.squeeze(1)}.get(part, lambda x: x)(values)

    def dealt(rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(keys, ratio, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    if arch != "qwen3next":
        if part in ("in_proj_qkv", "conv1d"):
            start = 2 * keys * config["linear_key_head_dim"]
            values = torch.cat([values[:start], dealt(values[start:])])
        elif part == "out_proj":
            values = dealt(values.T).T
        elif part != "norm":
            values = dealt(values)
    yield name.replace("dt_bias", "dt_proj.bias"), values


def _fused(tensors: Tensors) -> Tensors:
    """As with ``--fuse-qkv`` and ``--fuse-gate-up-exps``."""
    qkv, experts = ("attn_q", "attn_k", "attn_v"), ("ffn_gate_exps", "ffn_up_exps")
    for parts, whole, axis in ((qkv, "attn_qkv", 0), (experts, "ffn_gate_up_exps", 1)):
        for name in [name for name in tensors if f".{parts[0]}." in name]:
            *names, fused = (name.replace(f".{parts[0]}.", f".{part}.") for part in (*parts, whole))
            if tensors.keys() >= set(names) and not (axis and name.replace("weight", "bias") in tensors):
                tensors[fused] = torch.cat([tensors.pop(one) for one in names], axis)
    return tensors


def _in_turn(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """gpt-oss's experts, decoded: gate and up in turn along the last axis, which is a matrix's rows."""
    for name, values in tensors.items():
        layer, part = name.split(".")[1], name.split(".experts.")[1]
        kind = "bias" if part.endswith("_bias") else "weight"
        rows = values if kind == "bias" else values.transpose(1, 2)
        parts = {"down": rows} if part.startswith("down") else {"gate": rows[:, ::2], "up": rows[:, 1::2]}
        for which, some in parts.items():
            yield f"blk.{layer}.ffn_{which}_exps.{kind}", some


def _stacked(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    found: dict[str, dict[int, torch.Tensor]] = {}
    for name, values in tensors.items():
        layer, rest = name.split(".")[1], name.split(".experts.")[1]
        if rest == "gate_up_proj":
            for part, half in zip(("gate", "up"), values.chunk(2, dim=1), strict=True):
                yield f"blk.{layer}.ffn_{part}_exps.weight", half
        elif rest == "down_proj":
            yield f"blk.{layer}.ffn_down_exps.weight", values
        else:
            expert, part, _ = rest.split(".")
            found.setdefault(f"blk.{layer}.ffn_{part.removesuffix('_proj')}_exps.weight", {})[int(expert)] = values
    for name, experts in found.items():
        yield name, torch.stack([experts[e] for e in sorted(experts)])


def _add_tokenizer(writer: gguf.GGUFWriter, folder: pathlib.Path) -> None:
    told = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = dict(told["model"]["vocab"]) | {token["content"]: token["id"] for token in told["added_tokens"]}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([_KINDS.get(token, 1) for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in told["model"]["merges"]])
    writer.add_eos_token_id(vocabulary[settings["eos_token"]])
    writer.add_pad_token_id(vocabulary[settings["pad_token"]])
    writer.add_chat_template(settings["chat_template"])


def random_blocks(kind: str, count: int, seed: int) -> np.ndarray[Any, Any]:
    """Blocks ``[count, bytes]`` with any bits, except that their float16 numbers are finite."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    blocks = np.random.default_rng(seed).integers(0, 256, (count, size), np.uint8)
    for at in HALF_FLOATS.get(kind, ()):
        exponent = blocks[:, at + 1]
        exponent[(exponent & 0x7C) == 0x7C] &= 0xBF
    if kind == "MXFP4":
        blocks[:, 0] = np.minimum(blocks[:, 0], 251)
    return blocks


HALF_FLOATS = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
