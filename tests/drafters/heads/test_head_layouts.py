"""Layouts of heads: each tool's is recognised and computes the same; what is unclear is refused by its name."""

import json
import math
import shutil
from functools import partial
from operator import attrgetter

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

import specdec
from specdec.backends.ops import Rope
from specdec.contract import PrepareEnv
from specdec.drafters.heads.files import HeadFiles
from specdec.drafters.heads.layout import read_layout
from specdec.drafters.heads.plugin import specdec_drafters
from specdec.errors import SpecdecError
from tests.drafters.heads.recorded_heads import LAYERS, RECORDED, Recorded
from tests.drafters.heads.test_recorded_heads import BOUND, run


def edited(name, folder, edit):
    """A copy of a recorded head with another config or other tensors."""
    shutil.copytree(RECORDED / name, folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = {key: tensor.clone() for key, tensor in load_file(folder / "model.safetensors").items()}
    edit(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def flat(config, tensors):
    """From speculators' layout to NVIDIA's: one level, layer ids nested and numbering layers."""
    layer = config.pop("transformer_layer_config")
    ids = config.pop("eagle_aux_hidden_state_layer_ids")
    for key in list(config):
        if key not in ("draft_vocab_size", "norm_before_fc", "norm_before_residual", "norm_output", "fc_norm"):
            del config[key]
    config |= layer | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    config["eagle_config"] = {
        "eagle_aux_hidden_state_layer_ids": [k - 1 for k in ids],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    }


def original(config, tensors):
    """To SafeAILab's layout: the architecture says Llama, the layers are the target's, the layer is ``midlayer``."""
    flat(config, tensors)
    config |= {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40}
    del config["eagle_config"]
    config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 4]
    for name in list(tensors):
        if name.startswith("layers.0."):
            tensors[f"midlayer.{name.removeprefix('layers.0.')}"] = tensors.pop(name)


def prefixed(config, tensors):
    for name in list(tensors):
        tensors[f"model.{name}"] = tensors.pop(name)


def old_norms(config, tensors):
    """To the older names of the norms of each state."""
    flat(config, tensors)
    del config["fc_norm"]
    for number, name in enumerate(("low", "mid", "high")):
        tensors[f"aux_norm_{name}.weight"] = tensors.pop(f"fc_norm.{number}.weight")


def zlab(config, tensors):
    """From speculators' DFlash to z-lab's: one level, nested ids that number layers."""
    layer = config.pop("transformer_layer_config")
    ids, block, mask = (config[key] for key in ("aux_hidden_state_layer_ids", "block_size", "mask_token_id"))
    config.clear()
    theta = layer.pop("rope_parameters")["rope_theta"]
    config |= layer | {"architectures": ["DFlashDraftModel"], "block_size": block, "rope_theta": theta}
    config["dflash_config"] = {"mask_token_id": mask, "target_layer_ids": [k - 1 for k in ids]}
    config["num_target_layers"] = 8


def encoder(config, tensors):
    """z-lab's layout with transformers' names."""
    zlab(config, tensors)
    tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
    tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")


def deepspec(config, tensors):
    """From speculators' DSpark to DeepSpec's: ids at the top."""
    kept = {key: config[key] for key in ("markov_rank", "markov_head_type", "sample_from_anchor")}
    zlab(config, tensors)
    nested = config.pop("dflash_config")
    config |= nested | kept | {"architectures": ["Qwen3DSparkModel"]}


def last_layer(config, tensors):
    """z-lab's layout; the last of three states is that of the target's last layer, after the final norm."""
    zlab(config, tensors)
    config["dflash_config"]["target_layer_ids"] = [0, 1, LAYERS - 1]


def scaled(config, tensors):
    flat(config, tensors)
    config["logit_scale"] = 4.0
    tensors["lm_head.weight"] = tensors["lm_head.weight"] / 4


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("dflash", zlab),
        ("dflash", last_layer),
        ("eagle3", scaled),
        ("dflash", encoder),
        ("dspark", deepspec),
        ("eagle3", flat),
        ("eagle3-reduced", flat),
        ("eagle3-before-fc", flat),
        ("eagle3", original),
        ("eagle3-reduced", prefixed),
        ("eagle3-fc-norm", old_norms),
    ],
)
def test_other_layouts_of_a_head_draft_the_same(name, edit, tmp_path, monkeypatch):
    folder = edited(name, tmp_path / "head", edit)
    assert run(Recorded.load(name, folder=folder), monkeypatch) < BOUND


