"""Whole models: logits of a quantised checkpoint are those of the same one with its weights decoded, bit for bit."""

import json

import pytest
import torch
from safetensors.torch import load_file

import specdec
from specdec.checkpoints import Checkpoint, write_checkpoint
from specdec.checkpoints.quantised import formats_of
from specdec.config import RunConfig, TargetConfig
from specdec.errors import CheckpointError
from specdec.models.loading import _stored_dtype, load_target
from tests import tiny, tiny_families
from tests.checkpoints.quantised import quantisers as q
from tests.checkpoints.quantised.test_mlx_affine import FAMILIES, PROMPT, outputs_of

HYBRID = FAMILIES["qwen3_5"] | {"dtype": "bfloat16"}
EXPERTS = FAMILIES["qwen3_5_moe"] | {"dtype": "bfloat16"}
NORMS = ("norm.weight", "layernorm.weight", "A_log", "dt_bias", "norm_embedding.weight", "norm_hidden.weight", ".bias")


def matrix(name):
    return not name.endswith((*NORMS, "conv1d.weight"))


def split(folder, source, choose, dtype=torch.bfloat16, **config):
    """Folders of the quantised checkpoint and of the decoded one."""
    tensors = load_file(source / "model.safetensors")
    stored, decoded = q.quantised(tensors, choose, dtype)
    plain = json.loads((source / "config.json").read_text(encoding="utf-8"))
    generation = json.loads((source / "generation_config.json").read_text(encoding="utf-8"))
    told = {**plain, "quantization_config": config} if config else plain
    write_checkpoint(folder / "stored", told, stored, generation_config=generation, shards=2)
    write_checkpoint(folder / "decoded", plain, decoded, generation_config=generation)
    for made in ("stored", "decoded"):
        tiny.write_tokenizer(folder / made)
    return folder / "stored", folder / "decoded"


def outputs(folder, dtype, kernels):
    """Logits of a pass of several rows, and of the MTP head where there is one."""
    target = tiny.make_target(folder, kernels=kernels, dtype=dtype, weights="decoded")
    state = target.new_state(64, tiny.needs_of(target))
    out = target.decode(state, PROMPT)
    found = [torch.as_tensor(out.need_logits().rows()).clone()]
    if target.info.mtp_layers:
        target.commit(state, len(PROMPT))
        drafted = target.decode_mtp(state, PROMPT[1:], out.hidden[:-1])
        found.append(torch.as_tensor(drafted.need_logits().rows()).clone())
    return found


def assert_same_outputs(stored, decoded, dtype="bfloat16"):
    for kernels in tiny.kernels_available():
        for got, wanted in zip(outputs(stored, dtype, kernels), outputs(decoded, dtype, kernels), strict=True):
            assert torch.equal(got, wanted), kernels
            assert got.std() > 0.01


def mixed(name):
    """Experts NVFP4, attention FP8, the MTP block int8, the rest as it is."""
    if not matrix(name):
        return None
    if name.startswith("mtp."):
        return "int8 per channel" if "layers" in name and "shared_expert_gate" not in name else None
    if ".experts." in name:
        return "nvfp4"
    if "self_attn" in name or "linear_attn" in name:
        return None if "in_proj_a" in name or "in_proj_b" in name else "fp8-block 128x128"
    return None


@pytest.mark.parametrize("layout", ["apart", "fused"])
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_a_mixture_of_formats_and_a_lying_list_of_excluded_modules(tmp_path, family, layout):
    """The config says that all is FP8 but the attention: what the files hold counts, and it is the other way round."""
    write = {"qwen3_5_moe": tiny_families.write_qwen3_5_moe, "qwen3_next": tiny_families.write_qwen3_next}[family]
    source = write(tmp_path / "source", **EXPERTS, layouts=(layout,), mtp_layout="apart")
    stored, decoded = split(
        tmp_path,
        source,
        lambda n: None if layout == "fused" and n.endswith("_proj") else mixed(n),
        quant_method="fp8",
        weight_block_size=[128, 128],
        modules_to_not_convert=["self_attn", "linear_attn", "mlp.experts", "mtp"],
        ignore=["re:.*experts.*", "lm_head"],
    )
    found = {found.format for found in formats_of(Checkpoint.open(stored)).values()}
    assert found == {"bf16", "f32", "fp8-block 128x128", "int8 per channel"} | (
        {"nvfp4"} if layout == "apart" else set()
    )
    assert_same_outputs(stored, decoded)


