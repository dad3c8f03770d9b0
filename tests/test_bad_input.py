"""Bad checkpoints, prompts and plugins: one clear sentence that names the thing and what would work; never a traceback.

The parts have their own tests (``tests/checkpoints``, ``tests/config``); here the whole way is walked, through
``specdec.load`` and, for some, through the command line in a process of its own.
"""

import math
import pathlib
import shutil

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

import specdec
from specdec.errors import CheckpointError, PromptError, UnknownNameError, UnsupportedError
from tests import tiny

SHAPE = tiny.shape(
    "hidden=32 layers=2 heads=2 kv_heads=1 head_dim=8 key_heads=1 value_heads=2 key_dim=8 value_dim=8 intermediate=40 "
    "max_positions=64",
    layer_types=["linear_attention", "full_attention"],
    rotary_factor=0.5,
)


@pytest.fixture(autouse=True)
def reference_kernels(monkeypatch):
    """Nothing here depends on the kernels; the reference needs no compiler."""
    monkeypatch.setenv("SPECDEC_CPU_KERNELS", "torch")


@pytest.fixture
def folder(checkpoint, tmp_path):
    """A copy of a sound checkpoint, to be damaged."""
    return pathlib.Path(shutil.copytree(checkpoint("qwen3_5", **SHAPE), tmp_path / "tiny"))


def change(folder, edit):
    """Edit the tensors of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def check(error, *words):
    """The message is one sentence, and message and facts together say all of this."""
    said = str(error)
    assert "\n" not in error.message
    assert "Traceback" not in said
    for word in words:
        assert word in said, f"{word!r} is not in:\n{said}"


def test_the_sound_checkpoint_loads(folder):
    """Otherwise every test below could pass for another reason."""
    lm = specdec.load(str(folder))
    assert lm.generate("the", max_new_tokens=4, ignore_eos=True).finish_reason == "length"
    assert lm.drafter.title == "ngram, mtp"


# --- checkpoints ------------------------------------------------------------------------------------------------------


def no_mtp_tensors(folder):
    change(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")])


def large_tokenizer(folder):
    tiny.edit_config(folder, vocab_size=200)
    change(folder, lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"][:200].clone()}))


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
CHECKPOINTS = {
    "large tokenizer": (large_tokenizer, f"tokenizer.json has {tiny.TOKENIZER_SIZE} tokens; only 200"),
    "no type": (lambda at: tiny.edit_config(at, model_type=None), "config.json has no 'model_type'"),
    "unknown type": (lambda at: tiny.edit_config(at, model_type="qwen3_6_text"), "qwen3_6_text; qwen3_5; config.json"),
    "missing key": (
        lambda at: tiny.edit_config(at, num_attention_heads=None),
        "config.json lacks 'num_attention_heads'",
    ),
    "yarn": (lambda at: tiny.edit_config(at, rope_parameters=YARN), "'yarn'; 'default'"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_bad_checkpoint(name, folder):
    damage, words = CHECKPOINTS[name]
    damage(folder)
    with pytest.raises(UnknownNameError if name == "unknown type" else CheckpointError) as caught:
        specdec.load(str(folder))
    check(caught.value, *words.split("; "))


@pytest.mark.parametrize("counted", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_the_advice_for_a_missing_head_works(counted, folder):
    """Everything but the drafter that needs the head runs, and "auto" drafts with another one."""
    no_mtp_tensors(folder)
    tiny.edit_config(folder, mtp_num_hidden_layers=counted)
    assert specdec.load(str(folder)).drafter.spec.name == "ngram"
    with pytest.raises(UnsupportedError) as caught:
        specdec.load(str(folder), drafter="mtp")
    check(caught.value, "needs an MTP head", "ngram", "target.mtp", "try:")


# --- prompts and settings ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lm(checkpoint):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_CPU_KERNELS", "torch")
        return specdec.load(str(checkpoint("qwen3_5", **SHAPE)), dtype="float32")


@pytest.mark.parametrize(
    ("prompt", "settings", "words"),
    [
        ("", {}, ["the prompt is empty", "try:"]),
        ([1] * 64, {}, ["the prompt is too long: ", "max_position_embeddings 64", "at most 63"]),
        ([1, 277], {}, ["token id 277 is outside the vocabulary (0 to 276)"]),
        ([1, 2.0], {}, ["prompt[1]", "takes an integer, got 2.0"]),
        ("\ud800", {}, ["lone surrogate", "try:"]),
        ("the", {"max_new_tokens": 0}, ["max_new_tokens", "0"]),
        ("the", {"stop": [""]}, ["stop", "one character"]),
        ("the", {"max_tokens": 5}, ["max_tokens", "max_new_tokens"]),
        ("the", {"min_new_tokens": 200}, ["min_new_tokens", "at most generation.max_new_tokens (128), got 200"]),
        ("the", {"logprobs": 100_000}, ["logprobs", "the size of the vocabulary (", "got 100000"]),
        ("the", {"depth": 99}, ["argument depth takes 0 to 15 draft tokens, got 99"]),
        ("the", {"banned": [277]}, ["banned", "0 to 276"]),
        ("the", {"logit_bias": {1: math.nan}}, ["logit_bias[1]", "a finite number"]),
        ("the", {"logit_bias": {1: 1.0, "1": 2.0}}, ["logit_bias", "twice"]),
        (5, {}, ["prompt", "takes a string or a list, got 5"]),
        (["a", "b"], {}, ["takes one prompt, got ['a', 'b']"]),
        ([{"role": "user", "content": "x"}], {}, ["takes text or token ids"]),
        (torch.tensor([[1]]), {}, ["prompt", "takes a string or a list, got tensor([[1]])"]),
    ],
)
def test_a_bad_prompt_or_setting(prompt, settings, words, lm):
    """A prompt is refused where it is fed, too: when the model runs, the bad tokens would be part of the session."""
    session = lm.session()
    session.feed([1, 2, 3, 4])
    for call in (lambda: lm.generate(prompt, **settings), *[lambda: session.feed(prompt)] * (not settings)):
        with pytest.raises(PromptError) as caught:
            call()
        check(caught.value, *words)
    assert session.tokens == (1, 2, 3, 4)


@pytest.mark.parametrize(("limits", "words"), [({"capacity": 9}, "target.capacity"), ({}, "the free memory")])
def test_a_prompt_that_is_too_long_names_what_limits_it(lm, limits, words):
    config = attrs.evolve(lm.config, target=attrs.evolve(lm.config.target, **limits))
    small = attrs.evolve(lm, config=config, room=20 if limits else 9)
    with pytest.raises(PromptError) as caught:
        small.generate([1] * 9)
    check(caught.value, f"9 tokens ({words}", "at most 8")


@pytest.mark.parametrize("plan", [[60, 5], [62, 1], [63, 2]])
def test_a_session_at_its_limit_stays_usable(plan, lm):
    session = lm.session()
    length, _ = plan
    session.generate([1] * length, max_new_tokens=40, ignore_eos=True)
    assert len(session.tokens) == 64
    with pytest.raises(PromptError, match="too long"):
        session.feed([1])
    again = session.generate(max_new_tokens=1, ignore_eos=True)
    assert (again.tokens, again.finish_reason) == ([], "context")
    session.rewind(10)
    assert len(session.generate(max_new_tokens=3, ignore_eos=True).tokens) == 3
