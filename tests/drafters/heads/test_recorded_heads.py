"""Drafts of every kind of head are those of speculators' own model classes, for random small heads.

Greedy ids are equal, and the logits of every step within 1e-4 of the largest: after a prompt, after a catch-up over
several cycles, and at every depth. Source of the figures: ``tools/record_heads.py``.
"""

import numpy as np
import pytest

from specdec.drafters.heads.drafter import PreparedHead
from tests.drafters.heads.recorded_heads import ENDS, NAMES, Recorded

BOUND = 1e-4


DEPTHS = ((8, 1, 2, 8), (3, 8, 5, 4), (6, 7, 8, 8))  # at each of the recorded lengths


def run(recorded, monkeypatch, chunk=64, depths=DEPTHS[0]):
    """Draft at every recorded length; returns the largest relative difference of the logits.

    Raises: AssertionError if a drafted token is another one.
    """
    seen = []
    mapped = PreparedHead.mapped

    def watched(self, *arguments):
        found = mapped(self, *arguments)
        seen.append(found.rows())
        return found

    monkeypatch.setattr(PreparedHead, "mapped", watched)
    worst = 0.0
    recorded.prefill(ENDS[0], chunk)
    for number, (end, depth) in enumerate(zip(ENDS, depths, strict=True)):
        if number:
            recorded.cycle(end - recorded.at)
        wanted = recorded.expected["drafts"][number].tolist()[:depth]
        tokens = recorded.head.layout.tokens
        seen.clear()
        draft = recorded.drafter.propose(recorded.context(end), depth)
        assert list(draft.tokens) == wanted
        got = np.concatenate(seen)[: len(wanted)]
        if tokens is not None:
            assert np.isneginf(np.delete(got, tokens, axis=1)).all()
            got = got[:, tokens]
        truth = recorded.expected["logits"][number].numpy()[: len(wanted)]
        worst = max(worst, float(np.abs(got - truth).max() / np.abs(truth).max()))
    return worst


@pytest.mark.parametrize(("chunk", "depths"), [(64, DEPTHS[0]), (1, DEPTHS[1]), (5, DEPTHS[2])])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_those_of_speculators(name, chunk, depths, monkeypatch):
    assert run(Recorded.load(name), monkeypatch, chunk, depths) < BOUND
