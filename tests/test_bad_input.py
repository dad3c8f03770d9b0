"""Bad checkpoints, prompts and plugins: one clear sentence that names the thing and what would work; never a traceback.

The parts have their own tests (``tests/checkpoints``, ``tests/config``); here the whole way is walked, through
``specdec.load`` and, for some, through the command line in a process of its own.
"""

from __future__ import annotations

import json
import math
import pathlib
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import specdec
from specdec.errors import (
    CheckpointError,
    ConfigError,
    PluginError,
    PromptError,
    SpecdecError,
    UnknownNameError,
    UnsupportedError,
)
from tests import tiny
from tests.processes import run_specdec

SHAPE: dict[str, Any] = {
    "hidden": 32,
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 8,
    "rotary_factor": 0.5,
    "key_heads": 1,
    "value_heads": 2,
    "key_dim": 8,
    "value_dim": 8,
    "intermediate": 40,
    "max_positions": 64,
    "layer_types": ["linear_attention", "full_attention"],
}


@pytest.fixture(autouse=True)
def reference_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on the kernels; the reference needs no compiler."""
    monkeypatch.setenv("SPECDEC_CPU_KERNELS", "torch")


@pytest.fixture
def folder(checkpoint: Callable[..., pathlib.Path], tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of a sound checkpoint, to be damaged."""
    return pathlib.Path(shutil.copytree(checkpoint("qwen3_5", **SHAPE), tmp_path / "tiny"))


