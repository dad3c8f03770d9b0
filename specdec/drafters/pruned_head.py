"""The head of the next draft: the one cut to a draft vocabulary, or the full one where that misses too much.

Everything here is a function of the committed tokens and of where the generation began, so a drafter that is built anew
over the same tokens chooses the same head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from specdec.contract import Context, DraftHead

WINDOW = 64
"""Generated tokens over which misses are averaged: each new one counts 1/64, and all before it 63/64 of what they did.
The average starts at 0, so seven misses in a row pass the default limit of 0.1."""


@attrs.frozen(eq=False)
class PreparedVocabulary:
    """Shared by all sequences: the base head, and for each token id a byte, 1 where the head has it."""

    head: DraftHead
    inside: bytes

    @classmethod
    def of(cls, head: DraftHead, vocab_size: int) -> PreparedVocabulary:
        inside = bytearray(vocab_size)
        for token in head.tokens:
            inside[token] = 1
        return cls(head, bytes(inside))


class HeadChoice:
    """Follows one sequence: adds the ids it meets to the draft vocabulary, and counts what was outside.

    Ids of the prompt and of the output that the vocabulary lacks are added for this sequence. There are at most
    ``max_extra`` of them; when one more comes, the quarter that has not occurred for longest goes.

    A generated token is a **miss** when neither the vocabulary nor what had been added before it had the token: no
    draft of that position could have been right. While the decayed share of misses is above ``max_miss`` drafts run
    with the full head, until the share has fallen to half of that.
    """

    def __init__(self, prepared: PreparedVocabulary, *, max_miss: float, max_extra: int) -> None:
        self._prepared = prepared
        self._max_miss = max_miss
        self._max_extra = max_extra
        self._drafts = {"pruned": 0, "full": 0}
        self._generated_from = 0
        self.forget()

    def forget(self) -> None:
        """Start over: the tokens followed so far are no longer those of the sequence."""
        self._read = 0  # tokens followed
        self._extra: dict[int, None] = {}  # ids added, the one that occurred last at the end
        self._head: DraftHead | None = self._prepared.head  # None: to be built from _extra
        self._new: list[int] = []  # ids in _extra that _head lacks
        self.share = 0.0
        self.full = False

    def follow(self, context: Context) -> DraftHead | None:
        """The head for the draft after ``context``; None for the full one."""
        if context.generated_from != self._generated_from:
            self._generated_from = context.generated_from
            self.forget()
        inside, extra = self._prepared.inside, self._extra
        for position, token in enumerate(context[self._read :], start=self._read):
            missed = False
            if not inside[token]:
                missed = token not in extra
                self._add(token, new=missed)
            if position >= self._generated_from:
                self.share += (missed - self.share) / WINDOW
                self.full = self.share > (self._max_miss / 2 if self.full else self._max_miss)
        self._read = len(context)
        return None if self.full else self._extended()

    def count(self) -> None:
        """Count one draft with the present head."""
        self._drafts["full" if self.full else "pruned"] += 1

    def _add(self, token: int, *, new: bool) -> None:
        if self._max_extra == 0:
            return
        self._extra.pop(token, None)
        self._extra[token] = None
        if new:
            self._new.append(token)
        if len(self._extra) > self._max_extra:
            for oldest in list(self._extra)[: max(1, self._max_extra // 4)]:
                del self._extra[oldest]
            self._head = None

    def _extended(self) -> DraftHead:
        if self._head is None:
            self._head = self._prepared.head.extended(list(self._extra))
        elif self._new:
            self._head = self._head.extended(self._new)
        self._new = []
        return self._head

    def report(self) -> dict[str, Any]:
        """For ``Drafter.report``."""
        reason = ""
        if self.full:
            reason = (
                f"{self.share:.0%} of the last tokens were outside the draft vocabulary, more than "
                f"{'half of ' if self.share <= self._max_miss else ''}max_miss ({self._max_miss:g})"
            )
        return {
            "vocabulary": len(self._prepared.head.tokens),
            "extra": len(self._extra),
            "outside": round(self.share, 4),
            "head": "full" if self.full else "pruned",
            "reason": reason,
            "pruned_drafts": self._drafts["pruned"],
            "full_drafts": self._drafts["full"],
        }
