"""Whole models over packed weights: exact speculation, saved sessions, and the same weights however they are loaded."""

import re

import attrs
import pytest
import torch

import specdec
from specdec.checkpoints import Checkpoint
from specdec.checkpoints.quantised import formats_of
from specdec.config import Choice, RunConfig, TargetConfig
from specdec.contract import Parity
from specdec.errors import ConfigError
from specdec.models.loading import _own_options, load_target
from specdec.registry import registry
from tests import tiny
from tests.backends.families import check_drafter
from tests.checkpoints.gguf_files import write_gguf
from tests.checkpoints.quantised import mlx_layout
from tests.checkpoints.quantised.test_mlx_affine import FAMILIES
from tests.checkpoints.quantised.test_quantised_models import outputs_of as logits
from tests.decoding.test_lossless import adversarial, mtp, partly_right
from tests.selection import cases
from tests.tiny_families import write_qwen2

pytestmark = pytest.mark.skipif("native" not in tiny.kernels_available(), reason="needs the native kernels")


def folder_of(tmp_path, family):
    return tiny.WRITERS[family](tmp_path / "source", **FAMILIES[family])


def check_speculation(folder, target):
    """Drafts of any quality leave the tokens and the state of plain decoding."""
    assert target.info.parity is Parity.BITWISE
    prompt = [3, 1, 4, 1, 5]
    for number, drafter in enumerate((partly_right, adversarial, mtp)):
        check_drafter(folder, target, prompt, drafter, [3 + number, 1, 6], count=12)


@pytest.mark.parametrize("family", cases(FAMILIES, sample=["qwen3_5", "deepseek_v3"], mark="slow"))
def test_speculation_over_packed_weights_is_exact(tmp_path, family):
    """Rounded, and in a quantised checkpoint, of which no matrix is decoded."""
    folder = folder_of(tmp_path, family)
    for weights, activations in (("int8", "float"), ("int4", "float"), ("int4", "int8")):
        ops = tiny.make_ops("native", "bfloat16", activations=activations)
        check_speculation(folder, tiny.make_target(folder, ops=ops, dtype="bfloat16", weights=weights))
    converted = mlx_layout.convert(tmp_path, folder, family)[0]
    check_speculation(converted, tiny.make_target(converted, kernels="native", dtype="bfloat16"))
    shapes = [found.shape for found in formats_of(Checkpoint.open(converted)).values() if found.quantised]
    weights = load_target(RunConfig(target=TargetConfig(model=str(converted)))).target.info.weights
    assert "decoded" not in weights
    matrices = sum(shape[0] if len(shape) == 3 else 1 for shape in shapes)
    assert sum(map(int, re.findall(r"\((\d+)", weights))) == matrices


@pytest.mark.parametrize("family", cases(FAMILIES, sample=["qwen3_5", "deepseek_v3"], mark="slow"))
def test_packed_and_decoded_models_agree(tmp_path, family):
    """In float32 they differ by the rounding of sums alone: by as much as the torch reference and our kernels differ
    over decoded weights. A model may enlarge these differences, so both are measured on it."""
    source = folder_of(tmp_path, family)
    converted = mlx_layout.convert(tmp_path, source, family)[0]
    for folder, weights in ((source, "int8"), (source, "int4"), (converted, "auto")):
        unpacking = tiny.make_ops("native", "float32")
        unpacking.capabilities = attrs.evolve(unpacking.capabilities, packed_formats=frozenset())
        packed = logits(tiny.make_target(folder, kernels="native", weights=weights))
        decoded = logits(tiny.make_target(folder, ops=unpacking, weights=weights))
        reference = logits(tiny.make_target(folder, kernels="torch", weights=weights))
        assert reference.std() > 0.3
        noise = float((decoded - reference).abs().max())
        assert float((packed - decoded).abs().max()) <= 32 * noise + 1e-5
        assert not torch.equal(packed, decoded)  # it did run other kernels
    exact = logits(tiny.make_target(source))
    assert float((exact - logits(tiny.make_target(source, weights="int8"))).abs().max()) > 1e-4  # rounding is felt


