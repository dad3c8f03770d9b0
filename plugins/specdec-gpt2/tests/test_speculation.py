"""Speculation changes no token, and sessions go back, fork, and come back from a file."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import specdec
from hypothesis import given, settings
from specdec.errors import PromptError, SpecdecError

PROMPTS = st.lists(st.integers(0, 20), min_size=1, max_size=30)
SETTINGS = st.sampled_from([{}, {"temperature": 0.8, "seed": 2**40}, {"temperature": 1.3, "seed": 0, "top_k": 5}])


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def models(request, checkpoint):
    """Plain decoding, and speculation with a suffix automaton and with a model that is often right."""
    folder, second = (str(checkpoint(dtype=request.param, n_layer=layers)) for layers in (2, 1))
    plain = specdec.load(folder, drafter="none", depth=0)
    suffix = specdec.load(folder, drafter="suffix", depth=5)
    drafted = specdec.load(folder, drafter={"name": "draft_model", "model": second}, depth=3)
    same = specdec.load(folder, drafter={"name": "draft_model", "model": folder}, depth=4)
    return plain, [suffix, drafted, same]


@settings(max_examples=8, deadline=None)
@given(PROMPTS, SETTINGS)
def test_speculation_changes_no_token(models, prompt, sampling):
    plain, others = models
    wanted = plain.generate(prompt, max_new_tokens=30, ignore_eos=True, **sampling)
    for lm in others:
        got = lm.generate(prompt, max_new_tokens=30, ignore_eos=True, **sampling)
        assert got.tokens == wanted.tokens
        assert got.guarantee == "exact"
    assert sum(got.stats.accepted) > 0  # the model that drafts for itself


def test_sessions_go_back_fork_and_come_back_from_a_file(models, tmp_path):
    plain, [suffix, *_] = models
    prompt = [5, 6, 7, 5, 6, 7, 5, 6]
    wanted = plain.generate(prompt, max_new_tokens=40, ignore_eos=True).tokens
    session = suffix.session()
    begun = session.generate(prompt, max_new_tokens=12, ignore_eos=True).tokens
    fork = session.fork()
    session.save(tmp_path / "kept.safetensors")
    loaded = suffix.session()
    loaded.load(tmp_path / "kept.safetensors")
    session.generate(max_new_tokens=9, ignore_eos=True)
    session.rewind(len(prompt) + 12)
    for one in (session, fork, loaded):
        assert begun + one.generate(max_new_tokens=28, ignore_eos=True).tokens == wanted


def test_a_sequence_ends_at_the_last_position(checkpoint):
    lm = specdec.load(str(checkpoint(n_positions=24)), drafter="suffix", depth=5)
    assert lm.info.max_positions == 24
    result = lm.generate([1, 2, 3, 1, 2], max_new_tokens=100, ignore_eos=True)
    assert len(result.tokens) in (19, 20)  # the last token needs no position
    assert (
        result.tokens
        == specdec.load(str(checkpoint(n_positions=24)), drafter="none", depth=0)
        .generate([1, 2, 3, 1, 2], max_new_tokens=100, ignore_eos=True)
        .tokens
    )
    with pytest.raises(SpecdecError):
        lm.generate([1] * 25)
    with pytest.raises(PromptError, match="1 to 24"):
        lm.target.new_state(25)