def change(*path, of=None, without="", **keys):
    """Other keys in the table at ``path``, and one less, after the edit ``of``."""

    def edit(config, tensors):
        if of is not None:
            of(config, tensors)
        table = config
        for name in path:
            table = table[name]
        table.pop(without, None)
        table |= keys

    return edit


layer = partial(change, "transformer_layer_config")
nvidia = partial(change, "eagle_config", of=flat)
within = partial(change, "dflash_config", of=zlab)


def tensor(name, value):
    def edit(config, tensors):
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value

    return edit


def both(*edits):
    def edit(config, tensors):
        for one in edits:
            one(config, tensors)

    return edit


def reshaped(name, *shape):
    def edit(config, tensors):
        tensors[name] = tensors[name].reshape(shape or (-1,))[: None if shape else 20].contiguous()

    return edit


OFFSETS = torch.zeros(24, dtype=torch.int64)
REFUSED = {
    "unused tensor": ("eagle3", tensor("layers.0.extra.weight", torch.zeros(2)), "tensor layers.0.extra.weight .* not"),
    "unknown key": ("eagle3", change(shift_states=True), "unknown key shift_states; it may change"),
    "missing norm": ("eagle3", tensor("layers.0.hidden_norm.weight", None), "hidden_norm.weight .* missing"),
    "norm without its key": ("eagle3-before-fc", change(norm_before_fc=False), "norm_before_fc.*input_norm.weight is"),
    "key without its norm": ("eagle3", change(norm_before_fc=True), "input_norm.weight is missing"),
    "bias without its key": ("eagle3-bias", layer(attention_bias=False), "attention_bias"),
    "map out of range": ("eagle3-reduced", tensor("d2t", OFFSETS + 100), "d2t maps the draft token 0 to 100, outside"),
    "map of two to one": ("eagle3-reduced", tensor("d2t", OFFSETS - torch.arange(24) + 1), "two draft tokens to one"),
    "map that the flags contradict": ("eagle3-reduced", tensor("d2t", OFFSETS), "d2t and t2d name different tokens"),
    "two names of a layer": ("eagle3", tensor("midlayer.input_layernorm.weight", torch.zeros(16)), "same weight"),
    "a tower": ("eagle3", tensor("visual.proj.weight", torch.zeros(2)), "visual.proj.weight .* not used"),
    "a mask outside the vocabulary": ("dflash", change(mask_token_id=40), r"mask token 40 is outside .* \(0 to 39\)"),
    "more states than ids": (
        "eagle3",
        change(eagle_aux_hidden_state_layer_ids=[1, 2]),
        "hidden size is 24, this target's is 16",
    ),
    "no table of the layers": ("eagle3", change(transformer_layer_config=None), "lacks 'transformer_layer_config'"),
    "no map": ("eagle3-reduced", tensor("d2t", None), "d2t is missing"),
    "large vocabulary": ("eagle3-reduced", tensor("lm_head.weight", torch.zeros(64, 16)), "rows of lm_head.weight"),
    "larger than the target's": (
        "eagle3-reduced",
        both(tensor("lm_head.weight", torch.zeros(64, 16)), change(draft_vocab_size=64)),
        "64 tokens, more than the target's 40",
    ),
    "another intermediate size": ("eagle3", layer(intermediate_size=99), "intermediate_size' is 99, the tensors say"),
    "wrong layer type": ("eagle3-window", layer(layer_types=["chunked_attention"]), "layer_types"),
    "rope of another kind": ("eagle3", layer(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4}), "dynamic"),
    "activation": ("eagle3", layer(hidden_act="gelu"), "hidden_act"),
    "two layers outside speculators": ("eagle3-two-layers", flat, "2 layers, and outside speculators"),
    "a switch that is not computed": ("eagle3", nvidia(use_last_layernorm=False), "use_last_layernorm"),
    "parallel steps": ("eagle3", nvidia(parallel_draft_step=4), "parallel_draft_step"),
    "two lists of layers": ("eagle3", nvidia(layer_ids=[1, 2, 3]), "name different layers"),
    "layers in another order": ("eagle3", change(eagle_aux_hidden_state_layer_ids=[4, 1, 2]), "is not ascending"),
    "a block of transformers' without layer types": (
        "dflash",
        both(encoder, change(model_type="muse_glimmer_assistant", layer_types=None)),
        "transformers takes every layer as sliding",
    ),
    "sliding switched off": ("eagle3-window", layer(use_sliding_window=False), "'use_sliding_window' is false"),
    "fc of one axis": ("eagle3", reshaped("fc.weight"), r"fc.weight has the shape \[20\], and takes 2 axes"),
    "a mask of another width": ("p_eagle", reshaped("mask_hidden"), "mask_hidden"),
    "a block of the anchor alone": (
        "dflash",
        change(block_size=1),
        "'block_size' takes a whole number from 2 to .*, got 1",
    ),
    "two sizes of a block": ("dflash", within(block_size=4), "'block_size' is given twice, as 8 and 4"),
    "an architecture that is no name": ("eagle3", change(architectures=[{}], shift_states=1), "shift_states"),
    "a type that is no name": ("eagle3", change(speculators_model_type={}), "speculators_model_type' = {} is not"),
    "a reduced vocabulary that is tied": (
        "eagle3-reduced",
        both(tensor("lm_head.weight", None), change(tie_word_embeddings=True)),
        "lm_head.weight is missing",
    ),
    "a depth that is no number": (
        "eagle3",
        change(speculators_config={"proposal_methods": [{"speculative_tokens": "8"}]}),
        "speculative_tokens' takes a whole number from 1 to .*, got '8'",
    ),
    "output bias": ("eagle3", tensor("layers.0.self_attn.o_proj.bias", torch.ones(16)), "attention_bias' is False"),
    "no mask": ("p_eagle", tensor("mask_hidden", None), "mask_hidden is missing"),
    "no mask token": ("p_eagle", change(mask_token_id=None), "lacks a token for masked rows"),
    "config of another kind": ("p_eagle", change(speculators_model_type="dflash"), "mask_hidden belongs .* 'p_eagle'"),
    "unknown speculators type": ("eagle3", change(speculators_model_type="eagle9"), "eagle9"),
    "DFlash2": ("eagle3", tensor("layers.0.attention_conv.base_kernel", torch.zeros(2)), "is not used by"),
    "LiLiCorr": ("eagle3", change(architectures=["lilicorr"]), "LiLiCorr heads are not"),
    "MLA": ("eagle3", change(architectures=["Eagle3DeepseekV2ForCausalLM"]), "Latent-attention"),
    "Medusa": ("eagle3", change(medusa_num_heads=4), "Medusa"),
    "Hydra": ("eagle3", change(hydra_num_heads=4), "Hydra"),
    "an MLP speculator": ("eagle3", change(architectures=["MLPSpeculatorPreTrainedModel"]), "MLP speculator"),
    "speculators' MTP": (
        "eagle3",
        both(
            tensor("layers.0.hidden_norm.weight", None),
            tensor("mtp_layers.0.x", OFFSETS),
            change(speculators_model_type="mtp"),
        ),
        "target.mtp",
    ),
    "a block without a base": ("dflash", both(zlab, change(rope_theta=None)), "lacks 'rope_theta'"),
    "a block without layers": ("dflash", change(aux_hidden_state_layer_ids=None), "aux_hidden_state_layer_ids"),
    "a scale of values": ("dflash", both(zlab, change(attention_value_scale=2.0)), "attention_value_scale"),
    "a sink": ("dflash", tensor("layers.0.self_attn.attention_sink_bias", torch.zeros(4)), "attention_sink_bias"),
    "a block lacks its key norm": ("dflash", tensor("layers.1.self_attn.k_norm.weight", None), "k_norm.weight .* miss"),
    "another target's layers": ("dflash", both(zlab, change(num_target_layers=9)), "number of layers is 9, .* is 8"),
    "another rank": ("dspark", change(markov_rank=5), "markov_rank' is 5"),
    "another kind of Markov head": ("dspark-gated", change(markov_head_type="rnn"), "markov_head_type"),
    "confidence without its key": ("dspark", change(enable_confidence_head=False), "enable_confidence_head"),
    "confidence of another width": ("dspark", change(confidence_head_with_markov=False), "confidence_head_with_markov"),
    "no head": (
        "eagle3",
        lambda config, tensors: (tensors.clear(), config.pop("speculators_model_type"), tensors.update(x=OFFSETS)),
        "no draft head of a known kind",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_computed_is_refused_by_name(case, tmp_path):
    name, edit, said = REFUSED[case]
    folder = edited(name, tmp_path / "head", edit)
    with pytest.raises(SpecdecError, match=said) as refused:
        Recorded.load(name, folder=folder)
    assert "\n" not in refused.value.message


def test_a_trained_mask_row_beside_the_weights_is_refused(tmp_path):
    folder = edited("dflash", tmp_path / "head", change())
    torch.save(torch.zeros(16), folder / "mask_embedding.pt")
    with pytest.raises(SpecdecError, match=r"mask_embedding.pt beside the weights.* not supported"):
        specdec.inspect_checkpoint(folder)


def test_a_pickle_is_never_opened_and_the_conversion_is_named(tmp_path):
    shutil.copy(RECORDED / "eagle3" / "config.json", tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(SpecdecError, match="pickles are not read") as refused:
        specdec.inspect_checkpoint(tmp_path)
    assert "weights_only=True" in refused.value.facts["try"]
    (tmp_path / "head.gguf").write_bytes(b"GGUF")
    with pytest.raises(SpecdecError, match=r"Not a directory\n.*try: +a folder of safetensors"):
        HeadFiles.open(str(tmp_path / "head.gguf"))


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ({"vocab_size": 50}, "vocabulary is 40, this target's is 50"),
        ({"hidden_size": 32}, "hidden size is 16, this target's is 32"),
    ],
)
def test_a_head_of_another_target_is_refused_with_both_figures(size, said):
    recorded = Recorded.load("eagle3")
    recorded.target.info = attrs.evolve(recorded.target.info, **size)
    spec = next(spec for spec in specdec_drafters() if spec.name == "head")
    assert spec.prepare is not None
    with pytest.raises(SpecdecError, match=said):
        spec.prepare(spec.config(model=str(RECORDED / "eagle3")), PrepareEnv(target=recorded.target))


