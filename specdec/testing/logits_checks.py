"""Compare the methods of ``Logits`` with its ``rows``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specdec.backends.arrays import HostLogits
from specdec.contract import Choosing, Context, Logits, Sampling
from specdec.sampling import Purpose, Rows, exponential_sum, gumbel
from specdec.testing.checks import expect, expect_equal

if TYPE_CHECKING:
    from numpy.typing import NDArray

NOISE = (
    (7, 1.0, 123),
    (8, 2.5, 123),
    (255, 1.0, 2**32 - 1),
    (256, 0.05, 2**32 + 123),
    (70_000, 1.0, 2**63 - 1),
    (9, 20.0, 2**40 + 1),
)
"""Position, scale and seed of noise to compare."""

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
    _expect_ids(logits.argmax(), best, "argmax()")
    for k in (1, 2, 3, vocab):
        ids, values = logits.topk(k)
        for row in range(count):
            order = np.lexsort((np.arange(vocab), -rows[row]))[:k].tolist()
            _expect_ids(ids[row], order, f"topk({k}) of row {row}")
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
    _check_choices(logits, rows)
    return rows


def _expect_ids(got: Sequence[int], wanted: list[int], what: str) -> None:
    expect_equal(list(got), wanted, f"{what} differs from rows()")
    types = {type(token).__name__ for token in got}
    expect(types <= {"int"}, f"an id of {what} is not a plain int", got=sorted(types))


CHOICES = (
    Sampling(temperature=1.0, seed=5),
    Sampling(temperature=0.7, seed=6, top_p=0.8),
    Sampling(temperature=1.3, seed=2**62, top_k=3, repetition_penalty=1.5),
    Sampling(temperature=0.9, seed=7, min_p=0.1, frequency_penalty=0.5, presence_penalty=-0.5),
    Sampling(logit_bias={0: 2.5}, banned=(1,)),
    Sampling(frequency_penalty=-50.0),  # negative: what came most often, in the draft too, is best
    Sampling(temperature=0.5, seed=8, presence_penalty=-50.0, min_new_tokens=4, end_tokens=(1,)),
)
"""Settings to compare choices under."""


def _check_choices(logits: Logits, rows: NDArray[np.float32]) -> None:
    """``choose`` and ``exponential_sum``, if offered, give what the reference gives."""
    vocab = rows.shape[1]
    drafted = [number // 2 % vocab for number in range(len(rows) - 1)]
    for sampling in CHOICES if vocab > 2 and np.isfinite(rows).any(axis=1).all() else ():
        context = Context([0, vocab - 1, 0], sampling, generated_from=1)
        reference = Rows(HostLogits(rows), drafted, context)
        for row, token in enumerate(logits.choose(Choosing(drafted, context))):
            if token is not None:
                wanted = reference.choose(row)
                expect_equal(token, wanted, "choose() differs from the reference", row=row, sampling=sampling)
    for row, values in enumerate(rows):
        best = float(values.max())
        total = logits.exponential_sum(row, best)
        if total is not None:
            expect_equal(total, exponential_sum(values, best), "exponential_sum() differs from the reference", row=row)


def _check_noise(logits: Logits, rows: NDArray[np.float32]) -> None:
    """``noisy_argmax``, if offered, follows the formula of the contract."""
    ids = np.arange(rows.shape[1])
    for row in range(len(rows)):
        for position, scale, seed in NOISE:
            got = logits.noisy_argmax(row, scale, seed, position)
            if got is None:
                return
            scores = scale * rows[row].astype(np.float64) + gumbel(seed, position, ids, Purpose.TOKEN)
            order = np.argsort(-scores)
            if len(order) == 1 or scores[order[0]] - scores[order[1]] > 1e-4 * max(
                1.0, scale
            ):  # a device may compute the noise in float32
                case = {"row": row, "seed": seed, "position": position}
                expect_equal(got, int(order[0]), "noisy_argmax() chooses a different token", **case)
