"""What is refused, with the tensor and the reason: by the audit, by the weights, and on the command line."""

import pytest
import torch

from specdec.checkpoints import Checkpoint, StoredWeights, TensorSpec, check_weights, write_checkpoint
from specdec.errors import CheckpointError
from tests.checkpoints.quantised import quantisers as q
from tests.checkpoints.quantised.mlx_layout import affine
from tests.checkpoints.quantised.quantisers import NAME, X
from tests.checkpoints.quantised.test_quantised_decoders import drawn


def parts_of(label):
    """A matrix ``[200, 320]`` by the quantiser of that name, or in MLX's layout."""
    quantise = (lambda w: affine(w, 4, 64)) if label == "mlx" else q.QUANTISERS[label]
    return quantise(drawn(0, 200, 320))[0]


def audited(folder, parts, shape=(200, 320), **quantization):
    """The audit of one weight, which ``Weights`` must refuse for the same reason where it is refused."""
    key = "quantization" if "scales" in parts or "biases" in parts else "quantization_config"
    checkpoint = q.opened(folder, parts, **({key: quantization} if quantization else {}))
    found = check_weights(checkpoint, {NAME: TensorSpec(shape)})
    if found.unreadable:
        with pytest.raises(CheckpointError) as caught:
            StoredWeights(checkpoint)[NAME]
        assert caught.value.message == found.errors[0].message
    return found


def put(name, value):
    def change(parts):
        if value is None:
            del parts[name]
        else:
            parts[name] = value

    return change


def poke(name, value):
    """One value of a tensor, the last one."""

    def change(parts):
        copy = parts[name].clone()
        if copy.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
            copy.view(torch.uint8).view(-1)[-1] = int(value)
        else:
            copy.view(-1)[-1] = value
        parts[name] = copy

    return change


NAN = float("nan")
ONES = torch.ones(200, 320)
MLX = {"group_size": 64, "bits": 4}
FP8 = {"quant_method": "fp8", "weight_block_size": [64, 64]}


def groups(**weights):
    return {"config_groups": {"g": {"weights": weights}}}


def as_it_is(parts):
    pass


