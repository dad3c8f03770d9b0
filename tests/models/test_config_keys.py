"""Keys of ``config.json`` that change what a model computes are read or refused, whatever the family."""

import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.checkpoints import text_config
from specdec.errors import CheckpointError
from specdec.models.loading import family_of
from specdec.models.read_keys import ReadKeys
from tests.models.test_public_configs import PUBLISHED, YARN

FOLDER = pathlib.Path("model")
CONFIGS = {name: text_config(config) for name, (config, *_) in PUBLISHED.items()}
NAMES = st.sampled_from(
    ["Qwen3.5-0.8B", "Qwen3-Next-80B-A3B", "DeepSeek-V3", "GLM-4.5-Air", "Llama-3.1-8B", "Qwen2.5-7B"]
)
CHANGING = {
    "final_logit_softcapping": (30.0, 0, "30"),
    "attn_logit_softcapping": (50.0,),
    "logit_scale": (0.0625, "x"),
    "embedding_multiplier": (12.0,),
    "residual_multiplier": (0.22,),
    "attention_multiplier": (0.0078125, 1.0),
    "use_sliding_window": (True, 1, "yes"),
    "no_rope_layers": ([1, 1, 0], "x"),
    "mlp_bias": (True,),
    "norm_type": ("layernorm", 3),
    "is_causal": (False,),
    "query_pre_attn_scalar": (256,),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "num_kv_shared_layers": (18, True),
    "hidden_size_per_layer_input": (256,),
    "mup_width_multiplier": (8.0,),
    "a_key_of_next_year": ("x", [0], {"a": 1}),
}
NEUTRAL = {
    "logit_scale": 1.0,
    "embedding_multiplier": 1,
    "mlp_bias": False,
    "is_causal": True,
    "norm_type": "RMSNorm",
    "no_rope_layers": [1, 1],
    "num_kv_shared_layers": 0,
    "mup_width_multiplier": 1.0,
    "a_key_of_next_year": [],
}


def parsed(name, changes):
    return family_of(CONFIGS[name] | dict(changes), FOLDER)[1]


@given(NAMES, st.sampled_from([(key, value) for key, values in CHANGING.items() for value in values]))
def test_a_key_that_changes_the_computation_is_refused_by_name(name, change):
    with pytest.raises(CheckpointError, match=change[0]):
        parsed(name, [change])


@given(NAMES, st.sets(st.sampled_from(sorted(CHANGING))), st.sets(st.sampled_from(sorted(NEUTRAL))))
def test_a_value_that_changes_nothing_is_taken(name, empty, neutral):
    changes = {key: NEUTRAL[key] for key in neutral} | {
        key: None for key in empty - neutral if key not in ("use_sliding_window", "mlp_bias")
    }
    assert parsed(name, changes) == parsed(name, {})


def test_defaults_that_transformers_writes_are_taken():
    transformers = pytest.importorskip("transformers")
    llama_like = "Llama Qwen2 Qwen3 Gemma3Text GptOss Granite Ministral3 Mistral Olmo2 Phi3 Qwen3Moe SmolLM3"
    for family in f"Qwen3_5 Qwen3_5Moe Qwen3Next Glm4Moe DeepseekV3 Gemma4Text Gemma4UnifiedText {llama_like}".split():
        config = getattr(transformers, f"{family}Config")(**({"head_dim": 128} if family == "Glm4Moe" else {}))
        for written in (config.to_dict(), json.loads(config.to_json_string(use_diff=False))):
            family_of(text_config(written), FOLDER)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_epsilon_is_a_small_positive_number(name):
    for wrong in (1.6e28, 1, 0, -1e-6, "x"):
        with pytest.raises(CheckpointError, match="'rms_norm_eps' takes a positive number"):
            parsed(name, {"rms_norm_eps": wrong})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_parameters": "x"}, "'rope_parameters' takes an object, got 'x'"),
        ({"rope_scaling": [1]}, "'rope_scaling' takes an object"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN}, "in 'rope_parameters'"),
        ({"rope_parameters": YARN, "rope_scaling": YARN | {"factor": 2.0}}, "'factor' is 4.0"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "'rope_theta' is 1000000.0 at the top and 10000.0"),
        ({"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 1.0}}, "0.5 at the top and 1.0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rotary keys of its own for 'full_attention'"),
        ({"rope_scaling": {"factor": 4.0}}, "lacks 'rope_type'"),
        ({"rope_scaling": YARN | {"type": "linear"}}, "'type' 'linear'"),
    ],
)
def test_rotary_keys_that_contradict_each_other_are_refused(changes, named):
    with pytest.raises(CheckpointError, match=named):
        parsed("Qwen2.5-7B", changes)


def test_rotary_keys_that_agree_are_taken_from_either_place():
    old = {key: value for key, value in YARN.items() if key != "rope_type"} | {"type": "yarn"}
    ways = [
        {"rope_scaling": old},
        {"rope_parameters": YARN, "rope_scaling": old},
        {"rope_parameters": YARN | {"rope_theta": 1e6, "partial_rotary_factor": None}, "rope_scaling": YARN},
        {"rope_parameters": YARN | {"rope_theta": 1e6}, "rope_theta": None, "rope_scaling": {}},
    ]
    assert len({str(parsed("Qwen2.5-7B", way)) for way in ways}) == 1


@given(st.sampled_from([lambda c: {**c}, dict, lambda c: c | {}, lambda c: {} | c, lambda c: dict(c.items())]))
def test_a_family_that_reads_a_key_is_responsible_for_it(copied):
    config = {"logit_scale": 0.5, "sliding_window": 7, "mlp_bias": True}
    read = ReadKeys(config)
    with pytest.raises(CheckpointError):
        read.refuse_the_rest("some", FOLDER / "config.json")
    assert copied(read) == config
    read.refuse_the_rest("some", FOLDER / "config.json")
