"""Draft vocabularies: files of the token ids that a pruned draft head keeps (made by ``specdec vocab``).

A draft head cut to the ids that a model usually emits reads a fraction of the full head's bytes and misses only the
other ids. Source: Zhao et al. 2025, "FR-Spec", arXiv:2502.14856, section 3.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from specdec.errors import ConfigError
from specdec.files.reading import parse_json, read_text, why

if TYPE_CHECKING:
    from specdec.contract import ModelInfo
    from specdec.text import Tokenizer

FORMAT = "specdec draft vocabulary"
VERSION = 1


@attrs.frozen(kw_only=True)
class DraftVocabulary:
    """The token ids of a draft head, for one tokenizer.

    Attributes:
        vocab_size: V of the model.
        tokenizer: hash of the tokenizer (``tokenizer_hash``); "" if there was none.
        model: fingerprint of the model it was made with; any model with that tokenizer may use it.
        made: how it was made.
        coverage: share of held-out text covered by the first n ids, by n.
        tokens: unique ids; those that are always kept come first, then the most frequent.
    """

    vocab_size: int
    tokenizer: str = ""
    model: str = ""
    made: Mapping[str, Any] = attrs.field(factory=dict)
    coverage: Mapping[int, float] = attrs.field(factory=dict)
    tokens: tuple[int, ...]

    def write(self, path: Path | str) -> None:
        """Write the file. Raises: ConfigError when it cannot be written."""
        data = {"format": FORMAT, "version": VERSION, **attrs.asdict(self)}
        text = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items())
        try:
            Path(path).write_text("{\n" + text + "\n}\n")
        except OSError as error:
            raise ConfigError(f"cannot write the draft vocabulary: {why(error)}", file=path) from error

    @classmethod
    def read(cls, path: Path | str) -> DraftVocabulary:
        """Read a file made by ``write``. Raises: ConfigError with the reason when it is malformed."""
        try:
            data = parse_json(read_text(path))
        except (OSError, ValueError) as error:
            raise _unusable(path, f"cannot be read as JSON: {why(error)}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise _unusable(path, f"is a different kind of file: its 'format' is not {FORMAT!r}")
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
        try:
            return cls(
                tokens=tuple(tokens),
                vocab_size=vocab_size,
                tokenizer=str(data.get("tokenizer", "")),
                model=str(data.get("model", "")),
                made=dict(data.get("made") or {}),
                coverage={int(size): float(share) for size, share in dict(data.get("coverage") or {}).items()},
            )
        except (TypeError, ValueError) as error:
            raise _unusable(path, "has no tables under 'made' and 'coverage'") from error

    def check(self, info: ModelInfo, tokenizer: Tokenizer | None, path: Path | str) -> None:
        """Refuse a file for another model. ``tokenizer``: None if the target has none.

        Raises: ConfigError when vocabulary size or tokenizer differ.
        """
        if self.vocab_size != info.vocab_size:
            raise _unusable(
                path, f"was made for another model: its vocab_size is {self.vocab_size}, this model's {info.vocab_size}"
            )
        if tokenizer is not None and self.tokenizer and self.tokenizer != tokenizer_hash(tokenizer):
            raise _unusable(path, "was made for another tokenizer: the same ids mean different text here")


def _unusable(path: Path | str, reason: str) -> ConfigError:
    return ConfigError(
        f"the draft vocabulary {reason}", file=path, try_="specdec vocab MODEL --text FILE -o OUT makes one"
    )


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Hash of the mapping from token ids to text."""
    pieces = sorted((token, piece) for piece, token in tokenizer.core.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(pieces).encode()).hexdigest()