# label of a quantiser, change of its tensors, what the sentence says, and the config
REFUSED = {
    "fp8 without scale": (
        "fp8-block 128x128",
        put("weight_scale_inv", None),
        "weight (F8_E4M3 [200, 320]) needs one of weight_scale_inv, weight_scale",
    ),
    "block size of the config": (
        "fp8-block 128x128",
        put("weight", ONES.to(torch.float8_e4m3fn)),
        "weight_scale_inv has the shape [2, 3]; takes [4, 5]; 64x64 (config.json)",
        FP8,
    ),
    "NaN block scale": ("fp8-block 128x128", poke("weight_scale_inv", NAN), "weight_scale_inv holds NaN or infinity"),
    "negative scale": ("fp8 per channel", poke("weight_scale", -1.0), "weight_scale holds a negative value"),
    "two scales": ("fp8 per tensor", put("weight_scale_inv", torch.ones(2, 3)), "has two scales"),
    "E8M0 255": ("mxfp4", poke("scale", 255), "scale holds the E8M0 code 255, which is NaN"),
    "nvfp4 without the whole's scale": ("nvfp4", put("weight_scale_2", None), "needs weight_scale_2 with it"),
    "both whole scales": ("nvfp4", put("weight_global_scale", torch.ones(1)), "which mean reciprocal things"),
    "division by zero": (
        "nvfp4 packed",
        put("weight_global_scale", torch.zeros(1)),
        "weight_global_scale is 0; weight_packed is divided by it",
    ),
    "no shape": ("int4 g32", put("weight_shape", None), "weight_packed; needs weight_shape with it"),
    "bits of the config": ("int4 g32", as_it_is, "40 words for 320 columns: 4 bits a value; 8", groups(num_bits=8)),
    "group of the config": (
        "int4 g32",
        as_it_is,
        "weight_scale has the shape [200, 10]; takes [200, 5] for groups of 64",
        groups(num_bits=4, group_size=64),
    ),
    "zero points of another shape": (
        "int4 g16 zero points",
        put("weight_zero_point", torch.ones(7, 20).int()),
        "weight_zero_point has the shape [7, 20]; int32 [25, 20]",
    ),
    "zero points that are no codes": (
        "int4 g32",
        put("weight_zero_point", torch.full((200, 10), 16)),
        "weight_zero_point holds values outside -8 to 15",
    ),
    "groups that are not there": (
        "int4 g32",
        put("weight_g_idx", torch.full((320,), 10, dtype=torch.int32)),
        "weight_g_idx names groups outside 0 to 9",
    ),
    "a sibling without a meaning": (
        "fp8 per tensor",
        put("weight_zero_point", torch.ones(1)),
        "weight_zero_point is stored with; no known meaning",
    ),
    "MLX without config": ("mlx", as_it_is, "is in MLX's layout; no 'quantization'"),
    "MLX with other bits": ("mlx", as_it_is, "scales has the shape [200, 5]; for 8 bits", {**MLX, "bits": 8}),
    "MLX with bits that do not exist": ("mlx", as_it_is, "says 7 bits and groups of 64; not read", {**MLX, "bits": 7}),
    "MLX in another mode": ("mlx", as_it_is, "MLX's mode 'nf4', which is not read", {**MLX, "mode": "nf4"}),
    "MLX, not quantised": (
        "mlx",
        as_it_is,
        "is quantised, and config.json says that layers.0.mlp.up_proj is not",
        {**MLX, X.removesuffix("."): False},
    ),
    "MLX without biases": ("mlx", put("biases", None), "needs biases with it", MLX),
    "MLX's biases of NaN": ("mlx", poke("biases", NAN), "biases holds NaN or infinity", MLX),
    "stored twice": ("nvfp4", put("weight_packed", torch.ones(200, 160, dtype=torch.uint8)), "the same weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_contradiction_is_refused_with_tensor_and_reason(tmp_path, case):
    label, change, facts, *told = REFUSED[case]
    parts = parts_of(label)
    assert audited(tmp_path / "sound", parts, **(MLX if label == "mlx" else {})).errors == []
    change(parts)
    found = audited(tmp_path / "broken", parts, **dict(*told))
    assert [name for name, _, _ in found.unreadable] == [NAME]
    with pytest.raises(CheckpointError) as caught:
        found.raise_for_errors()
    text = str(caught.value)
    for fact in ["model.layers.0.mlp.up_proj.", "model.safetensors", *facts.split("; ")]:
        assert fact in text
    assert "try:" in text


def test_a_large_bias_that_overflows_is_found(tmp_path):
    parts = parts_of("mlx") | {"biases": torch.full((200, 5), 3.4e38)}
    assert audited(tmp_path, parts, **MLX).non_finite == [NAME]


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("label", ["fp8-block 128x128", "fp8 per channel", "mxfp8"])
def test_a_nan_code_anywhere_is_found(tmp_path, label, code):
    for i, at in enumerate((0, 12_345, -1)):
        parts = parts_of(label)
        parts["weight"] = parts["weight"].clone()
        parts["weight"].view(torch.uint8).view(-1)[at] = code
        found = audited(tmp_path / str(i), parts)
        assert found.non_finite == [NAME]
        with pytest.raises(CheckpointError, match=r"up_proj\.weight holds NaN or infinity"):
            found.raise_for_errors()


FOREIGN = {  # tensors of the codes first, of scales and the like, and the config
    "gptq": ("qweight qzeros g_idx", "scales", {"quant_method": "gptq", "bits": 4}),
    "awq": ("qweight qzeros", "scales", {"quant_method": "awq"}),
    "gptq or awq": ("qweight", "scales", {}),
    "bitsandbytes": (
        "weight weight.quant_state.bitsandbytes__nf4",
        "weight.absmax weight.quant_map",
        {"quant_method": "bitsandbytes"},
    ),
    "hqq": ("W_q", "scale", {}),
}


@pytest.mark.parametrize("method", FOREIGN)
def test_other_methods_are_refused_by_name(tmp_path, method):
    codes, scales, config = FOREIGN[method]
    kind = torch.int32 if codes.startswith("q") else torch.uint8
    parts = {name: torch.ones(40, 200, dtype=kind) for name in codes.split()}
    found = audited(tmp_path, parts | {name: torch.ones(10, 200) for name in scales.split()}, **config)
    assert found.unreadable == [(NAME, method, found.errors[0].message)]
    assert found.missing == []
    assert found.unused == []
    text = str(found.errors[0])
    assert f"the tensor {X}{codes.split()[0]} is quantised with {method}, which is not read" in text


def test_a_scale_beside_a_plain_weight_is_not_applied_and_is_said(tmp_path):
    """Tools leave scales beside weights that they did not quantise; the dtype decides."""
    weight = torch.ones(200, 320, dtype=torch.bfloat16)
    found = audited(tmp_path, {"weight": weight, "weight_scale": torch.tensor(2.0)})
    assert found.errors == []
    assert found.unused == ["layers.0.mlp.up_proj.weight_scale"]
    assert "up_proj.weight_scale" in found.notices[0]


def test_the_first_refusal_counts_the_others(tmp_path):
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": torch.ones(4, 4).to(torch.float8_e4m3fn) for i in range(3)}
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, {}, tensors))
    found = check_weights(checkpoint, {f"layers.{i}.mlp.up_proj.weight": TensorSpec((4, 4)) for i in range(3)})
    assert "2 more weights are refused" in str(found.errors[0])
