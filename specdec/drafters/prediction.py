"""Draft from a text that the output is expected to repeat, such as the file that a request asks to edit.

The text is followed from its beginning. After a miss, the last tokens of the output are looked up in it, the nearest
place ahead first. The drafts are point masses and depend on the committed tokens alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
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
        self._tokens = tuple(tokens)
        self._known = begin  # tokens of the sequence that ``_at`` takes into account
        self._at = 0  # in the prediction: where the output continues, or did last
        self._follows = True
        self._drafted = 0  # tokens of the last draft
        self._length = FIRST_DRAFT
        self._index: NgramIndex | None = None

    def draft(self, context: Sequence[int], most: int) -> tuple[int, ...]:
        """At most ``most`` tokens to follow ``context``, which is longer in every call."""
        new = tuple(context[self._known :])
        self._known = len(context)
        if self._follows and self._tokens[self._at : self._at + len(new)] == new:
            self._at += len(new)
            if len(new) > self._drafted > 0:
                self._length = min(2 * self._length, len(self._tokens))
        else:
            self._rejoin(context)
            self._length = FIRST_DRAFT
        draft = self._tokens[self._at : self._at + min(self._length, most)] if self._follows else ()
        self._drafted = len(draft)
        return draft

    def _rejoin(self, context: Sequence[int]) -> None:
        """Continue after the longest suffix of ``context`` in the prediction; of several, the next ahead."""
        if self._index is None:  # nothing is looked up in a prediction that comes true
            self._index = NgramIndex(LONGEST, SHORTEST)
            self._index.extend(self._tokens)
        starts = self._index.starts(context)
        self._follows = bool(starts)
        if starts:
            self._at = starts[min(bisect_left(starts, self._at), len(starts) - 1)]


class Answers:
    """The last tokens of finished answers, which new ones may repeat. For one thread.

    Args:
        most: tokens that are remembered; the oldest answers make room.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._answers: deque[tuple[int, ...]] = deque()
        self._after: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {}  # suffix -> the newest answer, and place
        self.size = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Remember an answer; of one that is too long, its end."""
        answer = tuple(tokens[-self._most :])
        if len(answer) <= LONGEST:
            return
        self._answers.append(answer)
        self.size += len(answer)
        for at in range(LONGEST, len(answer)):
            self._after[answer[at - LONGEST : at]] = answer, at
        while self.size > self._most:
            oldest = self._answers.popleft()
            self.size -= len(oldest)
            for at in range(LONGEST, len(oldest)):
                suffix = oldest[at - LONGEST : at]
                if suffix in self._after and self._after[suffix][0] is oldest:
                    del self._after[suffix]

    def after(self, context: Sequence[int]) -> tuple[tuple[int, ...], int] | None:
        """The newest answer that has the last tokens of ``context``, and the place behind them."""
        return self._after.get(tuple(context[-LONGEST:]))


class RepeatedAnswer(PredictedText):
    """Follows whichever finished answer the output repeats."""

    def __init__(self, answers: Answers, begin: int) -> None:
        super().__init__((), begin)
        self._answers = answers
        self._follows = False

    def _rejoin(self, context: Sequence[int]) -> None:
        found = self._answers.after(context)
        self._follows = found is not None
        if found is not None:
            self._tokens, self._at = found
