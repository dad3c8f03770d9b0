"""Write and read the Hugging Face layout of the model."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tools.train_demo.data import END_OF_TEXT, IM_END
from tools.train_demo.model import DemoModel, ModelConfig
from tools.train_demo.tokenizer import write_tokenizer


def hugging_face_config(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, object]:
    """config.json of a ``Qwen3_5ForCausalLM``."""
    kinds = ("linear_attention", "full_attention")
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "layer_types": [kinds[config.is_full_attention(i)] for i in range(config.num_hidden_layers)],
        "full_attention_interval": config.full_attention_interval,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "output_gate_type": "swish",  # of the linear layers; the attention's gate is a sigmoid
        "linear_num_key_heads": config.linear_num_key_heads,
        "linear_num_value_heads": config.linear_num_value_heads,
        "linear_key_head_dim": config.linear_key_head_dim,
        "linear_value_head_dim": config.linear_value_head_dim,
        "linear_conv_kernel_dim": config.linear_conv_kernel_dim,
        "mamba_ssm_dtype": "float32",
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": 0.02,
        "max_position_embeddings": config.max_position_embeddings,
        "partial_rotary_factor": config.partial_rotary_factor,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": int(config.rope_theta),
            "partial_rotary_factor": config.partial_rotary_factor,
        },
        "tie_word_embeddings": True,
        "use_cache": True,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "bos_token_id": end_of_text,
        "pad_token_id": end_of_text,
        "eos_token_id": [tokenizer.token_to_id(IM_END), end_of_text],
    }


def export_model(model: DemoModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write all files to a folder next to ``folder`` and rename each into place, the weights first."""
    folder.mkdir(parents=True, exist_ok=True)
    config = hugging_face_config(model.config, tokenizer)
    generation = {key: config[key] for key in ("bos_token_id", "pad_token_id", "eos_token_id")}
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
        part = Path(name)
        tensors = {
            key: value.detach().to("cpu", torch.bfloat16).contiguous() for key, value in model.state_dict().items()
        }
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
        write_tokenizer(tokenizer, part)
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        generation_text = json.dumps(generation | {"do_sample": False}, indent=2) + "\n"
        (part / "generation_config.json").write_text(generation_text, encoding="utf-8")
        names = [
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
            "generation_config.json",
            "config.json",
        ]
        for file in names:
            (part / file).chmod(0o644)
            (part / file).replace(folder / file)


def load_model(folder: Path, compute_dtype: torch.dtype = torch.float32) -> DemoModel:
    """The training model with the exported weights, in float32."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    fields = {name: raw[name] for name in ModelConfig.__dataclass_fields__ if name in raw}
    model = DemoModel(ModelConfig(**fields, rope_theta=raw["rope_parameters"]["rope_theta"]), compute_dtype)
    model.load_state_dict({name: value.float() for name, value in load_file(folder / "model.safetensors").items()})
    return model.eval()
