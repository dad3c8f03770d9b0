"""The gate decides on what is known before a token is drawn, as clause D10 demands of the gated drafters."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.backends.arrays import HostLogits
from specdec.contract import Context, DraftNoise, Sampling
from specdec.drafters.gate import DraftGate, Drawing

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
    assert DraftGate(min_confidence=threshold).stops(HostLogits(values[None]), context) == (confidence < threshold)


@given(row=logits_rows, threshold=st.floats(0.01, 40))
def test_margin_is_the_gap_of_the_two_best_logits(row, threshold):
    values = np.array(row, dtype=np.float32)
    best = sorted(values.tolist(), reverse=True)
    gap = math.inf if len(best) == 1 else best[0] - best[1]
    gate = DraftGate(min_margin=threshold)
    assert gate.stops(HostLogits(values[None]), Context([1])) == (gap < threshold)
    assert gate.report() == {"gate_steps": 1, "gate_stops": int(gap < threshold)}


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_rows_that_need_no_draft_are_chosen_in_one_call(penalty):
    """Where the backend decides them; a row that it leaves open, and rows under a penalty, are drawn one by one."""
    values = np.random.default_rng(0).standard_normal((3, 9)).astype(np.float32)
    context = Context([1, 2], Sampling(temperature=1.0, seed=3, repetition_penalty=penalty))

    class Chosen(HostLogits):
        def choose(self, choosing):
            return [7, 7, None]

    singly, at_once = (Drawing(DraftGate(), context, reduced=False) for _ in range(2))
    for row in range(3):
        singly.next(HostLogits(values[row : row + 1]))
    at_once.rows(Chosen(values))
    assert at_once.tokens == (singly.tokens if penalty > 1 else [7, 7, singly.tokens[2]])
