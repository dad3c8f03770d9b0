"""What is told about a checkpoint without decoding it: one entry per weight, its format, its shape, its bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.checkpoints import Checkpoint, TensorSpec, check_weights, write_checkpoint
from specdec.checkpoints.quantised import formats_of
from tests.checkpoints.quantised import quantisers as q
from tests.checkpoints.quantised.test_quantised_decoders import drawn

X = "model.language_model.layers.3.mlp.up_proj."


def opened(folder: Path, tensors: q.Tensors, **quantization: object) -> Checkpoint:
    config = {"quantization_config": quantization} if quantization else {}
    return Checkpoint.open(write_checkpoint(folder, config, tensors))


@pytest.mark.parametrize("name", q.QUANTISERS)
def test_a_weight_is_one_entry_whatever_it_is_made_of(tmp_path: Path, name: str) -> None:
    parts, values = q.QUANTISERS[name](drawn(0, 200, 320))
    tensors = {X + part: tensor for part, tensor in parts.items()}
    checkpoint = opened(tmp_path, {**tensors, "model.language_model.norm.weight": torch.ones(4)})
    formats = formats_of(checkpoint)
    assert set(formats) == {"layers.3.mlp.up_proj.weight", "norm.weight"}
    found = formats["layers.3.mlp.up_proj.weight"]
    assert found.format == q.label(name)[0]
    assert found.shape == values.shape
    own = [tensor for part, tensor in parts.items() if not part.startswith("input")]
    assert found.stored_bytes == sum(tensor.nbytes for tensor in own)
    assert found.tensors[0] in (f"{X}weight", f"{X}weight_packed")
    assert len(found.tensors) == len(own)
    assert (found.error, found.quantised) == (None, True)
    assert (formats["norm.weight"].format, formats["norm.weight"].quantised) == ("f32", False)


def test_scales_of_activations_belong_to_no_weight(tmp_path: Path) -> None:
    scales = [
        "self_attn.k_proj.k_scale",
        "self_attn.v_proj.v_scale",
        "self_attn.q_scale",
        "mlp.up_proj.input_scale",
        "mlp.experts.gate_up_proj_input_scale",
        "mlp.up_proj.input_global_scale",
    ]
    checkpoint = opened(tmp_path, {f"model.layers.0.{name}": torch.ones(1) for name in scales})
    formats = formats_of(checkpoint)
    assert dict(formats) == {}
    assert set(formats.activation_scales) == {f"layers.0.{name}" for name in scales}
    assert check_weights(checkpoint, {}).unused == []
    wanted = check_weights(checkpoint, {"layers.0.self_attn.q_scale": TensorSpec((1,))})
    assert "q_scale" not in wanted.notices[-1]
