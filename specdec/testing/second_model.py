"""``second_model``: what the kit gives to a drafter that loads a model of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from specdec.config import TargetConfig
from specdec.contract import ForwardPass, PrepareEnv
from specdec.errors import UnsupportedError
from specdec.testing.byte_tokenizer import byte_tokenizer
from specdec.testing.table_model import WIDE, Memory, TableModel, WideModel

TABLE = "table"
"""The name by which options ask for it."""
_BYTES = 257  # ids that the kit's tokenizer has


def second_model(vocab: int) -> TableModel:
    """A draft model that is often right about a ``TableModel``, whose state goes back to few points."""
    if vocab == WIDE:
        return WideModel(np.full((4, 4), 0.25), WIDE)
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
