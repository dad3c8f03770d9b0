"""``specdec info`` at the scale of released models, from ``config.json`` alone, and on checkpoints of all kinds."""

import json
import math

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import specdec
from specdec.cli import main
from specdec.errors import CheckpointError
from tests import tiny
from tests.models.test_public_configs import PUBLISHED


def report_on(config, folder):
    (folder / "config.json").write_text(json.dumps(config))
    return specdec.inspect_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("name", "billions", "cache_bytes", "state_megabytes"),
    [
        ("Qwen3.5-0.8B", 0.752, 12 * 1024, 18.9),
        ("Qwen3.5-4B", 4.206, 32 * 1024, 50.3),
        ("Qwen3.5-9B", 7.937, 32 * 1024, 50.3),
        ("Qwen3.6-27B", 25.625, 64 * 1024, 151),
        ("Qwen3.6-35B-A3B", 2.946, 20 * 1024, 62.9),
    ],
)
def test_bytes_of_a_decode_step(name, billions, cache_bytes, state_megabytes, tmp_path):
    """Of experts those that a row chooses, of an untied embedding one row. The window of the convolution makes the
    state a few percent larger than its recurrent part, which is what is given here."""
    step = report_on(PUBLISHED[name][0], tmp_path).decode_step
    assert step is not None
    assert round(step.weights / 2e9, 3) == billions
    assert step.per_context_token == cache_bytes
    assert state_megabytes <= step.state / 2e6 <= state_megabytes * 1.05


def info(*arguments):
    done = CliRunner().invoke(main, ["info", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.stdout.split()), done.stderr


def test_the_command_shows_formats_and_findings(tmp_path):
    """The real report through the real command: formats in a table, long lists cut short, all of them in JSON."""
    folder = tiny.write_qwen3_5(tmp_path / "model", dtype="bfloat16")
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    weights |= {f"extra.{i}": torch.ones(2) for i in range(30)}
    save_file(weights, folder / "model.safetensors")
    status, text, errors = info(folder)
    assert (status, errors) == (0, "")
    head = sum(math.prod(value.shape) for key, value in weights.items() if key.startswith("mtp."))
    for part in (
        f"; and {head:,} in the MTP head",
        "module format weights parameters stored",
        "MLP fp8 1",
        "30 unused, 1 problem",
        "unused: extra.0",
        "unused: 10 more, which --json lists",
        f"problem: the tensor {name}",
    ):
        assert part in text
    told = json.loads(CliRunner().invoke(main, ["info", str(folder), "--json"]).stdout)
    assert len(told["unused"]) == 30


@pytest.mark.parametrize("read", [specdec.load, specdec.inspect_checkpoint])
def test_an_end_token_outside_the_vocabulary_is_refused(tmp_path, read):
    folder = tiny.write_qwen3_5(tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": 100000}')
    with pytest.raises(CheckpointError, match=r"^generation_config\.json: 'eos_token_id' names the token 100000"):
        read(str(folder))


def test_the_command_names_the_plugin_for_a_foreign_checkpoint(tmp_path):
    told = report_on({"model_type": "t5", "is_encoder_decoder": True}, tmp_path).taken_by
    assert ("encoder-decoder" in told, "specdec-transformers" in told) == (True, False)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    status, text, errors = info(tmp_path)
    assert (status, errors) == (0, "")
    assert "no weights in this folder" in text
    save_file({"h.0.attn.c_attn.weight": torch.ones(4, 12)}, tmp_path / "model.safetensors")
    status, text, errors = info(tmp_path)
    assert (status, errors) == (0, "")
    for part in ("none of specdec's reads model_type 'gpt2'", "the plugin specdec-transformers", "f32 1 48 192 bytes"):
        assert part in text


def test_settings_of_generation_config_that_are_not_used_are_listed():
    report = specdec.inspect_checkpoint("demo")
    assert report.generation_config_ignored == {"do_sample": False}
    assert "do_sample no" in CliRunner().invoke(main, ["info", "demo"]).output


def test_the_longest_sequence_takes_nine_tenths_of_the_free_memory(make_target, monkeypatch):
    target = make_target("qwen3")
    monkeypatch.setattr(target.ops, "free_bytes", lambda: 100_000)
    most = target.most_tokens()
    taken, more = (sum(cache.nbytes() for cache in target.new_state(count).caches) for count in (most, most + 1))
    assert taken <= 90_000 < more
