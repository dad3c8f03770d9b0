"""Files that the compressed-tensors library wrote: our values are the ones that it decompresses, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.checkpoints import Checkpoint, StoredWeights, check_weights, text_config
from specdec.checkpoints.quantised import formats_of
from specdec.models.weights import dry_run
from specdec.registry import registry
from tests import tiny
from tests.comparisons import record

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors import BaseCompressor, ModelCompressor  # noqa: E402 (the skip comes first)
from compressed_tensors.quantization import (  # noqa: E402
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam  # noqa: E402

# The library's preset -> changes of its weight scheme, and the format that we should see.
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
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


def _blocks(weight: torch.Tensor, scheme: Any) -> tuple[int, int]:
    strategy = getattr(scheme.strategy, "value", scheme.strategy)
    n, k = weight.shape
    sizes = {"tensor": (n, k), "channel": (1, k), "block": tuple(scheme.block_structure or ())}
    return sizes.get(strategy, (1, scheme.group_size or k))  # type: ignore[return-value]


def _observe(module: torch.nn.Module, scheme: Any) -> None:
    """Scales and zero points from smallest and largest values, computed by the library."""
    weight = module.weight.detach().float()
    rows, columns = _blocks(weight, scheme)
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -k % columns, 0, -n % rows))
    tiles = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    if hasattr(module, "weight_global_scale"):
        gain = generate_gparam(weight.min().reshape(1), weight.max().reshape(1))
        module.weight_global_scale.data.copy_(gain)
        scale, _ = calculate_qparams(tiles.amin((1, 3)), tiles.amax((1, 3)), scheme, global_scale=gain)
        module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
        return
    scale, zero = calculate_qparams(tiles.amin((1, 3)), tiles.amax((1, 3)), scheme)
    if scheme.scale_dtype == torch.uint8:  # the library gives exponents, its compressors take powers of two
        scale = 2.0 ** (scale.float() - 127)
    module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
    if getattr(module, "weight_zero_point", None) is not None:
        module.weight_zero_point.data.copy_(zero.reshape(module.weight_zero_point.shape))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``saved(case)``: a tiny Qwen3 that the library compressed and saved, and what it decompresses per module."""
    made: dict[str, tuple[Path, dict[str, torch.Tensor]]] = {}

    def make(case: str) -> tuple[Path, dict[str, torch.Tensor]]:
        if case in made:
            return made[case]
        preset, changes, _ = CASES[case]
        torch.manual_seed(len(made))
        config = transformers.Qwen3Config(
            vocab_size=tiny.TOKENIZER_SIZE,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            tie_word_embeddings=False,
        )
        model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
        scheme = preset_name_to_scheme(preset, ["Linear"]).model_copy(deep=True)
        for key, value in changes.items():
            setattr(scheme.weights, key, value)
        scheme = QuantizationScheme.model_validate(scheme.model_dump())
        apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
        for module in model.modules():
            if hasattr(module, "quantization_scheme"):
                _observe(module, module.quantization_scheme.weights)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        wanted: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            scheme = getattr(module, "quantization_scheme", None)
            if scheme is not None:
                library = BaseCompressor.get_value_from_registry(getattr(scheme.format, "value", scheme.format))
                wanted[f"{name}.weight"] = library.decompress(dict(module.state_dict()), scheme)["weight"]
        folder = tmp_path_factory.mktemp("compressed")
        model.save_pretrained(folder)
        compressor.update_config(folder)
        tiny.write_tokenizer(folder)
        made[case] = folder, wanted
        return made[case]

    return make


@pytest.mark.parametrize("case", CASES)
def test_what_the_library_wrote_is_decoded_as_it_decodes(
    saved: Any, case: str, record_property: Callable[[str, object], None]
) -> None:
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


@pytest.mark.parametrize("case", CASES)
def test_the_audit_takes_every_tensor_that_the_library_wrote(saved: Any, case: str) -> None:
    folder, _ = saved(case)
    checkpoint = Checkpoint.open(folder)
    config = text_config(checkpoint.config)
    spec = registry().model(config["model_type"])
    found = check_weights(checkpoint, dry_run(spec, spec.parse(config), StoredWeights(checkpoint)).tensors)
    found.raise_for_errors()
    assert (found.missing, found.unused, found.misshaped, found.unreadable) == ([], [], [], [])
