"""A byte-level BPE tokenizer built here, with tokens that cross the borders of any grammar. Nothing here is a test."""

import functools

from tokenizers import AddedToken

from specdec.contract import ProcessorEnv
from specdec.text import Tokenizer
from tests.drafters.two_tokenizers import byte_level

WORDS = ("true", "ue", "12", '"a', '":', "abc", "}}")
EOS, TURN, CALL = "<|endoftext|>", "<|im_end|>", "<tool_call>"
PADDING = 5  # rows of the model's head that no token uses


@functools.cache
def tokenizer() -> Tokenizer:
    """256 bytes, the merges, two special tokens that both end a text, and an added one that is text."""
    core = byte_level(WORDS, (EOS, TURN), split=False).core
    core.add_tokens([AddedToken(CALL, special=False)])
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
