"""Write an untrained head for a target: what drafting costs can be measured before a head is trained."""

from __future__ import annotations

import math
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
    blocks = kind in (DFLASH, DSPARK)
    width = hidden if blocks else 2 * hidden
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(ids) * hidden),
        "norm.weight": (hidden,),
        "hidden_norm.weight" if blocks else "layers.0.hidden_norm.weight": (hidden,),
        **{f"layers.0.self_attn.{name}_proj.weight": (heads * dim, width) for name in "qkv"},
        "layers.0.self_attn.o_proj.weight": (hidden, heads * dim),
        "layers.0.mlp.gate_proj.weight": (2 * hidden, hidden),
        "layers.0.mlp.up_proj.weight": (2 * hidden, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, 2 * hidden),
        "layers.0.input_layernorm.weight": (hidden,),
        "layers.0.post_attention_layernorm.weight": (hidden,),
    }
    if blocks:
        del config["eagle_aux_hidden_state_layer_ids"], config["norm_before_residual"]
        config |= {"aux_hidden_state_layer_ids": ids, "block_size": BLOCK, "mask_token_id": 0}
        config["sample_from_anchor"] = kind == DSPARK
        shapes |= {f"layers.0.self_attn.{name}_norm.weight": (dim,) for name in "qk"}
    if kind == DSPARK:
        shapes |= {f"markov_head.markov_w{number}.weight": (info.vocab_size, RANK) for number in (1, 2)}
        shapes |= {"confidence_head.proj.weight": (1, hidden + RANK), "confidence_head.proj.bias": (1,)}
    if kind == P_EAGLE:
        config["mask_token_id"] = 0
        shapes["mask_hidden"] = (1, 1, len(ids) * hidden)
    draw = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=draw) / math.sqrt(shape[-1]) if len(shape) > 1 else torch.ones(shape)
        for name, shape in shapes.items()
    }
    return write_checkpoint(folder, config, tensors)
