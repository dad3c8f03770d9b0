"""The native sampler: every token that it chooses is one that the float64 reference could, and plain equals verified.

Beside random rows come the cases where float32 could decide wrongly: equal and nearly equal logits, wide nuclei, rows
of minus infinities, all tokens banned but one, tiny and huge temperatures, and vocabularies of 1 to 248,320 tokens.
"""

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.backends.arrays import HostLogits
from specdec.backends.cpu.native import NativeOps
from specdec.backends.cpu.pruned import HeadRows, NativePrunedLogits
from specdec.contract import Choosing, Context, Sampling
from specdec.errors import ConfigError, ContractError
from specdec.sampling import Rows
from tests.backends.choices import SETTINGS, logits_of, misfit, random_case, tied
from tests.instruction_sets import kernels_of
from tests.selection import cases


@pytest.fixture(scope="module")
def ops(instruction_set):
    return NativeOps(torch.float32, kernels_of(instruction_set))


def faults(choose, values, drafted, context):
    """What is wrong with the choice for these rows."""
    chosen = choose(Choosing(drafted, context))
    assert len(chosen) == len(values)
    found = []
    for row, token in enumerate(chosen):
        reference = Rows(HostLogits(values), drafted, context)
        if token is None:
            try:
                reference.choose(row)
                found.append(f"row {row} is not decided")
            except ConfigError:  # no token is allowed
                pass
        elif reason := misfit(values[row], reference.history(row), context, token):
            found.append(f"row {row}: {token} is {reason}; {attrs.evolve(context.sampling, banned=())}")
    return found


@pytest.mark.parametrize("rows", cases([60, 400], sample=1, mark="slow"))
@pytest.mark.parametrize("name", SETTINGS)
def test_chosen_tokens_could_be_the_references(ops, name, rows):
    rng = np.random.default_rng([*name.encode()])
    for vocab, share in ((1, 0.02), (5, 0.2), (277, 0.4), (4096, 0.379), (248_320, 0.001)):
        for _ in range(max(1, int(rows * share))):
            values, drafted, context = random_case(rng, SETTINGS[name], vocab)
            wrong = faults(ops.logits(torch.from_numpy(values)).choose, values, drafted, context)
            assert not wrong, wrong[0]


@given(case=tied())
def test_ties_and_the_same_token_alone_and_in_a_block(ops, case):
    values, drafted, context = case
    if not np.isfinite(values).any(axis=1).all():
        return
    rows = torch.from_numpy(values)
    wrong = faults(ops.logits(rows).choose, values, drafted, context)
    assert not wrong, wrong[0]
    together = ops.logits(rows).choose(Choosing(drafted, context))
    for row in range(len(values)):
        tokens = [*context, *drafted[:row]]
        plain = Context(tokens, context.sampling, generated_from=context.generated_from)
        drafting = Choosing(drafted[:row], context, first=row)
        for choosing in (Choosing((), plain), drafting):
            assert ops.logits(rows[row : row + 1]).choose(choosing) == together[row : row + 1]


@given(case=tied(), data=st.data())
def test_a_pruned_row_gives_a_token_of_the_full_row(ops, case, data):
    values, drafted, context = case
    vocab = values.shape[1]
    ids = np.array(data.draw(st.permutations(range(vocab)))[: data.draw(st.integers(1, vocab))], np.int32)
    full = np.full_like(values, -np.inf)
    full[:, ids] = values[:, ids]
    if not np.isfinite(full).any(axis=1).all():
        return
    pruned = NativePrunedLogits(values[:, ids], HeadRows((), ids, vocab), ops._search)
    wrong = faults(pruned.choose, full, drafted, context)
    assert not wrong, wrong[0]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error(ops, value):
    values = logits_of("normal", np.random.default_rng(1), 2, 300)
    values[1, 299] = value
    with pytest.raises(ContractError, match="logits of row 1 are not finite"):
        ops.logits(torch.from_numpy(values)).choose(Choosing((4,), Context([1], Sampling(temperature=1.0))))
