"""Tiny random checkpoints, written by transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

VOCAB = 61
DENSE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
}
DEEPSEEK = {
    **DENSE,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_nextn_predict_layers": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "qwen3": {**DENSE, "head_dim": 8},
    "mistral": {**DENSE, "sliding_window": 8},
    "gemma3_text": {
        **DENSE,
        "head_dim": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 8,
    },
    "gpt2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 160, "eos_token_id": 2},
    "qwen3_next": {
        **DENSE,
        **LINEAR,
        **MOE,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "mamba": {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "eos_token_id": 2},
    "lfm2": {
        **DENSE,
        "conv_L_cache": 3,
        "full_attn_idxs": [1],
        "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
    },
    "openai-gpt": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 160},
    "recurrent_gemma": {
        **DENSE,
        "head_dim": 8,
        "lru_width": 32,
        "attention_window_size": 8,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "deepseek_v3": DEEPSEEK,
}
SSM = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_ssm": 32, "mamba_d_state": 8, "mamba_n_groups": 1}
FURTHER: dict[str, dict[str, Any]] = {
    "opt": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 160,
        "word_embed_proj_dim": 32,
    },
    "bloom": {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "llama4_text": {
        **DENSE,
        "head_dim": 8,
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 8,
    },
    "gpt_oss": {**DENSE, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8},
    "mamba2": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "falcon_h1": {**DENSE, **SSM, "head_dim": 8},
    "nemotron_h": {
        **DENSE,
        "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "head_dim": 8,
    },
    "deepseek_v4": {**DENSE, "head_dim": 16},
}
"""Architectures that are tested less closely: other positions, masks, and classes of caches."""
CONFIGS |= FURTHER


def write(folder: Path, model_type: str, *, seed: int = 0, **changes: Any) -> Path:
    """A checkpoint with a one-token-per-word tokenizer; its logits are spread enough to avoid greedy near-ties."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**CONFIGS.get(model_type, DENSE), **changes})
    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in network.named_parameters():
        if weight.dim() >= 2 and "conv" not in name and "A_log" not in name:
            torch.nn.init.normal_(weight, std=0.25)
    network.save_pretrained(folder)
    words = {"<unk>": 0, "<bos>": 1, "<eos>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def add_head(folder: Path, *, seed: int = 1) -> None:
    """Give a checkpoint of DeepSeek-V3 an MTP layer, under the names that published ones have."""
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    last, hidden = config["num_hidden_layers"] - 1, config["hidden_size"]
    generator = torch.Generator().manual_seed(seed)
    head = f"model.layers.{last + 1}."
    added = {
        name.replace(f"model.layers.{last}.", head): torch.randn(array.shape, generator=generator) * 0.2
        + (1.0 if array.dim() == 1 and "norm" in name else 0.0)
        for name, array in weights.items()
        if name.startswith(f"model.layers.{last}.")
    }
    added[f"{head}eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * 0.2
    for name in ("enorm", "hnorm", "shared_head.norm"):
        added[f"{head}{name}.weight"] = 1 + 0.1 * torch.randn(hidden, generator=generator)
    added[f"{head}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    added[f"{head}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights | added, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of a checkpoint's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
