"""Draft from a text that the output is expected to repeat, such as the file that a request asks to edit.

The text is followed from its beginning. After a miss, the last tokens of the output are looked up in it, the nearest
place ahead first. The drafts are point masses and depend on the committed tokens alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from specdec.drafters.ngram import NgramIndex

LONGEST, SHORTEST = 6, 3  # tokens of a suffix that is looked up
FIRST_DRAFT = 3  # tokens after a look-up; doubled with every draft that comes true


class PredictedText:
    """Follows one predicted text through one generation.

    Args:
        tokens: the predicted output.
        begin: tokens of the sequence before the first generated one.
    """

    def __init__(self, tokens: Sequence[int], begin: int) -> None:
        self._tokens = list(tokens)
        self._known = begin  # tokens of the sequence that ``_at`` takes into account
        self._at = 0  # in the prediction: where the output continues, or did last
        self._follows = True
        self._drafted = 0  # tokens of the last draft
        self._length = FIRST_DRAFT
        self._index: NgramIndex | None = None

    def draft(self, context: Sequence[int], most: int) -> tuple[int, ...]:
        """At most ``most`` tokens to follow ``context``, which is longer in every call."""
        new = context[self._known :]
        self._known = len(context)
        if self._follows and self._tokens[self._at : self._at + len(new)] == new:
            self._at += len(new)
            if len(new) > self._drafted > 0:
                self._length = min(2 * self._length, len(self._tokens))
        else:
            self._rejoin(context)
            self._length = FIRST_DRAFT
        draft = tuple(self._tokens[self._at : self._at + min(self._length, most)]) if self._follows else ()
        self._drafted = len(draft)
        return draft

    def _rejoin(self, context: Sequence[int]) -> None:
        """Continue after the longest suffix of ``context`` in the prediction; of several, the next ahead."""
        if self._index is None:  # nothing is looked up in a prediction that comes true
            self._index = NgramIndex(LONGEST, SHORTEST)
            self._index.extend(self._tokens)
        _, starts = self._index.starts(context)
        self._follows = bool(starts)
        if starts:
            self._at = starts[min(bisect_left(starts, self._at), len(starts) - 1)]


class Answers:
    """The last tokens of finished answers, which new ones may repeat. For one thread.

    Args:
        most: tokens that are remembered; the older half makes room.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.index = NgramIndex(LONGEST, LONGEST)

    def add(self, tokens: Sequence[int]) -> None:
        """Remember an answer; of one that is too long, its end."""
        known = self.index.tokens
        if len(known) + len(tokens) > self._most:
            self.index = NgramIndex(LONGEST, LONGEST)
            self.index.extend(known[max(len(known) - self._most // 2, 0) :])
        self.index.extend(tokens[-(self._most - len(self.index.tokens)) :])


class RepeatedAnswer(PredictedText):
    """Follows whichever finished answer the output repeats, the newest one of several."""

    def __init__(self, answers: Answers, begin: int) -> None:
        super().__init__((), begin)
        self._answers = answers
        self._follows = False

    def _rejoin(self, context: Sequence[int]) -> None:
        index = self._answers.index
        _, starts = index.starts(context)
        self._follows = bool(starts)
        if starts:
            self._tokens, self._at = index.tokens, starts[-1]
