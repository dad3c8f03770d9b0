"""Files that the compressed-tensors library wrote: our values are the ones that it decompresses, bit for bit."""

import functools
from importlib.metadata import version

import pytest
import torch

from specdec.checkpoints import Checkpoint, StoredWeights, write_checkpoint
from specdec.checkpoints.quantised import formats_of
from specdec.errors import CheckpointError
from tests import tiny
from tests.comparisons import record

# The library's preset -> changes of its weight scheme, and the format that we should see.
CASES = {
    "pack-quantized int4": ("W4A16", {"group_size": 32}, "int4 g32"),
    "pack-quantized int4 asymmetric": ("W4A16_ASYM", {"group_size": 16}, "int4 g16"),
    "pack-quantized int8": ("W8A16", {"group_size": None, "strategy": "channel"}, "int8 per channel"),
    "pack-quantized int2": ("W2A16", {"group_size": 32}, "int2 g32"),
    "int-quantized": ("W8A8", {}, "int8 per channel"),
    "float-quantized per tensor": ("FP8", {}, "fp8 per tensor"),
    "float-quantized per channel": ("FP8_DYNAMIC", {}, "fp8 per channel"),
    "float-quantized blocks": ("FP8_BLOCK", {"block_structure": [24, 40]}, "fp8-block 24x40"),
    "nvfp4-pack-quantized": ("NVFP4", {}, "nvfp4"),
    "nvfp4-pack-quantized, weights only": ("NVFP4A16", {}, "nvfp4"),
    "mxfp4-pack-quantized": ("MXFP4A16", {}, "mxfp4"),
    "mxfp8-quantized": ("MXFP8A16", {}, "mxfp8"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """``saved(case)``: a tiny Qwen3 that the library compressed and saved, and what it decompresses per module."""
    pytest.importorskip("compressed_tensors")  # and its import of seconds: only where these tests run
    from tests.checkpoints.quantised.compressing import save_compressed

    @functools.cache
    def make(case):
        preset, changes, _ = CASES[case]
        folder = tmp_path_factory.mktemp("compressed")
        wanted = save_compressed(folder, preset, changes, seed=list(CASES).index(case))
        tiny.write_tokenizer(folder)
        return folder, wanted

    return make


@pytest.mark.parametrize("case", CASES)
def test_what_the_library_wrote_is_decoded_as_it_decodes(saved, case, record_property):
    folder, wanted = saved(case)
    checkpoint = Checkpoint.open(folder)
    formats = formats_of(checkpoint)
    weights = StoredWeights(checkpoint)
    assert len(wanted) == 7
    for name, values in wanted.items():
        canonical = name.removeprefix("model.")
        assert formats[canonical].format == CASES[case][2]
        assert values.abs().max() > 0
        assert torch.equal(weights[canonical].view(torch.int16), values.to(torch.bfloat16).view(torch.int16)), name
    assert formats["lm_head.weight"].format == "bf16"
    library = f"compressed-tensors {version('compressed-tensors').rpartition('.')[0]}"
    record(record_property, CASES[case][2], "decoded weights", library, case, 0.0)


def test_weights_whose_config_promises_zero_points_are_refused_without_them(saved, tmp_path):
    folder, _ = saved("pack-quantized int4 asymmetric")
    checkpoint = Checkpoint.open(folder)
    kept = {name: checkpoint.load(name) for name in checkpoint.tensors if not name.endswith("zero_point")}
    write_checkpoint(tmp_path, checkpoint.config, kept)
    with pytest.raises(CheckpointError, match="needs weight_zero_point with it"):
        StoredWeights(Checkpoint.open(tmp_path))["layers.0.self_attn.q_proj.weight"]
