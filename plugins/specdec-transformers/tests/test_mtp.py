"""The MTP head: transformers' layer against specdec's own, its tensors, and the effect of drafts."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import specdec
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from specdec.contract import Needs
from specdec.errors import CheckpointError

PROMPT = [5 + 7 * i % 50 for i in range(15)]


@pytest.fixture
def head(checkpoint, tmp_path):
    """A checkpoint with an MTP head whose tensors a test may change."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("deepseek_v3"), folder)

    def change(edit):
        weights = edit(load_file(folder / "model.safetensors"))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return change


def drafts_of(target):
    """Logits of a true pass and of two chained ones, after a prompt in two chunks."""
    state = target.new_state(60, Needs(mtp=True))
    target.prefill(state, PROMPT[:5])
    target.prefill(state, PROMPT[5:-1])
    rows, chosen = [], [7, 33, 2]

    def choose(logits, drafted):
        rows.append(logits.rows()[0].copy())
        return chosen[len(drafted)]

    target.draft_mtp(state, PROMPT[-1], 3, choose=choose)
    return np.stack(rows)


def test_the_head_gives_the_logits_of_specdecs_own(checkpoint):
    folder = str(checkpoint("deepseek_v3"))
    native = drafts_of(specdec.load(folder, dtype="float32").target)
    foreign = drafts_of(specdec.load(folder, backend="transformers").target)
    assert np.abs(native - foreign).max() <= 1e-4 * np.abs(native).max()


def test_the_first_draft_is_the_one_of_transformers_own_loop(target):
    """``MtpModel.forward`` drafts one token per layer, from all pairs at once."""
    from transformers.cache_utils import MtpCache

    model = target("deepseek_v3")
    state = model.new_state(60, Needs(mtp=True, final_hidden=True))
    hidden = model.prefill(state, PROMPT[:-1]).need_hidden()
    layers = model.mtp._layers
    with torch.no_grad():
        drafted, _, _ = layers(
            input_ids=torch.tensor([PROMPT[1:]]),
            last_hidden_states=hidden.array[None],
            attention_mask=None,
            position_ids=torch.arange(1, len(PROMPT))[None],
            mtp_cache=MtpCache(config=model.model.network.config.get_mtp_config()),
        )
    assert model.draft_mtp(state, PROMPT[-1], 1) == (int(drafted[0, -1]),)


def test_the_drafter_mtp_is_in_the_default_and_changes_no_token(checkpoint):
    folder = str(checkpoint("deepseek_v3"))
    plain = specdec.load(folder, backend="transformers", drafter="none")
    drafting = specdec.load(folder, backend="transformers", depth=3)
    assert drafting.drafter.title == "ngram, mtp"
    for start in (3, 30):
        prompt, settings = list(range(start, start + 12)), {"max_new_tokens": 30, "ignore_eos": True}
        got, wanted = drafting.generate(prompt, **settings), plain.generate(prompt, **settings)
        assert got.tokens == wanted.tokens
        assert got.stats.inactive_reason == ""
        assert sum(got.stats.offered) > 30


def test_a_rewound_session_drafts_what_a_new_one_drafts(checkpoint):
    lm = specdec.load(str(checkpoint("deepseek_v3")), backend="transformers", depth=3)
    session = lm.session()
    settings = {"max_new_tokens": 12, "ignore_eos": True}
    session.generate(PROMPT, **settings)
    for length in (24, 14, 3, 0):
        session.rewind(length)
        kept = list(session.tokens)
        fresh = lm.session()
        got = session.generate([9, 4], **settings)
        wanted = fresh.generate([*kept, 9, 4], **settings)
        assert got.tokens == wanted.tokens
        assert (got.stats.offered, got.stats.accepted) == (wanted.stats.offered, wanted.stats.accepted)


def test_a_head_that_lacks_a_tensor_is_refused_by_its_name(head):
    folder = head(lambda weights: {n: w for n, w in weights.items() if n != "model.layers.3.eh_proj.weight"})
    with pytest.raises(CheckpointError, match=r"not complete.*eh_proj"):
        specdec.load(str(folder), backend="transformers")


def test_a_head_of_another_shape_is_refused(head):
    def edit(weights):
        return weights | {"model.layers.3.enorm.weight": torch.ones(7)}

    with pytest.raises(CheckpointError, match="MTP head"):
        specdec.load(str(head(edit)), backend="transformers")


def test_a_checkpoint_without_the_head_loads_without(head):
    folder = head(lambda weights: {n: w for n, w in weights.items() if not n.startswith("model.layers.3.")})
    lm = specdec.load(str(folder), backend="transformers")
    assert lm.info.mtp_layers == 0
    assert lm.drafter.spec.name == "ngram"
    assert any("no tensor of them" in notice for notice in lm.notices)


def test_a_head_that_transformers_has_no_layer_for_is_said():
    lm = specdec.load(backend="transformers")  # the embedded model is a Qwen3.5 with a head
    assert lm.info.mtp_layers == 0
    assert any("no MTP layer for qwen3_5_text" in notice for notice in lm.notices)


def test_a_head_of_several_layers_is_not_used_and_that_is_said(head):
    folder = head(lambda weights: weights)
    tiny_models.edit_config(folder, num_nextn_predict_layers=2)
    lm = specdec.load(str(folder), backend="transformers")
    assert lm.info.mtp_layers == 0
    assert any("2 MTP layers" in notice for notice in lm.notices)
