"""What the kit gives to plugins that load a model of their own, or that need a tokenizer."""

from __future__ import annotations

from functools import cache
from typing import Any

from specdec.config import TargetConfig
from specdec.contract import ForwardPass, PrepareEnv
from specdec.errors import UnsupportedError
from specdec.testing.table_model import Memory, TableModel

TABLE = "table"
"""The name by which options ask for it."""
_BYTES = 257  # ids that the kit's tokenizer has


def second_model(vocab: int) -> TableModel:
    """A draft model that is often right about a ``TableModel``, whose state goes back to few points."""
    return TableModel.random(vocab, seed=3, tilt=0.5, memory=Memory.RECURRENT, peak=0.4)


def prepare_env(target: ForwardPass) -> PrepareEnv:
    """What a drafter's ``prepare`` gets in the kit: a tokenizer, and ``load`` for a model named ``table``."""
    tokenizer = byte_tokenizer(min(target.info.vocab_size, _BYTES))

    def load(asked: TargetConfig) -> tuple[ForwardPass, Any]:
        if asked.model != TABLE:
            raise UnsupportedError(
                f"the conformance kit loads no checkpoints; a drafter asks for {asked.model!r}",
                try_=f'model = "{TABLE}", a small model of the kit',
            )
        return second_model(target.info.vocab_size), tokenizer

    return PrepareEnv(target=target, tokenizer=tokenizer, load=load)


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
