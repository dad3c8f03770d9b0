"""Write GGUF files from tiny safetensors checkpoints with the `gguf` package, as llama.cpp's converter would."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_KINDS = {"<|endoftext|>": 3, "<|im_start|>": 3, "<|im_end|>": 3}


def write_gguf(file: pathlib.Path, folder: pathlib.Path, *, matrices: str = "F32", **metadata: Any) -> pathlib.Path:
    """``folder`` as a GGUF file; its matrices as ``matrices`` where their rows allow it, all else in float32."""
    config = json.loads((folder / "config.json").read_text())
    arch, heads = config["model_type"], config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"])
    _add_tokenizer(writer, folder)
    for key, value in metadata.items():
        for values in writer.kv_data:
            values.pop(key, None)
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.to(torch.float32)
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            rows = values.view(heads if ".q_proj." in name else kv_heads, 2, -1, values.shape[1])
            values = rows.transpose(1, 2).reshape(values.shape)
        kind = gguf.GGMLQuantizationType[matrices]
        whole = values.ndim == 2 and values.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        kind = kind if whole else gguf.GGMLQuantizationType.F32
        writer.add_tensor(renamed(name), gguf.quants.quantize(values.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def renamed(name: str) -> str:
    """The converter's name of a tensor."""
    stem, _, kind = name.removeprefix("model.").rpartition(".")
    if not stem.startswith("layers."):
        return f"{_NAMES[stem]}.{kind}"
    _, layer, part = stem.split(".", 2)
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


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
