"""Heads change speed only: any output is that of plain decoding. Clauses D10 and D14 have their distributions."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.contract import PrepareEnv, Sampling
from specdec.drafters.heads.plugin import specdec_drafters
from specdec.drafters.pruned_head import PreparedVocabulary
from specdec.models.causal_lm import PrunedHead
from specdec.testing.engine_run import plain_decoding, run_engine
from specdec.verifiers.strict import StrictVerifier
from tests.drafters.test_mtp_pruned import switched
from tests.selection import cases, examples

SPECS = {spec.name: spec for spec in specdec_drafters()}
KINDS = tuple(name for name in SPECS if name != "head")


def prepared(kind, target, model="random"):
    prepare = SPECS[kind].prepare
    assert prepare is not None
    return prepare(SPECS[kind].config(model=model), PrepareEnv(target=target))


def made(kind, env):
    return SPECS[kind].factory(SPECS[kind].config(model="random"), env)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", cases(["qwen3_5", "qwen3"], sample=1, mark="slow"))
def test_the_output_is_that_of_plain_decoding(kind, family, kernels, make_target):
    """Greedy and sampled, at any depths, over a real family's hidden states, with any head at any cycle."""
    target = make_target(family, kernels=kernels)
    shared = prepared(kind, target)
    around, verifier = shared.around, StrictVerifier()

    def pruned(tokens, rows=()):
        return PrunedHead(around, [around.ops.head_rows(around.lm_head, tokens, *rows)], pruned)

    @examples(20)
    @given(
        prompt=st.lists(st.integers(0, 200), min_size=1, max_size=30),
        depths=st.lists(st.integers(0, 8), min_size=1, max_size=4),
        sampling=st.sampled_from([Sampling(), Sampling(temperature=1.0, seed=4), Sampling(temperature=0.7, top_k=5)]),
        kept=st.lists(st.integers(0, 200), max_size=40),
        switches=st.lists(st.booleans(), min_size=1, max_size=6),
    )
    def check(prompt, depths, sampling, kept, switches):
        vocabulary = PreparedVocabulary.of(pruned(kept), target.info.vocab_size) if kept else None

        def make(env):
            drafter = made(kind, env)
            if kept:
                switched(drafter, switches)
            return drafter

        options = {"needs": around.needs, "shared": attrs.evolve(shared, vocabulary=vocabulary)}
        got, stats = run_engine(target, verifier, make, prompt, 12, depths, sampling, **options)
        assert got == plain_decoding(target, verifier, prompt, 12, sampling)
        assert not stats.inactive_reason

    check()
