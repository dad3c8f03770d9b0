"""The real sampler with its real noise: joint laws by chi-square. ``test_exact_law`` has the acceptance rates.

Sizes: 27 joint outcomes need about 4 000 draws to find a total variation of .08 at 1e-4, 25 000 for .04; the profile
``ci`` draws the latter. Seeds are fixed, so a test cannot fail by luck on one day and pass on another; a first failure
is tried again with other seeds, which leaves a false alarm of 1e-8 when somebody changes the seeds.
"""

from __future__ import annotations

import os

import attrs
import numpy as np
import pytest

from specdec.contract import Context, Draft, DraftNoise, Sampling
from specdec.sampling import Purpose, draft_token, gumbel
from specdec.testing.numerics import goodness_of_fit
from specdec.testing.reference_sampling import joint_distribution, reference_distribution
from specdec.testing.table_model import TableLogits, TableModel
from specdec.testing.verifier_cases import target_rows
from specdec.verifiers.rejection import RejectionConfig, RejectionVerifier
from specdec.verifiers.strict import StrictVerifier

pytestmark = pytest.mark.slow

JOINT = 3  # tokens whose joint distribution is tested
JOINT_VOCAB = 3


@attrs.frozen
class Scenario:
    """How one test of the joint distribution makes its drafts."""

    name: str
    draws: int
    with_probs: bool  # draw tokens from a distribution and pass it as probs; otherwise take the most probable tokens
    sampling: Sampling = Sampling(temperature=1.0)
    pruned: bool = False  # the drafter covers only part of the vocabulary
    cycles: int = 1  # cycles before completing the rest from the target


def target_and_draft():
    """Two chains over 3 tokens, different enough for every known mistake to show; the target forbids one pair."""
    target = np.array([[0.6, 0.3, 0.1], [0.15, 0.25, 0.6], [0.5, 0.5, 0.0]])
    draft = np.array([[0.2, 0.3, 0.5], [0.5, 0.4, 0.1], [0.25, 0.35, 0.4]])
    return TableModel(target), TableModel(draft)


def target_joint(target, sampling):
    """The joint distribution of the ``JOINT`` tokens after ``[1]``, by the reference."""

    def next_token(later):
        return reference_distribution(target.logits([1, *later]).tolist(), [1, *later], sampling, 1)

    return joint_distribution(next_token, JOINT, JOINT_VOCAB)


def _draft(draft, history, scenario, context):
    """Draft two tokens; with ``probs`` if the verifier asks for the drafter's own noise."""
    drafted, probs = [], []
    for _ in range(2):
        row = draft.distribution([*history, *drafted])
        if scenario.pruned:
            row[2] = 0.0
            row /= row.sum()
        if not scenario.with_probs:
            drafted.append(int(row.argmax()))
            continue
        with np.errstate(divide="ignore"):
            logits = np.log(row.astype(np.float32))
        token, drawn_from = draft_token(TableLogits(logits[None]), drafted, context)
        drafted.append(token)
        if context.draft_noise is DraftNoise.INDEPENDENT and drawn_from is not None:
            probs.append(drawn_from)
    return Draft(tuple(drafted), np.stack(probs) if probs else None)


def tally_joint(verifier, target, draft, scenario, draws, seed):
    """Counts of the first ``JOINT`` tokens after ``[1]``."""
    tally = np.zeros((JOINT_VOCAB,) * JOINT, np.int64)
    rest = np.random.default_rng(seed)  # completes the rest from the target
    for number in draws:
        tokens = [1]
        sampling = attrs.evolve(scenario.sampling, seed=(seed + (number + 1) * 0x5851F42D4C957F2D) % 2**63)
        for cycle in range(1, scenario.cycles + 1):
            if len(tokens) > JOINT:
                break
            context = Context(tokens, sampling, generated_from=1, cycle=cycle, draft_noise=verifier.draft_noise)
            drafted = _draft(draft, tokens, scenario, context)
            rows = TableLogits(target_rows(target, tokens, drafted.tokens))
            verdict = verifier.verify(drafted, rows, context)
            tokens = [*tokens, *drafted.tokens[: verdict.accepted], int(verdict.next_token)]
        while len(tokens) <= JOINT:
            probs = reference_distribution(target.logits(tokens).tolist(), tokens, sampling, 1)
            tokens.append(int(rest.choice(JOINT_VOCAB, p=probs)))
        tally[tuple(tokens[1 : JOINT + 1])] += 1
    return tally.ravel()


