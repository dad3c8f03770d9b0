"""Passive measurements and acceptance by kind of token."""

import attrs
import pytest

from specdec.config import Choice
from specdec.errors import UnsupportedError
from specdec.measuring import Prompt, measure_acceptance
from specdec.measuring.acceptance import passive_lm
from specdec.measuring.runs import at_depth, generate, plain
from specdec.registry.parts import make_verifier
from tests.decoding.test_sessions import CODE, load, variant
from tests.measuring.test_acceptance import COSTS

__all__ = ["load"]  # a fixture


class OneRow:
    """A target that lets no pass of several rows through to decoding."""

    def __init__(self, target):
        self._target = target
        self.passes = 0

    def __getattr__(self, name):
        return getattr(self._target, name)

    def decode(self, state, tokens):
        assert len(tokens) == 1
        self.passes += 1
        return self._target.decode(state, tokens)


@pytest.mark.parametrize(("drafter", "depth", "temperature"), [("mtp", 4, 0.0), ("mtp", 1, 0.9), ("ngram", 4, 0.9)])
def test_the_drafts_are_those_of_an_active_run_and_nothing_is_verified(drafter, depth, temperature, load):
    """Wherever the active run drafted, the passive one drafted the same and accepts as much of it."""
    lm = at_depth(variant(load("demo", "bfloat16"), drafter), depth)
    settings = {"max_new_tokens": 60, "ignore_eos": True, "temperature": temperature, "seed": 3}
    ids = lm.tokenizer.encode(CODE)
    active = generate(lm, ids, **settings)
    watched, with_drafts = passive_lm(lm)
    spied = OneRow(lm.target)
    run = with_drafts(generate(attrs.evolve(watched, target=spied), ids, **settings))
    assert run.tokens == active.tokens == generate(plain(lm), ids, **settings).tokens
    assert spied.passes == len(run.cycles) == 60
    found = {cycle.position: cycle for cycle in run.cycles}
    compared = 0
    for cycle in active.cycles:
        other = found[cycle.position]
        assert (other.drafted, other.accepted) == (cycle.drafted, cycle.accepted)
        compared += bool(cycle.drafted)
    assert compared > 0


def test_a_verifier_that_accepts_other_tokens_is_refused(load):
    lm = attrs.evolve(
        variant(load("demo", "bfloat16"), "mtp"), verifier=make_verifier(Choice("margin", {"margin": 1.0}))
    )
    with pytest.raises(UnsupportedError, match="accepts others too"):
        measure_acceptance(lm, {"one": [Prompt(kind="one", text=CODE)]}, passive=True)


def test_the_report_of_a_passive_measurement(load):
    lm = variant(load("demo", "bfloat16"), "mtp")
    prompts = {"one": [Prompt(kind="one", text=CODE)]}
    options = {"depth": 3, "costs": COSTS, "max_new_tokens": 40, "ignore_eos": True}
    report = measure_acceptance(lm, prompts, passive=True, **options)
    (group,) = report.classes
    assert [place.offered for place in group.positions] == [39, 38, 37]  # the last step has room for no draft
    assert (group.cycles, group.tokens, group.tokens_per_cycle, group.cycle_seconds) == (40, 40, None, None)
    assert report.to_dict()["passive"] is True
    tokens = 1.0
    for place, prediction in zip(group.positions, group.predictions, strict=True):
        tokens += place.accepted / place.offered
        assert prediction.tokens == pytest.approx(tokens)
    reached = sum(place.reached for place in group.positions)
    assert sum(kind.accepted + kind.rejected for kind in report.kinds) == reached
    assert sum(kind.accepted for kind in report.kinds) == sum(place.accepted for place in group.positions)
    active = measure_acceptance(lm, prompts, **options)
    assert not active.passive
    assert active.overall.tokens_per_cycle == 40 / active.overall.cycles
    assert all(kind["rate"] is None or 0 <= kind["rate"] <= 1 for kind in active.to_dict()["kinds"])
