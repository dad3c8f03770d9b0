"""The value of a depth: expected tokens over the seconds of a cycle, and the acceptance at which it pays.

With t(k) the seconds of a cycle that drafts k tokens, and E(k) the tokens it is expected to emit,

    S(k) = E(k) / t(k) * t(0),    E(k) = 1 + A_1 + ... + A_k

where A_i is the share of cycles whose first i draft tokens were all accepted. With one conditional acceptance a at
every position, E(k) = (1 - a^(k+1)) / (1 - a); the depth breaks even where that equals t(k) / t(0).
Source: Leviathan et al. 2023, arXiv:2211.17192, equation 1 and theorem 3.8, with measured costs in place of
``1 + c k``.
"""

from __future__ import annotations

import enum
import math

import attrs
import numpy as np

from specdec.measuring.intervals import MIN_PROMPTS

TURN_ON = 1.05  # the lower end of the speed-up must exceed this
NOT_WORTH_IT = 1.02  # the upper end of the speed-up must be below this


def break_even(cost: float, depth: int) -> float | None:
    """The conditional acceptance, equal at every position, at which ``depth`` emits ``cost`` tokens.

    Args:
        cost: t(depth) / t(0), the cycle in plain steps.
    Returns: 0 to 1, or None if even perfect drafts do not pay (``cost > depth + 1``).
    """
    if cost <= 1.0:
        return 0.0
    if depth < 1 or cost > depth + 1:
        return None
    roots = np.roots([*[1.0] * depth, 1.0 - cost])  # a + ... + a^depth = cost - 1 has one positive root
    return float(min(1.0, max(root.real for root in roots if abs(root.imag) < 1e-9)))


class Advice(enum.Enum):
    """Whether to speculate on a class of prompts."""

    TURN_ON = "turn on"
    """Even the lower end of the predicted speed-up is above ``TURN_ON``."""
    WORTH_TRYING = "worth trying"
    """Neither of the others: the interval is too wide, or the gain too small."""
    NOT_WORTH_IT = "not worth it"
    """Even the upper end of the predicted speed-up is below ``NOT_WORTH_IT``."""


@attrs.frozen(kw_only=True)
class Prediction:
    """The predicted speed-up of a depth."""

    depth: int
    tokens: float  # E(depth)
    speedup: float  # S(depth), against plain decoding
    interval: tuple[float, float] | None  # of the speed-up, over prompts; None if there are too few


def advise(prediction: Prediction) -> tuple[Advice, str]:
    """The advice for the best depth, and the deciding number."""
    if prediction.interval is None:
        return Advice.WORTH_TRYING, f"too few prompts for an interval ({MIN_PROMPTS} or more)"
    low, high = prediction.interval
    if low > TURN_ON:
        return Advice.TURN_ON, f"lower end {_x(low)} is above {TURN_ON}x"
    if high < NOT_WORTH_IT:
        return Advice.NOT_WORTH_IT, f"upper end {_x(high)} is below {NOT_WORTH_IT}x"
    return Advice.WORTH_TRYING, f"lower end {_x(low)} is not above {TURN_ON}x, upper end {_x(high)}"


def _x(speedup: float) -> str:
    """Two digits, rounded towards the decision, so that the text never contradicts itself."""
    near = any(abs(speedup - edge) < 0.005 for edge in (TURN_ON, NOT_WORTH_IT))
    return f"{speedup:.4f}x" if near and math.isfinite(speedup) else f"{speedup:.2f}x"
