"""The suffix drafter: the longest match determines the source and the length of the draft."""

from __future__ import annotations

import attrs
from specdec import Context, Draft, Drafter, DrafterEnv, between
from specdec.contract import EMPTY_DRAFT, ForwardOutput
from specdec.errors import ConfigError

from specdec_suffix.automaton import ROOT, SuffixAutomaton


@attrs.frozen(kw_only=True)
class SuffixConfig:
    """What counts as a match, and how many tokens to draft from it."""

    min_match: int = attrs.field(default=1, validator=between(1, 64))  # tokens of the shortest match used
    max_match: int = attrs.field(default=32, validator=between(1, 256))  # longer matches count as this long
    max_draft: int = attrs.field(default=15, validator=between(1, 255))  # tokens of the longest draft
    factor: float = attrs.field(default=2.0, validator=between(0.1, 100.0))  # draft at most factor * match tokens
    min_share: float = attrs.field(default=0.1, validator=between(0.0, 1.0))  # stop when no token follows this often
    corpus: str | None = None  # a file that all sequences may match: text, or token ids as .json or .npy
    tokenizer: str | None = None  # the tokenizer.json (or its folder) for a corpus of text

    def __attrs_post_init__(self) -> None:
        if self.min_match > self.max_match:
            raise ConfigError(f"min_match ({self.min_match}) is above max_match ({self.max_match})")
        if self.tokenizer is not None and self.corpus is None:
            raise ConfigError("a tokenizer is for a corpus, and no corpus is named")


class SuffixDrafter(Drafter):
    """Matches the end of the text against the earlier text and the corpus; drafts from the longer match.

    If both are equally long, the session's text wins. Drafts are point masses: counts choose the path, but they are
    not the distribution that a token was drawn from.

    A rewind undoes the removed tokens one by one and costs as much as adding them did. The corpus is never changed;
    its match is a function of the last ``max_match`` tokens.
    """

    def __init__(self, config: SuffixConfig, env: DrafterEnv | None = None) -> None:
        self._config = config
        self._session = SuffixAutomaton(config.min_match, config.max_match)
        self._corpus: SuffixAutomaton | None = None if env is None else env.shared
        self._corpus_match = ROOT, 0
        self._stale = False  # after a rewind the corpus match is found again from the last tokens

    def prefill(self, context: Context, output: ForwardOutput) -> None:
        self._read(context)

    def propose(self, context: Context, depth: int) -> Draft:
        self._read(context)
        source = self._session
        state, matched = source.match()
        if self._corpus is not None and self._corpus_match[1] > matched:
            source, (state, matched) = self._corpus, self._corpus_match
        if matched < self._config.min_match:
            return EMPTY_DRAFT
        longest = min(depth, self._config.max_draft, max(1, int(self._config.factor * matched)))
        return Draft(tuple(source.follow(state, longest, self._config.min_share)))

    def rewind(self, length: int) -> None:
        if length < len(self._session):
            self._session.truncate(length)
            self._stale = True

    def _read(self, context: Context) -> None:
        """Index the new tokens, including the pending one."""
        known = len(self._session)
        self._session.extend(context[known:])
        if self._corpus is None:
            return
        if self._stale:
            known, self._corpus_match, self._stale = max(0, known - self._config.max_match), (ROOT, 0), False
        for token in context[known:]:
            self._corpus_match = self._corpus.advance(*self._corpus_match, token)
