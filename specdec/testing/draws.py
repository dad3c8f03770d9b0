"""``Draws``: whether many draws, each from a distribution of its own, follow these distributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specdec.contract import Draft
from specdec.sampling import Purpose, uniforms
from specdec.testing.checks import expect
from specdec.testing.scripted_session import ScriptedSession

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]

FAR = 6.5  # standard deviations: 8e-11, for each of some hundred sums
ENOUGH = 12.0  # the variance from which a sum of bounded terms is taken for normal


class Draws:
    """Sums of differences between what was drawn and what was to be expected.

    Each term is ``f(token) - E f`` under the distribution that the draft states, so it has mean 0 given all that came
    before, whatever the contexts are, and the sums are normal (a martingale central limit theorem: Hall and Heyde
    1980). The functions are chosen so that usual mistakes move one of them.
    """

    def __init__(self, seed: int) -> None:
        self._signs = np.random.default_rng([seed % 2**32, 6]).choice([-1.0, 1.0], 1 << 12)
        self._sums: dict[str, list[float]] = {}
        self.seen = 0  # tokens

    def see(self, session: ScriptedSession, draft: Draft, depth: int) -> None:
        """Add the tokens of a draft that has distributions."""
        if draft.probs is None:
            return
        self.seen += len(draft.tokens)
        history, before = list(session.tokens), 0.0
        for row, token in enumerate(draft.tokens):
            probs: Float64 = np.asarray(draft.probs[row], np.float64)
            probs = probs / probs.sum()
            place = "row 0" if row == 0 else "row 1" if row == 1 else "rows 2 to 6" if row < 7 else "rows from 7"
            for name, values in self._functions(probs, history, draft.tokens[:row]).items():
                self._add(name, values, probs, token, 1.0)
                self._add(f"{name}, {place}", values, probs, token, 1.0)
                if row == depth - 1:  # a token that is left out after it was drawn is often the last one
                    self._add(f"{name}, the last row that was asked for", values, probs, token, 1.0)
            middle = np.cumsum(probs) - probs / 2  # of the token's part of the unit interval
            sampling, ids = session.sampling, np.zeros(1, np.int64)
            for purpose in (Purpose.ACCEPT, Purpose.TOKEN):
                u = float(uniforms(sampling.seed, len(history), purpose, ids, session.cycles)[0])
                self._add(f"beside the noise {purpose.name}", middle, probs, token, 2 * u - 1)
            if row:
                self._add("beside the token before", middle, probs, token, before)
            before = 2 * float(middle[token]) - 1
            history.append(token)

    def _functions(self, probs: Float64, history: list[int], drafted: Sequence[int]) -> dict[str, Float64]:
        ids = np.arange(len(probs))
        return {
            "the most probable token": (ids == probs.argmax()).astype(np.float64),
            "the logarithm of the probability": np.log(np.maximum(probs, 1e-9)) / 20,
            "improbable tokens": (probs < 0.03).astype(np.float64),
            "the token before again": (ids == history[-1]).astype(np.float64),
            "the first drafted token again": np.isin(ids, drafted[:1]).astype(np.float64),
            "a drafted token again": np.isin(ids, drafted).astype(np.float64),
            "half of the tokens": self._signs[(ids * 7 + history[-1]) % len(self._signs)],
        }

    def _add(self, name: str, values: Float64, probs: Float64, token: int, weight: float) -> None:
        mean = float(probs @ values)
        spread = float(probs @ (values - mean) ** 2)
        if spread > 1e-12:
            entry = self._sums.setdefault(name, [0.0, 0.0, 0.0])
            entry[0] += weight * (float(values[token]) - mean)
            entry[1] += weight**2 * spread
            entry[2] = max(entry[2], abs(weight) * float(np.abs(values - mean).max()))

    def judge(self, setting: str) -> None:
        """Raises: Broken if a sum is too far from 0."""
        for name, (total, variance, largest) in self._sums.items():
            if variance <= ENOUGH * largest**2:
                continue
            away = total / variance**0.5
            what = f"drafted tokens do not follow their probs, as to {name}"
            expect(
                abs(away) <= FAR, what, got=f"{away:.1f} standard deviations", expected="at most 6.5", setting=setting
            )
        self._sums.clear()
