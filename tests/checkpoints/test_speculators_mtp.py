"""MTP heads in speculators' layout: renamed, fed with the states they were trained on, and refused where unclear."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import specdec
import tests.tiny_families  # noqa: F401  # registers the writers of its families
from specdec.config import RunConfig, TargetConfig
from specdec.errors import SpecdecError
from tests import tiny
from tests.drafters.test_mtp_drafts import Run, check, prompt_of
from tests.models.mtp_oracle import MtpOracle
from tests.tiny_families import SHAPES

EXACT = {"mtp.fc.weight": "input_proj.weight", "mtp.norm.weight": "final_layernorm.weight"}
PREFIXES = {
    "mtp.pre_fc_norm_hidden.": "hidden_layernorm.",
    "mtp.pre_fc_norm_embedding.": "token_layernorm.",
    "mtp.layers.0.": "",
}


def written(folder, family="qwen3_5"):
    shape = next((s for s in SHAPES.get(family, {}).values() if s.get("mtp", True)), {})
    return tiny.WRITERS[family](folder, **shape)


def converted(model, folder, edit=None):
    """The model's head as speculators' converter saves it: renamed, and experts packed."""
    head = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if not name.startswith("mtp."):
            continue
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
        head[f"mtp_layers.0.{EXACT.get(name) or PREFIXES[prefix] + name.removeprefix(prefix)}"] = tensor
    at, stack = "mtp_layers.0.mlp.experts.", {}
    for kind in ("gate", "up", "down"):
        names = [name for name in head if name.startswith(at) and name.endswith(f"{kind}_proj.weight")]
        if names:
            stack[kind] = torch.stack([head.pop(f"{at}{e}.{kind}_proj.weight") for e in range(len(names))])
    if stack:
        head |= {f"{at}gate_up_proj": torch.cat([stack["gate"], stack["up"]], 1), f"{at}down_proj": stack["down"]}
    config = json.loads((model / "config.json").read_text())
    config = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": config.get("text_config", config),
    }
    if edit is not None:
        edit(config, head)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(head, folder / "model.safetensors")
    return folder


def loaded(model, **target):
    config = RunConfig(target=TargetConfig(model=str(model), dtype="float32", **target))
    return specdec.load(config=config, depth=2, drafter="mtp")


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_the_renamed_head_is_the_models_own(family, tmp_path):
    """Fed with the states that the model's own head reads, it has the same drafts and the same bits."""
    model = written(tmp_path / "model", family)
    head = converted(model, tmp_path / "head")
    results = []
    for lm in (loaded(model), loaded(model, mtp=str(head), mtp_states="normed")):
        result = lm.generate(list(range(1, 24)), max_new_tokens=24, ignore_eos=True)
        results.append((result.tokens, list(result.stats.offered), list(result.stats.accepted)))
    assert results[0] == results[1]


def drafted(lm, oracle):
    """Compare the drafts with the oracle's: after prefill in chunks, catch-up, rewind, save and load."""
    for length, depth in ((1, 2), (2, 1), (17, 4)):
        run = Run(lm.target)
        run.prefill(prompt_of(length), [1, 5])
        check(run, oracle, depth)
    run.verify([3, 1, 4], 2, 7)
    check(run, oracle, 3)
    run.rewind(12)
    run.save_and_load()
    check(run, oracle, 8)


def test_the_head_reads_the_states_that_it_was_trained_on(tmp_path):
    """Speculators trains on the states before the final norm; a head that is stitched into its model can say so."""
    model = written(tmp_path / "model")
    head = converted(model, tmp_path / "head")
    trained, served = MtpOracle(model, "hidden-pre-norm"), MtpOracle(model)
    lm = loaded(model, mtp=str(head))
    assert any("before the final norm" in notice for notice in lm.notices)
    drafted(lm, trained)
    drafted(loaded(model, mtp_states="residual"), trained)
    drafted(loaded(model, mtp=str(head), mtp_states="normed"), served)
    with pytest.raises(AssertionError):
        drafted(lm, served)


def key(**keys):
    return lambda config, head: config.update(keys)


def layer(**keys):
    return lambda config, head: config["transformer_layer_config"].update(keys)


def tensor(name):
    return lambda config, head: head.update({name: torch.zeros(2)})


REFUSED = {
    "a second layer": (tensor("mtp_layers.1.input_proj.weight"), r"mtp_layers.1.input_proj.weight \[2\] is not used"),
    "a draft vocabulary": (tensor("d2t"), r"the tensor d2t \[2\] is not used"),
    "an unknown tensor": (tensor("mtp_layers.0.post_norm.weight"), "post_norm"),
    "another kind": (key(speculators_model_type="eagle3"), "of the kind 'eagle3', not an MTP head"),
    "another eps": (layer(rms_norm_eps=1e-2), "its rms_norm_eps is 0.01, this model's is"),
    "another width": (layer(hidden_size=64), "its hidden_size is 64, this model's is 48"),
    "a missing norm": (lambda config, head: head.__delitem__("mtp_layers.0.token_layernorm.weight"), "pre_fc_norm"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_computed_is_refused_by_name(case, tmp_path):
    edit, said = REFUSED[case]
    model = written(tmp_path / "model")
    head = converted(model, tmp_path / "head", edit)
    with pytest.raises(SpecdecError, match=said):
        loaded(model, mtp=str(head))


def test_states_for_a_head_that_is_not_there_are_refused(tmp_path):
    model = tiny.WRITERS["qwen3_5"](tmp_path / "model", mtp=False)
    config = RunConfig(target=TargetConfig(model=str(model), mtp_states="residual"))
    with pytest.raises(SpecdecError, match="has no MTP head"):
        specdec.load(config=config, drafter="none")
