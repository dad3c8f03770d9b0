"""The same checkpoint through specdec's own family and through the plugin: close logits, the same greedy tokens."""

from __future__ import annotations

import numpy as np
import pytest
import specdec
import tiny_models

from specdec_transformers.model import Rollback

NATIVE = ("llama", "qwen3", "qwen3_next", "deepseek_v3")


@pytest.fixture(scope="module", params=NATIVE)
def pair(request, checkpoint):
    folder = str(checkpoint(request.param))
    native = specdec.load(folder, drafter="none", dtype="float32")
    foreign = specdec.load(folder, drafter="none", backend="transformers")
    assert native.info.backend == "cpu"
    assert foreign.info.backend == "transformers"
    return native, foreign


def test_what_both_say_about_the_model(pair):
    native, foreign = (lm.info for lm in pair)
    for field in ("vocab_size", "hidden_size", "max_positions", "mtp_layers", "fingerprint", "dtype"):
        assert getattr(native, field) == getattr(foreign, field), field


def test_logits_agree_to_float32_rounding(pair):
    prompt, rows = [5 + 7 * i % 50 for i in range(19)], [9, 44, 3, 17, 28]
    found = []
    for lm in pair:
        state = lm.target.new_state(60)
        lm.target.prefill(state, prompt)
        lm.target.decode(state, rows)
        lm.target.commit(state, 2)
        lm.target.decode(state, rows[2:])
        found.append(lm.target.decode(state, rows).need_logits().rows())
    native, foreign = found
    scale = np.abs(native).max()
    assert np.abs(native - foreign).max() <= 1e-4 * scale


def test_greedy_tokens_are_the_same(pair):
    native, foreign = pair
    for start in (3, 20, 41):
        prompt = [start + i for i in range(9)]
        settings = {"max_new_tokens": 40, "ignore_eos": True}
        assert native.generate(prompt, **settings).tokens == foreign.generate(prompt, **settings).tokens


@pytest.mark.parametrize("name", tiny_models.FURTHER)
def test_cycles_of_other_architectures_give_the_logits_of_a_pass_without_a_cache(target, name):
    model = target(name)
    assert model.model.rollback in (Rollback.CUT, Rollback.REPLAY)
    tokens = [5 + 7 * i % 50 for i in range(5)]
    state = model.new_state(100)
    model.prefill(state, tokens)
    for cycle in range(12):
        drafted = [3 + (11 * cycle + 5 * i) % 58 for i in range(1 + cycle % 5)]
        got = model.decode(state, drafted).need_logits().rows()
        wanted = model.model.whole([*tokens, *drafted]).logits.numpy()[-len(drafted) :, : got.shape[1]]
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3)
        kept = cycle % (len(drafted) + 1)
        model.commit(state, kept)
        tokens += drafted[:kept]
    assert len(tokens) > 20  # chunks and windows hold 8
    restored = model.restore(model.snapshot(state))
    rows = [model.decode(one, [9, 4]).need_logits().rows() for one in (state, restored)]
    assert np.array_equal(*rows)


def test_greedy_tokens_are_those_of_generate(target):
    """transformers' own loop, without the plugin's cache handling."""
    import torch

    for name in ("mistral", "gemma3_text", "gpt2", "lfm2", "qwen3_next", "mamba"):
        model = target(name)
        prompt = [5 + 7 * i % 50 for i in range(13)]
        wanted = model.model.network.generate(
            torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=0
        )[0, len(prompt) :].tolist()
        state, tokens = model.new_state(64), list(prompt)
        model.prefill(state, prompt[:-1])
        for _ in range(24):
            logits = model.decode(state, tokens[-1:]).need_logits()
            model.commit(state, 1)
            rows = logits.rows().copy()
            rows[:, 2] = -np.inf  # min_new_tokens bans the end token
            tokens.append(int(rows[0].argmax()))
        assert tokens[len(prompt) :] == wanted, name
