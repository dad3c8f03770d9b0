"""The gate decides on what is known before a token is drawn; so a gated draft keeps the law of the output, exactly.

The law is enumerated through the production drafter: every draw goes every way, weighed with its probability.
"""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec import sampling
from specdec.contract import Context, DrafterEnv, DraftNoise, Needs, Sampling
from specdec.drafters.gate import DraftGate, Drawing
from specdec.drafters.mtp import MtpConfig, MtpDrafter
from specdec.drafters.pruned_head import PreparedVocabulary
from specdec.testing import TableModel
from specdec.testing.table_model import TableLogits
from specdec.verifiers import rejection
from tests.verifiers.enumeration import distance, emitted, joint_of

logits_rows = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=12)


def softmax(row, temperature=1.0):
    weights = np.exp((row - row.max()).astype(np.float64) / temperature)
    return weights / weights.sum()


temperatures = st.sampled_from([0.0, 0.5, 2.0])


@given(row=logits_rows, threshold=st.floats(0.01, 1.0), temperature=temperatures, coupled=st.booleans())
def test_confidence_is_the_largest_probability_of_the_law(row, threshold, temperature, coupled):
    values = np.array(row, dtype=np.float32)
    noise = DraftNoise.COUPLED if coupled else DraftNoise.INDEPENDENT
    context = Context([1, 2], Sampling(temperature=temperature), draft_noise=noise)
    point = coupled or temperature == 0
    confidence = softmax(values, 1.0 if point else temperature).max()
    if abs(confidence - threshold) < 1e-6:
        return
    assert DraftGate(min_confidence=threshold).stops(TableLogits(values[None]), context) == (confidence < threshold)


@given(row=logits_rows, threshold=st.floats(0.01, 40))
def test_margin_is_the_gap_of_the_two_best_logits(row, threshold):
    values = np.array(row, dtype=np.float32)
    best = sorted(values.tolist(), reverse=True)
    gap = math.inf if len(best) == 1 else best[0] - best[1]
    gate = DraftGate(min_margin=threshold)
    assert gate.stops(TableLogits(values[None]), Context([1])) == (gap < threshold)
    assert gate.report() == {"gate_steps": 1, "gate_stops": int(gap < threshold)}


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_rows_that_need_no_draft_are_chosen_in_one_call(penalty):
    """Where the backend decides them; a row that it leaves open, and rows under a penalty, are drawn one by one."""
    values = np.random.default_rng(0).standard_normal((3, 9)).astype(np.float32)
    context = Context([1, 2], Sampling(temperature=1.0, seed=3, repetition_penalty=penalty))

    class Chosen(TableLogits):
        def choose(self, choosing):
            return [7, 7, None]

    singly, at_once = (Drawing(DraftGate(), context, reduced=False) for _ in range(2))
    for row in range(3):
        singly.next(TableLogits(values[row : row + 1]))
    at_once.rows(Chosen(values))
    assert at_once.tokens == (singly.tokens if penalty > 1 else [7, 7, singly.tokens[2]])


# --- the drafter, and the law of what comes out -----------------------------------------------------------------------

VOCAB, DEPTH, JOINT = 3, 2, 3
PROMPT = [1, 2, 0, 1]


class _Script:
    """Which way each draw goes, in depth-first order, and how probable that was."""

    def __init__(self):
        self.taken = []

    def runs(self, run):
        while True:
            self.at, self.weight = 0, Fraction(1)
            outcome = run()
            yield self.weight, outcome
            while self.taken and self.taken[-1] == VOCAB - 1:
                self.taken.pop()
            if not self.taken:
                return
            self.taken[-1] += 1

    def draw(self, law, u):
        if self.at == len(self.taken):
            self.taken.append(0)
        token = self.taken[self.at]
        self.at += 1
        self.weight *= Fraction(float(law[token])) / Fraction(float(law.sum()))
        return token


def drafts(model, config, shared, monkeypatch):
    """Every draft of the production drafter after PROMPT with its probability and the laws handed over."""
    script = _Script()
    monkeypatch.setattr(sampling, "draw", script.draw)
    context = Context(PROMPT, Sampling(temperature=1.0), generated_from=2, draft_noise=DraftNoise.INDEPENDENT)

    def run():
        state = model.new_state(32, Needs(mtp=True))
        drafter = MtpDrafter(config, DrafterEnv(target=model, state=state, shared=shared))
        model.prefill(state, PROMPT[:-1])
        return drafter.propose(context, DEPTH)

    found = []
    for weight, draft in script.runs(run):
        laws = None if draft.probs is None else [np.array([Fraction(float(p)) for p in law]) for law in draft.probs]
        if weight:
            found.append((weight, draft.tokens, laws or []))
    assert sum(weight for weight, *_ in found) == 1
    return found


def output_distance(model, found, rule):
    def target(prefix):
        law = [Fraction(float(p)) for p in model.distribution([*PROMPT, *prefix])]
        return tuple(p / sum(law) for p in law)

    got, _ = emitted(rule, target, iter(found), VOCAB, JOINT)
    return float(distance(got, joint_of(target, VOCAB, JOINT)))


RULES = {"chain": rejection.accept_chain, "block": rejection.accept_block}
FLOAT32 = 1e-6  # laws are handed over in float32, and sum to 1 up to its rounding
CASES = list(itertools.product(range(6), [0.45, 0.6, 0.8], [None, (0, 2)]))


def prepared(model, kept):
    if kept is None:
        return {}, None
    # nothing added for the sequence: a token of the prompt stays outside
    options = {"vocabulary": "given", "max_extra": 0, "max_miss": 1.0}
    return options, PreparedVocabulary.of(model.draft_head(kept), VOCAB)


@pytest.mark.parametrize("rule", RULES)
def test_gated_sampled_drafts_keep_the_joint_law(rule, monkeypatch):
    lengths = set()
    for seed, threshold, kept in CASES:
        model = TableModel.random(VOCAB, seed=seed, mtp=True, tilt=0.3)
        options, shared = prepared(model, kept)
        found = drafts(model, MtpConfig(min_confidence=threshold, **options), shared, monkeypatch)
        lengths |= {len(tokens) for _, tokens, _ in found}
        if kept is not None:
            assert all(token in kept for _, tokens, _ in found for token in tokens)
        assert output_distance(model, found, RULES[rule]) < FLOAT32, (seed, threshold, kept)
    assert lengths == {0, 1, 2}  # the gate closed at either position, and let drafts through
