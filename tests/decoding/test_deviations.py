"""A run with a lossy verifier counts the tokens that plain decoding would not have chosen."""

import attrs
import pytest

from specdec.config import Choice
from specdec.registry.parts import make_verifier
from tests.decoding.test_sessions import CODE, load, variant

__all__ = ["load"]  # a fixture


@pytest.mark.parametrize(("verifier", "option"), [("margin", "margin"), ("typical", "epsilon")])
@pytest.mark.parametrize("value", [0.0, 0.3, 1.0])
def test_a_lossy_runs_count_is_that_of_a_replay(verifier, option, value, load):
    chosen = make_verifier(Choice(verifier, {option: value}))
    lm = attrs.evolve(variant(load("demo", "bfloat16"), "mtp", 3), verifier=chosen)
    run = lm.generate(CODE, max_new_tokens=60, ignore_eos=True)
    replay, plain = variant(lm).session(), []
    for position in range(len(run.tokens)):
        replay.set_prompt([*run.prompt, *run.tokens[:position]])
        plain += replay.generate(max_new_tokens=1, ignore_eos=True).tokens
    differing = sum(token != best for token, best in zip(run.tokens, plain, strict=True))
    assert run.deviation.count == differing
    if verifier == "margin":
        assert (differing > 0) == (value > 0)
        assert run.deviation.largest_gap <= value
