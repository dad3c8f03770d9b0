"""A verifier that keeps a draft token if it is among the target's k best."""

import sys

import attrs

import specdec.registry
from specdec import Context, Draft, Guarantee, Logits, Verdict, Verifier, VerifierSpec, between, hookimpl
from specdec.errors import ShapeError
from specdec.sampling import Rows


@attrs.frozen(kw_only=True)
class TopConfig:
    """The lowest rank, in the target's order, that is kept."""

    k: int = attrs.field(default=2, validator=between(1, 1000))  # 1 keeps the best only


class TopVerifier(Verifier):
    """Keeps a token of rank 1 to k; otherwise the token of plain decoding replaces it."""

    guarantee = Guarantee.HEURISTIC  # the second best may be arbitrarily worse than the best, so there is no bound

    def __init__(self, config: TopConfig) -> None:
        self._k = config.k

    def verify(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        if len(logits) != len(draft.tokens) + 1:
            raise ShapeError(f"{len(draft.tokens)} draft tokens need one row more, got {len(logits)}")
        rows = Rows(logits, draft.tokens, context)  # bias, penalties, bans and grammars, each row with its own history
        deviating: list[tuple[int, float]] = []  # lookahead position and gap of tokens unlike plain decoding
        for position, token in enumerate(draft.tokens):
            chosen = rows.choose(position)  # the token of plain decoding
            if token == chosen:
                continue
            values = rows.processed(position)
            rank = 1 + (values > values[token]).sum() + (values[:token] == values[token]).sum()
            if rank > self._k or values[token] == float("-inf"):  # forbidden tokens stay forbidden
                return Verdict(position, chosen, tuple(deviating))
            deviating.append((position, float(values.max() - values[token])))
        return Verdict(len(draft.tokens), rows.choose(len(draft.tokens)), tuple(deviating))


@hookimpl
def specdec_verifiers() -> list[VerifierSpec]:
    return [VerifierSpec(name="top", factory=TopVerifier, config=TopConfig, help="tokens among the k best; lossy")]


if __name__ == "__main__":  # without packaging: register this module, then ask for the verifier by its name
    specdec.registry.registry().register(sys.modules[__name__])
    lm = specdec.load("demo", verifier={"name": "top", "k": 3}, depth=4)
    result = lm.generate("def add(a, b):", max_new_tokens=40)
    print(result.text, result.guarantee, result.deviation, sep="\n")
