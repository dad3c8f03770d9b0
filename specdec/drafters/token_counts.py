"""Counts token ids, and chooses the draft vocabulary that covers most of them.

Zhao et al. 2025, "FR-Spec", arXiv:2502.14856, rank by frequency in a corpus; ranking by the model's own outputs covers
more of what it generates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from specdec.drafters.draft_vocabulary import DraftVocabulary, tokenizer_hash
from specdec.errors import ConfigError
from specdec.text.incremental import BYTE_OF

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specdec.contract import ModelInfo
    from specdec.text import Tokenizer

    Counts = NDArray[np.int64]

HELD_OUT = 10  # one block of text in this many is held out to measure coverage
BLOCK = 256  # tokens of a block
_ZEROS: Any = attrs.Factory(lambda counts: np.zeros(counts.vocab_size, dtype=np.int64), takes_self=True)
SIZES = tuple(1024 * 2**i for i in range(8))  # whose coverage is reported: 1k to 128k


def always_kept(tokenizer: Tokenizer) -> list[int]:
    """Ids in every draft vocabulary, ascending: special and added tokens, and single bytes."""
    core = tokenizer.core
    special = *core.get_added_tokens_decoder(), *tokenizer.special_ids, *tokenizer.eos_ids, tokenizer.bos_id
    pieces = BYTE_OF if tokenizer.decodes_bytes else [f"<0x{byte:02X}>" for byte in range(256)]
    return sorted({token for token in (*special, *map(core.token_to_id, pieces)) if token is not None})


def lowest_ids(tokenizer: Tokenizer, vocab_size: int, size: int) -> list[int]:
    """The ``size`` ids that a text most likely has, from the tokenizer alone: in a BPE, merges that came first."""
    always = [token for token in always_kept(tokenizer) if token < vocab_size]
    lowest: list[int] = TokenCounts(vocab_size).ranking(always, vocab_size)[:size].tolist()
    return lowest


@attrs.define
class TokenCounts:
    """Counts of token ids, and of a held-out sample to measure coverage on.

    Every tenth block of 256 tokens is held out, regardless of document boundaries.
    """

    vocab_size: int
    counted: Counts = attrs.field(init=False, default=_ZEROS)
    held_out: Counts = attrs.field(init=False, default=_ZEROS)
    total: int = attrs.field(init=False, default=0)  # tokens seen, which say what block is next

    def add(self, tokens: Sequence[int]) -> None:
        """Count the tokens of a document, or of the next part of one."""
        ids = np.asarray(tokens, dtype=np.int64)
        at = 0
        while at < len(ids):
            end = min(len(ids), at + BLOCK - self.total % BLOCK)
            counts = self.held_out if self.total // BLOCK % HELD_OUT == HELD_OUT - 1 else self.counted
            np.add.at(counts, ids[at:end], 1)
            self.total += end - at
            at = end

    def ranking(self, always: Collection[int], known: int) -> NDArray[np.int64]:
        """All ids below ``known``: those of ``always`` first, then by count, equal counts by ascending id.

        Uncounted ids come last, lowest first: in a BPE vocabulary these are the shortest pieces.
        """
        ids = np.arange(known)
        first = np.zeros(known, dtype=bool)
        first[list(always)] = True
        return np.lexsort((ids, -self.counted[:known], ~first))

    def coverage(self, ranking: Sequence[int] | NDArray[np.int64], sizes: Iterable[int]) -> dict[int, float]:
        """Share of the held-out tokens among the first ``size`` of a ranking; {} if nothing was held out."""
        total = int(self.held_out.sum())
        if not total:
            return {}
        reached = np.cumsum(self.held_out[np.asarray(ranking)])
        return {size: float(reached[min(size, len(reached)) - 1] / total) for size in sizes}


def make_vocabulary(
    counts: TokenCounts, tokenizer: Tokenizer, info: ModelInfo, size: int, made: Mapping[str, Any]
) -> DraftVocabulary:
    """The ``size`` most useful ids by these counts. Raises: ConfigError for a size out of range."""
    always = [token for token in always_kept(tokenizer) if token < info.vocab_size]
    known = min(tokenizer.vocab_size, info.vocab_size)
    if not len(always) <= size <= known:
        raise ConfigError(
            f"a draft vocabulary of this model has {len(always)} to {known} ids, asked for {size}",
            reason=f"{len(always)} ids are special tokens or single bytes and always kept",
        )
    ranking = counts.ranking(always, known)
    sizes = sorted({size, *(s for s in SIZES if len(always) <= s < known)})
    return DraftVocabulary(
        tokens=tuple(ranking[:size].tolist()),
        vocab_size=info.vocab_size,
        tokenizer=tokenizer_hash(tokenizer),
        model=info.fingerprint,
        made=made,
        coverage=counts.coverage(ranking, sizes),
    )
