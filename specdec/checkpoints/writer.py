"""Write a small checkpoint folder, for tests, conversions and plugin authors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specdec.checkpoints.reader import INDEX_FILE, SINGLE_FILE


def write_checkpoint(
    folder: Path | str,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    generation_config: Mapping[str, Any] | None = None,
    shards: int = 1,
) -> Path:
    """Write config.json and the tensors, in order; more than one shard gets an index.

    Tensors keep their dtype and name; the caller writes the tokenizer's files. Returns the folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    ready = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(ready, folder / SINGLE_FILE, metadata={"format": "pt"})
    else:
        weight_map: dict[str, str] = {}
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
            save_file({name: ready[name] for name in part}, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        size = sum(tensor.numel() * tensor.itemsize for tensor in ready.values())
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": weight_map})
    if generation_config is not None:
        write_json(folder / "generation_config.json", generation_config)
    write_json(folder / "config.json", config)
    return folder


def write_json(file: Path, value: Any) -> None:
    """Write a value as indented JSON."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