@pytest.mark.parametrize("family", cases(FAMILIES, sample=["qwen3_5", "deepseek_v3"], mark="slow"))
def test_the_cache_holds_the_rounded_weights(tmp_path, family):
    """Stacks of experts and rows of a group and a half too: the bits of a load without a cache."""
    folder = folder_of(tmp_path, family)
    for weights in ("int8", "int4"):
        targets, notices = [], []
        for cache in (None, tmp_path / "cache", tmp_path / "cache"):
            asked = TargetConfig(
                model=str(folder), weights=weights, decoded_cache=None if cache is None else str(cache)
            )
            loaded = load_target(RunConfig(target=asked))
            targets.append(loaded.target)
            notices.append(" ".join(loaded.notices))
        assert f"{weights} g64" in targets[0].info.weights
        assert len({target.info.fingerprint for target in targets}) == 1
        assert "rounded into the cache" in notices[1]
        assert "taken from the cache" in notices[2]
        first, *others = [logits(target) for target in targets]
        for other in others:
            assert torch.equal(first, other)
        written = next(path for path in (tmp_path / "cache").iterdir() if path.name.endswith(weights))
        plain = (folder / "model.safetensors").stat().st_size
        assert (written / "model.safetensors").stat().st_size < plain * (0.75 if weights == "int8" else 0.6)


@pytest.mark.parametrize("source", ["int4", "Q8_0", "Q4_1"])
def test_int8_activations_are_part_of_the_model(tmp_path, source):
    options = {"weights": source}
    if source != "int4":
        folder = write_qwen2(tmp_path / "folder", hidden=64, heads=4, head_dim=16, intermediate=96)
        options = {"model": str(write_gguf(tmp_path / "one.gguf", folder, matrices=source))}
    lm, plain = (specdec.load(activations="int8", drafter=drafter, **options) for drafter in ("auto", "none"))
    result, wanted = (one.generate("one two one two ", max_new_tokens=32, ignore_eos=True) for one in (lm, plain))
    assert result.tokens == wanted.tokens
    assert "; int8 activations (" in result.weights
    floats = specdec.load(activations="float", **options).info
    assert (floats.fingerprint + "-int8-activations", "int8 act" in floats.weights) == (lm.info.fingerprint, False)


@pytest.mark.parametrize("backend", ["metal", "cuda"])
def test_other_backends_refuse_int8_activations(backend):
    choice = Choice(backend, _own_options(TargetConfig(activations="int8")))
    with pytest.raises(ConfigError, match="activations is unknown"):
        registry().options(registry().backend(backend), choice, "target.backend_options")


def test_a_cache_without_a_use_is_a_notice(tmp_path):
    source = folder_of(tmp_path, "qwen3")
    converted = mlx_layout.convert(tmp_path, source, "qwen3")[0]
    for weights, reason in (("auto", "the weights stay packed"), ("int4", "leaves quantised weights")):
        asked = TargetConfig(model=str(converted), weights=weights, decoded_cache=str(tmp_path / "cache"))
        assert any(f"not used: {reason}" in n or reason in n for n in load_target(RunConfig(target=asked)).notices)
    assert not (tmp_path / "cache").exists()


def test_kernels_without_the_format_decode_and_say_so(tmp_path, monkeypatch):
    source = folder_of(tmp_path, "qwen3")
    converted = mlx_layout.convert(tmp_path, source, "qwen3")[0]
    monkeypatch.setenv("SPECDEC_CPU_KERNELS", "torch")
    for folder, weights, format in ((source, "int4", "int4 g64"), (converted, "auto", "mlx-affine 4 bits g32")):
        loaded = load_target(RunConfig(target=TargetConfig(model=str(folder), weights=weights)))
        told = [notice for notice in loaded.notices if "are decoded to" in notice]
        assert len(told) == 1
        assert format in told[0]
        assert f"{format} decoded to" in loaded.target.info.weights
    loaded = load_target(RunConfig(target=TargetConfig(model=str(converted), weights="decoded")))
    assert not any("are decoded to" in notice for notice in loaded.notices)
