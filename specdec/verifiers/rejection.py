"""Lossless sampling by the ratio rule, token by token or block by block.

Sources: Leviathan et al. 2023, arXiv:2211.17192, algorithm 1, with p = target and q = draft (Chen et al. 2023,
arXiv:2302.01318, swap the letters); for blocks Sun et al. 2024, arXiv:2403.10444, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import attrs
import numpy as np

from specdec.contract import Context, Draft, DraftNoise, Guarantee, Logits, Verdict, Verifier, VerifierSpec
from specdec.hookspecs import hookimpl
from specdec.sampling import Purpose, Rows, draw, uniforms
from specdec.verifiers.strict import StrictVerifier, check_rows

if TYPE_CHECKING:
    from specdec.sampling import Float64, Float64Like

Distribution = Callable[[int], "Float64"]
"""Gives the distribution ``[V]`` of a row; computed on demand."""


@attrs.frozen(kw_only=True)
class RejectionConfig:
    """``block``: verify the block as a whole; accepts at least as many tokens on average. Drafts need ``probs``."""

    block: bool = False


class RejectionVerifier(Verifier):
    """The output follows the target's distribution, but differs from plain decoding with the same seed."""

    guarantee = Guarantee.DISTRIBUTION
    draft_noise = DraftNoise.INDEPENDENT

    def __init__(self, config: RejectionConfig) -> None:
        self._block = config.block
        self._greedy = StrictVerifier()

    def verify(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        check_rows(draft, logits)
        sampling = context.sampling
        if sampling.temperature == 0:  # one-hot distributions: the ratio rule compares argmaxes
            return self._greedy.verify(draft, logits, context)
        rows = Rows(logits, draft.tokens, context)
        count, start = len(draft.tokens), len(context)

        def noise(row: int, purpose: Purpose) -> float:
            return float(uniforms(sampling.seed, start + row, purpose, np.zeros(1, np.int64), context.cycle)[0])

        accepts = [noise(row, Purpose.ACCEPT) for row in range(count)]
        if self._block and draft.probs is not None:
            accepted, final = accept_block(rows.distribution, draft.probs, draft.tokens, accepts)
        else:
            accepted, final = accept_chain(rows.distribution, draft.probs, draft.tokens, accepts)
        return Verdict(accepted, draw(final, noise(accepted, Purpose.RESIDUAL)))


def accept_chain(
    target_distribution: Distribution,
    draft_distributions: Float64Like | None,
    tokens: Sequence[int],
    accepts: Sequence[float],
) -> tuple[int, Float64]:
    """The token-level rule: how many draft tokens stay, and the distribution of the token after them.

    Token x of row i stays if ``accepts[i] * draft(x) < target(x)``; after the first failure the distribution is
    ``norm(max(target - draft, 0))``. ``draft_distributions`` None: point masses. Leviathan et al., algorithm 1.
    """
    for row, token in enumerate(tokens):
        target = target_distribution(row)
        draft = _point_mass(token, target) if draft_distributions is None else _wide(draft_distributions[row])
        if not accepts[row] * draft[token] < target[token]:
            return row, residual(target, draft)
    return len(tokens), target_distribution(len(tokens))


def accept_block(
    target_distribution: Distribution, draft_distributions: Float64Like, tokens: Sequence[int], accepts: Sequence[float]
) -> tuple[int, Float64]:
    """Block verification: the largest index whose test passes decides; an earlier failure does not end it.

    Sun et al. 2024, algorithm 2; ``kept`` is their p_i, ``spare`` the mass s_i of the scaled residual.
    """
    kept: float = 1  # ints, here and below, keep fractions exact
    best, final = 0, None
    count = len(tokens)
    for row in range(count + 1):
        target = target_distribution(row)
        if row == count:
            if row == 0 or accepts[row - 1] <= kept:
                return count, target
            break
        draft = _wide(draft_distributions[row])
        scaled = np.maximum(kept * target - draft, 0)
        spare = scaled.sum()
        passes = row == 0 or kept >= 1 or accepts[row - 1] <= spare / (spare + 1 - kept)
        if passes:
            best, final = row, (scaled / spare if spare > 0 else target)
        token = tokens[row]
        kept = min(1, kept * target[token] / draft[token]) if target[token] > 0 else 0
    assert final is not None  # row 0 always passes
    return best, final


def residual(target: Float64, draft: Float64) -> Float64:
    """``norm(max(0, target - draft))`` of two distributions ``[V]``; the target if they are equal."""
    rest = np.maximum(target - draft, 0)
    mass = rest.sum()
    return rest / mass if mass > 0 else target


def _point_mass(token: int, like: Float64) -> Float64:
    distribution = np.zeros_like(like)
    distribution[token] = 1
    return distribution


def _wide(distribution: Float64Like) -> Float64:
    """Converts float32 to float64; leaves fractions (used in tests) unchanged."""
    return distribution.astype(np.float64) if distribution.dtype == np.float32 else cast("Float64", distribution)


@hookimpl
def specdec_verifiers() -> list[VerifierSpec]:
    return [
        VerifierSpec(
            name="rejection",
            factory=RejectionVerifier,
            config=RejectionConfig,
            help="the target's distribution, by the ratio rule or block verification",
        )
    ]
