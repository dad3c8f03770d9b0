"""The tokenizer that a GGUF file describes: its vocabulary, with merges or scores, and the rules for its kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from specdec.checkpoints.gguf.checkpoint import special_tokens
from specdec.checkpoints.gguf.file import GgufFile
from specdec.errors import CheckpointError, shown
from specdec.text.chat_template import SOURCE_LIMIT, ChatTemplate

_PREFIX = "tokenizer.ggml."
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_SPACE = "▁"  # how SentencePiece writes a space
_LONGEST_PIECE = 256  # characters; all ways to split one are tried
_MOST_CHARACTERS = 2**22  # of all tokens; more than twice the largest known vocabulary
_BASES = 0x9E3779B97F4A7C15, pow(0x9E3779B97F4A7C15, -1, 2**64)  # odd, so that it has an inverse
_TOP = np.uint64(40)  # the upper 24 bits of 64 are behind it
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?{letters}+|\p{N}{digits}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _by_words(digits: str, *, marks: bool = False) -> str:
    """Words with their leading space, numbers of so many ``digits``, punctuation, and white space."""
    words = _WORDS.replace("{letters}", r"[\p{L}\p{M}]" if marks else r"\p{L}").replace("{digits}", digits)
    return words.replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]") if marks else words


def _by_case(digits: str, endings: str = "") -> str:
    """As ``_by_words``, but a capital letter after a small one begins a word, which may have one of the ``endings``."""
    lead, upper, lower = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = f"{lead}{upper}*{lower}+{endings}|{lead}{upper}+{lower}*{endings}"
    return rf"{words}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@attrs.frozen
class _Rules:
    """What the name of a pre-tokenizer stands for."""

    words: str = ""  # an expression: each match is a word, and what lies between two is one; empty: as GPT-2's
    digits: bool = False  # every digit is one first
    whole_words: bool = False  # a word in the vocabulary is one token, whatever the merges say
    composed: bool = False  # the original composes accents first (NFC), which a file does not say
    begins: bool = False  # texts begin with the bos token where the file does not say


_RULES: Mapping[str, _Rules] = {
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Rules(_by_words(""), composed=True)),
    "qwen35": _Rules(_by_words("", marks=True), composed=True),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe"), _Rules(_by_words("{1,3}"), whole_words=True, begins=True)),
    "glm4": _Rules(_by_words("{1,3}"), whole_words=True),
    **dict.fromkeys(("smaug-bpe", "dbrx"), _Rules(_by_words("{1,3}"))),
    "smollm": _Rules(digits=True),
    "gpt-4o": _Rules(_by_case("{1,3}", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?")),
    "tekken": _Rules(_by_case(""), whole_words=True, begins=True),
    **dict.fromkeys(("gpt-2", "default"), _Rules()),
}


def tokenizer_parts(file: GgufFile) -> tuple[tokenizers.Tokenizer, int, dict[str, str], dict[str, ChatTemplate]]:
    """The tokenizer, one more than its largest token id, the texts of its special tokens by role ("bos_token", ...),
    and the chat templates by name.

    Raises: CheckpointError naming the key, for a kind of tokenizer that is not read too.
    """
    metadata = file.metadata
    kind = metadata.get(f"{_PREFIX}model")
    if kind not in _KINDS:
        raise _error(
            file,
            f"has a tokenizer of the kind {shown(kind)}",
            read="gpt2 (byte-level BPE) and llama (SentencePiece's BPE)",
        )
    tokens, kinds = _tokens(file)
    named = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    special = {named[role]: tokens[index] for role, index in special_tokens(file).items() if role in named}
    core, begins = _KINDS[kind](file, tokens, kinds, special)
    for wanted in (_CONTROL, _USER_DEFINED):
        core.add_tokens(
            [
                AddedToken(tokens[index], special=wanted == _CONTROL, normalized=False)
                for index in np.flatnonzero(kinds == wanted).tolist()
            ]
        )
    around = {}
    for role, usual in (("bos", begins), ("eos", False)):
        added = _flag(file, key := f"{_PREFIX}add_{role}_token", usual)
        if added and f"{role}_token" not in special:
            raise _error(file, f"adds a {role} token ({key}) and does not name one")
        around[role] = special[f"{role}_token"] if added else ""
    if any(around.values()):
        ids = [(token, tokens.index(token)) for token in filter(None, around.values())]
        text = f"{around['bos']} $A {around['eos']}".strip()
        core.post_processor = processors.TemplateProcessing(text, special_tokens=ids)
    size = int(np.flatnonzero(kinds != _UNUSED).max(initial=-1)) + 1
    return core, size, special, _chat_templates(file)


def _byte_level(
    file: GgufFile, tokens: list[str], kinds: np.ndarray, special: Mapping[str, str]
) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE with the file's merges, and whether texts usually begin with the bos token."""
    name, merges = file.metadata.get(f"{_PREFIX}pre", "default"), file.metadata.get(f"{_PREFIX}merges")
    if name not in _RULES:
        raise _error(file, f"splits text by the rules {shown(name)}, which are not known", read=", ".join(_RULES))
    if not isinstance(merges, list):
        raise _error(file, f"lacks {_PREFIX}merges")
    rules = _RULES[name]
    pairs = [merge.partition(" ")[::2] for merge in merges]
    core = _bpe(file, tokens, kinds, pairs, ignore_merges=rules.whole_words)
    if rules.composed:
        core.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    steps += [pre_tokenizers.Digits(individual_digits=True)] if rules.digits else []
    steps += [pre_tokenizers.Split(Regex(rules.words), "isolated")] if rules.words else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not rules.words))
    core.pre_tokenizer = pre_tokenizers.Sequence(steps)
    core.decoder = decoders.ByteLevel()
    return core, rules.begins


