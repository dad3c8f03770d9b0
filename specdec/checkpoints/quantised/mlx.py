"""MLX's layout: ``X.weight`` uint32 ``[..., N, K * bits / 32]`` with ``X.scales`` and, in affine mode, ``X.biases``.

Rows are little-endian bit streams: code j has bits ``j * bits`` to ``(j + 1) * bits`` of its row's words. By ``mode``:

* ``affine``: unsigned codes of 2, 3, 4, 5, 6 or 8 bits, scales (of either sign) and biases per 32, 64 or 128 columns,
  ``W = code * scale + bias``.
* ``mxfp4``, ``mxfp8`` and ``nvfp4``: the formats of those names, with scales as bytes and no biases.

The shapes alone do not determine bits and columns per scale. They come from ``quantization`` in ``config.json``, which
has defaults for all modules and overrides by path.

Source: the documentation of ``mlx.core.quantize`` and ``mlx.core.dequantize`` in MLX 0.32.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from specdec.checkpoints.gguf.blocks import whole_numbers
from specdec.checkpoints.quantised.coding import Coding, Format
from specdec.checkpoints.quantised.fp4 import Fp4Coding
from specdec.checkpoints.quantised.fp8 import Fp8Coding
from specdec.checkpoints.quantised.hints import Hints
from specdec.checkpoints.quantised.parts import FLOATS, Parts, only
from specdec.checkpoints.quantised.scales import AGAIN, check_dtype, load_scales, misfit, read, tiled

BITS = (2, 3, 4, 5, 6, 8)
_SIZES = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}  # mode -> columns per scale, bits
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float32"}


@attrs.frozen(kw_only=True, eq=False)
class AffineCoding(Coding):
    """Unsigned codes, scales and biases."""

    def scales(self) -> torch.Tensor:
        return load_scales(self.parts, self.role, signed=True).reshape(self.grid.shape)

    def biases(self) -> torch.Tensor:
        return load_scales(self.parts, "mlx_bias", signed=True).reshape(self.grid.shape)

    @property
    def stands_for(self) -> str:
        return _DTYPES[str(self.parts.dtype_of("mlx_scale"))]

    @property
    def kept_as(self) -> str:
        return "mlx-affine"

    def packed(self, index: int) -> dict[str, torch.Tensor]:
        names = {
            "codes": self.parts.codes,
            "scale": self.parts.original("mlx_scale"),
            "bias": self.parts.original("mlx_bias"),
        }
        return {part: self.matrix(name, index) for part, name in names.items()}


@attrs.frozen(kw_only=True, eq=False)
class MlxNvfp4Coding(Fp4Coding):
    """NVFP4 in words, with e4m3 scales stored as bytes and no scale per tensor."""

    def scales(self) -> torch.Tensor:
        name = self.parts.original(self.role)
        scales = read(self.parts.checkpoint, name).view(torch.float8_e4m3fn).to(torch.float32)
        if not bool((scales >= 0).all()):
            raise self.parts.error(f"the scale {name} holds NaN or a negative value", try_=AGAIN)
        return scales.reshape(self.grid.shape)

    def packed(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "codes": self.matrix(self.parts.codes, index, torch.uint8),
            "scale": self.matrix(self.parts.original(self.role), index, torch.float8_e4m3fn),
            "global_scale": torch.ones(1),
        }


_CODINGS: dict[str, type[Fp4Coding | Fp8Coding]] = {"mxfp4": Fp4Coding, "mxfp8": Fp8Coding, "nvfp4": MlxNvfp4Coding}


def _looks_like(parts: Parts) -> bool:
    return parts.dtype == "U32" and parts.codes.endswith("weight") and "mlx_scale" in parts.roles


def _coding(parts: Parts, hints: Hints) -> Coding:
    mode, group, bits = _sizes(parts, hints)
    if len(parts.shape) < 2 or parts.shape[-1] * 32 % bits:
        raise parts.error(
            f"the tensor {parts.codes} ({parts.dtype} {list(parts.shape)}) is not a matrix of {bits}-bit codes"
        )
    shape, given = (*parts.shape[:-1], parts.shape[-1] * 32 // bits), parts.shape_of("mlx_scale")
    grid = tiled(shape, given, 1, group)
    if grid is None or shape[-1] % group:
        wanted = [*shape[:-1], shape[-1] / group if shape[-1] % group else shape[-1] // group]
        raise misfit(parts, "mlx_scale", f"{wanted} for {bits} bits and groups of {group} columns (config.json)")
    if mode != "affine":
        only(parts, "mlx_scale")
        check_dtype(parts, "mlx_scale", ("U8",))
        return _CODINGS[mode](parts=parts, label=mode, shape=shape, grid=grid, role="mlx_scale")
    only(parts, "mlx_scale", "mlx_bias")
    for role in ("mlx_scale", "mlx_bias"):
        check_dtype(parts, role, FLOATS)
    if parts.shape_of("mlx_bias") != given:
        raise misfit(parts, "mlx_bias", f"{list(given)}, as the scales")
    label = f"mlx-affine {bits} bits g{group}"
    return AffineCoding(
        parts=parts, label=label, shape=shape, grid=grid, bits=bits, meanings=whole_numbers(bits), role="mlx_scale"
    )


def _sizes(parts: Parts, hints: Hints) -> tuple[str, int, int]:
    """Mode, columns per scale and bits of a weight, from the config. Raises: CheckpointError if they are not there."""
    if hints.mlx is None:
        raise parts.error(
            f"the tensor {parts.codes} is in MLX's layout, and config.json has no 'quantization' with its "
            "'group_size' and 'bits'",
            try_="the config.json that was written with the weights",
        )
    module = parts.name.removesuffix(".weight")
    own = hints.mlx_modules.get(module, True)
    if own is False:
        raise parts.error(
            f"the tensor {parts.codes} is quantised, and config.json says that {module} is not",
            try_="config.json and weights of one and the same checkpoint",
        )
    declared: Any = hints.mlx if own is True else own
    mode = declared.get("mode", "affine") if isinstance(declared, dict) else None
    if mode not in _SIZES:
        raise parts.error(
            f"the tensor {parts.codes} is quantised with MLX's mode {mode!r}, which is not read", read=", ".join(_SIZES)
        )
    usual_group, usual_bits = _SIZES[mode]
    group, bits = (declared.get(key) or usual for key, usual in (("group_size", usual_group), ("bits", usual_bits)))
    allowed = BITS if mode == "affine" else (usual_bits,)
    if bits not in allowed or type(group) is not int or group < 1 or (mode != "affine" and group != usual_group):
        raise parts.error(
            f"the tensor {parts.codes}: config.json says {bits!r} bits and groups of {group!r} columns in mode {mode}, "
            "which is not read"
        )
    return mode, group, bits


FORMAT = Format("mlx", _looks_like, _coding)
