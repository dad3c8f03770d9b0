"""Logits of some token ids: everything they answer is what the full row answers with -inf in the other places, bit for
bit; and what a row is searched for (its best two, its log-sum-exp) against numpy in float64.

Rows are drawn with ties, infinities and few values, so that ids decide often.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.backends.cpu.arrays import CpuLogits
from specdec.backends.cpu.native import NativeOps
from specdec.backends.cpu.pruned import HeadRows
from specdec.backends.cpu.reference import ReferenceOps
from specdec.contract import Context, Sampling
from specdec.errors import ConfigError, ContractError
from specdec.sampling import draft_token
from tests.instruction_sets import each_set, kernels_of

# around a vector, four of them and a span that a thread searches
SIZES = st.sampled_from([1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 300, 4095, 4096, 4097, 8193, 30_011])


@pytest.fixture(scope="module", params=each_set("torch"))
def ops(request):
    if request.param == "torch":
        return ReferenceOps(torch.float32)
    return NativeOps(torch.float32, kernels_of(request.param))


def full_logits(ops, rows):
    array = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.float32))
    return ops.logits(array) if isinstance(ops, NativeOps) else CpuLogits(array)


def pruned_logits(ops, rows, ids):
    head = HeadRows((), ids.astype(np.int32), rows.shape[1])
    return ops._pruned_logits(np.ascontiguousarray(rows[:, ids], dtype=np.float32), head)


@st.composite
def cases(draw):
    """Rows ``[T, V]`` with -inf outside some ids, and those ids in any order."""
    size, count = draw(SIZES), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["normal", "few values", "with -inf", "far apart", "equal"]))
    rows = rng.normal(size=(count, size)) * 4
    if kind == "few values":
        rows = rng.integers(-2, 3, (count, size)).astype(np.float64)
    elif kind == "with -inf":
        rows[rng.random((count, size)) < 0.5] = -np.inf
        rows[:, rng.integers(size)] = 0.25
    elif kind == "far apart":
        rows *= 40
    elif kind == "equal":
        rows[:] = -1.5
    keep = np.flatnonzero(rng.random(size) < draw(st.sampled_from([0.1, 0.5, 1.0])))
    keep = np.union1d(keep, np.flatnonzero(rows.max(axis=0) > -np.inf)[:1])
    ids = rng.permutation(keep) if draw(st.booleans()) else keep
    masked = np.full((count, size), -np.inf, dtype=np.float32)
    masked[:, ids] = rows[:, ids]
    return masked, ids


def outcome(logits):
    """What ``argmax`` gives, or says of a row."""
    try:
        return logits.argmax()
    except ContractError as refusal:
        return str(refusal).partition("not finite")[0]


def alive(masked):
    return bool(np.isfinite(masked).any(axis=1).all())


@given(case=cases(), data=st.data())
def test_answers_are_those_of_the_masked_row(ops, case, data):
    masked, ids = case
    full, pruned = full_logits(ops, masked), pruned_logits(ops, masked, ids)
    assert len(pruned) == len(full)
    np.testing.assert_array_equal(pruned.rows(), full.rows())
    assert pruned.rows().dtype == np.float32
    for k in (1, 2, 3, masked.shape[1], masked.shape[1] + 2):
        assert pruned.topk(k) == full.topk(k), k
    if not alive(masked):
        for logits in (full, pruned):
            with pytest.raises(ContractError, match="not finite"):
                logits.argmax()
        return
    assert pruned.argmax() == full.argmax()
    ours, theirs = np.array(pruned.logsumexp()), np.array(full.logsumexp())
    assert (ours.view(np.int64) == theirs.view(np.int64)).all()
    # noise belongs to the token id, also through the reference
    context = Context([1, 2, 3], Sampling(temperature=0.7, seed=data.draw(st.integers(0, 2**63 - 1))))
    if len(full) == 1:
        assert draft_token(pruned, [], context)[0] == draft_token(full, [], context)[0]


@given(case=cases(), threads=st.sampled_from([1, 2]))
def test_the_best_two_and_the_sum_against_float64(ops, case, threads):
    masked, _ = case
    if isinstance(ops, NativeOps):
        ops.threads.chosen = threads
    logits = full_logits(ops, masked)
    for k in (1, 2):
        ids, values = logits.topk(k)
        for row, best, found in zip(masked, ids, values, strict=True):
            wanted = np.lexsort((np.arange(len(row)), -row))[:k]
            assert best == wanted.tolist()
            assert found == row[wanted].tolist()
    if alive(masked):
        assert logits.argmax() == masked.argmax(axis=1).tolist()
        wide = masked.astype(np.float64)
        top = wide.max(axis=1)
        wanted = top + np.log(np.exp(wide - top[:, None]).sum(axis=1))
        # each term is off by 1.5 ulp at most and by 2^-42, the sum is exact
        np.testing.assert_allclose(logits.logsumexp(), wanted, rtol=0, atol=3 * 2.0**-24)


@given(case=cases(), data=st.data())
def test_what_is_not_finite_is_refused_as_in_numpy(ops, case, data):
    """NaN anywhere, plus infinity, a row of minus infinities: refused for the same row. A lone -inf is fine."""
    rows, ids = case
    for value in data.draw(st.lists(st.sampled_from([np.nan, np.inf, -np.inf]), max_size=3)):
        rows[data.draw(st.integers(0, len(rows) - 1)), data.draw(st.sampled_from(ids.tolist()))] = value
    wanted = outcome(CpuLogits(torch.from_numpy(rows)))
    assert outcome(full_logits(ops, rows)) == outcome(pruned_logits(ops, rows, ids)) == wanted


def test_a_draft_from_what_is_not_finite_is_refused(ops):
    row = np.full((1, 40), np.nan, dtype=np.float32)
    with pytest.raises(ContractError, match="not finite"):
        draft_token(pruned_logits(ops, row, np.arange(0, 40, 2)), [], Context([1], Sampling(temperature=1.0)))


def test_a_vocabulary_without_a_legal_token_is_told(ops):
    row = np.zeros((1, 8), dtype=np.float32)
    context = Context([1], Sampling(banned=(2, 3)))
    with pytest.raises(ConfigError, match="no token is allowed"):
        draft_token(pruned_logits(ops, row, np.array([2, 3])), [], context)
