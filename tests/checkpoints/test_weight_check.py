"""The weight check: each defect is found, named and explained; each oddity that does no harm is a notice."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tests.tiny_families  # noqa: F401  # registers the writers of its families
from specdec.checkpoints import Checkpoint, StoredWeights, TensorSpec, check_weights, write_checkpoint
from specdec.errors import CheckpointError

CONV = "layers.0.linear_attn.conv1d.weight"
EXPECTED = {
    "embed_tokens.weight": TensorSpec((8, 4)),
    CONV: TensorSpec((6, 1, 3)),
    "norm.weight": TensorSpec((4,), plus=1.0),
    "mtp.fc.weight": TensorSpec((4, 8), group="mtp"),
    "mtp.norm.weight": TensorSpec((4,), group="mtp", plus=1.0),
}
PREFIX = "model.language_model."


def stored(**changes):
    """A sound vision-language checkpoint; a change of None leaves the tensor out. ``__`` stands for a dot."""
    tensors = {
        PREFIX + "embed_tokens.weight": torch.ones(8, 4, dtype=torch.bfloat16),
        PREFIX + CONV: torch.ones(6, 1, 3),
        PREFIX + "norm.weight": torch.zeros(4, dtype=torch.bfloat16),
        "mtp.fc.weight": torch.ones(4, 8, dtype=torch.bfloat16),
        "mtp.norm.weight": torch.zeros(4),
        "model.visual.patch.weight": torch.full((2, 2), torch.nan),  # not ours, so not looked at
    }
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def audited(folder, tensors, config=None, shards=1):
    config = {"text_config": {"mtp_num_hidden_layers": 1}} if config is None else config
    return check_weights(Checkpoint.open(write_checkpoint(folder, config, tensors, shards=shards)), EXPECTED)


def refusal(found):
    with pytest.raises(CheckpointError) as caught:
        found.raise_for_errors()
    return str(caught.value)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_sound_checkpoint_passes_in_silence(tmp_path, shards):
    found = audited(tmp_path, stored(), shards=shards)
    found.raise_for_errors()
    assert (found.missing, found.unused, found.misshaped, found.all_zero, found.non_finite) == ([], [], [], [], [])
    assert found.notices == []


def test_a_missing_tensor_names_file_shape_and_the_nearest_one(tmp_path):
    tensors = stored(model__language_model__embed_tokens__weight=None)
    found = audited(tmp_path, tensors | {"model.language_model.embed_token.weight": torch.ones(8, 4)}, shards=2)
    assert found.missing == ["embed_tokens.weight"]
    text = refusal(found)
    for fact in [
        "embed_tokens.weight [8, 4]",
        "index.json",
        "embed_token.weight [8, 4], stored as model.language_model.embed_token.weight",
    ]:
        assert fact in text


def test_a_wrong_shape_names_both(tmp_path):
    found = audited(tmp_path, stored(model__language_model__embed_tokens__weight=torch.ones(8, 5)))
    assert found.misshaped == [("embed_tokens.weight", (8, 5), (8, 4))]
    text = refusal(found)
    for fact in ["model.language_model.embed_tokens.weight", "[8, 5]", "[8, 4]", "model.safetensors"]:
        assert fact in text


def test_convolutions_may_be_flat_but_not_in_mlx_order(tmp_path):
    flat = {PREFIX + CONV: torch.ones(6, 3)}
    assert audited(tmp_path / "flat", stored() | flat).misshaped == []
    text = refusal(audited(tmp_path / "mlx", stored() | {PREFIX + CONV: torch.ones(6, 3, 1)}))
    assert "MLX" in text
    # for anything else a missing axis is a wrong shape
    assert audited(tmp_path / "other", stored(mtp__fc__weight=torch.ones(4, 1, 8))).misshaped


@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    value=st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    size=st.integers(1, 300),
    data=st.data(),
)
def test_one_bad_value_anywhere_is_found(tmp_path_factory, dtype, value, size, data):
    """In vector bodies and tails, and whatever the rest holds (zeros, the largest finite value)."""
    rest = data.draw(st.sampled_from([0.0, 1.0, float(torch.finfo(dtype).max), float(torch.finfo(dtype).min)]))
    tensor = torch.full((size,), rest, dtype=dtype)
    folder = tmp_path_factory.mktemp("finite")
    spec = {"x": TensorSpec((size,))}
    assert check_weights(Checkpoint.open(write_checkpoint(folder, {}, {"x": tensor})), spec).non_finite == []
    tensor[data.draw(st.integers(0, size - 1))] = value
    assert check_weights(Checkpoint.open(write_checkpoint(folder, {}, {"x": tensor})), spec).non_finite == ["x"]


@pytest.mark.parametrize(
    ("name", "values", "notice"),
    [
        ("mtp.fc.weight", torch.zeros(4, 8), "1 tensor is all zero: mtp.fc.weight"),
        # stored as an offset from 1
        ("mtp.norm.weight", torch.full((4,), -1.0), "1 norm has a scale of 0, so that nothing passes: mtp.norm.weight"),
    ],
)
def test_a_matrix_or_a_norm_of_zeros_is_a_notice(tmp_path, name, values, notice):
    found = audited(tmp_path, stored(**{name.replace(".", "__"): values}))
    found.raise_for_errors()
    assert found.all_zero == [name]
    assert found.notices == [notice]


def test_unused_tensors_are_counted_and_an_unused_mtp_head_is_always_named(tmp_path):
    extra = {f"model.layers.{i}.self_attn.{p}_proj.lora": torch.ones(1) for i in range(40) for p in "qkvo"}
    extra |= {"mtp.layers.7.extra.weight": torch.ones(1), "odd": torch.ones(1), "even": torch.ones(1)}
    found = audited(tmp_path, stored() | extra)
    found.raise_for_errors()
    assert len(found.unused) == 163
    mtp, others = found.notices
    assert "mtp.layers.7.extra.weight" in mtp
    assert "162 tensors not used" in others
    assert "layers.*.self_attn.k_proj.lora (40)" in others
    assert "and 2 more" in others


def test_a_matrix_of_integers_under_another_name_is_refused(tmp_path):
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, {}, {"odd.A_log": torch.ones(4).int()}))
    text = refusal(check_weights(checkpoint, {"odd.A_log": TensorSpec((4,))}))
    assert "odd.A_log is stored as I32, which is neither a weight nor" in text
    with pytest.raises(CheckpointError, match="neither a weight nor a known quantised format"):
        StoredWeights(checkpoint)["odd.A_log"]
