"""What is checked of a draft and of a verdict: right ones pass, and each fault is named or cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.contract import Context, Draft, DraftNoise, Sampling, Verdict
from specdec.errors import ContractError
from specdec.registry import checked_draft, checked_verdict

VOCAB = 7
PLAIN = Context([1, 2])
RATIO = Context([1, 2], Sampling(temperature=1.0), draft_noise=DraftNoise.INDEPENDENT)


@given(st.lists(st.integers(-2, VOCAB + 1), max_size=6), st.integers(0, 6))
def test_a_draft_is_cut_to_the_depth_and_before_the_first_id_outside(tokens, depth):
    draft, fault = checked_draft(Draft(tuple(tokens)), depth, VOCAB, PLAIN)
    assert draft.tokens == tuple(tokens[: len(draft.tokens)])
    assert len(draft.tokens) <= depth
    assert all(0 <= token < VOCAB for token in draft.tokens)
    assert bool(fault) == (len(draft.tokens) < len(tokens))


def law(token, value=1.0):
    row = np.full(VOCAB, (1 - value) / (VOCAB - 1), np.float32)
    row[token] = value
    return row


DISHONEST = {
    "NaN": Draft((1,), np.full((1, VOCAB), np.nan, np.float32)),
    "negative": Draft((1,), law(1, 1.5)[None]),
    "no distribution": Draft((1,), 2 * law(1)[None]),
    "a token of probability 0": Draft((2,), law(1)[None]),
}


@pytest.mark.parametrize("name", DISHONEST)
def test_probs_are_checked_where_a_ratio_test_reads_them(name):
    assert checked_draft(DISHONEST[name], 4, VOCAB, PLAIN)[1] == ""
    second = Draft((3, *DISHONEST[name].tokens), np.concatenate([law(3)[None], DISHONEST[name].probs]))
    for draft, row in ((DISHONEST[name], 0), (second, 1)):
        with pytest.raises(ContractError, match=f"row {row} its token cannot have been drawn"):
            checked_draft(draft, 4, VOCAB, RATIO)
    with pytest.raises(ContractError, match=r"1 tokens with probs \[\[1\.0\]\] \(list\)"):
        checked_draft(Draft((1,), [[1.0]]), 4, VOCAB, PLAIN)


@given(st.integers(-2, 5), st.integers(-2, VOCAB + 1), st.integers(0, 4))
def test_a_verdict_is_in_range_or_refused(accepted, token, drafted):
    verdict = Verdict(accepted, token, ((np.int64(0), np.float32(0.5)),))
    if 0 <= accepted <= drafted and 0 <= token < VOCAB:
        assert checked_verdict(verdict, drafted, VOCAB) == Verdict(accepted, token, ((0, 0.5),))
    else:
        with pytest.raises(ContractError, match="returned"):
            checked_verdict(verdict, drafted, VOCAB)
