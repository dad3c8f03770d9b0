"""MLX's layout: decoded as MLX does; checkpoints as mlx-lm converts them are the models that they were made from."""

import itertools
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tests.tiny_families  # noqa: F401  # registers the writers of its families
from specdec.checkpoints import Checkpoint, StoredWeights, TensorSpec, check_weights, write_checkpoint
from specdec.checkpoints.quantised import formats_of
from specdec.config import RunConfig, TargetConfig
from specdec.errors import CheckpointError
from specdec.models.loading import load_target
from tests import tiny
from tests.checkpoints.quantised import mlx_layout
from tests.checkpoints.quantised.quantisers import NAME, opened
from tests.checkpoints.quantised.test_quantised_decoders import assert_same_bits, drawn
from tests.selection import cases

DTYPES = ("bfloat16", "float16", "float32")
PROMPT = [1, 17, 3, 250, 88, 12, 5, 9]
SMALL = tiny.shape("hidden=64 heads=2 kv_heads=1 head_dim=32")
DENSE = SMALL | {"intermediate": 96}
DELTA = tiny.shape("key_heads=2 value_heads=4 key_dim=16 value_dim=16")
EXPERTS = tiny.shape("inner=32 shared=32 experts=4")
FAMILIES = {
    "qwen3_5": {**DENSE, **DELTA, "tied": False},
    "qwen3_5_moe": {**SMALL, **DELTA, **EXPERTS},
    "qwen3_next": {**SMALL, **DELTA, **EXPERTS},
    "qwen3": DENSE,
    "llama": DENSE,
    "qwen2": {**DENSE, "tied": False},
    "glm4_moe": {**DENSE, "inner": 32, "experts": 4},
    "deepseek_v3": tiny.shape(
        "hidden=64 heads=2 nope=32 rope=32 value=32 kv_lora=32 q_lora=32 intermediate=96 inner=32 experts=4"
    ),
}


def decoded(checkpoint, dtype):
    return StoredWeights(checkpoint, dtype=dtype)[NAME]


def outputs_of(target):
    """Logits of a pass of several rows."""
    return torch.as_tensor(target.decode(target.new_state(64), PROMPT).need_logits().rows()).clone()


def assert_same_logits(one, other):
    """Bit for bit with the native kernels; torch's own products depend on where in a file a tensor begins."""
    for kernels in tiny.kernels_available():
        targets = (tiny.make_target(folder, kernels=kernels, weights="decoded") for folder in (one, other))
        got, wanted = map(outputs_of, targets)
        assert wanted.std() > 0.5
        if kernels == "native":
            assert torch.equal(got, wanted)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)


def made(tmp_path, family, **more):
    source = tiny.WRITERS[family](tmp_path / "source", **FAMILIES[family])
    return mlx_layout.convert(tmp_path, source, family, **more)


# --- one weight ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_decoding_has_the_bits_of_mlx(tmp_path, bits, group):
    """A matrix and a stack, in float32 bit for bit, and rounded once."""
    mx = pytest.importorskip("mlx.core", exc_type=ImportError)
    for number, (shape, dtype) in enumerate(itertools.product([(24, 3 * group), (3, 7, group)], DTYPES)):
        weight = mx.array(drawn(bits, *shape))
        codes, scales, biases = mx.quantize(weight.astype(getattr(mx, dtype)), group_size=group, bits=bits)
        wide = (scales.astype(mx.float32), biases.astype(mx.float32))
        wanted = np.array(mx.dequantize(codes, *wide, group_size=group, bits=bits))
        parts = {"weight": torch.from_numpy(np.array(codes))}
        for name, grid in zip(("scales", "biases"), wide, strict=True):
            parts[name] = torch.from_numpy(np.array(grid)).to(getattr(torch, dtype))
        checkpoint = opened(tmp_path / str(number), parts, quantization={"group_size": group, "bits": bits})
        found = formats_of(checkpoint)[NAME]
        assert (found.format, found.shape) == (f"mlx-affine {bits} bits g{group}", shape)
        for other in DTYPES:
            assert_same_bits(decoded(checkpoint, getattr(torch, other)), wanted)
        assert np.abs(wanted - np.array(weight)).max() < np.abs(np.array(weight)).max() / 2  # it is that weight