def test_a_revision_of_an_untrained_head_is_refused():
    with pytest.raises(SpecdecError, match="revision 'x' is not used"):
        specdec.load(drafter={"name": "eagle3", "model": "random", "revision": "x"})


def test_boundaries_that_the_target_has_not_are_refused(tmp_path):
    folder = edited("eagle3", tmp_path / "head", change(eagle_aux_hidden_state_layer_ids=[1, 2, 30]))
    with pytest.raises(SpecdecError, match=r"boundaries \[1, 2, 30\], and this target has the boundaries 0 to 8"):
        Recorded.load("eagle3", folder=folder)


def test_the_kind_and_the_name_of_the_drafter_must_agree():
    recorded = Recorded.load("eagle3")
    spec = next(spec for spec in specdec_drafters() if spec.name == "p_eagle")
    assert spec.prepare is not None
    with pytest.raises(SpecdecError, match=r"drafter.name is 'p_eagle', and .* of the kind .eagle3."):
        spec.prepare(spec.config(model=str(RECORDED / "eagle3")), PrepareEnv(target=recorded.target))


def states(found):
    return found.states.of(12)


def rotated(found):
    return len(found.geometry.attention.rope.inv_freq)


def without_ids(config, tensors):
    del config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]


def mask_of_nvidia(config, tensors):
    del config["mask_token_id"]
    flat(config, tensors)
    config["ptd_token_id"] = 7


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
residual, norm_output = attrgetter("norm_before_residual"), attrgetter("norm_output")
bidirectional, own_head = attrgetter("bidirectional"), attrgetter("own_head")
unsaid = partial(change, without="norm_before_residual")
tied = change(tie_word_embeddings=True)
SWITCHES = {
    "speculators' residual": ("eagle3-residual", unsaid(), residual, False),
    "a residual of NVIDIA's": ("eagle3-residual", flat, residual, True),
    "a nested residual": ("eagle3-residual", unsaid(of=nvidia(norm_before_residual=True)), residual, True),
    "SpecForge's residual": ("eagle3-residual", unsaid(of=flat), residual, False),
    "speculators' fed-back norm": ("eagle3-output", change(), norm_output, True),
    "SpecForge feeds back the state": ("eagle3-output", flat, norm_output, False),
    "ids by default": ("eagle3", change(without="eagle_aux_hidden_state_layer_ids"), states, ((2, 6, 9), False)),
    "NVIDIA's ids by default": ("eagle3", both(flat, without_ids), states, ((2, 6, 9), False)),
    "ids at the top are boundaries": ("eagle3", original, states, ((1, 2, 4), False)),
    "plain ids in eagle_config are boundaries": (
        "eagle3",
        both(flat, change(eagle_config={"layer_ids": [1, 2, 4]})),
        states,
        ((1, 2, 4), False),
    ),
    "P-EAGLE under NVIDIA's name": ("p_eagle", mask_of_nvidia, attrgetter("kind", "mask_token"), ("p_eagle", 7)),
    "a causal block": ("dflash", both(zlab, change(causal=True)), bidirectional, (False, False)),
    "a causal block, SGLang's key": ("dflash", within(is_causal=True), bidirectional, (False, False)),
    "a block that sees both ways": ("dflash", change(causal=False), bidirectional, (True, True)),
    "speculators' sliding layers": ("dflash-window", change(), bidirectional, (False, True)),
    "speculators' sliding layers by default": (
        "dflash-window-both",
        change(without="sliding_window_non_causal"),
        bidirectional,
        (False, True),
    ),
    "z-lab's sliding layers": ("dflash-window", zlab, bidirectional, (True, True)),
    "z-lab's windows": ("dflash-window", zlab, attrgetter("window_from_anchor"), False),
    "z-lab's ids reach the embedding": ("dflash", within(target_layer_ids=[-1, 0, 3]), states, ((0, 1, 4), False)),
    "z-lab's YaRN": (
        "dflash",
        both(zlab, change(without="rope_theta", rope_parameters=YARN)),
        lambda f: (f.geometry.attention.rope, f.geometry.attention.scale),
        (Rope.yarn(1e4, 8, factor=4.0, original=8), pytest.approx(8**-0.5 * (1 + 0.1 * math.log(4)) ** 2)),
    ),
    "a block's eps": ("dflash", both(zlab, change(rms_norm_eps=1e-2)), attrgetter("geometry.eps"), 1e-2),
    "DFlash drafts masked rows": ("dflash", change(without="sample_from_anchor"), attrgetter("from_anchor"), False),
    "DSpark drafts from the anchor": (
        "dspark-mask-rows",
        change(without="sample_from_anchor"),
        attrgetter("from_anchor"),
        True,
    ),
    "DFlash without its ids' count": (
        "dflash",
        both(zlab, change(output_multiplier=2.0)),
        lambda f: dict(f.rules)["not used"],
        "output_multiplier, which act in DFlash2 only",
    ),
    "speculators' default rotation is of the whole head": (
        "eagle3",
        layer(partial_rotary_factor=0.5, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        rotated,
        4,
    ),
    "a partial rotation of NVIDIA's": ("eagle3", both(flat, change(partial_rotary_factor=0.5)), rotated, 2),
    "a tied head": ("eagle3", both(tensor("lm_head.weight", None), tied), own_head, True),
    "the target's head": ("eagle3", tensor("lm_head.weight", None), own_head, False),
    "the target's, whatever is tied": ("dflash", tied, attrgetter("own_embedding", "own_head"), (False, False)),
}


@pytest.mark.parametrize("case", SWITCHES)
def test_a_key_decides_its_switch_by_the_rule_of_its_layout(case, tmp_path):
    """That the switch then matters is shown by ``test_recorded_heads.py``."""
    name, edit, shows, wanted = SWITCHES[case]
    assert shows(read_layout(HeadFiles.open(str(edited(name, tmp_path / "head", edit))))) == wanted


def test_info_shows_the_rules_that_were_taken(tmp_path):
    rules = specdec.inspect_checkpoint(edited("eagle3", tmp_path / "head", flat)).to_dict()["rules"]
    assert "layers, whose output they name" in rules["hidden states"]
    assert rules["norm before fc"] == "none"
    assert "before hidden_norm" in rules["residual"]