def _sentencepiece(
    file: GgufFile, tokens: list[str], kinds: np.ndarray, special: Mapping[str, str]
) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece's BPE, and True: texts usually begin with the bos token.

    Any two neighbours are joined that make a token, the one of the best score first. Characters without a token are
    their bytes. Runs of spaces, which files hold as user-defined tokens, become normal ones, as in the original.
    """
    scores = file.metadata.get(f"{_PREFIX}scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise _error(file, f"has {len(tokens)} tokens, and {_PREFIX}scores does not fit them")
    if max(map(len, tokens)) > _LONGEST_PIECE or sum(map(len, tokens)) > _MOST_CHARACTERS:
        raise _error(file, f"has a token of more than {_LONGEST_PIECE} characters, or {_MOST_CHARACTERS:,} in all")
    scores = scores.astype(np.float64)
    for index in np.flatnonzero(kinds == _USER_DEFINED).tolist():
        if not tokens[index].strip(" "):
            tokens[index], kinds[index] = _SPACE * len(tokens[index]), _NORMAL
            scores[index] = np.inf
    ranked = np.argsort(-scores, kind="stable")
    pairs = joins(tokens, ranked[kinds[ranked] == _NORMAL])
    core = _bpe(file, tokens, kinds, pairs, unk_token=special.get("unk_token"), fuse_unk=True, byte_fallback=True)
    spaces, text = (
        normalizers.Replace(" ", _SPACE),
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()],
    )
    if _flag(file, f"{_PREFIX}add_space_prefix", True):
        core.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        core.decoder = decoders.Sequence([*text, decoders.Strip(" ", 1, 0)])
    else:
        core.normalizer, core.decoder = spaces, decoders.Sequence(text)
    return core, True


def joins(tokens: list[str], ranked: np.ndarray) -> list[tuple[str, str]]:
    """All ways to join two tokens to one of ``ranked``, in its order, the shortest first half first.

    Texts are compared by a polynomial of their characters modulo 2^64. By chance no two agree in it; two that were
    constructed to agree spoil the merges of their own file, or have it refused.
    """
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    characters = np.frombuffer("".join(tokens).encode("utf-32-le"), np.uint32) + np.uint64(1)
    power, inverse = (np.cumprod(np.full(len(characters) + 1, base, np.uint64)) for base in _BASES)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(characters * power[:-1])])

    def keys(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        found: np.ndarray = (sums[end] - sums[begin]) * inverse[begin]
        return found

    whole = keys(starts, ends)
    order = np.argsort(whole)
    whole, seen = whole[order], np.zeros(2**24, dtype=bool)
    seen[whole >> _TOP] = True  # most texts are no tokens, and most of them are not here
    ways = np.maximum(lengths[ranked] - 1, 0)
    token = np.repeat(ranked, ways)
    cuts = starts[token] + 1 + np.arange(len(token)) - np.repeat(np.cumsum(ways) - ways, ways)
    halves = np.stack([keys(starts[token], cuts), keys(cuts, ends[token])])
    halves = halves[:, seen[halves >> _TOP].all(0)]
    at = np.searchsorted(whole, halves).clip(max=len(whole) - 1)
    left, right = np.array(tokens, dtype=object)[order[at[:, (whole[at] == halves).all(0)]]].tolist()
    return list(zip(left, right, strict=True))


_KINDS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _bpe(
    file: GgufFile, tokens: list[str], kinds: np.ndarray, merges: list[Any], **settings: Any
) -> tokenizers.Tokenizer:
    vocabulary = {tokens[index]: index for index in np.flatnonzero(kinds != _UNUSED).tolist()}
    try:
        return tokenizers.Tokenizer(models.BPE(vocabulary, merges, **settings))
    except Exception as error:  # the library's own class
        raise _error(file, f"has merges that its vocabulary does not hold: {error}") from error


def _flag(file: GgufFile, key: str, usual: bool) -> bool:
    value = file.metadata.get(key, usual)
    if type(value) is not bool:
        raise _error(file, f"has {shown(value)} under {key}, which takes true or false")
    return value


def _tokens(file: GgufFile) -> tuple[list[str], np.ndarray]:
    """The vocabulary and the kind of each token."""
    tokens, kinds = file.metadata.get(f"{_PREFIX}tokens"), file.metadata.get(f"{_PREFIX}token_type")
    if not isinstance(tokens, list) or not tokens:
        raise _error(file, f"lacks {_PREFIX}tokens")
    if kinds is None:
        return tokens.copy(), np.full(len(tokens), _NORMAL)
    if not isinstance(kinds, np.ndarray) or len(kinds) != len(tokens):
        raise _error(file, f"has {len(tokens)} tokens, and {_PREFIX}token_type does not fit them")
    return tokens.copy(), kinds.copy()


def _chat_templates(file: GgufFile) -> dict[str, ChatTemplate]:
    key, templates = "tokenizer.chat_template", {}
    for name, source in file.metadata.items():
        if name != key and not name.startswith(f"{key}."):
            continue
        if not isinstance(source, str) or len(source) > SOURCE_LIMIT:
            raise _error(file, f"has no chat template of at most {SOURCE_LIMIT:,} characters under {name}")
        templates[name.removeprefix(key).removeprefix(".") or "default"] = ChatTemplate(source, Path(file.path))
    return templates


def _error(file: GgufFile, message: str, **facts: Any) -> CheckpointError:
    return CheckpointError(f"{file.path.name} {message}", file=file.path, **facts)
