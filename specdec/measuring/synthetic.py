"""Cycles at an imposed acceptance: real drafts and real verification, but a random draw decides.

The output is neither the model's text nor a result: it shows what the speed *would* be at that acceptance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from specdec.contract import Context, Draft, Guarantee, Logits, Verdict, Verifier
from specdec.errors import ConfigError, did_you_mean
from specdec.sampling import Purpose, uniforms

PROFILES: Mapping[str, tuple[float, ...]] = {
    "code": (0.917, 0.837, 0.648, 0.538, 0.451, 0.348),
    "mixed": (0.763, 0.623, 0.459, 0.396),
    "prose": (0.74, 0.481, 0.293, 0.161, 0.073),
}
"""Cumulative acceptance by lookahead position, as reported for MTP heads of 27 B models on such text."""


def parse_profile(text: str) -> tuple[float, ...]:
    """Parse a profile's name, or cumulative rates such as ``0.8,0.6,0.4``: each 0 to 1, never rising.

    Raises: ConfigError that says what was wrong.
    """
    if text in PROFILES:
        return PROFILES[text]
    try:
        rates = tuple(float(word) for word in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"an acceptance profile is a name or rates like 0.8,0.6,0.4, got {text!r}.{did_you_mean(text, PROFILES)}",
            available=", ".join(PROFILES),
        ) from error
    falling = all(later <= earlier for earlier, later in zip((1.0, *rates), rates, strict=False))
    if not falling or not all(math.isfinite(rate) and rate >= 0 for rate in rates):
        raise ConfigError(f"cumulative rates lie from 1 to 0 and never rise, got {text!r}", try_="0.8,0.6,0.4")
    return rates


class SyntheticVerifier(Verifier):
    """Runs another verifier for its cost, then draws acceptance from a given rate.

    The conditional acceptance of position i is ``cumulative[i] / cumulative[i - 1]``; past the profile's end the last
    conditional acceptance continues. The draw is keyed by seed, position and cycle.
    """

    guarantee: ClassVar[Guarantee] = Guarantee.HEURISTIC

    def __init__(self, inner: Verifier, cumulative: Sequence[float]) -> None:
        self._inner = inner
        before = (1.0, *cumulative)
        self._conditional = [rate / last if last else 0.0 for last, rate in zip(before, cumulative, strict=False)]

    def verify(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        self._inner.verify(draft, logits, context)
        accepted = 0
        for place in range(len(draft.tokens)):
            draw = uniforms(
                context.sampling.seed, len(context) + place, Purpose.ACCEPT, np.zeros(1, np.int64), context.cycle
            )
            if draw[0] >= self._conditional[min(place, len(self._conditional) - 1)]:
                break
            accepted += 1
        # the drafted token even where it is rejected: what the target emits would be no text to any drafter
        following = draft.tokens[min(accepted, len(draft.tokens) - 1)] if draft.tokens else logits.argmax()[0]
        return Verdict(accepted, following)
