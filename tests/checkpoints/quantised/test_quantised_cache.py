"""The decoded cache: written once, taken from afterwards, rebuilt when stale, and whole or not there at all."""

import errno
import os
import shutil
import sys
from pathlib import Path

import attrs
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specdec.checkpoints import Checkpoint, StoredWeights
from specdec.cli.doctor import doctor
from specdec.config import RunConfig, TargetConfig
from specdec.errors import CheckpointError
from specdec.models.loading import load_target
from tests import tiny
from tests.checkpoints.quantised import quantisers as q
from tests.checkpoints.quantised.test_quantised_models import HYBRID, matrix, outputs_of


@pytest.fixture
def source(tmp_path):
    """A tiny checkpoint whose matrices are NVFP4, with scales of activations."""
    folder = tiny.write_qwen3_5(tmp_path / "source", **HYBRID)
    tensors, _ = q.quantised(load_file(folder / "model.safetensors"), lambda n: "nvfp4" if matrix(n) else None)
    save_file(tensors, folder / "model.safetensors")
    tiny.edit_config(folder, quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    return folder


def load(source, cache, dtype="bfloat16"):
    return load_target(
        RunConfig(target=TargetConfig(model=str(source), dtype=dtype, weights="decoded", decoded_cache=str(cache)))
    )


def only(cache):
    (entry,) = cache.iterdir()  # nothing half-written stays either
    return entry


def test_the_cache_is_written_once_and_holds_the_same_bits(source, tmp_path):
    first = load(source, tmp_path / "cache")
    entry = only(tmp_path / "cache")
    assert any(str(entry) in notice and "decoded into the cache" in notice for notice in first.notices)
    written = (entry / "model.safetensors").stat().st_mtime_ns
    second = load(source, tmp_path / "cache")
    assert (entry / "model.safetensors").stat().st_mtime_ns == written
    assert any("weights taken from the cache" in notice for notice in second.notices)
    assert torch.equal(outputs_of(first.target), outputs_of(second.target))
    direct, cached = Checkpoint.open(source), Checkpoint.open(entry)
    weights = StoredWeights(direct)
    assert set(cached.tensors) == set(weights)
    for name in weights:
        assert cached.load(name).dtype == weights[name].dtype
        assert torch.equal(cached.load(name), weights[name])
    assert "quantization_config" not in cached.config
    with safe_open(entry / "model.safetensors", "pt") as file:  # an ordinary file to others too
        assert file.metadata() == {"format": "pt"}


def _edit_weights(source):
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].clone()
    tensors[name][40, 9] ^= 1  # in the middle, where the sampled fingerprint does not look
    save_file(tensors, source / "model.safetensors")


def _own(source):
    """The folder of the cache."""
    return only(source.parent / "cache")


def _cut(source):
    file = _own(source) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _edit_own_weights(source):
    with open(_own(source) / "model.safetensors", "rb+") as file:
        file.seek(-8, 2)
        file.write(b"\x7f" * 8)


CHANGES = {
    "weights": _edit_weights,
    "config": lambda source: tiny.edit_config(source, rms_norm_eps=1e-5),
    "cut": _cut,
    "own weights": _edit_own_weights,
    "own config": lambda source: tiny.edit_config(_own(source), num_hidden_layers=1),
    "marker": lambda source: (_own(source) / "decoded.json").write_text("[]", encoding="utf-8"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_stale_cache_is_said_and_written_anew(source, tmp_path, change):
    load(source, tmp_path / "cache")
    CHANGES[change](source)
    again = load(source, tmp_path / "cache")
    assert any("is stale and is rewritten" in notice for notice in again.notices)
    assert torch.equal(outputs_of(again.target), outputs_of(load(source, tmp_path / "cache").target))
    direct = Checkpoint.open(source)
    name = "layers.0.mlp.up_proj.weight"
    decoded = StoredWeights(direct)[name]
    assert torch.equal(Checkpoint.open(only(tmp_path / "cache")).load(name), decoded)


def test_a_checkpoint_without_quantised_weights_needs_no_cache(tmp_path):
    folder = tiny.write_qwen3_5(tmp_path / "plain", dtype="bfloat16")
    loaded = load(folder, tmp_path / "cache")
    assert any("target.decoded_cache is not used" in notice for notice in loaded.notices)
    assert not (tmp_path / "cache").exists()


def test_a_refused_checkpoint_leaves_no_cache(source, tmp_path):
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale_2"] = torch.tensor(float("nan"))
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match="weight_scale_2 holds NaN"):
        load(source, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_full_disk_is_said_before_anything_is_written(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"takes \d+,\d+ bytes, and .* has 1,000 left"):
        load(source, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_disk_that_fills_up_meanwhile_leaves_the_old_cache(source, tmp_path, monkeypatch):
    load(source, tmp_path / "cache")
    kept = (only(tmp_path / "cache") / "decoded.json").read_text(encoding="utf-8")
    _edit_weights(source)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device") as caught:
        load(source, tmp_path / "cache")
    assert "bytes" in caught.value.facts["needs"]
    assert (only(tmp_path / "cache") / "decoded.json").read_text(encoding="utf-8") == kept


def test_rounded_weights_of_a_large_checkpoint_are_kept_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.write_qwen3_5(tmp_path / "plain", dtype="bfloat16")
    kept = tmp_path / "weights"
    monkeypatch.setattr("specdec.models.loading.weights_folder", lambda: kept)
    monkeypatch.setattr(sys.modules[doctor.callback.__module__], "weights_folder", lambda: kept)
    target = TargetConfig(model=str(folder), weights="int8")

    def said(target: TargetConfig) -> str:
        return "; ".join(load_target(RunConfig(target=target)).notices)

    assert "cache" not in said(target)  # small
    monkeypatch.setattr("specdec.models.loading.KEPT", 1)
    assert "cache" not in said(attrs.evolve(target, decoded_cache="off"))
    with monkeypatch.context() as full:
        full.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(1000, 0, 1000))
        assert "rounded at every load" in said(target)
    assert f"rounded into the cache {kept}" in said(target)
    written = only(kept)
    assert "cache" not in said(target)  # taken from it
    assert only(kept) == written
    assert CliRunner().invoke(doctor, ["--clear-weights", "--json"]).exit_code == 0
    assert not kept.exists()