def test_fused_experts_with_scales_of_their_own(tmp_path):
    """Stacks are parameters without ``.weight``; transformers calls their scales ``gate_up_proj_scale_inv``."""
    source = tiny_families.write_qwen3_5_moe(tmp_path / "source", **EXPERTS, layouts=("fused",), mtp_layout="fused")
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    stored = {}
    plain = {}
    for name, tensor in tensors.items():
        stored[name] = plain[name] = tensor
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parts, values = q.fp8_block(tensor.float().numpy(), (16, 24))
            stored[name], stored[f"{name}_scale_inv"] = parts["weight"], parts["weight_scale_inv"]
            plain[name] = torch.from_numpy(values).bfloat16()
    tiny.write_tokenizer(write_checkpoint(tmp_path / "decoded", config, plain))
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 24]}
    tiny.write_tokenizer(write_checkpoint(tmp_path / "stored", config, stored))
    formats = formats_of(Checkpoint.open(tmp_path / "stored"))
    assert formats["mtp.layers.0.mlp.experts.gate_up_proj"].format == "fp8-block 16x24"
    assert_same_outputs(tmp_path / "stored", tmp_path / "decoded")


def test_the_layouts_of_gpt_oss_are_one_model(tmp_path):
    """Experts as released (packed or decoded, also into a cache), decoded to BF16, and in stacks, as mlx-lm writes."""
    shape = {**tiny_families.SHAPES["gpt_oss"]["released"], "hidden": 64, "intermediate": 96, "dtype": "bfloat16"}
    source = tiny.WRITERS["gpt_oss"](tmp_path / "source", **shape)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    layouts: dict[str, q.Tensors] = {"released": {}, "plain": {}, "stacks": {}}
    for name, tensor in load_file(source / "model.safetensors").items():
        if ".experts." not in name:
            for tensors in layouts.values():
                tensors[name] = tensor
            continue
        split_up, bias = "gate_up" in name, name.endswith("_bias")
        rows = tensor if bias else tensor.transpose(1, 2)
        if not bias:
            parts, values = q.mxfp4(rows.float().numpy(), naming="compressed-tensors")
            layouts["released"][f"{name}_blocks"] = parts["weight_packed"].view(*rows.shape[:2], -1, 16)
            layouts["released"][f"{name}_scales"] = parts["weight_scale"]
            rows = torch.from_numpy(values).bfloat16()
            tensor = rows.transpose(1, 2).contiguous()
        layouts["plain"][name] = tensor
        if bias:
            layouts["released"][name] = tensor
        stem, kind = name.removesuffix("_bias").rpartition(".")[0], "bias" if bias else "weight"
        for part, some in {"gate": rows[:, ::2], "up": rows[:, 1::2]}.items() if split_up else [("down", rows)]:
            layouts["stacks"][f"{stem}.{part}_proj.{kind}"] = some.contiguous()
    for layout, tensors in layouts.items():
        told = config | ({"quantization_config": {"quant_method": "mxfp4"}} if layout == "released" else {})
        tiny.write_tokenizer(write_checkpoint(tmp_path / layout, told, tensors))
    released = tmp_path / "released"
    assert formats_of(Checkpoint.open(released))["layers.0.mlp.experts.down_proj"].format == "mxfp4"
    for layout in ("plain", "stacks"):
        assert_same_outputs(released, tmp_path / layout)
    ways = ({}, {"weights": "decoded"}, *[{"weights": "decoded", "decoded_cache": str(tmp_path / "cache")}] * 2)
    targets = [load_target(RunConfig(target=TargetConfig(model=str(released), **way))).target for way in ways]
    packed, *whole = (outputs_of(target) for target in targets)
    assert all(torch.equal(whole[0], one) for one in whole)
    assert float((packed - whole[0]).abs().max()) < 0.05 * float(whole[0].abs().max())
    assert ("mxfp4 (" in targets[0].info.weights) == ("native" in tiny.kernels_available())
    plain, drafted = (
        specdec.load(str(released), drafter=drafter).generate("one two one two ", max_new_tokens=32, ignore_eos=True)
        for drafter in ("none", "ngram")
    )
    assert plain.tokens == drafted.tokens
    square = tiny.WRITERS["gpt_oss"](tmp_path / "square", **shape | {"intermediate": 32})
    with pytest.raises(CheckpointError, match="either way round"):
        specdec.load(str(square))


def test_the_stored_dtype_of_a_quantised_checkpoint_is_bfloat16(tmp_path):
    """Packed bytes and words would outvote everything else, and no backend has a choice for uint8."""
    source = tiny.write_qwen3_5(tmp_path / "source", **HYBRID)
    for name in ("nvfp4", "int4 g32", "fp8 per tensor", "int8 per channel"):
        stored, _ = split(tmp_path / name.replace(" ", "_"), source, lambda n, name=name: name if matrix(n) else None)
        assert _stored_dtype(Checkpoint.open(stored)) == "bfloat16"
