"""``byte_tokenizer``: a tokenizer for the models of the kit, which have no text."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def byte_tokenizer(vocab: int) -> Any:
    """A tokenizer of ``vocab`` tokens: bytes, and an end token."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    from specdec.text import Tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: max(vocab - 1, 1)]
    core = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if vocab > 1:
        core.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return Tokenizer(core)
