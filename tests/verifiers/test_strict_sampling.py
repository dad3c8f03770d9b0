"""Exact sampling: the output depends on target, prompt, settings and seed; rows have their own history."""

import math
from collections import Counter

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec import sampling as production
from specdec.backends.arrays import HostLogits
from specdec.contract import GREEDY_BELOW, Context, Draft, Sampling
from specdec.sampling import Purpose, Rows, gumbel, philox, survivors, uniforms
from specdec.testing import goodness_of_fit
from specdec.testing.verifier_cases import cases
from specdec.verifiers.strict import StrictVerifier
from tests.selection import examples

WEIGHTS = st.lists(st.integers(0, 8), min_size=6, max_size=6).filter(any)


def logits_by_hand(case, row):
    """Logits after bias, penalties over the row's history, bans and processors; before temperature."""
    s, values = case.sampling, case.rows[row].tolist()
    history = case.history_of(row)
    seen, generated = set(history), Counter(history[case.generated_from :])
    for token in range(len(values)):
        values[token] += s.logit_bias.get(token, 0.0)
        if s.repetition_penalty != 1.0 and token in seen:
            value = values[token]
            values[token] = value / s.repetition_penalty if value > 0 else value * s.repetition_penalty
        if token in generated:
            values[token] -= s.presence_penalty + s.frequency_penalty * generated[token]
        if token in s.banned:
            values[token] = -math.inf
    for processor in s.processors:
        values = [float(value) for value in processor.process(np.array(values, np.float32), history)]
    if len(history) - case.generated_from < s.min_new_tokens:
        longer = [-math.inf if token in s.end_tokens else value for token, value in enumerate(values)]
        if max(longer) > -math.inf or not s.processors:
            values = longer
    return values


def law_by_hand(case, row):
    """The distribution of the row's token, ``[V]``; one-hot at temperature 0. Ties go to the lowest id."""
    values, sampling = logits_by_hand(case, row), case.sampling
    ranked = sorted(range(len(values)), key=lambda token: (-values[token], token))
    distribution = np.zeros(len(values))
    if sampling.temperature == 0:
        distribution[ranked[0]] = 1.0
        return distribution
    best = values[ranked[0]]
    weights = {token: math.exp((values[token] - best) / sampling.temperature) for token in ranked}
    kept = [token for token in ranked if values[token] > -math.inf]
    if sampling.top_k:
        kept = kept[: sampling.top_k]
    if sampling.top_p < 1.0:
        total, mass, chosen = sum(weights[token] for token in kept), 0.0, []
        for token in kept:
            if mass / total >= sampling.top_p:
                break
            chosen.append(token)
            mass += weights[token]
        kept = chosen
    if sampling.min_p > 0.0:
        kept = [token for token in kept if weights[token] >= sampling.min_p * weights[kept[0]]]
    total = sum(weights[token] for token in kept)
    for token in kept:
        distribution[token] = weights[token] / total
    return distribution


@examples(200)
@given(cases())
def test_every_row_follows_the_law_written_out_by_hand(case):
    """F(row i) is F(plain decoding after y + x_1..x_i)."""
    rows = case.law
    for row in range(len(case.draft.tokens) + 1):
        np.testing.assert_allclose(rows.distribution(row), law_by_hand(case, row), atol=1e-9)


@given(cases())
def test_every_row_has_the_logits_and_the_token_written_out_by_hand(case):
    rows, seed, ids = case.law, case.sampling.seed, np.arange(case.vocab)
    for row in range(len(case.draft.tokens) + 1):
        np.testing.assert_allclose(rows.processed(row), logits_by_hand(case, row), rtol=1e-9)
        noise = gumbel(seed, len(case.history) + row, ids, Purpose.TOKEN) if case.sampling.temperature else 0
        with np.errstate(divide="ignore"):
            scores = np.log(law_by_hand(case, row)) + noise
        assert scores[rows.choose(row)] >= scores.max() - 1e-6


# --- ties ------------------------------------------------------------------------------------------------------------


def test_ties_go_by_ascending_id():
    """Equal logits: the lowest id is the best, and top-k and top-p keep the lowest ids."""
    logits = np.zeros(6)
    assert survivors(logits, Sampling(temperature=1.0, top_k=2))[0].tolist() == [0, 1]
    assert survivors(logits, Sampling(temperature=1.0, top_p=0.5))[0].tolist() == [0, 1, 2]
    logits[[2, 4]] = 1.0
    assert survivors(logits, Sampling(temperature=1.0, top_k=3))[0].tolist() == [0, 2, 4]
    rows = Rows(HostLogits(logits[None].astype(np.float32)), (), Context([0], Sampling()))
    assert rows.choose(0) == 2
    assert (
        Rows(HostLogits(logits[None].astype(np.float32)), (), Context([0], Sampling(logit_bias={5: 0.0}))).choose(0)
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


@pytest.mark.slow
def test_a_large_vocabulary_keeps_its_tail():
    """V = 248 320, Zipf: sums in float32 lose the tail, and with it the law of the rare tokens."""
    weights = 1.0 / np.arange(1, 248_321)
    logits, edges = HostLogits(np.log(weights).astype(np.float32)[None]), np.array([1, 3, 10, 30, 100, 1_000, 10_000])
    counts = np.zeros(len(edges) + 1, np.int64)
    for seed in range(300):
        context = Context([1], Sampling(temperature=1.0, seed=seed), generated_from=1)
        counts[np.searchsorted(edges, StrictVerifier().verify(Draft(), logits, context).next_token, side="right")] += 1
    law = weights / weights.sum()
    assert goodness_of_fit(counts, [part.sum() for part in np.split(law, edges)]) >= 1e-4


@given(WEIGHTS, st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_draw_never_gives_an_impossible_token(weights, u):
    assert weights[production.draw(np.array(weights) / sum(weights), u)] > 0


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