@pytest.mark.parametrize(("mode", "label"), [("mxfp4", "mxfp4"), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4")])
def test_the_other_modes_have_the_bits_of_mlx_too(tmp_path, mode, label):
    mx = pytest.importorskip("mlx.core", exc_type=ImportError)
    group, bits = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}[mode]
    for shape in ((24, 96), (3, 8, 64)):
        codes, scales = mx.quantize(mx.array(drawn(3, *shape)), mode=mode)
        wanted = np.array(mx.dequantize(codes, scales, mode=mode, dtype=mx.float32))
        parts = {"weight": torch.from_numpy(np.array(codes)), "scales": torch.from_numpy(np.array(scales))}
        config = {"group_size": group, "bits": bits, "mode": mode}
        checkpoint = opened(tmp_path / str(len(shape)), parts, quantization=config)
        assert formats_of(checkpoint)[NAME].format == label
        assert_same_bits(decoded(checkpoint, torch.float32), wanted)
        assert check_weights(checkpoint, {NAME: TensorSpec(shape)}).errors == []
        parts["scales"] = torch.full_like(parts["scales"], 255)
        checkpoint = opened(tmp_path / f"{len(shape)} broken", parts, quantization=config)
        assert "NaN" in str(check_weights(checkpoint, {NAME: TensorSpec(shape)}).errors[0])


# --- whole checkpoints -----------------------------------------------------------------------------------------------


SIZES = {"quantised": mlx_layout.four_bits, "plain": mlx_layout.plain}


@pytest.mark.parametrize("kind", cases(SIZES, sample=1, mark="slow"))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_checkpoint_is_its_hugging_face_twin(tmp_path, family, kind):
    """Names, stacks of experts, turned convolutions, norms with the 1 in them, overrides by path: the same logits."""
    mlx, twin = made(tmp_path, family, sizes=SIZES[kind])
    formats = {found.format for found in formats_of(Checkpoint.open(mlx)).values()}
    if kind == "plain":
        assert formats == {"f32"}
    else:
        routed = family in ("qwen3_5_moe", "qwen3_next", "glm4_moe", "deepseek_v3")
        assert formats == {"f32", "mlx-affine 4 bits g32"} | ({"mlx-affine 8 bits g32"} if routed else set())
    assert_same_logits(mlx, twin)


LENT = ["qwen3_5", "qwen3_next", "deepseek_v3", "glm4_moe"]


@pytest.mark.parametrize("family", cases(LENT, sample=["qwen3_5", "deepseek_v3"], mark="slow"))
def test_the_original_checkpoint_lends_its_head(tmp_path, family):
    """The original's convolutions show that its norms are raw; a file with the head alone shows nothing."""
    mlx, twin = made(tmp_path, family)
    source = tmp_path / "source"
    config = json.loads((mlx / "config.json").read_text(encoding="utf-8"))
    layers, plus_one = config["num_hidden_layers"], family in ("qwen3_5", "qwen3_next")
    prefix = "mtp." if plus_one else f"layers.{layers}."
    whole = load_file(twin / "model.safetensors")
    head = {name: t for name, t in load_file(source / "model.safetensors").items() if prefix in name}
    save_file(whole | head, twin / "model.safetensors")
    tiny.edit_config(twin, **{key: config[key] for key in config if key.startswith(("mtp_num", "num_nextn"))})
    file = tmp_path / "head.safetensors"
    save_file(head, file)

    def drafted(model, mtp=None):
        head = None if mtp is None else str(mtp)
        asked = TargetConfig(model=str(model), dtype="float32", weights="decoded", mtp=head)
        target = load_target(RunConfig(target=asked)).target
        state = target.new_state(64, tiny.needs_of(target))
        target.prefill(state, list(range(5, 30)))
        return target.draft_mtp(state, 7, 4)

    assert drafted(mlx, source) == drafted(twin)
    if not plus_one:
        assert drafted(mlx, file) == drafted(twin)
        return
    with pytest.raises(CheckpointError, match="nothing in the files shows"):
        drafted(mlx, file)
    file.rename(mlx / "mtp.safetensors")
    loaded = load_target(RunConfig(target=TargetConfig(model=str(mlx))))
    assert any("nothing in the files shows" in notice for notice in loaded.notices)
    assert loaded.target.info.mtp_layers == 0


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_a_head_without_such_norms_is_used(tmp_path, family):
    mlx, _ = made(tmp_path, family, keep_head=True)
    assert load_target(RunConfig(target=TargetConfig(model=str(mlx)))).target.info.mtp_layers == 1


def test_convolutions_in_both_layouts_are_refused(tmp_path):
    mlx, _ = made(tmp_path, "qwen3_5", sizes=mlx_layout.plain)
    tensors = load_file(mlx / "model.safetensors")
    name = "language_model.model.layers.1.linear_attn.conv1d.weight"
    tensors[name] = tensors[name].transpose(1, 2)
    write_checkpoint(mlx, json.loads((mlx / "config.json").read_text(encoding="utf-8")), tensors)
    with pytest.raises(CheckpointError, match=r"layers\.1\.linear_attn\.conv1d\.weight has the shape"):
        load_target(RunConfig(target=TargetConfig(model=str(mlx))))
