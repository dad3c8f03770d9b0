"""Read GGUF files: one file that holds a model's config, tokenizer and quantised weights."""

from specdec.checkpoints.gguf.checkpoint import (
    generation_config,
    open_gguf,
    read_gguf,
    read_gguf_config,
    special_tokens,
    with_gguf_keys,
)
from specdec.checkpoints.gguf.file import GgufFile
from specdec.checkpoints.locate import is_gguf

__all__ = [
    "GgufFile",
    "generation_config",
    "is_gguf",
    "open_gguf",
    "read_gguf",
    "read_gguf_config",
    "special_tokens",
    "with_gguf_keys",
]
