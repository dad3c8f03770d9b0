"""Compare the methods of ``Logits`` with its ``rows``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specdec.contract import Logits
from specdec.sampling import Purpose, gumbel
from specdec.testing.checks import expect, expect_equal

if TYPE_CHECKING:
    from numpy.typing import NDArray

CLOSE = 1e-3  # nats between logsumexp and the float64 sum: probabilities are right to a thousandth


def check_logits(logits: Logits, count: int, vocab: int, picked: Sequence[int]) -> NDArray[np.float32]:
    """Check that every method agrees with ``rows``, and return those: ``[count, vocab]``.

    Args:
        picked: tokens to gather, one for each of the first rows; the best token of row 0 is gathered too.
    Raises: Broken.
    """
    rows = logits.rows()
    expect_equal(rows.shape, (count, vocab), "rows() has the wrong shape")
    expect_equal(rows.dtype, np.dtype(np.float32), "rows() is not float32")
    expect_equal(len(logits), count, "len() is not the number of rows")
    expect(not np.isnan(rows).any(), "a logit is NaN")
    best = rows.argmax(axis=1).tolist()
    expect_equal(logits.argmax(), best, "argmax() differs from rows()")
    for k in (1, 2, 3, vocab):
        ids, values = logits.topk(k)
        for row in range(count):
            order = np.lexsort((np.arange(vocab), -rows[row]))[:k].tolist()
            expect_equal(list(ids[row]), order, f"topk({k}) of row {row} differs from rows()")
            expect_equal(np.asarray(values[row], np.float32), rows[row][order], f"topk({k}) gives different logits")
    for chosen in (list(picked), [best[0], *picked[1:]]):
        wanted = [float(rows[row, token]) for row, token in enumerate(chosen)]
        expect_equal(list(logits.gather(chosen)), wanted, "gather() differs from rows()")
        expect_equal(list(logits.gather(chosen[:1])), wanted[:1], "gather() of fewer tokens than rows is wrong")
    wide = rows.astype(np.float64)
    sums = wide.max(axis=1) + np.log(np.exp(wide - wide.max(axis=1, keepdims=True)).sum(axis=1))
    got = np.asarray(logits.logsumexp(), np.float64)
    close = got.shape == sums.shape and bool((np.abs(got - sums) <= CLOSE).all())
    expect(close, "logsumexp() differs from rows()", got=got, expected=sums)
    _check_noise(logits, rows)
    return rows


def _check_noise(logits: Logits, rows: NDArray[np.float32]) -> None:
    """``noisy_argmax``, if offered, follows the formula of the contract."""
    ids = np.arange(rows.shape[1])
    for row in range(len(rows)):
        for position, scale in ((7, 1.0), (8, 2.5)):
            got = logits.noisy_argmax(row, scale, 123, position)
            if got is None:
                return
            scores = scale * rows[row].astype(np.float64) + gumbel(123, position, ids, Purpose.TOKEN)
            order = np.argsort(-scores)
            if scores[order[0]] - scores[order[1]] > 1e-4:  # a device may compute the noise in float32
                expect_equal(got, int(order[0]), "noisy_argmax() chooses a different token", row=row)
