"""Heads change speed only: any output is that of plain decoding, and a ratio test keeps the target's distribution."""

import functools
import json
from fractions import Fraction

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from specdec.contract import Context, DrafterEnv, DraftNoise, ModelInfo, PrepareEnv, Sampling
from specdec.drafters import gate
from specdec.drafters.heads.plugin import specdec_drafters
from specdec.drafters.heads.untrained import write_untrained
from specdec.drafters.pruned_head import PreparedVocabulary
from specdec.models.causal_lm import PrunedHead
from specdec.testing import TableModel
from specdec.testing.engine_run import plain_decoding, run_engine
from specdec.verifiers import rejection
from specdec.verifiers.strict import StrictVerifier
from tests.drafters.test_mtp_pruned import switched
from tests.selection import cases, examples
from tests.verifiers.enumeration import distance, emitted, joint_of, random_laws, sampled_drafts

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


# --- ratio tests ---------------------------------------------------------------------------------------------------

VOCAB, DEPTH = 3, 2


def reduced(folder):
    """Cut the vocabulary of a head to the tokens 0 and 2."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    config["draft_vocab_size"] = 2
    tensors["lm_head.weight"] = torch.randn(2, config["transformer_layer_config"]["hidden_size"])
    tensors["d2t"] = torch.tensor([0, 1])
    if "markov_head.markov_w2.weight" in tensors:
        tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][:2].contiguous()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def law_of(kind, folder, monkeypatch):
    """The distributions that the drafter hands over, by the tokens drafted before."""
    target = TableModel.random(VOCAB, tilt=0.5)
    shared, forced = prepared(kind, target, str(folder)), [0]
    draw = gate.draft_token

    def forcing(logits, drafted, context):
        _, distribution = draw(logits, drafted, context)
        return (forced[len(drafted)] if len(drafted) < len(forced) else 0), distribution

    monkeypatch.setattr(gate, "draft_token", forcing)

    @functools.cache
    def law(prefix):
        forced[:] = prefix
        state = target.new_state(16, shared.around.needs)
        one = made(kind, DrafterEnv(target=target, state=state, shared=shared))
        tokens = [1, 2, 0, 1]
        one.prefill(Context(tokens[:-1]), target.prefill(state, tokens[:-1]))
        context = Context(tokens, Sampling(temperature=1.0), draft_noise=DraftNoise.INDEPENDENT)
        probs = one.propose(context, len(prefix) + 1).probs[len(prefix)]
        assert probs.dtype == np.float32
        exact = [Fraction(float(p)) for p in probs]
        return tuple(p / sum(exact) for p in exact)

    return law


@pytest.mark.parametrize("rule", ["accept_chain", "accept_block"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "reduced"])
def test_a_ratio_test_keeps_the_exact_joint_distribution(kind, cut, rule, tmp_path, monkeypatch):
    """Every branch of verifying a head's drafts with the distributions it hands over, weighed with fractions."""
    info = TableModel.random(VOCAB).info
    assert isinstance(info, ModelInfo)
    folder = write_untrained(tmp_path / kind, kind, info, seed=3)
    if cut:
        reduced(folder)
    law = law_of(kind, folder, monkeypatch)
    laws = [law(()), law((0,)), law((2,))]
    assert all((one[1] == 0) == cut for one in laws)  # no mass outside the vocabulary, and all of it inside
    if kind in ("p_eagle", "dflash"):
        assert laws[1] == laws[2]  # marginals: no draft depends on another
    target = random_laws(VOCAB, 5)
    got, accepted = emitted(getattr(rejection, rule), target, sampled_drafts(law, DEPTH, VOCAB), VOCAB, 3)
    assert sum(got.values()) == 1
    assert accepted > 0
    assert distance(got, joint_of(target, VOCAB, 3)) == 0
