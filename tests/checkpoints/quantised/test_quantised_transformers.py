"""Weights that transformers' FP8 code quantised, and its own dequantisation of FP8 and MXFP4, against ours."""

from types import SimpleNamespace

import pytest
import torch

from specdec.checkpoints import Checkpoint, StoredWeights, write_checkpoint
from specdec.checkpoints.quantised import formats_of
from tests.checkpoints.quantised import quantisers as q
from tests.checkpoints.quantised.test_quantised_decoders import assert_same_bits, drawn
from tests.comparisons import record

transformers = pytest.importorskip("transformers")
library = pytest.importorskip("transformers.integrations.finegrained_fp8")

BLOCKS = [(128, 128), (32, 64)]
LINEAR, STACK = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.experts.gate_up_proj"


def operations(**settings):
    config = transformers.FineGrainedFP8Config(**settings)
    quantiser = SimpleNamespace(quantization_config=config)
    return library.Fp8Quantize(quantiser), library.Fp8Dequantize(quantiser)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_what_transformers_quantised_is_decoded_as_it_does(tmp_path, block, scale_fmt, record_property):
    quantise, dequantise = operations(weight_block_size=block, scale_fmt=scale_fmt)
    weights = {LINEAR: drawn(0, 256, 384), STACK: drawn(1, 3, 128, 256)}
    stored = quantise.convert({name: torch.from_numpy(weight) for name, weight in weights.items()})
    assert len(stored) == 4
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, config, stored))
    assert {found.format for found in formats_of(checkpoint).values()} == {f"fp8-block {block[0]}x{block[1]}"}
    ours = StoredWeights(checkpoint)
    for name, scale in ((LINEAR, f"{LINEAR}_scale_inv"), (STACK, f"{STACK}_scale_inv")):
        theirs = dequantise._dequantize_one(stored[name], stored[scale], output_dtype=torch.float32)
        assert_same_bits(ours[name.removeprefix("model.")], theirs)
    label = f"fp8-block {block[0]}x{block[1]}"
    record(record_property, label, "decoded weights", "transformers' Fp8Dequantize", f"{scale_fmt} scales", 0.0)


def test_mxfp4_experts_are_decoded_as_transformers_does(tmp_path, record_property):
    """DeepSeek-V4's: pairs in int8, exponents in E8M0; and the library's reading of the same bytes."""
    _, dequantise = operations()
    parts, _ = q.mxfp4(drawn(2, 64, 128))
    name = "layers.0.ffn.experts.5.w1."
    checkpoint = Checkpoint.open(
        write_checkpoint(tmp_path, {}, {name + part: tensor for part, tensor in parts.items()})
    )
    assert formats_of(checkpoint)[f"{name}weight"].format == "mxfp4"
    theirs = dequantise._dequantize_one(parts["weight"], parts["scale"], output_dtype=torch.float32)
    ours = StoredWeights(checkpoint, dtype=torch.float32)
    assert_same_bits(ours[f"{name}weight"], theirs)
    record(record_property, "mxfp4", "decoded weights", "transformers' Fp8Dequantize", "DeepSeek-V4's layout", 0.0)
