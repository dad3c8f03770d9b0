"""Open a checkpoint, whichever format it is in: a folder of safetensors, or a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specdec.checkpoints.gguf.checkpoint import open_gguf, with_gguf_keys
from specdec.checkpoints.locate import is_gguf
from specdec.checkpoints.reader import Checkpoint
from specdec.errors import CheckpointError


def open_checkpoint(path: Path) -> Checkpoint:
    """Open what ``locate`` returned. Raises: CheckpointError."""
    return open_gguf(path) if is_gguf(path) else Checkpoint.open(path)


@contextmanager
def naming_keys(path: Path) -> Iterator[None]:
    """Let errors about a GGUF file's numbers name it and its keys instead of ``config.json`` and those there."""
    try:
        yield
    except CheckpointError as error:
        file = Path(error.facts.get("file", path))
        if file.name == "config.json" and file.parent != path:  # a real one, of an MTP head
            raise
        if (message := with_gguf_keys(path, error.message)) != error.message:
            error.message, error.args, error.facts = message, (message,), {"file": str(path)}
        raise
