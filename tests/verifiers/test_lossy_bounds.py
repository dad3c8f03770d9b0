"""The verifiers that may deviate: the margin's bound, and that both reduce to strict where they should."""

import attrs
import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from specdec.backends.arrays import HostLogits
from specdec.contract import Context, Draft, Sampling
from specdec.sampling import Rows
from specdec.testing.verifier_cases import cases, emitted
from specdec.verifiers.margin import MarginConfig, MarginVerifier
from specdec.verifiers.strict import StrictVerifier
from specdec.verifiers.typical import TypicalConfig, TypicalVerifier

GREEDY = cases().filter(lambda case: case.sampling.temperature == 0)
MARGINS = st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0])


def decide(verifier, case):
    return verifier.verify(case.draft, HostLogits(case.rows), case.context())


@given(GREEDY)
def test_margin_zero_is_strict(case):
    assert decide(MarginVerifier(MarginConfig(margin=0.0)), case) == decide(StrictVerifier(), case)


@given(GREEDY, MARGINS, MARGINS)
def test_a_larger_margin_never_accepts_less(case, one, other):
    low, high = sorted([one, other])
    accepted = [decide(MarginVerifier(MarginConfig(margin=m)), case).accepted for m in (low, high)]
    assert accepted[0] <= accepted[1]


@given(cases())
def test_typical_at_neutral_parameters_is_strict(case):
    """epsilon = 1 and a huge delta ask for a probability above 1: nothing but the chosen token passes."""
    neutral = TypicalVerifier(TypicalConfig(epsilon=1.0, delta=1e9))
    assert decide(neutral, case) == decide(StrictVerifier(), case)


def test_typical_compares_probabilities():
    """Four equal tokens have a probability of 1/4 each: below .3, above .2."""
    context = Context([0], Sampling(), generated_from=1)
    for epsilon, accepted in ((0.3, 0), (0.2, 1)):
        verifier = TypicalVerifier(TypicalConfig(epsilon=epsilon, delta=1e9))
        assert verifier.verify(Draft((1,)), HostLogits(np.zeros((2, 4), np.float32)), context).accepted == accepted


def test_the_minimum_length_may_end_within_a_draft():
    sampling = Sampling(temperature=1.0, min_new_tokens=2, end_tokens=(3,))
    rows = Rows(HostLogits(np.zeros((4, 4), np.float32)), (0, 0, 0), Context([1], sampling, generated_from=1))
    assert [bool(rows.distribution(row)[3]) for row in range(4)] == [False, False, True, True]


@given(cases())
def test_typical_keeps_tokens_above_its_floor_only(case):
    config = TypicalConfig(epsilon=0.2, delta=0.5)
    verdict = decide(TypicalVerifier(config), case)
    for row, token in enumerate(emitted(case, verdict)[: verdict.accepted]):
        alone = attrs.evolve(case, rows=case.rows[row : row + 1], history=case.history_of(row), draft=Draft())
        if token == decide(StrictVerifier(), alone).next_token:
            continue
        values = case.law.processed(row)
        scaled = (values - values.max()) / (case.sampling.temperature or 1.0)
        probs = np.exp(scaled) / np.exp(scaled).sum()
        entropy = -sum(p * np.log(p) for p in probs if p > 0)
        assert probs[token] > min(config.epsilon, config.delta * np.exp(-entropy)) - 1e-12
