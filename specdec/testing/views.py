"""What every ``Logits`` answers, compared with its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specdec.contract import Logits
from specdec.testing.registry import expect

if TYPE_CHECKING:
    from numpy.typing import NDArray

CLOSE = 1e-3  # nats between logsumexp and the float64 sum; the probability of a token is then right to a thousandth


def check_views(logits: Logits, count: int, vocab: int, picked: Sequence[int]) -> NDArray[np.float32]:
    """Every view of ``count`` rows says what ``rows`` says; gives these.

    Args:
        picked: tokens to gather, one for each of the first rows; the best token of row 0 is gathered too.
    Raises: Broken.
    """
    rows = logits.rows()
    expect(rows.shape == (count, vocab), "rows has another shape", got=rows.shape, expected=(count, vocab))
    expect(rows.dtype == np.float32, "rows are float32", got=rows.dtype)
    expect(len(logits) == count, "len is the number of rows", got=len(logits), expected=count)
    expect(not np.isnan(rows).any(), "a logit is NaN")
    best = rows.argmax(axis=1).tolist()
    expect(logits.argmax() == best, "argmax", got=logits.argmax(), expected=best)
    for k in (1, 2, 3, vocab):
        ids, values = logits.topk(k)
        for row in range(count):
            order = np.lexsort((np.arange(vocab), -rows[row]))[:k].tolist()
            expect(list(ids[row]) == order, f"topk({k}) of row {row}", got=list(ids[row]), expected=order)
            same = np.array_equal(np.asarray(values[row], np.float32), rows[row][order])
            expect(same, f"values of topk({k})", got=values[row], expected=rows[row][order])
    for chosen in (list(picked), [best[0], *picked[1:]]):
        wanted = [float(rows[row, token]) for row, token in enumerate(chosen)]
        expect(list(logits.gather(chosen)) == wanted, "gather", got=logits.gather(chosen), expected=wanted)
        expect(list(logits.gather(chosen[:1])) == wanted[:1], "gather of fewer tokens than rows")
    wide = rows.astype(np.float64)
    sums = wide.max(axis=1) + np.log(np.exp(wide - wide.max(axis=1, keepdims=True)).sum(axis=1))
    got = np.asarray(logits.logsumexp(), np.float64)
    expect(got.shape == sums.shape and bool((np.abs(got - sums) <= CLOSE).all()), "logsumexp", got=got, expected=sums)
    _check_noise(logits, rows)
    return rows


def _check_noise(logits: Logits, rows: NDArray[np.float32]) -> None:
    """``noisy_argmax``, where it is offered, is the formula of the contract."""
    from specdec.sampling import Purpose, gumbel

    ids = np.arange(rows.shape[1])
    for row in range(len(rows)):
        for position, scale in ((7, 1.0), (8, 2.5)):
            got = logits.noisy_argmax(row, scale, 123, position)
            if got is None:
                return
            scores = scale * rows[row].astype(np.float64) + gumbel(123, position, ids, Purpose.TOKEN)
            order = np.argsort(-scores)
            if scores[order[0]] - scores[order[1]] > 1e-4:  # a device may compute the noise in float32
                expect(got == order[0], "noisy_argmax is another token", got=got, expected=int(order[0]), row=row)
