"""Which targets the plugin takes, what it refuses and why, and the check of the loaded weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import specdec
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from specdec.config import TargetConfig
from specdec.errors import CheckpointError, PluginError, SpecdecError, UnknownNameError, UnsupportedError
from specdec.registry import Registry, use_registry
from transformers import AutoConfig

from specdec_transformers import choice, loading, specdec_forward_pass
from specdec_transformers.loading import DEVICE_VARIABLE
from specdec_transformers.model import Model


@pytest.fixture
def copy(checkpoint, tmp_path):
    """A checkpoint that a test may change."""

    def made(name: str) -> Path:
        return Path(shutil.copytree(checkpoint(name), tmp_path / name))

    return made


def stub(folder: Path, **config) -> Path:
    """A folder with a config and one tensor: enough for refusals before weights are read."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"x": torch.zeros(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# --- which targets ---------------------------------------------------------------------------------------------------


def test_families_of_specdec_stay_native_unless_transformers_is_asked_for(checkpoint):
    for name in ("llama", "qwen3_next", "deepseek_v3"):
        assert specdec_forward_pass(TargetConfig(model=str(checkpoint(name)))) is None
    assert specdec.load(str(checkpoint("llama"))).info.backend == "cpu"
    assert specdec.load(str(checkpoint("llama")), backend="transformers").info.backend == "transformers"


def test_a_family_that_specdec_lacks_is_taken_unasked(checkpoint):
    lm = specdec.load(str(checkpoint("gpt2")))
    assert (lm.info.family, lm.info.backend) == ("gpt2", "transformers")
    assert specdec_forward_pass(TargetConfig(model=str(checkpoint("gpt2")), backend="cpu")) is None


def test_what_is_no_model_of_transformers_is_left_to_specdec(tmp_path):
    """The error is about the model_type, not about a tokenizer that such a folder may lack."""
    assert specdec_forward_pass(TargetConfig(model="demo")) is None
    assert specdec_forward_pass(TargetConfig(model=str(tmp_path / "absent"))) is None
    unknown = stub(tmp_path / "unknown", model_type="no_such_model")
    assert specdec_forward_pass(TargetConfig(model=str(unknown))) is None
    with pytest.raises(UnknownNameError, match="reads model_type 'no_such_model'"):
        specdec.load(str(unknown))


@pytest.mark.parametrize("model", ["./nowhere", "../nowhere", "~/nowhere", "a/b/c", "a--b/c", "x..y/z", ".a/b"])
def test_a_place_that_is_none_is_left_to_specdec(model):
    """Some of these match the pattern of hub ids but not the hub client's rules; it raises its own errors."""
    assert specdec_forward_pass(TargetConfig(model=model)) is None
    with pytest.raises(CheckpointError, match="there is no folder|neither a folder nor a hub id"):
        specdec.load(model)


