"""Logits of a drafter addressed by the target's token ids, and single rows of logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.backends.arrays import HostLogits
from specdec.contract import Choosing, Logits

if TYPE_CHECKING:
    from specdec.contract import Float32


class Row(Logits):
    """One row of logits."""

    def __init__(self, inner: Logits, row: int) -> None:
        self._inner, self._row = inner, row

    def __len__(self) -> int:
        return 1

    def argmax(self) -> list[int]:
        return [self._inner.argmax()[self._row]]

    def topk(self, k: int) -> tuple[list[list[int]], list[list[float]]]:
        ids, values = self._inner.topk(k)
        return [ids[self._row]], [values[self._row]]

    def logsumexp(self) -> list[float]:
        return [self._inner.logsumexp()[self._row]]

    def choose(self, choosing: Choosing) -> Sequence[int | None]:
        return self._inner.choose(choosing) if len(self._inner) == 1 else ()

    def rows(self) -> Float32:
        row: Float32 = self._inner.rows()[self._row][None]
        return row


class MappedLogits(Logits):
    """Logits over some of the target's tokens, in ascending order so that ties keep theirs; other ids have -inf."""

    def __init__(self, inner: Logits, tokens: np.ndarray[Any, np.dtype[np.int64]], vocab_size: int) -> None:
        self._inner, self._tokens, self._vocab_size = inner, tokens, vocab_size

    def __len__(self) -> int:
        return len(self._inner)

    def argmax(self) -> list[int]:
        best: list[int] = self._tokens[self._inner.argmax()].tolist()
        return best

    def topk(self, k: int) -> tuple[list[list[int]], list[list[float]]]:
        ids, values = self._inner.topk(min(k, len(self._tokens)))
        return [self._tokens[row].tolist() for row in ids], values

    def logsumexp(self) -> list[float]:
        return self._inner.logsumexp()

    def rows(self) -> Float32:
        rows = np.full((len(self._inner), self._vocab_size), -np.inf, np.float32)
        rows[:, self._tokens] = self._inner.rows()
        return rows


def last_row(logits: Logits, vocab_size: int, target_vocab_size: int) -> Logits:
    """The last row of a model's logits, as wide as the target's vocabulary.

    Models with the same tokenizer may pad their vocabularies differently. Ids that only the target has get -inf; ids
    that only the model has are dropped.
    """
    row = Row(logits, -1)
    if vocab_size < target_vocab_size:
        return MappedLogits(row, np.arange(vocab_size), target_vocab_size)
    return row if vocab_size == target_vocab_size else HostLogits(row.rows()[:, :target_vocab_size])
