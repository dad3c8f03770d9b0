"""Counters, rates and predictions against drafts whose fate was written down beforehand."""

import json

import attrs
import numpy as np
import pytest

from specdec.contract import Draft, Drafter
from specdec.errors import PromptError
from specdec.measuring import AcceptanceMeasurement, Advice, Prompt, measure_acceptance
from specdec.records.cost_table import CostTable

COSTS = CostTable(verify={1: 1.0, 5: 1.4}, draft={0: 0.0, 4: 0.4}, commit=0.1)
PROMPT = "abcdefgh"


class Scripted(Drafter):
    """Knows what the target will say, and is right for as many tokens as the script tells, cycle by cycle.

    A step of the script is ``(length, right)``: tokens drafted, and how many of them are right; then it starts over.
    """

    def __init__(self, truth, start, script, vocab):
        self._truth, self._start, self._script, self._vocab = truth, start, script, vocab
        self.cycle = 0

    def propose(self, context, depth):
        length, right = self._script[self.cycle % len(self._script)]
        self.cycle += 1
        at = len(context) - self._start
        known = self._truth[at : at + min(length, depth)]
        return Draft(tuple(t if i < right else (t + 1) % self._vocab for i, t in enumerate(known)))


def with_drafter(lm, **changes):
    return attrs.evolve(lm, drafter=attrs.evolve(lm.drafter, spec=attrs.evolve(lm.drafter.spec, **changes)))


def prompts(*kinds, count=1):
    return {kind: [Prompt(kind=kind, text=PROMPT, source=f"{kind} {n}") for n in range(count)] for kind in kinds}


def test_counters_of_a_script(scripted):
    """Cycles of 3, 1, 5 and 2 tokens; the generation ends after eight of them."""
    lm = scripted([(4, 2), (4, 0), (4, 4), (4, 1)])
    report = measure_acceptance(lm, prompts("one"), depth=4, costs=COSTS, max_new_tokens=27)
    (group,) = report.classes
    # 8 cycles emit 22 tokens, the ninth 3; then there is room for one drafted token (a wrong one), then for none
    assert [place.offered for place in group.positions] == [10, 9, 9, 9]
    assert [place.reached for place in group.positions] == [10, 7, 5, 2]
    assert [place.accepted for place in group.positions] == [7, 5, 2, 2]
    assert (group.prompts, group.tokens, group.cycles) == (1, 27, 11)
    assert group.tokens_per_cycle == 27 / 11
    for place in group.positions:
        assert place.cumulative == place.accepted / place.offered
        assert place.conditional == place.accepted / place.reached
    tokens = 1 + np.cumsum([7 / 10, 5 / 9, 2 / 9, 2 / 9])
    for prediction, expected in zip(group.predictions, tokens, strict=True):
        assert prediction.tokens == pytest.approx(expected)
        assert prediction.speedup == pytest.approx(expected * 1.1 / COSTS.cycle(prediction.depth))
        assert prediction.interval is None  # of one prompt
    assert group.verdict is Advice.WORTH_TRYING
    assert [one.cost for one in report.costs] == pytest.approx([COSTS.cycle(k) / 1.1 for k in (1, 2, 3, 4)])


def test_classes_take_turns_and_an_interruption_keeps_what_was_done(scripted):
    lm = scripted([(4, 1)])
    seen = []

    def progress(done, planned):
        assert planned == 6
        if done == 3:
            run.stop()

    def on_run(one):
        seen.append(one.prompt.source)

    run = AcceptanceMeasurement(
        lm, prompts("a", "b", count=3), depth=2, costs=COSTS, progress=progress, on_run=on_run, max_new_tokens=8
    )
    report = run.run()
    assert seen == ["a 0", "b 0", "a 1"]
    assert (report.partial, report.done, report.planned) == (True, 3, 6)
    assert [(group.name, group.prompts) for group in report.classes] == [("a", 2), ("b", 1)]
    assert report.overall.prompts == 3


def test_a_drafter_that_fails_is_told(scripted):
    lm = scripted([(4, 1)])

    class Failing(Drafter):
        def propose(self, context, depth):
            raise RuntimeError("no idea")

    lm = with_drafter(lm, factory=lambda config, env: Failing())
    report = measure_acceptance(lm, prompts("a"), depth=2, costs=COSTS, max_new_tokens=4)
    assert any("failed in propose: RuntimeError: no idea" in n for n in report.notices)
    assert report.overall.positions[0].offered == 0
    assert report.overall.cycles == 4


def test_what_cannot_be_measured_is_refused(scripted):
    lm = scripted([(4, 1)])
    with pytest.raises(PromptError, match="temperature takes"):
        AcceptanceMeasurement(lm, prompts("a"), temperature=-1.0)
    long = {"a": [Prompt(kind="a", text="word " * 600, source="mine.txt, line 4")]}
    with pytest.raises(PromptError, match="too long") as caught:
        AcceptanceMeasurement(lm, long, costs=COSTS).run()
    assert caught.value.facts["prompt"] == "mine.txt, line 4"


def test_an_interrupted_prompt_is_not_counted(scripted):
    lm = scripted([(4, 1)])

    class Stopping(Scripted):
        def propose(self, context, depth):
            if self.cycle == 2:
                run.stop()  # a signal in the middle of the first prompt
            return super().propose(context, depth)

    lm = with_drafter(lm, factory=lambda config, env: Stopping([5] * 99, 8, [(2, 2)], env.target.info.vocab_size))
    run = AcceptanceMeasurement(lm, prompts("a", count=2), depth=2, costs=COSTS, max_new_tokens=40)
    report = run.run()
    assert (report.partial, report.done, report.overall.cycles) == (True, 0, 0)
    json.dumps(report.to_dict(), allow_nan=False)
