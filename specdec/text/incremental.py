"""Tokens to text as they come: text that never changes again, and the first of several stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence

from specdec.text.tokenizer import Tokenizer


class IncrementalDecoder:
    """Decodes a growing sequence of tokens; returns each character once, as soon as it is final.

    The results of all ``push`` calls and the last ``flush``, joined, equal ``tokenizer.decode`` of all ids, however
    they were chunked. An incomplete character is held back. The cost of a push depends on its own tokens only.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        make = _ByteDecoder if tokenizer.decodes_bytes else _WindowDecoder
        self._decoder: _ByteDecoder | _WindowDecoder = make(tokenizer)
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens and return the text that became final."""
        return self._decoder.push([token for token in ids if token not in self._skipped])

    def flush(self) -> str:
        """Return the text held back, with incomplete characters as U+FFFD, and reset."""
        return self._decoder.flush()


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable bytes map to themselves, the others to U+0100 onwards.

    Source: GPT-2, openai/gpt-2 ``src/encoder.py``, ``bytes_to_unicode``.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes that a token stands for by itself; of a tokenizer that is not byte-level, its text."""
    piece = tokenizer.piece(token) or ""
    if not tokenizer.decodes_bytes:
        return tokenizer.decode([token], skip_special=False).encode()
    try:
        return bytes(BYTE_OF[character] for character in piece)
    except KeyError:  # for example, an added token with a space is not in the byte alphabet
        return piece.encode()


class _ByteDecoder:
    """For byte-level BPE: joins bytes and decodes UTF-8 incrementally, with the result of the tokenizer's own decoder.

    Both put one U+FFFD for each maximal invalid part (Unicode 16.0, section 3.9, "substitution of maximal subparts").
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(self._bytes_of(token) for token in ids))

    def flush(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text

    def _bytes_of(self, token: int) -> bytes:
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = token_bytes(self._tokenizer, token)
        return known


class _WindowDecoder:
    """For every other tokenizer: decodes the last final tokens together with the new ones and returns the difference.

    The final tokens provide context (a leading space is stripped only at the very beginning).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode: Callable[[list[int]], str] = lambda ids: tokenizer.decode(ids, skip_special=False)
        self._piece = tokenizer.piece
        self._byte_runs = tokenizer.falls_back_to_bytes
        self._context: list[int] = []  # the tokens of the last text returned
        self._new: list[int] = []  # tokens held back

    def push(self, ids: Sequence[int]) -> str:
        self._new += [token for token in ids if self._piece(token) is not None]
        return self._take() if self._new and not self._may_change() else ""

    def flush(self) -> str:
        text = self._take() if self._new else ""
        self._context = []
        return text

    def _may_change(self) -> bool:
        """Whether later tokens could change the text of the last one."""
        last = self._piece(self._new[-1]) or ""
        # a run of byte pieces is decoded as a whole: an invalid byte at its end turns all of it into U+FFFD
        if self._byte_runs and len(last) == 6 and last.startswith("<0x") and last.endswith(">"):
            return True
        return self._decode(self._new[-4:]).endswith("�")  # a character has four bytes, a piece at least one

    def _take(self) -> str:
        text = self._decode(self._context + self._new)[len(self._decode(self._context)) :]
        self._context, self._new = self._new[-8:], []
        return text


class StopMatcher:
    """Finds stop strings in text that arrives in pieces, however it is split.

    The match that ends first wins; of several that end at the same character, the longest. Text before the match is
    emitted; the match and what follows are not. No stop string is empty.
    """

    def __init__(self, stop_strings: Iterable[str]) -> None:
        # longest first: of two that end at the same character, the one that starts earlier is found first
        self._stops = sorted(dict.fromkeys(stop_strings), key=len, reverse=True)
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return the part that no match can include, and the stop string if one was found.

        Text that could be the start of a stop string is held back. After a match nothing is emitted.
        """
        if self._matched is not None or not self._stops:
            return ("" if self._matched is not None else text), self._matched
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self._matched = min(found)
            self._held = ""
            return text[:at], self._matched
        keep = open_end(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """Return the text held back; call it at the end of the text."""
        held, self._held = self._held, ""
        return held


def open_end(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of ``text`` may become one of ``marks``, of which the first is the longest."""
    for length in range(min(len(marks[0]) - 1, len(text)), 0, -1):
        end = text[len(text) - length :]
        if any(mark.startswith(end) for mark in marks):
            return length
    return 0
