"""Trained draft heads over a transformers target: its hidden states, embedding and output head."""

from __future__ import annotations

import pytest
import torch
from specdec.contract import Needs, PrepareEnv, Sampling
from specdec.drafters.heads.plugin import specdec_drafters
from specdec.testing.engine_run import plain_decoding, run_engine
from specdec.verifiers.strict import StrictVerifier

SPECS = {spec.name: spec for spec in specdec_drafters() if spec.name != "head"}


@pytest.mark.parametrize("kind", SPECS)
def test_the_output_is_that_of_plain_decoding(kind, target):
    passes, spec = target("llama"), SPECS[kind]
    config = spec.config(model="random")
    shared = spec.prepare(config, PrepareEnv(target=passes))
    prompt, verifier = [3, 1, 4, 1, 5, 9, 2, 6], StrictVerifier()
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=2)):
        got, stats = run_engine(
            passes,
            verifier,
            lambda env: spec.factory(config, env),
            prompt,
            12,
            [3, 0, 5],
            sampling,
            needs=shared.around.needs,
            shared=shared,
        )
        assert got == plain_decoding(passes, verifier, prompt, 12, sampling)
        assert not stats.inactive_reason
        assert sum(stats.offered) > 0


def test_the_shared_weights_are_the_models(target):
    passes = target("llama")
    shared = passes.shared_weights()
    network = passes.model.network
    assert torch.equal(shared.embed_tokens, network.get_input_embeddings().weight)
    assert torch.equal(shared.lm_head, network.get_output_embeddings().weight)
    assert shared.embed_scale == pytest.approx(1.0)


def test_a_rewind_gives_the_last_kept_tokens_states_again(target):
    passes = target("llama")
    state = passes.new_state(32, Needs(boundaries=(1,)))
    passes.prefill(state, [3, 1, 4, 1, 5])
    assert passes.rewind(state, 3) == 2