DRAWS = 4_000 if os.environ.get("HYPOTHESIS_PROFILE", "dev") == "dev" else 25_000
P_VALUE = 1e-4
SCENARIOS = {
    "sampled": Scenario("sampled", DRAWS, with_probs=True),
    "pruned": Scenario("pruned", DRAWS, with_probs=True, pruned=True),
    "points": Scenario("points", DRAWS, with_probs=False),
    "cycles": Scenario("cycles", DRAWS // 2, with_probs=True, cycles=JOINT),
    "filtered": Scenario(
        "filtered",
        DRAWS // 2,
        with_probs=True,
        sampling=Sampling(temperature=0.7, top_k=2, presence_penalty=1.0, frequency_penalty=0.5),
    ),
}
VERIFIERS = {
    "strict": StrictVerifier,
    "rejection": lambda: RejectionVerifier(RejectionConfig()),
    "block": lambda: RejectionVerifier(RejectionConfig(block=True)),
}


def check_joint_law(verifier, scenario, *, draws=None):
    """The joint law of three emitted tokens is the target's."""
    target, draft = target_and_draft()
    draws = draws or scenario.draws
    wanted = target_joint(target, scenario.sampling)
    for seed in (1, 2):
        fit = goodness_of_fit(tally_joint(verifier, target, draft, scenario, range(draws), seed), wanted)
        if fit.passes(P_VALUE):
            return
    raise AssertionError(str(fit))


CASES = [
    ("rejection", "sampled"),
    ("rejection", "pruned"),
    ("rejection", "points"),
    ("rejection", "cycles"),
    ("rejection", "filtered"),
    ("block", "sampled"),
    ("block", "cycles"),
    ("strict", "sampled"),
    ("strict", "filtered"),
]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_joint_law_is_the_targets(case):
    verifier, scenario = case
    check_joint_law(VERIFIERS[verifier](), SCENARIOS[scenario])


def near(successes, trials, rate):
    """Within 4.5 standard deviations: missed 7 times in a million."""
    return abs(successes / trials - rate) <= 4.5 * np.sqrt(rate * (1 - rate) / trials)


@pytest.mark.sample
def test_coupled_drafts_are_accepted_as_often_as_the_formula_says():
    """Drafting with the noise that decides: Pr[match] = sum_t 1 / sum_s max(p_s / p_t, q_s / q_t), arXiv 2408.07978."""
    target, draft = target_and_draft()
    p, q = target.distribution([1]), draft.distribution([1])
    expected = sum(1 / sum(max(p[s] / p[t], q[s] / q[t]) for s in range(3)) for t in range(3) if p[t] and q[t])
    ids, matches = np.arange(3), 0
    for seed in range(DRAWS):
        noise = gumbel(seed, 1, ids, Purpose.TOKEN)
        matches += int(np.argmax(np.log(p) + noise) == np.argmax(np.log(q) + noise))
    assert near(matches, DRAWS, expected)


def test_a_large_vocabulary_keeps_its_tail():
    """V = 248 320, Zipf: sums in float32 lose the tail, and with it the law of the rare tokens."""
    vocab, draws = 248_320, DRAWS // 25
    weights = 1.0 / np.arange(1, vocab + 1)
    law = weights / weights.sum()
    logits = TableLogits(np.log(weights).astype(np.float32)[None])
    verifier, edges = StrictVerifier(), np.array([1, 3, 10, 30, 100, 1_000, 10_000, 100_000])
    counts = np.zeros(len(edges) + 1, np.int64)
    for seed in range(draws):
        context = Context([1], Sampling(temperature=1.0, seed=seed), generated_from=1)
        token = verifier.verify(Draft(), logits, context).next_token
        counts[np.searchsorted(edges, token, side="right")] += 1
    fit = goodness_of_fit(counts, [part.sum() for part in np.split(law, edges)])
    assert fit.passes(P_VALUE), str(fit)
