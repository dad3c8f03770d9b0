"""MTP heads outside the listed weights: found, named and checked; one that is missing refuses only ``mtp``."""

import json
import random
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import specdec
import tests.tiny_families  # noqa: F401  # registers the writers of its families
from specdec.config import RunConfig, TargetConfig
from specdec.errors import CheckpointError, UnsupportedError
from tests import tiny
from tests.fuzz.mutations import mutate_safetensors
from tests.selection import cases
from tests.tiny_families import SHAPES

PROMPT = list(range(1, 24))
FAMILIES = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe", "deepseek_v3"]


def written(folder, family="qwen3_5", **shape):
    return tiny.WRITERS[family](folder, **shape)


def split(folder, family="qwen3_5"):
    """The tensors of a checkpoint without its head, and those of the head; only the former stay in the folder."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    prefix = f"layers.{layers}." if family in ("glm4_moe", "deepseek_v3") else "mtp."
    head = {name: tensor for name, tensor in tensors.items() if prefix in name}
    assert head
    rest = {name: tensor for name, tensor in tensors.items() if name not in head}
    save_file(rest, file, metadata={"format": "pt"})
    return rest, head


def loaded(folder, mtp=None, **options):
    target = {"model": str(folder), "dtype": "float32"} | ({} if mtp is None else {"mtp": str(mtp)})
    config = RunConfig(target=TargetConfig(**target))
    return specdec.load(config=config, depth=2, **options)


def drafts(lm):
    """Output, and how many drafts were accepted at each position."""
    result = lm.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
    assert result.stats.offered[0] > 0
    return result.tokens, list(result.stats.accepted)


@pytest.mark.parametrize("family", cases(FAMILIES, sample=["qwen3_5", "deepseek_v3"], mark="slow"))
def test_a_head_drafts_alike_wherever_it_lies(family, tmp_path):
    """Listed, beside the weights, in a file of its own, in a folder of its own, or in the original checkpoint."""
    shape = next((s for s in SHAPES.get(family, {}).values() if s.get("mtp", True)), {})
    whole, stripped = written(tmp_path / "whole", family, **shape), written(tmp_path / "stripped", family, **shape)
    wanted = drafts(loaded(whole, drafter="mtp"))
    _, head = split(stripped, family)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    save_file(head, elsewhere / "any-name.safetensors")
    for path in (elsewhere, elsewhere / "any-name.safetensors", whole):
        lm = loaded(stripped, path, drafter="mtp")
        assert drafts(lm) == wanted
        assert any(str(path) in notice for notice in lm.notices)
        assert str(path) in lm.info.mtp_reason
        assert str(path) in specdec.inspect_checkpoint(str(stripped), mtp=str(path)).mtp
    save_file(head, stripped / "mtp.safetensors")
    lm = loaded(stripped)
    assert lm.drafter.title == "ngram, mtp"
    assert drafts(lm) == wanted
    assert any("mtp.safetensors" in notice for notice in lm.notices)
    report = specdec.inspect_checkpoint(str(stripped))
    assert re.search(r"^1 layer, .*mtp\.safetensors$", report.mtp)
    assert report.missing == report.unused == report.problems == []


@pytest.mark.parametrize("family", cases(FAMILIES, sample=["qwen3_5", "deepseek_v3"], mark="slow"))
def test_a_stripped_head_refuses_only_the_drafter_that_needs_it(family, tmp_path):
    folder = written(tmp_path / "model", family)
    plain = loaded(folder, drafter="none").generate(PROMPT, max_new_tokens=16, ignore_eos=True).tokens
    split(folder, family)
    counted = family != "qwen3_next"  # whose config does not count its head, so it promises none
    for options in ({"drafter": "none"}, {"drafter": "ngram"}, {}):
        lm = loaded(folder, **options)
        result = lm.generate(PROMPT, max_new_tokens=16, ignore_eos=True)
        assert result.tokens == plain
        assert any("promises an MTP head" in notice for notice in result.notices) == counted
    assert loaded(folder).drafter.spec.name == "ngram"
    with pytest.raises(UnsupportedError, match="needs an MTP head") as caught:
        loaded(folder, drafter="mtp")
    assert ("promises an MTP head" in str(caught.value)) == counted
    assert "target.mtp" in str(caught.value)
    assert "ngram" in str(caught.value)
    report = specdec.inspect_checkpoint(str(folder))
    assert report.mtp.startswith("none")
    assert report.missing == []


NORM, FC = "mtp.norm.weight", "mtp.fc.weight"
UNUSABLE = {  # an ``mtp.safetensors`` that cannot be used: the reason, and what becomes of the head
    "another model": (
        "mtp.pre_fc_norm_embedding.weight has the shape [64], config.json implies [48]",
        lambda head, folder: load_file(written(folder.parent / "other", hidden=64) / "model.safetensors"),
    ),
    "another vocabulary": (
        "mtp.lm_head.weight has the shape [300, 48], config.json implies [277, 48]",
        lambda head, folder: split(written(folder.parent / "other", vocab=300, mtp_lm_head=True))[1],
    ),
    "half": ("mtp.fc.weight [48, 96] is missing", lambda head, _: {name: head[name] for name in head if name != FC}),
    "nan": ("mtp.norm.weight holds NaN", lambda head, _: head | {NORM: torch.full_like(head[NORM], torch.nan)}),
    "no head": ("none of its 1 tensors is named mtp.*", lambda head, _: {"fc.weight": head[FC]}),
    "codes": ("mtp.fc.weight (F8_E4M3 [48, 96]) needs", lambda head, _: head | {FC: head[FC].to(torch.float8_e4m3fn)}),
    "shape": (
        "has the shape [48, 95], config.json implies [48, 96]",
        lambda head, _: head | {FC: head[FC][:, :-1].contiguous()},
    ),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_an_unusable_head_says_why_and_costs_nothing_else(name, tmp_path):
    folder = written(tmp_path / "model")
    plain = loaded(folder, drafter="none").generate(PROMPT, max_new_tokens=8, ignore_eos=True).tokens
    reason, change = UNUSABLE[name]
    save_file(change(split(folder)[1], folder), folder / "mtp.safetensors")
    lm = loaded(folder)
    assert lm.generate(PROMPT, max_new_tokens=8, ignore_eos=True).tokens == plain
    assert any(reason in notice for notice in lm.notices), lm.notices
    assert reason in specdec.inspect_checkpoint(str(folder)).mtp
    with pytest.raises(UnsupportedError) as refused:
        loaded(folder, drafter="mtp")
    assert reason in str(refused.value)
    (folder / "mtp.safetensors").rename(tmp_path / "head.safetensors")
    with pytest.raises(CheckpointError) as caught:  # one that was asked for is not passed over
        loaded(folder, tmp_path / "head.safetensors", drafter="none")
    assert reason in str(caught.value)


def test_a_named_head_takes_the_place_of_the_own_one(tmp_path):
    folder, other = written(tmp_path / "model"), written(tmp_path / "other", seed=1)
    twin = written(tmp_path / "twin")
    rest, _ = split(twin)
    _, head = split(written(tmp_path / "again", seed=1))
    save_file(rest | head, twin / "model.safetensors")
    lm = loaded(folder, other, drafter="mtp")
    assert drafts(lm) == drafts(loaded(twin, drafter="mtp"))
    assert any("checkpoint's own MTP head are not used" in notice for notice in lm.notices)
    assert lm.info.fingerprint != loaded(folder).info.fingerprint
    save_file(head, folder / "mtp.safetensors")
    lm = loaded(folder)
    assert any("the weights hold an MTP head already" in notice for notice in lm.notices)
    assert lm.info.mtp_reason == ""


def test_a_path_that_is_nothing_and_a_family_without_heads(tmp_path):
    folder = written(tmp_path / "model")
    with pytest.raises(CheckpointError, match="target.mtp names no file or folder"):
        loaded(folder, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="model.safetensors"):
        loaded(folder, tmp_path / "empty")
    with pytest.raises(CheckpointError, match="the family 'qwen3' has no MTP head\n.*try: +no target.mtp"):
        loaded(written(tmp_path / "qwen3", "qwen3"), folder)


@pytest.mark.parametrize(
    ("section", "refused"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, True),
        ({"quant_method": "awq", "bits": 4}, True),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, True),
        ({"quant_method": "unheard-of"}, True),
        ({"group_size": 64, "bits": 4}, True),
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}, False),
        ({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}, False),
    ],
)
def test_a_config_that_says_packed_over_plain_tensors(section, refused, tmp_path):
    folder = written(tmp_path / "model", dtype="bfloat16")
    tiny.edit_config(folder, quantization_config=section)
    if not refused:
        assert loaded(folder).info.mtp_layers == 1
        return
    with pytest.raises(CheckpointError, match="config.json says that the weights are quantised") as caught:
        loaded(folder)
    for fact in ("quantization_config", "bf16", "plain"):
        assert fact in str(caught.value)
    assert any("quantised" in problem for problem in specdec.inspect_checkpoint(str(folder)).problems)


@pytest.mark.parametrize(
    "seeds", cases([range(25), range(25, 300)], sample=1, mark="slow", name=lambda seeds: f"{seeds.start}-{seeds.stop}")
)
def test_a_mutated_head_is_used_or_says_why_and_never_changes_the_output(seeds, tmp_path):
    folder = written(tmp_path / "model")
    plain = loaded(folder, drafter="none").generate(PROMPT, max_new_tokens=8, ignore_eos=True).tokens
    _, head = split(folder)
    file = folder / "mtp.safetensors"
    save_file(head, file)
    data = file.read_bytes()
    for seed in seeds:
        mutant = mutate_safetensors(random.Random(seed), data)
        file.write_bytes(mutant.data)
        lm = loaded(folder)
        result = lm.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
        assert result.tokens == plain, (seed, mutant.what)
        assert any("MTP" in notice for notice in result.notices), (seed, mutant.what)
        assert lm.drafter.title == ("ngram, mtp" if lm.info.mtp_layers else "ngram")
