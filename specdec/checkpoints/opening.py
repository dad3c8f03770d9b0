"""The formats of checkpoints: how each is recognised and opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from specdec.checkpoints.gguf import is_gguf, open_gguf, read_gguf_config
from specdec.checkpoints.locate import check_folder
from specdec.checkpoints.reader import Checkpoint, read_json


@attrs.frozen
class CheckpointFormat:
    """A format of checkpoints.

    Attributes:
        name: for messages.
        recognises: whether a path that exists holds one.
        open: opens it. Raises: CheckpointError.
        config: reads its ``config.json`` or what stands for it, and nothing else. Raises: CheckpointError.
    """

    name: str
    recognises: Callable[[Path], bool]
    open: Callable[[Path], Checkpoint]
    config: Callable[[Path], dict[str, Any]]


FORMATS = (
    CheckpointFormat("GGUF", is_gguf, open_gguf, read_gguf_config),
    CheckpointFormat("safetensors", Path.is_dir, Checkpoint.open, lambda path: read_json(path / "config.json")),
)


def format_of(path: Path) -> CheckpointFormat:
    """The format of what ``locate`` returned. Raises: CheckpointError if it is none that is read."""
    for one in FORMATS:
        if one.recognises(path):
            return one
    check_folder(path)
    raise AssertionError(path)  # check_folder refuses whatever is not a folder
