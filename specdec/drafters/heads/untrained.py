"""Write an untrained head for a target: what drafting costs can be measured before a head is trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specdec.checkpoints import write_checkpoint
from specdec.contract import ModelInfo
from specdec.drafters.heads.files import DFLASH, DSPARK, P_EAGLE

HEAD_DIM, BLOCK, RANK = 64, 8, 16


def write_untrained(folder: Path, kind: str, info: ModelInfo, *, seed: int = 0) -> Path:
    """Write a head of this kind with random weights, in speculators' layout: one layer, the target's vocabulary."""
    hidden = info.hidden_size
    dim = min(HEAD_DIM, 2 * max(1, hidden // 2))
    heads = max(1, hidden // dim)
    ids = sorted({min(k, info.layers) for k in (2, info.layers // 2, max(info.layers - 3, 0))})
    layer = {
        "model_type": "qwen3" if kind in (DFLASH, DSPARK) else "llama",
        "vocab_size": info.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": dim,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
    }
    config: dict[str, Any] = {
        "speculators_model_type": {P_EAGLE: "peagle"}.get(kind, kind),
        "draft_vocab_size": info.vocab_size,
        "transformer_layer_config": layer,
        "eagle_aux_hidden_state_layer_ids": ids,
        "norm_before_residual": False,
    }
    draw = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=draw) / math.sqrt(columns)

    blocks = kind in (DFLASH, DSPARK)
    width = hidden if blocks else 2 * hidden
    tensors = {
        "fc.weight": matrix(hidden, len(ids) * hidden),
        "norm.weight": torch.ones(hidden),
        "hidden_norm.weight" if blocks else "layers.0.hidden_norm.weight": torch.ones(hidden),
        **_layer(matrix, hidden, heads * dim, width),
    }
    if blocks:
        del config["eagle_aux_hidden_state_layer_ids"], config["norm_before_residual"]
        config |= {"aux_hidden_state_layer_ids": ids, "block_size": BLOCK, "mask_token_id": 0}
        config["sample_from_anchor"] = kind == DSPARK
        tensors |= {f"layers.0.self_attn.{name}_norm.weight": torch.ones(dim) for name in "qk"}
    if kind == DSPARK:
        tensors["markov_head.markov_w1.weight"] = matrix(info.vocab_size, RANK)
        tensors["markov_head.markov_w2.weight"] = matrix(info.vocab_size, RANK)
        tensors["confidence_head.proj.weight"] = matrix(1, hidden + RANK)
        tensors["confidence_head.proj.bias"] = torch.zeros(1)
    if kind == P_EAGLE:
        config["mask_token_id"] = 0
        tensors["mask_hidden"] = matrix(1, len(ids) * hidden)[None]
    return write_checkpoint(folder, config, tensors)


def _layer(matrix: Any, hidden: int, mixed: int, width: int) -> Mapping[str, torch.Tensor]:
    attention = {f"self_attn.{name}_proj.weight": matrix(mixed, width) for name in "qkv"}
    return {
        f"layers.0.{name}": tensor
        for name, tensor in {
            **attention,
            "self_attn.o_proj.weight": matrix(hidden, mixed),
            "mlp.gate_proj.weight": matrix(2 * hidden, hidden),
            "mlp.up_proj.weight": matrix(2 * hidden, hidden),
            "mlp.down_proj.weight": matrix(hidden, 2 * hidden),
            "input_layernorm.weight": torch.ones(hidden),
            "post_attention_layernorm.weight": torch.ones(hidden),
        }.items()
    }
