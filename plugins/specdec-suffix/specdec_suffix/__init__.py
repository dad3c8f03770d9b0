"""specdec-suffix: draft what followed the longest suffix of the text that occurred before.

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
            help="what most often followed the longest match in the session or in a corpus (suffix automaton)",
        )
    ]
