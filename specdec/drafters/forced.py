"""Draft what a logits processor forces: where a grammar leaves one continuation, that continuation is the draft.

It costs no pass. The tokens are a proposal like any other: the same text may have other spellings, of which the target
chooses, so the output and its distribution are those of decoding without drafts under the same grammar. Taking forced
tokens without asking the target would change both (arXiv:2605.07698).

Elsewhere it drafts nothing, so it is meant to be the first of a chain:

    drafters = [{ name = "forced" }, { name = "mtp" }]
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from specdec.contract import EMPTY_DRAFT, Context, Draft, Drafter, DrafterEnv, DrafterSpec, NoConfig
from specdec.hookspecs import hookimpl


class ForcedDrafter(Drafter):
    """Asks the sequence's logits processors."""

    def __init__(self, config: NoConfig, env: DrafterEnv) -> None:
        self._vocab_size = env.target.info.vocab_size
        self._drafts = self._tokens = 0

    def propose(self, context: Context, depth: int) -> Draft:
        for processor in context.sampling.processors if depth > 0 else ():
            spelt = itertools.takewhile(lambda token: token < self._vocab_size, processor.forced(context))
            tokens = tuple(itertools.islice(spelt, depth))
            if tokens:
                self._drafts += 1
                self._tokens += len(tokens)
                return Draft(tokens)
        return EMPTY_DRAFT

    def report(self) -> Mapping[str, Any]:
        return {"forced_drafts": self._drafts, "forced_tokens": self._tokens}


@hookimpl
def specdec_drafters() -> list[DrafterSpec]:
    return [DrafterSpec(name="forced", factory=ForcedDrafter, help="what a grammar leaves no choice about")]
