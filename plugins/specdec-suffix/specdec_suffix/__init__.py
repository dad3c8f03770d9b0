"""specdec-suffix: a drafter that continues the longest suffix of the text that occurred before.

Entry point, group ``specdec``: ``suffix = "specdec_suffix"``.
"""

from __future__ import annotations

from specdec import DrafterSpec, hookimpl

from specdec_suffix.automaton import SuffixAutomaton
from specdec_suffix.corpus import load_corpus
from specdec_suffix.drafter import SuffixConfig, SuffixDrafter

__all__ = ["SuffixAutomaton", "SuffixConfig", "SuffixDrafter", "load_corpus", "specdec_drafters"]


@hookimpl
def specdec_drafters() -> list[DrafterSpec]:
    """The drafter of this plugin."""
    return [
        DrafterSpec(
            name="suffix",
            factory=SuffixDrafter,
            config=SuffixConfig,
            prepare=load_corpus,
            help="the tokens that most often followed the longest match in the session or a corpus (suffix automaton)",
        )
    ]
