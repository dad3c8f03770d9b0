"""Acceptance by kind of token: common, rare and special ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from specdec.measuring.runs import Run

KINDS = ("common", "rare", "special")
COMMON_SHARE = 0.5


@attrs.frozen(kw_only=True)
class KindReport:
    """Draft tokens by the kind of the token that the output has in their place.

    Counted are tokens whose predecessors in the draft were all right, so that each is a fair guess.
    """

    kind: str
    accepted: int
    rejected: int

    @property
    def rate(self) -> float | None:
        """accepted / (accepted + rejected); None if there were none."""
        tried = self.accepted + self.rejected
        return self.accepted / tried if tried else None


def by_kind(runs: Sequence[Run], special_ids: Collection[int]) -> tuple[KindReport, ...]:
    """Count accepted and rejected draft tokens by kind.

    Special tokens are the tokenizer's. Of the others, the most frequent ones that make up half of all prompt and output
    tokens of ``runs`` are common; the rest is rare.
    """
    seen = Counter(token for run in runs for token in (*run.prompt_tokens, *run.tokens) if token not in special_ids)
    common: set[int] = set()
    covered = 0
    for token, count in sorted(seen.items(), key=lambda entry: (-entry[1], entry[0])):
        if covered >= COMMON_SHARE * seen.total():
            break
        common.add(token)
        covered += count
    counted: Counter[tuple[str, bool]] = Counter()
    for run in runs:
        for token, right in _guesses(run):
            kind = "special" if token in special_ids else "common" if token in common else "rare"
            counted[kind, right] += 1
    return tuple(KindReport(kind=kind, accepted=counted[kind, True], rejected=counted[kind, False]) for kind in KINDS)


def _guesses(run: Run) -> Iterator[tuple[int, bool]]:
    """For every draft token that was reached: the token of the output in its place, and whether it was accepted."""
    start = len(run.prompt_tokens)
    for cycle in run.cycles:
        following = run.tokens[cycle.position - start :]
        yield from ((token, True) for token in following[: cycle.accepted])
        if cycle.accepted < min(cycle.offered, len(following)):
            yield following[cycle.accepted], False
