"""Check what drafters and verifiers return."""

from __future__ import annotations

import operator

from specdec.contract import Context, Draft, DraftNoise, Verdict
from specdec.errors import ContractError, typed

SUM_TOLERANCE = 1e-4  # of a draft distribution


def checked_draft(draft: Draft, depth: int, vocab_size: int, context: Context) -> tuple[Draft, str]:
    """A draft of plain ints, cut to ``depth`` tokens and before the first id outside the vocabulary.

    Returns it with the fault for which it was cut, or "".
    Raises: ContractError for what is no Draft, has ``probs`` of another shape, or, where a ratio test reads them,
        ``probs`` that are not the distributions its tokens were drawn from.
    """
    if not isinstance(draft, Draft):
        raise ContractError(f"propose returned {typed(draft)}", takes="a specdec.Draft")
    tokens = tuple(map(operator.index, draft.tokens[:depth]))
    probs, fault = draft.probs, "draft longer than asked for" if len(draft.tokens) > depth else ""
    outside = next((place for place, token in enumerate(tokens) if not 0 <= token < vocab_size), None)
    if outside is not None:
        tokens, fault = tokens[:outside], "draft token outside the vocabulary"
    if probs is None:
        return Draft(tokens, None, draft.drafter), fault
    if len(probs) < len(tokens) or probs.shape[1:] != (vocab_size,):
        raise ContractError(
            f"propose returned {len(tokens)} tokens with probs of the shape {list(probs.shape)}",
            takes=f"probs of shape [K, {vocab_size}] and dtype float32, or None",
        )
    probs = probs[: len(tokens)]
    if context.draft_noise is DraftNoise.INDEPENDENT and context.sampling.temperature > 0:
        import numpy as np

        sums = probs.sum(axis=1, dtype=np.float64)
        drawn = probs[np.arange(len(tokens)), list(tokens)]
        if not (np.all(probs >= 0) and np.all(np.abs(sums - 1) <= SUM_TOLERANCE) and np.all(drawn > 0)):
            raise ContractError(
                "propose returned probs that its tokens cannot have been drawn from",
                takes="rows of probs that are not negative, sum to 1, and give every drafted token more than 0",
            )
    return Draft(tokens, probs, draft.drafter), fault


def checked_verdict(verdict: Verdict, drafted: int, vocab_size: int) -> Verdict:
    """``verdict`` on a draft of ``drafted`` tokens, with plain numbers. Raises: ContractError when it is not one."""
    if not isinstance(verdict, Verdict):
        raise ContractError(f"verify returned {typed(verdict)}", takes="a specdec.Verdict")
    accepted, token = operator.index(verdict.accepted), operator.index(verdict.next_token)
    if not (0 <= accepted <= drafted and 0 <= token < vocab_size):
        raise ContractError(
            f"verify returned {typed(verdict)}",
            takes=f"a Verdict with 0 to {drafted} accepted tokens and a next_token of 0 to {vocab_size - 1}",
        )
    return Verdict(accepted, token, tuple((operator.index(at), float(gap)) for at, gap in verdict.deviations))