def change(folder: pathlib.Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Edit the tensors of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def check(error: SpecdecError, *words: str) -> None:
    """The message is one sentence, and message and facts together say all of this."""
    said = str(error)
    assert "\n" not in error.message
    assert "Traceback" not in said
    for word in words:
        assert word in said, f"{word!r} is not in:\n{said}"


def test_the_sound_checkpoint_loads(folder: pathlib.Path) -> None:
    """Otherwise every test below could pass for another reason."""
    lm = specdec.load(str(folder))
    assert lm.generate("the", max_new_tokens=4, ignore_eos=True).finish_reason == "length"
    assert lm.drafter.spec.name == "mtp"


# --- checkpoints ------------------------------------------------------------------------------------------------------


def no_folder(folder: pathlib.Path) -> None:
    shutil.rmtree(folder)


def not_a_checkpoint(folder: pathlib.Path) -> None:
    (folder / "config.json").unlink()


def no_weights(folder: pathlib.Path) -> None:
    (folder / "model.safetensors").unlink()


def no_tokenizer(folder: pathlib.Path) -> None:
    (folder / "tokenizer.json").unlink()


def broken_tokenizer(folder: pathlib.Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": 7}')


def large_tokenizer(folder: pathlib.Path) -> None:
    tiny.edit_config(folder, vocab_size=200)
    change(folder, lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"][:200].clone()}))


def broken_config(folder: pathlib.Path) -> None:
    (folder / "config.json").write_text('{"model_type": "qwen3_5_text",')


def no_model_type(folder: pathlib.Path) -> None:
    tiny.edit_config(folder, model_type=None)


def unknown_model_type(folder: pathlib.Path) -> None:
    tiny.edit_config(folder, model_type="qwen3_6_text")


def missing_key(folder: pathlib.Path) -> None:
    tiny.edit_config(folder, num_attention_heads=None)


def wrong_key(folder: pathlib.Path) -> None:
    tiny.edit_config(folder, hidden_size="32")


def other_variant(folder: pathlib.Path) -> None:
    tiny.edit_config(folder, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0})


def truncated(folder: pathlib.Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def truncated_in_the_header(folder: pathlib.Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:60])


def foreign(folder: pathlib.Path) -> None:
    (folder / "model.safetensors").write_bytes(b"GGUF" + bytes(1000))


def pickled(folder: pathlib.Path) -> None:
    torch.save({"a": torch.zeros(3)}, folder / "model.safetensors")


def missing_tensor(folder: pathlib.Path) -> None:
    change(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def misshaped_tensor(folder: pathlib.Path) -> None:
    change(folder, lambda t: t.update({"model.layers.1.self_attn.q_proj.weight": torch.ones(16, 32)}))


def nan_tensor(folder: pathlib.Path) -> None:
    change(folder, lambda tensors: tensors["model.layers.0.linear_attn.out_proj.weight"][3].fill_(torch.nan))


def infinite_tensor(folder: pathlib.Path) -> None:
    change(folder, lambda tensors: tensors["model.norm.weight"][0].fill_(torch.inf))


def no_mtp_tensors(folder: pathlib.Path) -> None:
    change(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")])


def absent_shard(folder: pathlib.Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = dict.fromkeys(tensors, "model-00002-of-00002.safetensors")
    tiny.write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})


CHECKPOINTS: dict[Callable[[pathlib.Path], None], tuple[type[SpecdecError], tuple[str, ...]]] = {
    no_folder: (CheckpointError, ("there is no folder", "tiny", "try:")),
    not_a_checkpoint: (CheckpointError, ("it has no config.json", "tiny", "try:")),
    no_weights: (CheckpointError, ("neither model.safetensors nor model.safetensors.index.json", "try:")),
    no_tokenizer: (CheckpointError, ("no tokenizer.json", "try:")),
    broken_tokenizer: (CheckpointError, ("tokenizer.json cannot be read", "try:")),
    large_tokenizer: (CheckpointError, (f"tokenizer.json has {tiny.TOKENIZER_SIZE} tokens", "only 200")),
    broken_config: (CheckpointError, ("config.json is not valid JSON", "line:")),
    no_model_type: (CheckpointError, ("config.json has no 'model_type'",)),
    unknown_model_type: (UnknownNameError, ("qwen3_6_text", "qwen3_5", "config.json")),
    missing_key: (CheckpointError, ("config.json lacks 'num_attention_heads'",)),
    wrong_key: (CheckpointError, ("'hidden_size'", "'32'")),
    other_variant: (CheckpointError, ("config.json", "'yarn'", "'default'")),
    truncated: (CheckpointError, ("model.safetensors is truncated", "bytes", "try:")),
    truncated_in_the_header: (CheckpointError, ("model.safetensors is truncated", "try:")),
    foreign: (CheckpointError, ("model.safetensors is a GGUF file", "try:")),
    pickled: (CheckpointError, ("model.safetensors is a pickled PyTorch file", "try:")),
    missing_tensor: (CheckpointError, ("layers.1.mlp.up_proj.weight",)),
    misshaped_tensor: (CheckpointError, ("layers.1.self_attn.q_proj.weight", "[16, 32]", "[32, 32]")),
    nan_tensor: (CheckpointError, ("layers.0.linear_attn.out_proj.weight",)),
    infinite_tensor: (CheckpointError, ("model.norm.weight",)),
    absent_shard: (CheckpointError, ("model.safetensors.index.json", "model-00002-of-00002.safetensors", "try:")),
}


@pytest.mark.parametrize("damage", CHECKPOINTS, ids=lambda damage: damage.__name__)
def test_a_bad_checkpoint(damage: Callable[[pathlib.Path], None], folder: pathlib.Path) -> None:
    damage(folder)
    error, words = CHECKPOINTS[damage]
    with pytest.raises(SpecdecError) as caught:
        specdec.load(str(folder))
    assert type(caught.value) is error
    check(caught.value, *words)


@pytest.mark.parametrize("counted", [1, 0])
def test_the_advice_for_a_missing_head_works(counted: int, folder: pathlib.Path) -> None:
    """Everything but the drafter that needs the head runs, and "auto" drafts with another one."""
    no_mtp_tensors(folder)
    tiny.edit_config(folder, mtp_num_hidden_layers=counted)
    assert specdec.load(str(folder)).drafter.spec.name == "ngram"
    with pytest.raises(UnsupportedError) as caught:
        specdec.load(str(folder), drafter="mtp")
    check(caught.value, "needs an MTP head", "ngram", "target.mtp", "try:")


# --- prompts and settings ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lm(checkpoint: Callable[..., pathlib.Path]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_CPU_KERNELS", "torch")
        return specdec.load(str(checkpoint("qwen3_5", **SHAPE)), dtype="float32")


@pytest.mark.parametrize(
    ("prompt", "settings", "words"),
    [
        ("", {}, ["the prompt is empty", "try:"]),
        ([], {}, ["the prompt is empty", "try:"]),
        ([1] * 64, {}, ["the prompt is too long: 64 tokens", "max_position_embeddings 64", "at most 63"]),
        ([1, 277], {}, ["token id 277 is outside the vocabulary (0 to 276)"]),
        ([1, -1], {}, ["token id -1 is outside the vocabulary"]),
        ([1, 2.0], {}, ["prompt[1]", "takes an integer, got 2.0"]),
        ([True], {}, ["prompt[0]", "takes an integer, got True"]),
        ("\ud800", {}, ["lone surrogate", "try:"]),
        ("the", {"max_new_tokens": 0}, ["max_new_tokens", "0"]),
        ("the", {"max_new_tokens": 2.5}, ["max_new_tokens", "2.5"]),
        ("the", {"temperature": -1.0}, ["temperature", "-1.0"]),
        ("the", {"stop": [""]}, ["stop", "one character"]),
        ("the", {"max_tokens": 5}, ["max_tokens", "max_new_tokens"]),
        ("the", {"stop": 5}, ["stop", "takes a string or a list of strings, got 5"]),
        ("the", {"stop": b"x"}, ["stop", "takes a string or a list of strings, got b'x'"]),
        ("the", {"stop": "\ud800"}, ["stop", "without lone surrogates"]),
        ("the", {"min_new_tokens": 200}, ["min_new_tokens", "at most generation.max_new_tokens (128), got 200"]),
        ("the", {"min_new_tokens": 2, "max_new_tokens": 1}, ["min_new_tokens", "max_new_tokens (1), got 2"]),
        ("the", {"logprobs": 100_000}, ["logprobs", "the size of the vocabulary (", "got 100000"]),
        ("the", {"banned": [5.5]}, ["banned[0]", "takes an integer, got 5.5"]),
        ("the", {"banned": "123"}, ["banned", "takes a list, got '123'"]),
        ("the", {"banned": [277]}, ["banned", "0 to 276"]),
        ("the", {"ignore_eos": "no"}, ["ignore_eos", "takes True or False, got 'no'"]),
        ("the", {"logit_bias": {1: math.nan}}, ["logit_bias[1]", "a finite number"]),
        ("the", {"logit_bias": {1: math.inf}}, ["logit_bias", "-1000000.0 to 1000000.0"]),
        ("the", {"logit_bias": {1: 1.0, "1": 2.0}}, ["logit_bias", "twice"]),
        ("the", {"logit_bias": {" 1": 1.0}}, ["logit_bias", "' 1'"]),
        ("the", {"seed": True}, ["seed", "takes an integer, got True"]),
        ("the", {"seed": 2**64}, ["seed", "0 to"]),
        ("the", {"temperature": 1e38}, ["temperature", "0.0 to 100.0"]),
        ("the", {"temperature": math.inf}, ["temperature", "0.0 to 100.0"]),
        ("the", {"top_p": 5e-324}, ["top_p", "1e-06 to 1.0"]),
        ("the", {"chat": 1}, ["chat", "takes True or False, got 1"]),
        (b"the", {}, ["prompt", "takes a string or a list, got b'the'"]),
        ({1, 2}, {}, ["prompt", "takes a string or a list, got {1, 2}"]),
        ({1: 2}, {}, ["prompt", "takes a string or a list, got {1: 2}"]),
        (torch.tensor([1.0]), {}, ["prompt[0]", "takes an integer, got 1.0"]),
        (torch.tensor([[1]]), {}, ["prompt", "takes a string or a list, got tensor([[1]])"]),
    ],
)
def test_a_bad_prompt_or_setting(prompt: Any, settings: dict[str, Any], words: list[str], lm: Any) -> None:
    with pytest.raises(PromptError) as caught:
        lm.generate(prompt, **settings)
    check(caught.value, *words)


@pytest.mark.parametrize(("limits", "words"), [({"capacity": 9}, "target.capacity"), ({}, "the free memory")])
def test_a_prompt_that_is_too_long_names_what_limits_it(lm: Any, limits: dict[str, int], words: str) -> None:
    config = attrs.evolve(lm.config, target=attrs.evolve(lm.config.target, **limits))
    small = attrs.evolve(lm, config=config, room=20 if limits else 9)
    with pytest.raises(PromptError) as caught:
        small.generate([1] * 9)
    check(caught.value, f"9 tokens ({words}", "at most 8")


@pytest.mark.parametrize(
    "ids", [(5, 6), range(5, 7), torch.tensor([5, 6]), np.array([5, 6], np.uint16), [np.int32(5), 6]]
)
def test_ids_of_a_prompt_come_in_many_forms(ids: Any, lm: Any) -> None:
    assert lm.generate(ids, max_new_tokens=3).tokens == lm.generate([5, 6], max_new_tokens=3).tokens


@pytest.mark.parametrize("prompt", [[1, 277], [-1], [], [1] * 60])
def test_a_refused_prompt_leaves_the_session_as_it_was(prompt: list[int], lm: Any) -> None:
    """Refused where it is fed, not when the model runs: by then the bad tokens would be part of the session."""
    session = lm.session()
    session.feed([1, 2, 3, 4])
    with pytest.raises(PromptError):
        session.feed(prompt)
    assert session.tokens == (1, 2, 3, 4)
    assert len(session.generate(max_new_tokens=2, ignore_eos=True).tokens) == 2


def test_the_longest_prompt_that_fits_fits(lm: Any) -> None:
    """What the message offers must work, at the very limit, and the generation then says why it ended."""
    result = lm.generate([1] * 63, max_new_tokens=5, ignore_eos=True)
    assert (len(result.tokens), result.finish_reason) == (1, "context")


@pytest.mark.parametrize("plan", [[60, 5], [62, 1], [63, 2]])
def test_a_session_at_its_limit_stays_usable(plan: list[int], lm: Any) -> None:
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


def test_unknown_names_and_options(folder: pathlib.Path) -> None:
    for arguments, error, words in [
        ({"drafter": "mpt"}, UnknownNameError, ["'mpt'", "'mtp'", "ngram"]),
        ({"verifier": "stricd"}, UnknownNameError, ["'stricd'", "'strict'"]),
        ({"depth": "fixd"}, UnknownNameError, ["'fixd'", "'fixed'"]),
        ({"backend": "cpuu"}, UnknownNameError, ["'cpuu'", "'cpu'"]),
        ({"drafter": {"name": "ngram", "max_ordr": 3}}, ConfigError, ["max_ordr", "max_order"]),
        ({"drafter": {"name": "ngram", "max_order": "3"}}, ConfigError, ["max_order", "'3'"]),
        ({"depth": 99}, ConfigError, ["depth", "99"]),
        ({"depth": 1.5}, ConfigError, ["depth", "takes an integer, a string or a mapping, got 1.5"]),
        ({"depth": True}, ConfigError, ["depth", "got True"]),
        ({"drafter": 5}, ConfigError, ["drafter", "takes a string or a mapping, got 5"]),
        ({"drafter": {"name": 3}}, ConfigError, ["drafter.name", "takes the name of a plugin, got 3"]),
        ({"drafter": {"max_order": 3}}, ConfigError, ["drafter.name", "takes the name of a plugin, got None"]),
        ({"verifier": ["strict"]}, ConfigError, ["verifier", "got ['strict']"]),
        ({"config": {"seed": 1}}, ConfigError, ["config", "takes a RunConfig"]),
        ({"verifier": "xyzzy"}, UnknownNameError, ["try:", 'verifier.name = "strict"']),
        ({"drafter": "xyzzy"}, UnknownNameError, ['drafter.name = "ngram"']),
        ({"depth": "xyzzy"}, UnknownNameError, ['depth.name = "fixed"']),
        ({"dtype": "float15"}, ConfigError, ["dtype", "'float15'", "float16"][:2]),
    ]:
        with pytest.raises(SpecdecError) as caught:
            specdec.load(str(folder), **arguments)
        assert type(caught.value) is error or isinstance(caught.value, error)
        check(caught.value, *words)


def test_a_path_is_a_folder(folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert specdec.load(folder).config == specdec.load(str(folder)).config
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="there is no folder"):
        specdec.load(pathlib.Path("demo"))  # not the embedded model


def test_a_plugin_that_raises_in_its_constructor(folder: pathlib.Path) -> None:
    """The plugin is named, with its own error; other names go on working."""
    from specdec.contract import DepthPolicySpec, DrafterSpec, VerifierSpec
    from specdec.hookspecs import hookimpl
    from specdec.registry import Registry, use_registry

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("its own bug")

    class Plugin:
        @hookimpl
        def specdec_drafters(self) -> list[DrafterSpec]:
            return [
                DrafterSpec(name="broken", factory=broken),
                DrafterSpec(name="heavy", factory=broken, prepare=broken),
                DrafterSpec(name="other", factory=lambda config, env: object()),  # type: ignore[arg-type,return-value]
            ]

        @hookimpl
        def specdec_verifiers(self) -> list[VerifierSpec]:
            return [VerifierSpec(name="broken", factory=broken)]

        @hookimpl
        def specdec_depth_policies(self) -> list[DepthPolicySpec]:
            return [DepthPolicySpec(name="broken", factory=broken)]

    registry = Registry()
    registry.load()
    registry.register(Plugin(), "their-plugin")
    previous = use_registry(registry)
    try:
        for arguments, words in [
            ({"drafter": "broken"}, ["drafter 'broken'", "ZeroDivisionError: its own bug"]),
            ({"drafter": "heavy"}, ["drafter 'heavy'", "ZeroDivisionError: its own bug"]),
            ({"drafter": "other"}, ["drafter 'other'", "object"]),
            ({"verifier": "broken"}, ["verifier 'broken'", "ZeroDivisionError: its own bug"]),
            ({"depth": "broken"}, ["'broken'", "ZeroDivisionError: its own bug"]),
        ]:
            with pytest.raises(PluginError) as caught:
                specdec.load(str(folder), **arguments)
            check(caught.value, *words)
        assert specdec.load(str(folder)).generate([1], max_new_tokens=2, ignore_eos=True).tokens
    finally:
        use_registry(previous)


# --- the command line -------------------------------------------------------------------------------------------------


def run(*arguments: str, status: int = 2) -> subprocess.CompletedProcess[str]:
    return run_specdec(*arguments, status=status, env={"SPECDEC_CPU_KERNELS": "torch"})


def check_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


@pytest.mark.slow
def test_the_command_line_refuses_a_truncated_file(folder: pathlib.Path) -> None:
    truncated(folder)
    done = run("generate", "-m", str(folder), "-p", "the")
    check_refused(done, "CheckpointError: model.safetensors is truncated", "try:")
    assert done.stdout == ""


def test_the_command_line_refuses_a_setting_and_says_so_in_json(folder: pathlib.Path) -> None:
    done = run("generate", "-m", str(folder), "-p", "the", "-n", "0", "--json")
    check_refused(done, "max_new_tokens", "0")
    told = json.loads(done.stdout)
    assert told["error"]["type"] == "ConfigError"
    assert "max_new_tokens" in told["error"]["message"]


@pytest.mark.slow
def test_the_command_line_refuses_an_unknown_key_and_a_token_outside(folder: pathlib.Path) -> None:
    check_refused(run("generate", "-m", str(folder), "-p", "the", "-s", "drafter.nmae=ngram"), "nmae")
    check_refused(
        run("generate", "-m", str(folder), "--prompt-tokens", "1,999"), "PromptError: token id 999 is outside"
    )


@pytest.mark.slow
def test_the_command_line_generates_from_the_sound_checkpoint(folder: pathlib.Path) -> None:
    """The way to the errors above is the way that works."""
    done = run("generate", "-m", str(folder), "-p", "the", "-n", "5", "--ignore-eos", "--json", status=0)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert len(told["tokens"]) == 5
    assert told["stats"]["rows"] == sum(told["stats"]["offered"]) + told["stats"]["cycles"]


@pytest.mark.parametrize("other", [None, 5, "demo"])
def test_a_session_of_no_language_model(other: Any) -> None:
    with pytest.raises(ConfigError, match=r"a session takes a language model, got .*\n.*specdec\.load"):
        specdec.Session(other)
    with pytest.raises(ConfigError, match="a stream takes a language model, got"):
        specdec.Stream(other, *[None] * 4)  # type: ignore[arg-type]
