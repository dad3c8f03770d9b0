"""Forced drafts: what a grammar leaves no choice about is drafted, and the output stays that of plain decoding."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import specdec
from specdec.contract import LogitsProcessor, Sampling
from specdec.drafters.forced import specdec_drafters
from specdec.testing import TableModel
from specdec.testing.engine_run import plain_decoding, run_engine
from specdec.testing.numerics import goodness_of_fit
from specdec.verifiers.rejection import RejectionConfig, RejectionVerifier
from specdec.verifiers.strict import StrictVerifier
from tests.selection import examples

SCHEMA = {
    "type": "object",
    "properties": {"measurement": {"type": "integer"}, "certainty": {"enum": ["high", "low"]}},
    "required": ["measurement", "certainty"],
    "additionalProperties": False,
}
SPEC = specdec_drafters()[0]


class Pattern(LogitsProcessor):
    """After a 0 the tokens 1, 2 must follow; it also calls 3 "forced" after a 2, which the mask does not enforce."""

    def process(self, logits, history):
        wanted = {0: 1, 1: 2}.get(history[-1])
        if wanted is None:
            return logits
        masked = np.full_like(logits, -np.inf)
        masked[wanted] = logits[wanted]
        return masked

    def forced(self, history):
        return {0: [1, 2, 3], 1: [2, 3], 2: [3]}.get(history[-1], [])


def target():
    return TableModel.random(4, seed=2, peak=2.0)


@examples(40)
@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    depths=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 1000),
)
def test_the_output_is_that_of_plain_decoding(prompt, depths, temperature, seed):
    """Also where a processor calls something forced that the target may spell otherwise."""
    sampling = Sampling(temperature=temperature, seed=seed, processors=(Pattern(),))
    verifier = StrictVerifier()
    got, stats = run_engine(target(), verifier, lambda env: SPEC.factory(None, env), prompt, 12, depths, sampling)
    assert got == plain_decoding(target(), verifier, prompt, 12, sampling)
    assert not stats.inactive_reason


def test_sampled_text_keeps_its_distribution():
    """With a ratio test too: a token that is merely likely to be forced must not become certain."""
    model, prompt, counts = target(), [3, 0], np.zeros(4, np.int64)
    for seed in range(600):
        sampling = Sampling(temperature=1.0, seed=seed, processors=(Pattern(),))
        made, _ = run_engine(
            model, RejectionVerifier(RejectionConfig()), lambda env: SPEC.factory(None, env), prompt, 3, [3], sampling
        )
        assert made[:2] == [1, 2]
        counts[made[2]] += 1
    fit = goodness_of_fit(counts, model.distribution([3, 0, 1, 2]))
    assert fit >= 1e-6


def test_a_schema_forces_its_keys():
    """On the embedded model: the same JSON with and without, in fewer passes, greedily and sampled."""
    pytest.importorskip("llguidance")
    grammar = {"name": "grammar", "json_schema": json.dumps(SCHEMA), "whitespace": False}
    plain = specdec.load("demo", drafter="none")
    lm = specdec.load("demo", drafter={"name": "first_of", "drafters": [{"name": "forced"}, {"name": "mtp"}]}, depth=6)
    for settings in ({}, {"temperature": 1.0, "seed": 5}):
        options = {"max_new_tokens": 40, "processors": [grammar], **settings}
        wanted, got = (one.generate("Report: ", **options) for one in (plain, lm))
        assert got.text == wanted.text
        assert got.tokens == wanted.tokens
        forced = got.stats.draft["drafters"]["forced"]
        assert forced["accepted"] > 0
        assert got.stats.cycles < wanted.stats.cycles
