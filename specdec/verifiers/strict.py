"""The exact verifier: a draft token stays if and only if plain decoding would have chosen it."""

from __future__ import annotations

from specdec.contract import Context, Draft, Guarantee, Logits, NoConfig, Verdict, Verifier, VerifierSpec
from specdec.errors import ShapeError
from specdec.hookspecs import hookimpl
from specdec.sampling import Rows


class StrictVerifier(Verifier):
    """Row k decides token k by the same function as plain decoding: argmax, or noise keyed by the position.

    The output is a function of target, prompt, settings and seed alone; drafter, depth and cycle boundaries do not
    affect it.
    """

    guarantee = Guarantee.EXACT

    def __init__(self, config: NoConfig | None = None) -> None:
        pass

    def verify(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        check_rows(draft, logits)
        rows = Rows(logits, draft.tokens, context)
        for position, token in enumerate(draft.tokens):
            chosen = rows.choose(position)
            if token != chosen:
                return Verdict(position, chosen)
        return Verdict(len(draft.tokens), rows.choose(len(draft.tokens)))


def check_rows(draft: Draft, logits: Logits) -> None:
    """Raises: ShapeError unless there is one row per draft token plus one for the token after them."""
    if len(logits) != len(draft.tokens) + 1:
        raise ShapeError(f"{len(draft.tokens)} draft tokens need {len(draft.tokens) + 1} rows, got {len(logits)}")


@hookimpl
def specdec_verifiers() -> list[VerifierSpec]:
    return [VerifierSpec(name="strict", factory=StrictVerifier, help="exact: the tokens of plain decoding")]
