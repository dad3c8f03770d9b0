"""Small tokenizers of the kinds that checkpoints have, for drafting across two of them. Nothing here is a test."""

from collections.abc import Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from specdec.text import Tokenizer

WORDS = ("the", "then", "he", "in", "inn", " a", " an", "and", " the", " theory", "ab", "abc", "bc", "ö", "日本", "本")


def byte_level(
    words: Sequence[str] = WORDS, specials: Sequence[str] = ("<|end|>",), *, split: bool = True
) -> Tokenizer:
    """Byte-level BPE: a token per byte, merges towards ``words``, special tokens behind them; merges may cross the
    borders of words unless texts are ``split`` there."""
    before = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in words:
        spelt = before.pre_tokenize_str(word)[0][0]
        for end in range(2, len(spelt) + 1):
            if spelt[:end] not in vocab:
                vocab[spelt[:end]] = len(vocab)
                merges.append((spelt[: end - 1], spelt[end - 1]))
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    return Tokenizer(core)


def sentence_piece(words: Sequence[str] = WORDS, specials: Sequence[str] = ("<s>", "</s>")) -> Tokenizer:
    """What Llama 2 has: spaces as ``▁``, one put before a text, bytes for what has no piece; begins with ``<s>``.

    The byte pieces and the characters are two ids for one string.
    """
    pieces = ["<unk>", *specials, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges: list[tuple[str, str]] = []
    for word in words:
        spelt = word.replace(" ", "▁")
        for character in spelt:
            vocab.setdefault(character, len(vocab))
        for end in range(2, len(spelt) + 1):
            if spelt[:end] not in vocab:
                vocab[spelt[:end]] = len(vocab)
                merges.append((spelt[: end - 1], spelt[end - 1]))
    core = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    return Tokenizer(core, tokenizer_config={"bos_token": "<s>"})


def letters(*pieces: str) -> Tokenizer:
    """A vocabulary of exactly these strings, joined without spaces; longer ones are merged from shorter ones."""
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [(piece[:-1], piece[-1]) for piece in pieces if len(piece) > 1]
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.decoder = decoders.Fuse()
    return Tokenizer(core)
