"""Exact sampling: the output depends on target, prompt, settings and seed; rows have their own history."""

import attrs
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from specdec import sampling as production
from specdec.contract import GREEDY_BELOW, Context, Draft, LogitsProcessor, Sampling
from specdec.sampling import Purpose, Rows, gumbel, philox, survivors, uniforms
from specdec.testing import Memory, TableModel, strategies
from specdec.testing.engine_run import ScriptedDrafter, run_engine
from specdec.testing.numerics import goodness_of_fit
from specdec.testing.table_model import TableLogits
from specdec.testing.verifier_cases import Case, cases
from specdec.verifiers.strict import StrictVerifier
from tests.selection import examples

VOCAB = 7
MODELS = {memory: TableModel.random(VOCAB, memory=memory, seed=8, tilt=0.6, peak=0.4) for memory in Memory}


class EveryOther(LogitsProcessor):
    """A two-state grammar: after an even token an odd one, and the other way round."""

    def process(self, logits, history):
        masked = logits.copy()
        masked[history[-1] % 2 :: 2] = -np.inf
        return masked

    def legal(self, draft, history):
        last = history[-1]
        for kept, token in enumerate(draft):
            if token % 2 == last % 2:
                return kept
            last = token
        return len(draft)


def check_independence(prompt, depths, sampling, memory, wrong, count=14):
    """Right, wrong and mixed drafts in blocks of any length give the tokens of plain decoding."""
    model = MODELS[memory]
    expected, _ = run_engine(model, StrictVerifier(), None, prompt, count, [0], sampling)
    told = [*prompt, *expected]

    def script(history, number):
        right = told[len(history)] if len(history) < len(told) else 0
        return (right + wrong[(len(history) + number) % len(wrong)]) % VOCAB

    got, stats = run_engine(
        model, StrictVerifier(), lambda env: ScriptedDrafter(script), prompt, count, depths, sampling
    )
    assert got == expected
    assert not stats.inactive_reason


@examples(300)
@given(
    prompt=strategies.tokens(VOCAB, min_size=1),
    depths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    sampling=strategies.samplings(VOCAB),
    memory=st.sampled_from(Memory),
    wrong=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    grammar=st.booleans(),
)
def test_drafter_depth_and_cycle_boundaries_cannot_change_the_output(prompt, depths, sampling, memory, wrong, grammar):
    if grammar:
        sampling = attrs.evolve(sampling, processors=(EveryOther(),), banned=(), end_tokens=())
    check_independence(prompt, depths, sampling, memory, wrong)


def check_rows_have_their_own_history(case):
    """F(row i) is F(plain decoding after y + x_1..x_i)."""
    rows = Rows(TableLogits(case.rows), case.draft.tokens, case.context())
    for row in range(len(case.draft.tokens) + 1):
        np.testing.assert_allclose(rows.distribution(row), case.distribution(row), atol=1e-9)


@examples(200)
@given(cases())
def test_every_row_follows_the_law_written_out_by_hand(case):
    check_rows_have_their_own_history(case)


def test_a_repeated_draft_token_is_penalised_in_the_next_row():
    """The case behind it: row 1 must count x_1, which is not committed yet."""
    draft, history = Draft((2, 2)), [0, 1]
    case = Case(np.zeros((3, 4), np.float32), history, draft, Sampling(temperature=1.0, frequency_penalty=1.0), 1)
    check_rows_have_their_own_history(case)
    rows = Rows(TableLogits(case.rows), draft.tokens, case.context())
    assert rows.distribution(0)[2] > rows.distribution(1)[2] > rows.distribution(2)[2]


def test_minimum_length_ends_inside_a_block():
    sampling = Sampling(temperature=1.0, min_new_tokens=2, end_tokens=(3,))
    rows = Rows(TableLogits(np.zeros((4, 4), np.float32)), (0, 0, 0), Context([1], sampling, generated_from=1))
    assert [rows.distribution(row)[3] > 0 for row in range(4)] == [False, False, True, True]


def test_the_mask_of_a_grammar_moves_with_the_row():
    sampling = Sampling(temperature=1.0, processors=(EveryOther(),))
    rows = Rows(TableLogits(np.zeros((3, 4), np.float32)), (1, 2), Context([0], sampling, generated_from=1))
    assert [set(np.flatnonzero(rows.distribution(row))) for row in range(3)] == [{1, 3}, {0, 2}, {1, 3}]


# --- ties ------------------------------------------------------------------------------------------------------------


