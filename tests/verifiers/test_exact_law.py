"""The ratio rules are lossless: proved by enumerating the production functions with fractions, no tolerance."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from specdec.verifiers import rejection
from tests.verifiers.enumeration import array, emitted, joint_of, point_drafts, random_laws, sampled_drafts

JOINT = 3
SIZES = [(3, 0), (2, 1), (2, 3), (3, 1), (3, 2), (4, 2)]  # vocabulary, K
SEEDS = range(8)


def chain(target, laws, drafted, accepts):
    """The production rule, looked up when it is called."""
    return rejection.accept_chain(target, laws, drafted, accepts)


def block(target, laws, drafted, accepts):
    """Likewise."""
    return rejection.accept_block(target, laws, drafted, accepts)


@pytest.mark.parametrize(
    "draws", [{}, {"pruned": True, "seeds": range(5)}, {"sizes": [(4, 3)], "seeds": range(1)}], ids=repr
)
@pytest.mark.parametrize("rule", [chain, block])
def test_the_rules_emit_the_target_exactly(rule, draws):
    """Drafts drawn from a law of the whole vocabulary, or of part of it, leave the target's joint law as it is."""
    for vocab, depth in draws.get("sizes", SIZES):
        for seed in draws.get("seeds", SEEDS):
            target = random_laws(vocab, seed)
            draft = random_laws(vocab, seed + 100, support=range(vocab - 1) if "pruned" in draws else None)
            got, _ = emitted(rule, target, sampled_drafts(draft, depth, vocab), vocab, JOINT)
            assert got == joint_of(target, vocab, JOINT), f"vocabulary {vocab}, K {depth}, seed {seed}"


def test_point_masses_emit_the_target_exactly():
    """Any deterministic drafter, handed over as point masses, leaves the target's joint law as it is."""
    for vocab, depth in SIZES:
        for seed in SEEDS:
            target, draft = random_laws(vocab, seed), random_laws(vocab, seed + 100)
            best = point_drafts(lambda prefix, draft=draft: draft(prefix).index(max(draft(prefix))), depth)
            got, _ = emitted(chain, target, best, vocab, JOINT)
            assert got == joint_of(target, vocab, JOINT), f"vocabulary {vocab}, K {depth}, seed {seed}"


@pytest.mark.parametrize("seeds", [SEEDS], ids=repr)
def test_acceptance_is_the_overlap_of_the_laws(seeds):
    """E[accepted] of the token rule is what sum(min(target, draft)) says; more is as wrong as less."""
    for vocab, depth in SIZES:
        for seed in seeds:
            target, draft = random_laws(vocab, seed), random_laws(vocab, seed + 100)
            _, got = emitted(chain, target, sampled_drafts(draft, depth, vocab), vocab, 1)

            def expected(prefix, left, target=target, draft=draft, vocab=vocab):
                if left == 0:
                    return Fraction(0)
                kept = (min(a, b) for a, b in zip(target(prefix), draft(prefix), strict=True))
                return sum(
                    (k * (1 + expected((*prefix, token), left - 1)) for token, k in enumerate(kept) if k), Fraction(0)
                )

            assert got == expected((), depth), f"vocabulary {vocab}, K {depth}, seed {seed}"


@pytest.mark.parametrize("seeds", [range(12)], ids=repr)
def test_block_verification_accepts_at_least_as_much(seeds):
    """In expectation, and more in some cases."""
    gained = 0
    for vocab, depth in [(2, 3), (3, 2), (4, 2)]:
        for seed in seeds:
            target, draft = random_laws(vocab, seed, zeros=0.1), random_laws(vocab, seed + 100, zeros=0.1)
            _, by_token = emitted(chain, target, sampled_drafts(draft, depth, vocab), vocab, 1)
            _, by_block = emitted(block, target, sampled_drafts(draft, depth, vocab), vocab, 1)
            assert by_block >= by_token, f"vocabulary {vocab}, K {depth}, seed {seed}"
            gained += by_block > by_token
    assert gained > 5


def test_a_variable_depth_chosen_from_the_prefix_changes_nothing():
    """Stopping is safe when it depends on what was known before the draw (algorithms: the measurability trap)."""
    for seed in range(6):
        target, draft = random_laws(3, seed), random_laws(3, seed + 100)

        def drafts(draft=draft):
            for first in range(3):
                weight = draft(())[first]
                if not weight:
                    continue
                deeper = max(draft((first,))) > Fraction(1, 2)  # of the law, not of the token drawn from it
                for second in range(3) if deeper else [None]:
                    if second is None:
                        yield weight, (first,), [array(draft(()))]
                    elif draft((first,))[second]:
                        laws = [array(draft(())), array(draft((first,)))]
                        yield weight * draft((first,))[second], (first, second), laws

        for rule in (chain, block):
            got, _ = emitted(rule, target, drafts(), 3, JOINT)
            assert got == joint_of(target, 3, JOINT)


def test_production_arrays_are_float64():
    """Fractions prove the rule; the arrays that it gets in a generation are float64, from float32 drafts."""
    target = np.array([0.25, 0.75])
    accepted, final = rejection.accept_chain(lambda row: target, np.array([[1.0, 0.0]], np.float32), (0,), (0.9,))
    assert accepted == 0
    assert final.dtype == np.float64
    accepted, final = rejection.accept_block(lambda row: target, np.array([[1.0, 0.0]], np.float32), (0,), (0.9,))
    assert accepted == 0
    assert final.dtype == np.float64
    assert list(itertools.chain(final)) == [0.0, 1.0]
