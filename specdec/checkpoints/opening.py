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
        # other facts about config.json are advice for a folder
        facts = {name: text for name, text in error.facts.items() if name != "file" and "config.json" not in text}
        message, *texts = with_gguf_keys(path, "\0".join([error.message, *facts.values()])).split("\0")
        if message != error.message:
            error.message, error.args = message, (message,)
            error.facts = {"file": str(path), **dict(zip(facts, texts, strict=True))}
        raise
