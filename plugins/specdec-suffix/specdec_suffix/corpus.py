"""The corpus: texts that every sequence may match, read and indexed once per pipeline."""

from __future__ import annotations

import json
import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from specdec.errors import ConfigError

from specdec_suffix.automaton import SuffixAutomaton

if TYPE_CHECKING:
    from specdec import PrepareEnv

    from specdec_suffix.drafter import SuffixConfig

SEPARATOR = -1  # between documents: no context contains it, so no match or draft crosses documents


def load_corpus(config: SuffixConfig, env: PrepareEnv) -> SuffixAutomaton | None:
    """The automaton of ``config.corpus``, shared by all sequences and never changed; None without a corpus.

    Raises: ConfigError when the file cannot be read or has token ids outside the target's vocabulary.
    """
    if config.corpus is None:
        return None
    path = pathlib.Path(config.corpus).expanduser()
    try:
        documents = _documents(path, config.tokenizer)
    except OSError as error:
        raise ConfigError(f"cannot read the corpus {str(path)!r}: {error.strerror or error}") from error
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ConfigError(f"cannot read the corpus {str(path)!r}: {error}") from error
    automaton = SuffixAutomaton(config.min_match, config.max_match, undo=False)
    for document in documents:
        for token in document:
            if not 0 <= token < env.target.info.vocab_size:
                raise ConfigError(
                    f"the corpus {str(path)!r} has token id {token}, outside 0 to {env.target.info.vocab_size - 1}",
                    try_="token ids of the target's own tokenizer",
                )
        automaton.extend(document)
        automaton.push(SEPARATOR)
    return automaton


def _documents(path: pathlib.Path, tokenizer: str | None) -> list[list[int]]:
    """Token ids by document, from a .npy array, a .json list (or list of lists), or any other file as UTF-8 text."""
    if path.suffix == ".npy":
        array = np.load(path, allow_pickle=False)
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"an array of token ids has one axis of integers, got {array.dtype} {array.shape}")
        return [array.tolist()]
    if path.suffix == ".json":
        data = json.loads(path.read_text(encoding="utf-8"))
        documents = data if isinstance(data, list) and data and isinstance(data[0], list) else [data]
        if not all(isinstance(document, list) and all(_is_id(t) for t in document) for document in documents):
            raise ValueError("a list of token ids, or a list of such lists, was expected")
        return documents
    if tokenizer is None:
        raise ConfigError(
            f"the corpus {str(path)!r} is text, and no tokenizer is named",
            try_='drafter.tokenizer = "path/to/tokenizer.json", or a .json or .npy file of token ids',
        )
    return [_tokenizer(tokenizer).encode(path.read_text(encoding="utf-8"), add_special_tokens=False).ids]


def _is_id(value: object) -> bool:
    return type(value) is int


def _tokenizer(given: str) -> Any:
    path = pathlib.Path(given).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"cannot read the tokenizer {str(path)!r}: {error}") from error