def test_a_native_load_imports_no_transformers(checkpoint):
    script = f"""
import sys, specdec_transformers
from specdec.config import TargetConfig
for model in "demo", {str(checkpoint("llama"))!r}:
    assert specdec_transformers.specdec_forward_pass(TargetConfig(model=model)) is None
assert "transformers" not in sys.modules
assert specdec_transformers.specdec_forward_pass(TargetConfig(model={str(checkpoint("gpt2"))!r})) is not None
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=600)


def test_without_the_plugin_the_error_names_it(checkpoint):
    former = use_registry(Registry(entry_points=()))
    try:
        with pytest.raises(UnknownNameError, match="install specdec-transformers"):
            specdec.load(str(checkpoint("gpt2")), backend="transformers")
        with pytest.raises(UnknownNameError, match="install specdec-transformers"):
            specdec.load(str(checkpoint("gpt2")))
    finally:
        use_registry(former)


def test_without_transformers_the_error_names_it(checkpoint, monkeypatch):
    monkeypatch.setattr(choice, "_installed", lambda: False)
    with pytest.raises(PluginError, match="needs the package transformers"):
        specdec_forward_pass(TargetConfig(model=str(checkpoint("gpt2")), backend="transformers"))
    assert specdec_forward_pass(TargetConfig(model=str(checkpoint("gpt2")))) is None


# --- what is refused -------------------------------------------------------------------------------------------------

REFUSED = {
    "t5": ({"model_type": "t5"}, "encoder-decoder"),
    "bart": ({"model_type": "bart"}, "encoder-decoder"),
    "clip": ({"model_type": "clip"}, "no causal language model for model_type 'clip'"),
    "own code": ({"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "m.M"}}, "is never run"),
    "unknown": ({"model_type": "mine"}, "knows no model_type 'mine'"),
    "no model_type": ({"vocab_size": 4}, "no 'model_type'"),
    "broken field": ({"model_type": "gpt2", "n_embd": "wide"}, "transformers cannot"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_says_why_and_what_would_work(tmp_path, case):
    config, why = REFUSED[case]
    with pytest.raises(SpecdecError, match=why) as caught:
        specdec.load(str(stub(tmp_path / "model", **config)), backend="transformers")
    assert "try" in caught.value.facts or "file" in caught.value.facts


def test_an_encoder_decoder_is_refused_with_its_reason_unasked(tmp_path):
    folder = stub(tmp_path / "model", model_type="bart", is_encoder_decoder=True)
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        specdec.load(str(folder))


def test_a_model_whose_rows_see_later_rows_is_refused(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    folder = tiny_models.write(tmp_path / "bert", "bert", **sizes)
    with pytest.raises(UnsupportedError, match="not causal"):
        specdec.load(str(folder))


def test_pickles_adapters_and_gguf_are_refused(copy, tmp_path):
    folder = copy("gpt2")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="adapter"):
        specdec.load(str(folder))
    (folder / "adapter_config.json").unlink()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="safetensors"):
        specdec.load(str(folder))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="GGUF|gguf"):
        specdec.load(str(tmp_path / "model.gguf"), backend="transformers")


def test_the_command_line_ends_with_status_2_and_no_traceback(tmp_path):
    folder = stub(tmp_path / "model", model_type="t5")
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "specdec",
            "generate",
            "-s",
            f"target.model={folder}",
            "-s",
            "target.backend=transformers",
            "--prompt",
            "hi",
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 2
    assert "encoder-decoder" in ran.stderr
    assert "Traceback" not in ran.stderr


# --- the audit -------------------------------------------------------------------------------------------------------


def edited(folder: Path, edit) -> str:
    save_file(edit(load_file(folder / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_a_missing_tensor_is_an_error_that_names_it(copy):
    gone = "model.layers.1.mlp.up_proj.weight"
    folder = edited(copy("llama"), lambda weights: {n: w for n, w in weights.items() if n != gone})
    with pytest.raises(CheckpointError, match="lacks tensors.*" + gone.replace(".", r"\.")):
        specdec.load(folder, backend="transformers")


def test_a_tensor_of_another_shape_is_an_error(copy):
    name = "model.layers.1.mlp.up_proj.weight"
    folder = edited(copy("llama"), lambda weights: weights | {name: weights[name][:-1].clone()})
    with pytest.raises(CheckpointError, match=r"another shape than the config says: .*up_proj.weight \[47, 32\]"):
        specdec.load(folder, backend="transformers")


def test_tensors_that_are_not_part_of_the_model_are_a_notice(copy):
    folder = edited(copy("llama"), lambda weights: weights | {"vision.patch": weights["model.norm.weight"].clone()})
    lm = specdec.load(folder, backend="transformers")
    assert any("vision.patch" in notice for notice in lm.notices)
    assert lm.generate([5, 6], max_new_tokens=2).notices == list(lm.notices)


def test_the_fingerprint_follows_config_and_weights(copy, target):
    folder = copy("gpt2")
    first = specdec.load(str(folder)).info.fingerprint
    assert first == target("gpt2").info.fingerprint
    edited(folder, lambda weights: weights | {"transformer.ln_f.bias": weights["transformer.ln_f.bias"] + 1})
    assert specdec.load(str(folder)).info.fingerprint != first


def _coded(weights, scale="weight_scale"):
    module = "model.layers.1.mlp.up_proj."
    coded = weights[module + "weight"].to(torch.float8_e4m3fn)
    return weights | {module + "weight": coded, module + scale: torch.tensor(0.5)}


@pytest.mark.parametrize("method", [None, "modelopt", "homemade"])
def test_codes_that_transformers_would_take_for_values_are_refused(copy, method):
    """It loads them without an error: the method is unknown or missing, and the scale is just an unused tensor."""
    folder = copy("llama")
    if method is not None:
        tiny_models.edit_config(folder, quantization_config={"quant_method": method})
    edited(folder, _coded)
    with pytest.raises(UnsupportedError, match=r"up_proj\.weight is stored as fp8 per tensor, .* codes for values"):
        specdec.load(str(folder), backend="transformers")
    assert specdec.load(str(folder), backend="cpu").info.backend == "cpu"


def test_scales_that_transformers_left_over_are_refused(copy, monkeypatch):
    """Even if it knows the method: its list of unconverted modules may include a converted one."""
    folder = edited(copy("llama"), _coded)
    monkeypatch.setattr(loading, "_has_decoder", lambda config: True)
    with pytest.raises(UnsupportedError, match=r"up_proj\.weight .* did not read all of its scales"):
        specdec.load(folder, backend="transformers")


def test_a_method_that_transformers_knows_is_its_own_to_decode(checkpoint):
    config = AutoConfig.from_pretrained(checkpoint("llama"))
    for section, known in (
        (None, False),
        ({"quant_method": "fp8"}, True),
        ({"load_in_4bit": True}, True),
        ({"quant_method": "modelopt"}, False),
        ({"quant_algo": "NVFP4"}, False),
    ):
        config.quantization_config = section
        assert loading._has_decoder(config) is known


def test_a_decoded_cache_is_not_used_and_that_is_said(checkpoint, tmp_path):
    target = TargetConfig(model=str(checkpoint("gpt2")), decoded_cache=str(tmp_path / "cache"))
    lm = specdec.load(config=specdec.RunConfig(target=target))
    assert any("target.decoded_cache is not used" in notice for notice in lm.notices)
    assert not (tmp_path / "cache").exists()


def test_a_model_that_transformers_cannot_run_is_an_error_of_the_model(copy, monkeypatch):
    def fail(*arguments, **settings):
        raise RuntimeError("unflatten: sizes do not\nmultiply up")

    monkeypatch.setattr(Model, "whole", fail)
    with pytest.raises(UnsupportedError, match="cannot run this llama model") as caught:
        specdec.load(str(copy("llama")), backend="transformers")
    assert caught.value.facts["error"] == "RuntimeError: unflatten: sizes do not multiply up"


# --- info ------------------------------------------------------------------------------------------------------------


def test_dtype_and_device(copy, monkeypatch):
    folder = copy("gpt2")
    info = specdec.load(str(folder)).info
    assert (info.dtype, info.device) == ("float32", "cpu")
    half = specdec.load(str(folder), dtype="bfloat16")
    assert half.info.dtype == "bfloat16"
    assert half.generate([5, 6, 7], max_new_tokens=4, ignore_eos=True).stats.cycles > 0
    edited(folder, lambda weights: {n: w.half() for n, w in weights.items()})
    assert "float16" in specdec.load(str(folder)).info.dtype_reason
    monkeypatch.setenv(DEVICE_VARIABLE, "nowhere")
    with pytest.raises(UnsupportedError, match=DEVICE_VARIABLE):
        specdec.load(str(folder))


def test_ways_that_are_slow_say_so(target):
    assert target("llama").notices == ()
    assert any("one token per pass" in notice for notice in target("mamba").notices)
    assert any("whole text" in notice for notice in target("openai-gpt").notices)
    assert "copy of the cache" in target("qwen3_next").info.parity_reason


def test_a_model_without_a_limit_has_none(target):
    assert target("mamba").info.max_positions == 2**31 - 1
    assert target("gpt2").info.max_positions == 160
