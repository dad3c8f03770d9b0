"""Converts tokens between two tokenizers through text: committed tokens to the draft model's, and its drafts back.

Source: Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies", arXiv:2502.05202, section 3 (string-level exact match). Drafts are point masses, so this affects how
often a draft is right but never the output.

Two rules make a drafter's state a function of the committed tokens, however they were chunked:

* text is cut into *segments* before a space that follows a visible character, and each segment is tokenised alone.
  Tokenizers cut there too, so a segment that is followed by another never changes again. Only the last segment is
  tokenised again with every token;
* an incomplete character is not text yet, in either direction.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.text import IncrementalDecoder, Tokenizer, common_prefix

LONGEST_SEGMENT = 64  # characters; text without spaces is cut here
WINDOW = 8  # most committed tokens that are tokenised again together with a draft's text
_KEPT = 512  # characters of recent text that are kept; a window is far shorter
_BROKEN = "\ufffd"  # what incomplete bytes decode to
_WORD_STARTS = ("▁", "Ġ", "Ċ", "ĉ", "č", " ", "\n", "\t", "\r")  # spaces of SentencePiece, of byte-level BPE, and plain


def differences(target: Tokenizer, draft: Tokenizer) -> list[tuple[int, str | None, str | None]]:
    """Token ids with different strings, ascending: ``(id, target's, draft's)``; None where an id does not exist."""
    ours, theirs = _pieces(target), _pieces(draft)
    if ours == theirs:
        return []
    ids = sorted(ours.keys() | theirs.keys())
    return [(i, ours.get(i), theirs.get(i)) for i in ids if ours.get(i) != theirs.get(i)]


def _pieces(tokenizer: Tokenizer) -> dict[int, str]:
    return {i: piece for piece, i in tokenizer.core.get_vocab(with_added_tokens=True).items()}


class Transcript:
    """The committed target tokens, converted to the draft model's tokens.

    Special tokens have no text. A special token that the draft model also has, with the same string, is mapped to it;
    all others are dropped.

    Attributes:
        ids: the draft model's tokens of everything read.
        closed: how many of ``ids`` later text cannot change.
        text: the text since the last special token, or its end if it is long.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self._target, self._draft = target, draft
        self._specials = {i: draft.core.token_to_id(target.piece(i) or "") for i in target.special_ids}
        self._opening = _opening(draft)
        self._space = _added_space(draft)
        self._former: list[int] | None = None  # ``ids`` from before a restart
        self._clear()

    def _clear(self) -> None:
        self.ids = list(self._opening)
        self.closed = len(self.ids)
        self.text = ""
        self._segment = ""  # the last one, still open
        self._fresh = True  # no text yet: the tokenizer adds its prefix here
        self._read = 0  # target tokens
        self._decoder = IncrementalDecoder(self._target)

    def restart(self) -> None:
        """Make the next ``follow`` read its context from the beginning."""
        if self._former is None:
            self._former = self.ids
        self._clear()

    def follow(self, context: Sequence[int]) -> int:
        """Read the new tokens of ``context``; returns how many leading ``ids`` are unchanged."""
        first = self.closed if self._former is None else 0
        before = self.ids[first:] if self._former is None else self._former
        self._former = None
        for token in context[self._read :]:  # one by one: the result must not depend on the grouping
            self._take(token)
        self._read = len(context)
        self.ids[self.closed :] = self._encoded(self._segment)
        return first + common_prefix(before, self.ids[first:])

    def _take(self, token: int) -> None:
        if token not in self._target.special_ids:
            self._add(self._decoder.push([token]))
            return
        self._add(self._decoder.flush())
        self._close(len(self._segment))
        self.text = ""
        same = self._specials[token]
        if same is not None and same in self._draft.special_ids and self.ids != [same]:  # the bos token is there
            self.ids.append(same)
            self.closed += 1

    def _add(self, text: str) -> None:
        self.text = (self.text + text)[-_KEPT:]
        at = max(len(self._segment), 1)
        self._segment += text
        while at < len(self._segment):
            if at >= LONGEST_SEGMENT or (self._segment[at] == " " and not self._segment[at - 1].isspace()):
                self._close(at)
                at = 0
            at += 1

    def _close(self, end: int) -> None:
        """Tokenise the first ``end`` characters of the open segment for good."""
        if end:
            self.ids[self.closed :] = self._encoded(self._segment[:end])
            self._segment = self._segment[end:]
            self._fresh = False
        else:
            del self.ids[self.closed :]
        self.closed = len(self.ids)

    def _encoded(self, text: str) -> list[int]:
        if self._space is not None and not self._fresh and text.startswith(" "):
            text = text[1:]  # the tokenizer adds this space itself
            if not text:
                return [self._space]
        return self._draft.encode(text, add_special=False) if text else []

    def spelt(self, drafted: Sequence[int]) -> str:
        """The text that draft model tokens add after ``ids``, up to the last complete character."""
        tail = [i for i in self.ids[-WINDOW:] if i not in self._draft.special_ids]
        before, after = self._draft.decode(tail), self._draft.decode([*tail, *drafted])
        return after[len(before) :].rstrip(_BROKEN) if after.startswith(before) else ""


def continuation(
    target: Tokenizer, context: Sequence[int], written: str, text: str, vocab_size: int
) -> list[int] | None:
    """``text`` as target tokens after ``context``, cut before the first special token.

    The last word of ``context`` is tokenised again together with the text. If the result does not begin with the
    committed tokens (the text would have merged with them), there is no continuation: None.

    Args:
        written: the end of the text of ``context``, ``Transcript.text``.
        vocab_size: the result is also cut before the first id of this or more.
    """
    window = _last_word(target, context[-WINDOW:])
    before = target.decode(window)
    if not written.endswith(before) or (window and not before):  # incomplete bytes, or ids without text
        return None
    ids = target.encode(before + text, add_special=False) if before + text else []
    if ids[: len(window)] != window:
        return None
    ids = ids[len(window) :]
    end = next((at for at, i in enumerate(ids) if i in target.special_ids or i >= vocab_size), len(ids))
    return ids[:end]


def _last_word(target: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """The shortest suffix of ``tokens`` that begins a word: nothing before it can merge with what follows."""
    for at in range(len(tokens) - 1, -1, -1):
        if tokens[at] in target.special_ids:
            return list(tokens[at + 1 :])
        if (target.piece(tokens[at]) or "").startswith(_WORD_STARTS):
            return list(tokens[at:])
    return list(tokens)


def _opening(tokenizer: Tokenizer) -> list[int]:
    """The tokens that the tokenizer adds before a text: often a bos token."""
    return [i for i in tokenizer.encode("") if i == tokenizer.bos_id][:1]


def _added_space(tokenizer: Tokenizer) -> int | None:
    """The token of the space that the tokenizer adds before a text, as SentencePiece does; None if it adds none."""
    ids = tokenizer.encode("a", add_special=False)
    first = (tokenizer.piece(ids[0]) or "")[:1] if ids else ""
    return tokenizer.core.token_to_id(first) if first in ("▁", "Ġ") else None