def test_ties_go_by_ascending_id():
    """Equal logits: the lowest id is the best, and top-k and top-p keep the lowest ids."""
    logits = np.zeros(6)
    assert survivors(logits, Sampling(temperature=1.0, top_k=2))[0].tolist() == [0, 1]
    assert survivors(logits, Sampling(temperature=1.0, top_p=0.5))[0].tolist() == [0, 1, 2]
    logits[[2, 4]] = 1.0
    assert survivors(logits, Sampling(temperature=1.0, top_k=3))[0].tolist() == [0, 2, 4]
    rows = Rows(TableLogits(logits[None].astype(np.float32)), (), Context([0], Sampling()))
    assert rows.choose(0) == 2
    assert (
        Rows(TableLogits(logits[None].astype(np.float32)), (), Context([0], Sampling(logit_bias={5: 0.0}))).choose(0)
        == 2
    )


def test_top_p_keeps_the_token_that_crosses_the_bound():
    logits = np.log(np.array([0.5, 0.3, 0.2]))
    for top_p, kept in ((0.4, [0]), (0.5, [0]), (0.51, [0, 1]), (0.8, [0, 1]), (0.81, [0, 1, 2])):
        ids, probs = survivors(logits, Sampling(temperature=1.0, top_p=top_p))
        assert ids.tolist() == kept, top_p
        assert probs.sum() == pytest.approx(1.0)


def test_min_p_is_a_share_of_the_best():
    logits = np.log(np.array([0.6, 0.25, 0.1, 0.05]))
    assert survivors(logits, Sampling(temperature=1.0, min_p=0.4))[0].tolist() == [0, 1]
    assert survivors(logits, Sampling(temperature=1.0, min_p=1.0))[0].tolist() == [0]


# --- noise -----------------------------------------------------------------------------------------------------------

_PHILOX = [  # Random123 1.09, tests/kat_vectors, philox4x32 10
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "expected"), _PHILOX)
def test_philox_gives_the_published_vectors(counter, key, expected):
    words = [int(word, 16) for word in counter.split()]
    low, high = (int(word, 16) for word in key.split())
    got = philox(np.array([words], np.uint32), low | high << 32)[0]
    assert [f"{word:08x}" for word in got.tolist()] == expected.split()


def test_uniforms_do_not_depend_on_which_ids_are_asked_for():
    everything = uniforms(5, 9, Purpose.TOKEN, np.arange(23))
    some = np.array([22, 3, 4, 17])
    assert (uniforms(5, 9, Purpose.TOKEN, some) == everything[some]).all()


def test_noise_differs_by_seed_position_purpose_and_cycle():
    ids = np.arange(8)
    base = uniforms(1, 2, Purpose.DRAFT, ids, 3)
    for other in (
        uniforms(2, 2, Purpose.DRAFT, ids, 3),
        uniforms(1, 3, Purpose.DRAFT, ids, 3),
        uniforms(1, 2, Purpose.ACCEPT, ids, 3),
        uniforms(1, 2, Purpose.DRAFT, ids, 4),
        uniforms(1 + 2**40, 2, Purpose.DRAFT, ids, 3),
    ):
        assert not (other == base).any()


def test_the_gumbel_race_has_the_law_of_the_softmax():
    law = np.array([0.5, 0.25, 0.2, 0.05])
    wins = np.bincount(
        [int(np.argmax(np.log(law) + gumbel(seed, 3, np.arange(4), Purpose.TOKEN))) for seed in range(8_000)],
        minlength=4,
    )
    assert goodness_of_fit(wins, law) >= 1e-4


@given(strategies.distributions(6), st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_draw_never_gives_an_impossible_token(law, u):
    assert law[production.draw(law, u)] > 0


def test_draw_follows_the_quantiles():
    law = np.array([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    assert [production.draw(law, u) for u in (1e-12, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 1e-12)] == [1, 1, 3, 3, 4, 4]


@pytest.mark.parametrize("temperature", [1e-38, 5e-324, 1e-7, 9.99e-7, np.float32(1e-38)])
def test_a_tiny_temperature_is_greedy(temperature):
    """1e-38 gave other tokens than greedy decoding: ``logit / temperature`` overflowed."""
    assert Sampling(temperature=temperature) == Sampling()
    assert attrs.evolve(Sampling(temperature=1.0), temperature=temperature).temperature == 0.0


def test_the_least_temperature_decides_between_logits_that_differ_by_rounding():
    """What ``GREEDY_BELOW`` is derived from: noise cannot choose a token farther below the best one."""
    least, most = (float(-np.log(-np.log1p(-u))) for u in (0.5 * 2.0**-32, 1 - 0.5 * 2.0**-32))
    span = abs(most - least)
    assert 26 < span < 26.01
    assert np.spacing(np.float32(256)) > span * GREEDY_BELOW
