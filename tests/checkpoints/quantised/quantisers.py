"""Quantisers for tests: a float32 matrix to the tensors of a format, and what they mean, worked out independently.

The decoded value comes from numpy and from tables written out here, one scale per element, so that it shares nothing
with the decoders under test. Nothing here is a test.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec.checkpoints import Checkpoint, write_checkpoint
from specdec.checkpoints.quantised import StoredMatrix

Tensors = dict[str, torch.Tensor]
X, NAME = "model.layers.0.mlp.up_proj.", "layers.0.mlp.up_proj.weight"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
E4M3_MAX, E2M1_MAX = 448.0, 6.0


def spread(scale: np.ndarray, shape: tuple[int, ...], rows: int, columns: int) -> np.ndarray:
    """One scale per element: ``scale [..., A, B]`` over blocks of rows x columns, cut at the edge."""
    wide = np.repeat(np.repeat(scale, rows, axis=-2), columns, axis=-1)
    return wide[..., : shape[-2], : shape[-1]]


def amax(weight: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Largest magnitude of every block, at least a tiny number."""
    *lead, n, k = weight.shape
    a, b = -(-n // rows), -(-k // columns)
    padded = np.zeros((*lead, a * rows, b * columns), dtype=np.float32)
    padded[..., :n, :k] = np.abs(weight)
    return np.maximum(padded.reshape(*lead, a, rows, b, columns).max(axis=(-1, -3)), 1e-12).astype(np.float32)


def to_e4m3(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(torch.float8_e4m3fn)


def e4m3_value(codes: torch.Tensor) -> np.ndarray:
    """Every code's value from its bits: sign, 4 bits of exponent with bias 7, 3 of mantissa, subnormals below."""
    bits = codes.view(torch.uint8).numpy().astype(np.int64)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    value = np.where(bits & 127 == 127, np.nan, value)
    return np.where(bits >> 7 == 1, -value, value).astype(np.float32)


def to_e2m1(values: np.ndarray) -> np.ndarray:
    """The nearest code; of equally near ones the first."""
    magnitude = np.abs(values)[..., None]
    code = np.abs(magnitude - E2M1[:8]).argmin(axis=-1)
    return (code | (np.signbit(values) << 3)).astype(np.uint8)


def nibbles(codes: np.ndarray) -> torch.Tensor:
    """Pairs of codes in bytes, the even column low."""
    return torch.from_numpy(np.ascontiguousarray(codes[..., 0::2] | codes[..., 1::2] << 4))


def to_e8m0(scale: np.ndarray) -> np.ndarray:
    return np.clip(np.ceil(np.log2(scale)) + 127, 0, 254).astype(np.uint8)


def e8m0_value(codes: np.ndarray) -> np.ndarray:
    return np.ldexp(np.float32(1), codes.astype(np.int64) - 127).astype(np.float32)


def pack(values: np.ndarray, bits: int) -> torch.Tensor:
    """Signed integers along the last axis into int32 words, lowest bits first, bit by bit."""
    *lead, k = values.shape
    unsigned = (values.astype(np.int64) + 2 ** (bits - 1)).reshape(-1, k)
    words = np.zeros((unsigned.shape[0], -(-k * bits // 32)), dtype=np.uint32)
    for j in range(k):
        word, at = divmod(j * bits, 32)
        words[:, word] |= (unsigned[:, j] << at).astype(np.uint32)
    return torch.from_numpy(words.view(np.int32).reshape(*lead, -1))


# --- formats: float32 [..., N, K] -> tensors by suffix of "X.", and the float32 values that they mean ----------------


def fp8_block(
    weight: np.ndarray,
    block: tuple[int, int] = (128, 128),
    *,
    name: str = "weight_scale_inv",
    e8m0: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensors, np.ndarray]:
    scale = amax(weight, *block) / E4M3_MAX
    if e8m0:
        codes = to_e8m0(scale)
        stored, scale = torch.from_numpy(codes).view(torch.float8_e8m0fnu), e8m0_value(codes)
    else:
        stored = torch.from_numpy(scale).to(dtype)
        scale = stored.float().numpy()
    wide = spread(scale, weight.shape, *block)
    codes8 = to_e4m3(weight / wide)
    return {"weight": codes8, name: stored}, e4m3_value(codes8) * wide


def fp8_tensor(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    scale = np.float32(max(np.abs(weight).max(), 1e-12) / E4M3_MAX)
    codes = to_e4m3(weight / scale)
    tensors = {"weight": codes, "weight_scale": torch.tensor(scale), "input_scale": torch.tensor(0.5)}
    return tensors, e4m3_value(codes) * scale


def fp8_channel(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    scale = amax(weight, 1, weight.shape[-1]) / np.float32(E4M3_MAX)
    codes = to_e4m3(weight / scale)
    return {"weight": codes, "weight_scale": torch.from_numpy(scale)}, e4m3_value(codes) * scale


def mxfp8(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    codes = to_e8m0(amax(weight, 1, 32) / np.float32(E4M3_MAX))
    wide = spread(e8m0_value(codes), weight.shape, 1, 32)
    codes8 = to_e4m3(weight / wide)
    return {"weight": codes8, "weight_scale": torch.from_numpy(codes)}, e4m3_value(codes8) * wide


def nvfp4(weight: np.ndarray, *, packed: bool = False) -> tuple[Tensors, np.ndarray]:
    whole = np.float32(max(np.abs(weight).max(), 1e-12) / (E2M1_MAX * E4M3_MAX))
    if packed:  # the reciprocal is what is stored
        divisor = np.float32(1) / whole
        local = to_e4m3(amax(weight, 1, 16) / np.float32(E2M1_MAX) * divisor)
        scale = e4m3_value(local) / divisor
    else:
        local = to_e4m3(amax(weight, 1, 16) / np.float32(E2M1_MAX) / whole)
        scale = e4m3_value(local) * whole
    wide = spread(scale, weight.shape, 1, 16)
    codes = to_e2m1(weight / np.where(wide > 0, wide, 1))
    if packed:
        tensors = {
            "weight_packed": nibbles(codes),
            "weight_scale": local,
            "weight_global_scale": torch.tensor([divisor]),
            "input_global_scale": torch.ones(1),
        }
    else:
        tensors = {
            "weight": nibbles(codes),
            "weight_scale": local,
            "weight_scale_2": torch.tensor(whole),
            "input_scale": torch.tensor(0.25),
        }
    return tensors, E2M1[codes] * wide


def mxfp4(weight: np.ndarray, *, naming: str = "deepseek") -> tuple[Tensors, np.ndarray]:
    exponents = to_e8m0(amax(weight, 1, 32) / np.float32(E2M1_MAX))
    wide = spread(e8m0_value(exponents), weight.shape, 1, 32)
    codes = to_e2m1(weight / wide)
    stored = torch.from_numpy(exponents)
    if naming == "deepseek":
        tensors = {"weight": nibbles(codes).view(torch.int8), "scale": stored.view(torch.float8_e8m0fnu)}
    else:
        tensors = {"weight_packed": nibbles(codes), "weight_scale": stored}
    return tensors, E2M1[codes] * wide


def integers(
    weight: np.ndarray,
    bits: int = 4,
    group: int | None = None,
    *,
    zero_points: bool = False,
    packed: bool = True,
    order: np.ndarray | None = None,
) -> tuple[Tensors, np.ndarray]:
    *lead, n, k = weight.shape
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    scale = (amax(weight, 1, group or k) / np.float32(high)).astype(np.float32)
    rng = np.random.default_rng(k)
    offsets = rng.integers(low, high + 1, scale.shape) if zero_points else np.zeros(scale.shape, dtype=np.int64)
    if order is None:
        wide, shift = (spread(grid, weight.shape, 1, group or k) for grid in (scale, offsets))
    else:
        wide, shift = scale[..., order], offsets[..., order]
    codes = np.clip(np.rint(weight / wide) + shift, low, high).astype(np.int64)
    tensors: Tensors = {"weight_scale": torch.from_numpy(np.ascontiguousarray(scale))}
    if packed:
        tensors["weight_packed"] = pack(codes, bits)
        tensors["weight_shape"] = torch.tensor(weight.shape)
    else:
        tensors["weight"] = torch.from_numpy(codes.astype(np.int8))
    if zero_points and packed:
        tensors["weight_zero_point"] = pack(offsets.swapaxes(-1, -2), bits).transpose(-1, -2).contiguous()
    elif zero_points:
        tensors["weight_zero_point"] = torch.from_numpy(offsets.astype(np.int8))
    if order is not None:
        tensors["weight_g_idx"] = torch.from_numpy(order.astype(np.int32))
    return tensors, ((codes - shift) * wide.astype(np.float32)).astype(np.float32)


Quantiser = Callable[[np.ndarray], tuple[Tensors, np.ndarray]]
# name -> quantiser; each takes any [..., N, K] with K a multiple of 32
QUANTISERS: Mapping[str, Quantiser] = {
    "fp8-block 128x128": fp8_block,
    "fp8-block 128x128 e8m0": lambda w: fp8_block(w, name="scale", e8m0=True),
    "fp8-block 128x128 bf16": lambda w: fp8_block(w, dtype=torch.bfloat16),
    "fp8 per tensor": fp8_tensor,
    "fp8 per channel": fp8_channel,
    "mxfp8": mxfp8,
    "nvfp4": nvfp4,
    "nvfp4 packed": lambda w: nvfp4(w, packed=True),
    "mxfp4": mxfp4,
    "mxfp4 packed": lambda w: mxfp4(w, naming="compressed-tensors"),
    "int4 g32": lambda w: integers(w, 4, 32),
    "int4 g16 zero points": lambda w: integers(w, 4, 16, zero_points=True),
    "int8 g32 packed": lambda w: integers(w, 8, 32),
    "int8 per channel": lambda w: integers(w, 8, packed=False),
    "int8 per channel zero points": lambda w: integers(w, 8, packed=False, zero_points=True),
}


VARIANTS = ("e8m0", "bf16", "packed", "zero points")  # last words of names above that are no part of the label


def label(name: str) -> tuple[str, str]:
    """What ``formats_of`` calls a quantiser's format, and the variant of it, "" for the usual one."""
    variant = next((variant for variant in VARIANTS if name.endswith(f" {variant}")), "")
    return name.removesuffix(f" {variant}") if variant else name, variant


def quantised(
    tensors: Mapping[str, torch.Tensor], choose: Callable[[str], str | None], dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensors, Tensors]:
    """A checkpoint's tensors with some of them quantised, and the same with these decoded to ``dtype`` instead.

    ``choose`` gives a name of ``QUANTISERS`` for the name of a matrix, or None to leave it.
    """
    stored: Tensors = {}
    decoded: Tensors = {}
    for name, tensor in tensors.items():
        chosen = choose(name)
        if chosen is None:
            stored[name] = decoded[name] = tensor
            continue
        parts, values = QUANTISERS[chosen](tensor.float().numpy())
        stored |= {f"{name.removesuffix('weight')}{suffix}": part for suffix, part in parts.items()}
        decoded[name] = torch.from_numpy(values).to(dtype)
    return stored, decoded


# --- a matrix in a checkpoint, and what it means when it stays packed -----------------------------------------------


def opened(folder: Path, parts: Tensors, prefix: str = X, **config: Any) -> Checkpoint:
    """A checkpoint of these tensors alone."""
    return Checkpoint.open(write_checkpoint(folder, config, {prefix + name: part for name, part in parts.items()}))


def meaning(matrix: StoredMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    """The values in float64, and the sum of the magnitudes of their parts, by the docstring of ``StoredMatrix``."""
    blocks = (matrix.meta["block_rows"], matrix.meta["block_columns"])

    def wide(part: str) -> torch.Tensor:
        if part not in matrix.parts:
            return torch.zeros(matrix.shape, dtype=torch.float64)
        values = spread(matrix.parts[part].double().numpy(), matrix.shape, *blocks)
        if f"{part}_unit" in matrix.parts:
            unit = matrix.parts[f"{part}_unit"].double().numpy()
            values = values * spread(unit, matrix.shape, 1, matrix.shape[1] // unit.shape[1])
        return torch.from_numpy(values)

    bits = matrix.meta["bits"]
    stream = np.unpackbits(matrix.parts["codes"].contiguous().view(torch.uint8).numpy(), axis=-1, bitorder="little")
    codes = stream[:, : matrix.shape[1] * bits].reshape(*matrix.shape, bits) @ (1 << np.arange(bits))
    values = matrix.values.double()[torch.from_numpy(codes)]
    factor = 1.0
    if "global_scale" in matrix.parts:
        divisor = matrix.parts.get("divisor")
        factor = float(matrix.parts["global_scale"] if divisor is None else 1 / divisor.double())
    scale = wide("scale") * factor
    largest = float(matrix.values.nan_to_num().abs().max())
    parts = (values.abs() + largest + wide("offset").abs()) * scale.abs() + wide("bias").abs()
    return (values - wide("offset")) * scale + wide("bias"), parts
