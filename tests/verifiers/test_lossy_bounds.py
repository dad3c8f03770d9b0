"""The verifiers that may deviate: the margin's bound, and that both reduce to strict where they should."""

import attrs
import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from specdec.backends.arrays import HostLogits
from specdec.contract import Draft
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


@given(cases())
def test_typical_keeps_tokens_above_its_floor_only(case):
    config = TypicalConfig(epsilon=0.2, delta=0.5)
    verdict = decide(TypicalVerifier(config), case)
    for row, token in enumerate(emitted(case, verdict)[: verdict.accepted]):
        alone = attrs.evolve(case, rows=case.rows[row : row + 1], history=case.history_of(row), draft=Draft())
        if token == decide(StrictVerifier(), alone).next_token:
            continue
        values = np.array(case.processed(row))
        scaled = (values - values.max()) / (case.sampling.temperature or 1.0)
        probs = np.exp(scaled) / np.exp(scaled).sum()
        entropy = -sum(p * np.log(p) for p in probs if p > 0)
        assert probs[token] > min(config.epsilon, config.delta * np.exp(-entropy)) - 1e-12
