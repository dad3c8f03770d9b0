"""Checkpoints that the compressed-tensors library writes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from tests import tiny


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


def save_compressed(folder: Path, preset: str, changes: Mapping[str, Any], *, seed: int) -> dict[str, torch.Tensor]:
    """Write a tiny random Qwen3 that the library quantises by ``preset``; the weights that it decompresses, by name."""
    torch.manual_seed(seed)
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
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return wanted
