"""Four-bit floating point, NVFP4 and MXFP4: two e2m1 codes per byte, the even column in the low nibble.

* NVFP4 has an e4m3 scale per 16 columns and a float32 scale per tensor. ModelOpt: ``X.weight``, ``X.weight_scale``,
  ``X.weight_scale_2``, ``W = e2m1 * (scale * scale_2)``. compressed-tensors: ``X.weight_packed``, ``X.weight_scale``,
  ``X.weight_global_scale``, which is the reciprocal: ``W = e2m1 * (scale / global_scale)``.
* MXFP4 has only a power of two per 32 columns. ``X.weight`` or ``X.weight_packed`` with ``X.scale`` or
  ``X.weight_scale``; ``X_blocks [..., N, K/32, 16]`` with ``X_scales [..., N, K/32]``.

Source of e2m1 and of MXFP4: OCP Microscaling Formats v1.0, sections 5.3.3 and 5.2.
"""

from __future__ import annotations

import math

import attrs
import torch

from specdec.checkpoints.gguf.blocks import E2M1
from specdec.checkpoints.quantised.coding import Coding, Format
from specdec.checkpoints.quantised.hints import Hints
from specdec.checkpoints.quantised.parts import Parts, only
from specdec.checkpoints.quantised.scales import EXPONENTS, blocks, check_dtype, load_scales, misfit, tiled, whole


@attrs.frozen(kw_only=True, eq=False)
class Fp4Coding(Coding):
    """Pairs of e2m1 codes times one combined scale."""

    bits: int = 4
    meanings: torch.Tensor = E2M1

    def scales(self) -> torch.Tensor:
        scales = super().scales()  # the second scale is per tensor or per matrix
        if "scale_2" in self.parts.roles:
            return scales * load_scales(self.parts, "scale_2").reshape(-1, 1, 1)
        if "global_scale" in self.parts.roles:
            return scales / load_scales(self.parts, "global_scale", zero=False).reshape(-1, 1, 1)
        return scales

    @property
    def kept_as(self) -> str:
        return self.label

    def packed(self, index: int) -> dict[str, torch.Tensor]:
        codes = self.matrix(self.parts.codes, index, torch.uint8)
        if self.label == "mxfp4":
            return {"codes": codes, "scale": self.of_matrix(self.scales(), index)}
        parts = {"codes": codes, "scale": self.matrix(self.parts.original("scale"), index)}
        if "scale_2" in self.parts.roles:
            return parts | {"global_scale": _of_matrix(load_scales(self.parts, "scale_2"), index)}
        divisor = _of_matrix(load_scales(self.parts, "global_scale", zero=False), index)
        return parts | {"global_scale": 1.0 / divisor, "divisor": divisor}


def _of_matrix(scales: torch.Tensor, index: int) -> torch.Tensor:
    """The scale ``[1]`` of one matrix, from one per matrix or one for all."""
    flat = scales.flatten()
    return flat if len(flat) == 1 else flat[index : index + 1]


def _looks_like(parts: Parts) -> bool:
    if parts.dtype == "I8":  # int8 also holds pairs if there is an exponent per 32 columns
        return parts.dtype_of("scale") in EXPONENTS
    named = parts.codes.endswith(("_packed", "_blocks"))
    return parts.dtype == "U8" and (named or not {"scale", "scale_2", "global_scale"}.isdisjoint(parts.roles))


def _coding(parts: Parts, hints: Hints) -> Coding:
    stacked = parts.codes.endswith("_blocks")
    if len(parts.shape) < (3 if stacked else 2):
        raise parts.error(f"the tensor {parts.codes} ({parts.dtype} {list(parts.shape)}) is not a matrix of FP4 pairs")
    *lead, last = parts.shape
    shape = (*lead[:-1], lead[-1] * 2 * last) if stacked else (*lead, 2 * last)
    check_dtype(parts, "scale", ("F8_E4M3", *EXPONENTS))
    exponents = parts.dtype_of("scale") in EXPONENTS
    if exponents:
        only(parts, "scale")
    else:
        _one_global(parts)
    group = 32 if exponents else 16
    grid = tiled(shape, parts.shape_of("scale"), 1, group)
    if grid is None:
        wanted = [*shape[:-2], *blocks(shape, 1, group)]
        raise misfit(parts, "scale", f"{wanted} for {group} columns of {list(shape)} per scale")
    return Fp4Coding(parts=parts, label="mxfp4" if exponents else "nvfp4", shape=shape, grid=grid)


def _one_global(parts: Parts) -> None:
    """NVFP4's scale per tensor: exactly one of the two names, with one value (or one per matrix of a stack)."""
    only(parts, "scale", "scale_2", "global_scale")
    if {"scale_2", "global_scale"} <= set(parts.roles):
        raise parts.error(
            f"the tensor {parts.codes} has both {parts.roles['scale_2']} and {parts.roles['global_scale']}, "
            "which mean reciprocal things"
        )
    role = "global_scale" if "global_scale" in parts.roles or parts.codes.endswith("_packed") else "scale_2"
    check_dtype(parts, role, ("F32", "BF16", "F16"))
    lead = parts.shape[:-2]
    found = whole((*lead, 2, 2), parts.shape_of(role))  # any matrix shape: only scales per tensor and matrix match
    if found is None or found.shape[1:] != (1, 1):
        raise misfit(parts, role, f"one value{f', or {math.prod(lead)}' if lead else ''}")


FORMAT = Format("fp4", _looks_like, _coding)
