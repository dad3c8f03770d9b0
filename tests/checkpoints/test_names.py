"""Names: text-only and vision-language checkpoints look alike after this."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.checkpoints import canonical_name, canonical_names, text_config
from specdec.errors import CheckpointError

TAILS = ["layers.3.mlp.up_proj.weight", "layers.11.linear_attn.A_log", "norm.weight", "lm_head.weight", "mtp.fc.weight"]


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", ""])
def test_every_text_tower_has_one_form(prefix):
    names = canonical_names([prefix + tail for tail in TAILS])
    assert names == {tail: prefix + tail for tail in TAILS}


def test_other_towers_are_ignored_and_listed():
    towers = ["model.visual.blocks.0.norm.weight", "visual.merger.mlp.0.bias", "vision_tower.x", "model.audio_tower.y"]
    names = canonical_names([*towers, "model.norm.weight"])
    assert list(names) == ["norm.weight"]
    assert list(names.ignored) == towers
    assert not canonical_names(["model.layers.0.visual.weight"]).ignored


def test_two_names_for_one_weight_are_refused():
    with pytest.raises(CheckpointError) as caught:
        canonical_names(["model.norm.weight", "lm_head.weight", "model.language_model.norm.weight"])
    assert "'model.norm.weight'" in caught.value.message
    assert "'model.language_model.norm.weight'" in caught.value.message


@given(st.lists(st.sampled_from(["model", "language_model", "layers", "0", "weight"]), min_size=1).map(".".join))
def test_a_canonical_name_is_its_own(name):
    assert canonical_name(canonical_name(name)) == canonical_name(name)
    assert name.endswith(canonical_name(name))


def test_text_config_wins_over_the_root():
    config = {
        "model_type": "qwen3_5",
        "architectures": ["X"],
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "fp8"},
        "vision_config": {"hidden_size": 1},
        "text_config": {"model_type": "qwen3_5_text", "hidden_size": 8, "tie_word_embeddings": True},
    }
    assert text_config(config) == {
        "model_type": "qwen3_5_text",
        "architectures": ["X"],
        "hidden_size": 8,
        "tie_word_embeddings": True,
        "quantization_config": {"quant_method": "fp8"},
    }


def test_the_root_counts_where_text_config_says_nothing():
    assert text_config({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": None}}) == {
        "tie_word_embeddings": True
    }
    assert text_config({"hidden_size": 8}) == {"hidden_size": 8}
    with pytest.raises(CheckpointError, match="text_config"):
        text_config({"text_config": [1]})
