"""FP8 weights: e4m3 with a scale per tensor, row or block, under the names that several tools use.

* ``X.weight`` + ``X.weight_scale_inv [ceil(N/b0), ceil(K/b1)]`` (DeepSeek-V3, Qwen, GLM): multiplied, despite the
  name; DeepSeek-V4 calls it ``X.scale`` and stores E8M0.
* ``X.weight`` + ``X.weight_scale``: one value, ``[N]``, ``[N, 1]`` or blocks (ModelOpt, compressed-tensors); E8M0
  bytes per 32 columns are MXFP8.

Source of e4m3fn: Micikevicius et al. 2022, arXiv:2209.05433, table 1 (bias 7, largest 448, NaN is S.1111.111).
"""

from __future__ import annotations

import attrs
import torch

from specdec.checkpoints.quantised.coding import Coding, Format
from specdec.checkpoints.quantised.hints import Hints
from specdec.checkpoints.quantised.parts import Parts, only
from specdec.checkpoints.quantised.scales import EXPONENTS, Grid, blocks, check_dtype, label, misfit, tiled, whole

_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)  # by byte
_USUAL = (128, 128)
_GROUPS = (128, 64, 32, 16)


@attrs.frozen(kw_only=True, eq=False)
class Fp8Coding(Coding):
    """e4m3 codes times one scale."""

    bits: int = 8
    meanings: torch.Tensor = _E4M3

    @property
    def kept_as(self) -> str:
        return "fp8-block" if self.label.startswith("fp8-block") else "fp8"

    def packed(self, index: int) -> dict[str, torch.Tensor]:
        codes = self.matrix(self.parts.codes, index, torch.uint8)
        return {"codes": codes, "scale": self.of_matrix(self.scales(), index)}

    def has_nan(self) -> bool:
        # 0x7F is the largest int8, 0xFF the largest uint8: two reductions without a copy
        for start, stop in self.slabs():
            raw = self.raw(start, stop)
            if raw.numel() and (raw.view(torch.int8).max() == 0x7F or raw.view(torch.uint8).max() == 0xFF):
                return True
        return False


def _looks_like(parts: Parts) -> bool:
    return parts.dtype == "F8_E4M3" and len(parts.shape) > 0 and not parts.codes.endswith(("_packed", "_blocks"))


def _coding(parts: Parts, hints: Hints) -> Coding:
    only(parts, "scale")
    check_dtype(parts, "scale")
    grid = _grid(parts, hints)
    return Fp8Coding(parts=parts, label=_label(parts, grid), shape=parts.shape, grid=grid)


def _grid(parts: Parts, hints: Hints) -> Grid:
    shape, given = parts.shape, parts.shape_of("scale")
    grids = [tiled(shape, given, *size) for size in hints.blocks]
    if not (hints.blocks and parts.original("scale").endswith("scale_inv")):  # only block scales have this name
        grids.append(whole(shape, given))
    if parts.dtype_of("scale") in EXPONENTS:
        grids.append(tiled(shape, given, 1, 32))
    if not hints.blocks:
        grids += [tiled(shape, given, *size) for size in (_USUAL, *((1, group) for group in _GROUPS))]
    for grid in filter(None, grids):
        return grid
    size = hints.blocks[0] if hints.blocks else _USUAL
    source = " (config.json)" if hints.blocks else ""
    count = [*shape[:-2], *blocks(shape, *size)]
    raise misfit(parts, "scale", f"{count} for blocks of {size[0]}x{size[1]}{source}")


def _label(parts: Parts, grid: Grid) -> str:
    size = label(grid, parts.shape)
    if size == "g32" and parts.dtype_of("scale") in EXPONENTS:
        return "mxfp8"
    if "x" in size:
        return f"fp8-block {size}"
    return f"fp8 {size}"


FORMAT = Format("fp8", _looks_like, _coding)
