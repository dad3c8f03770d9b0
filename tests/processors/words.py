"""A byte-level BPE tokenizer built here, with tokens that cross the borders of any grammar. Nothing here is a test."""

from __future__ import annotations

import functools

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from specdec.contract import ProcessorEnv
from specdec.text import Tokenizer

MERGES = [("t", "r"), ("u", "e"), ("tr", "ue"), ("1", "2"), ('"', "a"), ('"', ":"), ("a", "b"), ("ab", "c"), ("}", "}")]
EOS, TURN, CALL = "<|endoftext|>", "<|im_end|>", "<tool_call>"
PADDING = 5  # rows of the model's head that no token uses


@functools.cache
def tokenizer() -> Tokenizer:
    """256 bytes, the merges, two special tokens that both end a text, and an added one that is text."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in MERGES)]
    core = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(CALL, special=False)])
    core.add_special_tokens([AddedToken(EOS, special=True), AddedToken(TURN, special=True)])
    ids = [core.token_to_id(EOS), core.token_to_id(TURN)]
    return Tokenizer(core, generation_config={"eos_token_id": ids}, tokenizer_config={"eos_token": EOS})


def end_tokens() -> tuple[int, ...]:
    """Ids of the tokens that end a text."""
    return tuple(sorted(tokenizer().eos_ids))


def vocab_size() -> int:
    """Logits per row: the tokens and the padding."""
    return tokenizer().vocab_size + PADDING


def env(generated_from: int = 0) -> ProcessorEnv:
    """What processors are built with."""
    return ProcessorEnv(
        tokenizer=tokenizer(), vocab_size=vocab_size(), end_tokens=end_tokens(), generated_from=generated_from
    )
