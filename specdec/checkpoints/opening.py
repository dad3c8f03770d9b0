"""Open a checkpoint, whichever format it is in: a folder of safetensors, or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.checkpoints.gguf import is_gguf, open_gguf, read_gguf_config
from specdec.checkpoints.reader import Checkpoint, read_json


def open_checkpoint(path: Path) -> Checkpoint:
    """Open what ``locate`` returned. Raises: CheckpointError."""
    return open_gguf(path) if is_gguf(path) else Checkpoint.open(path)


def checkpoint_config(path: Path) -> dict[str, Any]:
    """Its ``config.json``, or what stands for it, and nothing else. Raises: CheckpointError."""
    return read_gguf_config(path) if is_gguf(path) else read_json(path / "config.json")
