"""Draft the tokens that followed the latest earlier occurrence of the current suffix, longest suffix first.

A draft is at most twice as long as the suffix that matched, since short matches are often chance. It repeats itself
where it gets to the end of the text. Source: prompt lookup decoding, A. Saxena 2023. The drafts are point masses; no
model runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs

from specdec.config import between
from specdec.contract import EMPTY_DRAFT, Context, Draft, Drafter, DrafterEnv, DrafterSpec
from specdec.errors import ConfigError
from specdec.hookspecs import hookimpl

REACH = 2  # drafted tokens per token of the match


@attrs.frozen(kw_only=True)
class NgramConfig:
    """How long a suffix must be to count as a match."""

    max_order: int = attrs.field(default=8, validator=between(1, 16))  # tokens of the longest suffix tried
    min_order: int = attrs.field(default=1, validator=between(1, 16))  # tokens of the shortest

    def __attrs_post_init__(self) -> None:
        if self.min_order > self.max_order:
            raise ConfigError(f"min_order ({self.min_order}) is above max_order ({self.max_order})")


class NgramIndex:
    """The n-grams of a text, and the positions after them.

    Args:
        longest, shortest: tokens of the n-grams.

    Attributes:
        tokens: the text.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self._orders = range(longest, shortest - 1, -1)
        self.tokens: list[int] = []
        self._followers: dict[tuple[int, ...], list[int]] = {}  # n-gram -> where its continuations start, ascending

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self.tokens.append(token)
            for gram in self._ending_here():
                self._followers.setdefault(gram, []).append(len(self.tokens))

    def cut(self, length: int) -> None:
        """Forget the text from position ``length`` on."""
        while len(self.tokens) > length:
            for gram in self._ending_here():
                starts = self._followers[gram]
                starts.pop()
                if not starts:
                    del self._followers[gram]
            self.tokens.pop()

    def starts(self, context: Sequence[int]) -> tuple[int, Sequence[int]]:
        """The tokens of the longest suffix of ``context`` that is an n-gram, and the positions after it, ascending."""
        for order in self._orders:
            if order <= len(context) and (starts := self._followers.get(tuple(context[-order:]))):
                return order, starts
        return 0, ()

    def _ending_here(self) -> list[tuple[int, ...]]:
        """The n-grams that end with the last indexed token."""
        return [tuple(self.tokens[-order:]) for order in self._orders if order <= len(self.tokens)]


class NgramDrafter(Drafter):
    """Looks the end of the context up in an index of the context, extended by new tokens and cut by a rewind."""

    def __init__(self, config: NgramConfig, env: DrafterEnv | None = None) -> None:
        self._index = NgramIndex(config.max_order, config.min_order)

    def propose(self, context: Context, depth: int) -> Draft:
        # leave the last token for the next call, so that the suffix itself is not indexed yet
        self._index.extend(context[len(self._index) : len(context) - 1])
        order, starts = self._index.starts(context)
        if not starts:
            return EMPTY_DRAFT
        length = min(depth, REACH * order)
        followers = context[starts[-1] : starts[-1] + length]
        return Draft(tuple(itertools.islice(itertools.cycle(followers), length)))

    def rewind(self, length: int) -> None:
        self._index.cut(length)


@hookimpl
def specdec_drafters() -> list[DrafterSpec]:
    return [
        DrafterSpec(
            name="ngram",
            factory=NgramDrafter,
            config=NgramConfig,
            help="the tokens that followed the same words earlier in the text (prompt lookup)",
        )
    ]
