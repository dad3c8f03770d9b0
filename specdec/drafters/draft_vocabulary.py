"""The token ids that a drafter's pruned head keeps: how they are chosen, and the file that holds them.

A draft head cut to the ids that a model really emits reads a fraction of the bytes of the full one, and misses only
what lies outside. Source: Zhao et al. 2025, "FR-Spec", arXiv:2502.14856, section 3, which ranks by frequency in a
corpus; ranking by the model's own outputs covers more of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from specdec.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specdec.contract import ModelInfo
    from specdec.text import Tokenizer

    Counts = NDArray[np.int64]

FORMAT = "specdec draft vocabulary"
VERSION = 1
HELD_OUT = 10  # one block of text in so many is not counted, but measured
BLOCK = 256  # tokens of a block


@attrs.frozen(kw_only=True)
class DraftVocabulary:
    """Token ids for a draft head, of one tokenizer.

    Attributes:
        tokens: the ids, each once, the ones that are always kept first, then the most frequent.
        vocab_size: V of the model.
        tokenizer: hash of the tokenizer (``tokenizer_hash``); "" where there was none.
        model: fingerprint of the model that it was made with; any model with that tokenizer may use it.
        made: how it was made.
        coverage: share of text that was not counted inside the first n ids, by n.
    """

    tokens: tuple[int, ...]
    vocab_size: int
    tokenizer: str = ""
    model: str = ""
    made: Mapping[str, Any] = attrs.field(factory=dict)
    coverage: Mapping[int, float] = attrs.field(factory=dict)

    def write(self, path: Path | str) -> None:
        """Write the file. Raises: ConfigError when it cannot be written."""
        data = {
            "format": FORMAT,
            "version": VERSION,
            "vocab_size": self.vocab_size,
            "tokenizer": self.tokenizer,
            "model": self.model,
            "made": dict(self.made),
            "coverage": {str(size): share for size, share in self.coverage.items()},
            "tokens": list(self.tokens),
        }
        text = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items())
        try:
            Path(path).write_text("{\n" + text + "\n}\n")
        except OSError as error:
            raise ConfigError(f"cannot write the draft vocabulary: {error.strerror or error}", file=path) from error

    @classmethod
    def read(cls, path: Path | str) -> DraftVocabulary:
        """Read what ``write`` wrote. Raises: ConfigError with the reason when it is not such a file."""
        try:
            data = json.loads(Path(path).read_bytes().decode())
        except OSError as error:
            raise _unusable(path, f"cannot be read: {error.strerror or error}") from error
        except ValueError as error:  # not UTF-8, or not JSON
            raise _unusable(path, f"is not JSON: {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise _unusable(path, f"is another kind of file: its 'format' is not {FORMAT!r}")
        if data.get("version") != VERSION:
            raise _unusable(path, f"has version {data.get('version')!r}, this specdec reads version {VERSION}")
        tokens, vocab_size = data.get("tokens"), data.get("vocab_size")
        if type(vocab_size) is not int or vocab_size < 1:
            raise _unusable(path, f"has the vocab_size {vocab_size!r}")
        if not isinstance(tokens, list) or not tokens:
            raise _unusable(path, "has no list of tokens")
        for token in tokens:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise _unusable(path, f"has the token {token!r}, outside 0 to {vocab_size - 1}")
        if len(set(tokens)) < len(tokens):
            raise _unusable(path, "has a token twice")
        return cls(
            tokens=tuple(tokens),
            vocab_size=vocab_size,
            tokenizer=str(data.get("tokenizer", "")),
            model=str(data.get("model", "")),
            made=dict(data.get("made") or {}),
            coverage={int(size): float(share) for size, share in (data.get("coverage") or {}).items()},
        )

    def check(self, info: ModelInfo, tokenizer: Tokenizer | None, path: Path | str) -> None:
        """Refuse a file of another model. ``tokenizer``: None where the target comes without one.

        Raises: ConfigError when vocabulary size or tokenizer differ.
        """
        if self.vocab_size != info.vocab_size:
            raise _unusable(
                path, f"is of another model: its vocab_size is {self.vocab_size}, this model's {info.vocab_size}"
            )
        if tokenizer is not None and self.tokenizer and self.tokenizer != tokenizer_hash(tokenizer):
            raise _unusable(path, "is of another tokenizer: the same ids stand for other text here")


def _unusable(path: Path | str, reason: str) -> ConfigError:
    return ConfigError(
        f"the draft vocabulary {reason}", file=path, try_="specdec vocab MODEL --text FILE -o OUT makes one"
    )


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Hash of what every token id stands for."""
    pieces = sorted((token, piece) for piece, token in tokenizer.core.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(pieces).encode()).hexdigest()


