"""What is checked of a draft and of a verdict: right ones pass, and each fault is named or cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.contract import Draft, Verdict
from specdec.errors import ContractError
from specdec.registry import checked_draft, checked_verdict

VOCAB = 7


@given(st.lists(st.integers(-2, VOCAB + 1), max_size=6), st.integers(0, 6))
def test_a_draft_is_cut_to_the_depth_and_before_the_first_id_outside(tokens, depth):
    draft, fault = checked_draft(Draft(tuple(tokens)), depth, VOCAB)
    assert draft.tokens == tuple(tokens[: len(draft.tokens)])
    assert len(draft.tokens) <= depth
    assert all(0 <= token < VOCAB for token in draft.tokens)
    assert bool(fault) == (len(draft.tokens) < len(tokens))


@given(st.integers(-2, 5), st.integers(-2, VOCAB + 1), st.integers(0, 4))
def test_a_verdict_is_in_range_or_refused(accepted, token, drafted):
    verdict = Verdict(accepted, token, ((np.int64(0), np.float32(0.5)),))
    if 0 <= accepted <= drafted and 0 <= token < VOCAB:
        assert checked_verdict(verdict, drafted, VOCAB) == Verdict(accepted, token, ((0, 0.5),))
    else:
        with pytest.raises(ContractError, match="returned"):
            checked_verdict(verdict, drafted, VOCAB)
