"""Tiny checkpoints as mlx-lm converts them, each with a twin in Hugging Face's layout. Nothing here is a test.

What mlx-lm 0.32 does to each family is written out from its ``sanitize`` methods; quantising is numpy's work, one bit
after the other, so that these tests run without MLX and share nothing with the reader.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from specdec.checkpoints import write_checkpoint
from tests import tiny
from tests.checkpoints.quantised.quantisers import Tensors, spread

HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
SHIFTED = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "model.norm.weight",
    "q_norm.weight",
    "k_norm.weight",
)


def bit_stream(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Unsigned codes ``[..., K]`` as words ``[..., K * bits / 32]``: code j has bits j * bits and up of its row."""
    *lead, columns = codes.shape
    single = (codes[..., None] >> np.arange(bits) & 1).astype(np.uint8).reshape(*lead, columns * bits)
    return torch.from_numpy(np.packbits(single, axis=-1, bitorder="little").view(np.uint32))


def affine(weight: np.ndarray, bits: int, group: int, dtype: torch.dtype = torch.float32) -> tuple[Tensors, np.ndarray]:
    """MLX's affine format, every other scale negative: tensors by suffix, and the values that they mean."""
    blocks = weight.reshape(*weight.shape[:-1], -1, group).astype(np.float64)
    low, high = blocks.min(-1), blocks.max(-1)
    sign = np.where(np.arange(low.size).reshape(low.shape) % 2, -1.0, 1.0)
    scale = torch.from_numpy(sign * np.maximum(high - low, 1e-9) / (2**bits - 1)).to(dtype)
    bias = torch.from_numpy(np.where(sign > 0, low, high)).to(dtype)
    wide, shift = (spread(grid.float().numpy(), weight.shape, 1, group) for grid in (scale, bias))
    codes = np.clip(np.rint((weight - shift) / wide), 0, 2**bits - 1).astype(np.int64)
    values = codes.astype(np.float32) * wide + shift
    return {"weight": bit_stream(codes, bits), "scales": scale, "biases": bias}, values


Sizes = Callable[[str], tuple[int, int] | None]  # path of a module in MLX's model -> bits and columns per scale


def four_bits(path: str) -> tuple[int, int] | None:
    """As mlx-lm does by default, with groups that tiny models have: routers and their kin in 8 bits."""
    return (8, 32) if path.endswith(("mlp.gate", "shared_expert_gate")) else (4, 32)


def plain(path: str) -> tuple[int, int] | None:
    """Nothing is quantised."""
    return None


def convert(
    folder: Path,
    source: Path,
    family: str,
    sizes: Sizes = four_bits,
    *,
    dtype: torch.dtype = torch.float32,
    keep_head: bool = False,
) -> tuple[Path, Path]:
    """``source`` as mlx-lm would convert it, and the twin: the values that this has, in Hugging Face's layout.

    With ``keep_head`` the MTP head stays in the former, under its own names, in the dtype that it has.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(source / "model.safetensors")
    layers = config.get("num_hidden_layers", 0)
    head = {name: tensor for name, tensor in tensors.items() if _of_head(name, layers)}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in head}
    moved = _to_mlx(tensors, family, config)
    default = (4, 32)
    quantization: dict[str, Any] = {"group_size": default[1], "bits": default[0], "mode": "affine"}
    stored: Tensors = {}
    decoded: Tensors = {}
    for name, tensor in moved.items():
        path, chosen = name.removesuffix(".weight"), None
        if name.endswith(".weight") and tensor.dim() > 1 and "conv1d" not in name and tensor.shape[-1] % 32 == 0:
            chosen = sizes(path)
            if chosen is None:
                quantization[path] = False
        if chosen is None:
            stored[name] = decoded[name] = tensor
            continue
        if chosen != default:
            quantization[path] = {"group_size": chosen[1], "bits": chosen[0]}
        parts, values = affine(tensor.float().numpy(), *chosen, dtype)
        stored |= {f"{path}.{suffix}": part for suffix, part in parts.items()}
        decoded[name] = torch.from_numpy(values)
    if keep_head:
        stored |= head
    told = config
    if any(name.endswith(".scales") for name in stored):
        told = {**config, "quantization": quantization, "quantization_config": quantization}
    write_checkpoint(folder / "mlx", told, stored)
    headless = {
        key: 0 if key in ("mtp_num_hidden_layers", "num_nextn_predict_layers") else config[key] for key in config
    }
    write_checkpoint(folder / "twin", headless, _to_hf(decoded, tensors, config))
    for made in ("mlx", "twin"):
        tiny.write_tokenizer(folder / made)
    return folder / "mlx", folder / "twin"


def _of_head(name: str, layers: int) -> bool:
    return name.startswith("mtp.") or name.startswith(f"model.layers.{layers}.")


def _to_mlx(tensors: Mapping[str, torch.Tensor], family: str, config: Mapping[str, Any]) -> Tensors:
    """The names, shapes and norms of mlx-lm's model."""
    moved: Tensors = {}
    apart: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        expert = re.fullmatch(r"(.*\.mlp)\.experts\.(\d+)\.(\w+)\.weight", name)
        if expert:
            apart.setdefault(f"{expert[1]}.switch_mlp.{expert[3]}.weight", {})[int(expert[2])] = tensor
        elif name.endswith(".experts.gate_up_proj"):
            block = name.removesuffix("experts.gate_up_proj")
            half = tensor.shape[1] // 2
            moved[f"{block}switch_mlp.gate_proj.weight"] = tensor[:, :half]
            moved[f"{block}switch_mlp.up_proj.weight"] = tensor[:, half:]
        elif name.endswith(".experts.down_proj"):
            moved[name.replace("experts.down_proj", "switch_mlp.down_proj.weight")] = tensor
        elif name.endswith(".kv_b_proj.weight"):
            heads = tensor.reshape(config["num_attention_heads"], -1, tensor.shape[1])
            nope = config["qk_nope_head_dim"]
            moved[name.replace("kv_b_proj", "embed_q")] = heads[:, :nope].transpose(1, 2)
            moved[name.replace("kv_b_proj", "unembed_out")] = heads[:, nope:]
        elif name.endswith("conv1d.weight"):
            moved[name] = tensor.transpose(1, 2)
        elif family in HYBRIDS and name.endswith(SHIFTED):
            moved[name] = tensor + 1.0
        else:
            moved[name] = tensor
    moved |= {name: torch.stack([found[e] for e in range(len(found))]) for name, found in apart.items()}
    prefix = "language_model." if family in ("qwen3_5", "qwen3_5_moe") else ""
    return {prefix + name: tensor.contiguous() for name, tensor in moved.items()}


def _to_hf(
    moved: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> Tensors:
    """Back again, experts one by one; what was not quantised is taken from ``tensors``."""
    back: Tensors = {}
    for mlx_name, tensor in moved.items():
        name = mlx_name.removeprefix("language_model.")
        if ".switch_mlp." in name:
            for e, matrix in enumerate(tensor):
                back[name.replace("switch_mlp", f"experts.{e}")] = matrix
        elif name.endswith(".embed_q.weight"):
            values = moved[mlx_name.replace("embed_q", "unembed_out")]
            both = torch.cat([tensor.transpose(1, 2), values], dim=1)
            back[name.replace("embed_q", "kv_b_proj")] = both.reshape(-1, both.shape[-1])
        elif not name.endswith(".unembed_out.weight"):
            back[name] = tensors[name] if name.endswith((*SHIFTED, "conv1d.weight")) else tensor
    return back