def always_kept(tokenizer: Tokenizer) -> list[int]:
    """Ids that every draft vocabulary has, ascending: special and added tokens, and those of single bytes."""
    core = tokenizer.core
    kept = {*core.get_added_tokens_decoder(), *tokenizer.special_ids, *tokenizer.eos_ids}
    if tokenizer.bos_id is not None:
        kept.add(tokenizer.bos_id)
    for piece, token in core.get_vocab(with_added_tokens=False).items():
        is_byte = len(piece) == 1 if tokenizer.decodes_bytes else len(piece) == 6 and piece.startswith("<0x")
        if is_byte:
            kept.add(token)
    return sorted(kept)


@attrs.define
class TokenCounts:
    """Counts of token ids, and a sample of the text that is kept out of them to measure on.

    Text comes as documents; every tenth block of 256 tokens is held out, whole documents long or parts of them.
    """

    vocab_size: int
    counted: Counts = attrs.field(init=False)
    held_out: Counts = attrs.field(init=False)
    _filled: int = attrs.field(default=0, init=False)  # tokens so far: which block is next

    def __attrs_post_init__(self) -> None:
        self.counted = np.zeros(self.vocab_size, dtype=np.int64)
        self.held_out = np.zeros(self.vocab_size, dtype=np.int64)

    def add(self, tokens: Sequence[int]) -> None:
        """Count the tokens of a document, or of the next part of one."""
        ids = np.asarray(tokens, dtype=np.int64)
        at = 0
        while at < len(ids):
            end = min(len(ids), at + BLOCK - self._filled % BLOCK)
            held = self._filled // BLOCK % HELD_OUT == HELD_OUT - 1
            np.add.at(self.held_out if held else self.counted, ids[at:end], 1)
            self._filled += end - at
            at = end

    @property
    def total(self) -> int:
        """Tokens seen."""
        return self._filled

    def ranking(self, always: Collection[int], known: int) -> NDArray[np.int64]:
        """All ids below ``known``: those of ``always`` first, then by count, equal counts by ascending id.

        What was never counted comes last, lowest ids first: in a merged vocabulary these are the shortest pieces.
        """
        ids = np.arange(known)
        first = np.zeros(known, dtype=bool)
        first[list(always)] = True
        return np.lexsort((ids, -self.counted[:known], ~first))

    def coverage(self, ranking: Sequence[int] | NDArray[np.int64], sizes: Iterable[int]) -> dict[int, float]:
        """Share of the held-out tokens among the first ``size`` of a ranking; {} where nothing was held out."""
        total = int(self.held_out.sum())
        if not total:
            return {}
        reached = np.cumsum(self.held_out[np.asarray(ranking)])
        return {size: float(reached[min(size, len(reached)) - 1] / total) for size in sizes}


def make_vocabulary(
    counts: TokenCounts, tokenizer: Tokenizer, info: ModelInfo, size: int, made: Mapping[str, Any]
) -> DraftVocabulary:
    """The ``size`` most useful ids by these counts. Raises: ConfigError for a size that cannot be had."""
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


SIZES = tuple(1024 * 2**i for i in range(8))
"""Sizes whose coverage is told: 1k to 128k."""
