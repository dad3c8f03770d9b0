"""What is in a checkpoint: the object that ``specdec info`` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from specdec.checkpoints import Audit, Checkpoint, TensorSpec, canonical_names
from specdec.contract import ModelSpec


@attrs.frozen(kw_only=True)
class CheckpointReport:
    """Facts read from the files; no weight is computed with."""

    path: str
    family: str
    model_type: str
    config: dict[str, Any]  # the fields that the family reads
    parameters: dict[str, int]  # by part: "embedding", "layers", "head", "mtp"
    dtypes: dict[str, int]  # dtype -> parameters stored in it
    mtp: str
    tied: bool
    missing: list[str]
    unused: list[str]
    misshaped: list[str]
    problems: list[str]  # all-zero or non-finite tensors
    size_bytes: int
    state_bytes_per_token: int  # bfloat16 keys and values, the MTP head's included
    fixed_state_bytes: int  # recurrent and convolution state, whatever the length

    @property
    def total_parameters(self) -> int:
        """All parameters but the MTP head's, the embedding counted once where it is tied."""
        return sum(count for part, count in self.parameters.items() if part != "mtp")

    def to_dict(self) -> dict[str, Any]:
        """The object that ``info --json`` prints."""
        return {**attrs.asdict(self), "total_parameters": self.total_parameters}


def describe(
    checkpoint: Checkpoint, spec: ModelSpec, family: Any, expected: Mapping[str, TensorSpec], found: Audit
) -> CheckpointReport:
    """Put a checkpoint's facts together."""
    names = canonical_names(checkpoint.names)
    parameters: dict[str, int] = {}
    for name, tensor in expected.items():
        if tensor.optional and name not in names:
            continue
        part = tensor.group if tensor.group != "model" else _part(name)
        parameters[part] = parameters.get(part, 0) + math.prod(tensor.shape)
    dtypes: dict[str, int] = {}
    for original in checkpoint.names:
        dtype = str(checkpoint.dtype(original)).removeprefix("torch.")
        dtypes[dtype] = dtypes.get(dtype, 0) + math.prod(checkpoint.shape(original))
    per_token, fixed = family.state_bytes(2)
    return CheckpointReport(
        path=str(checkpoint.path),
        family=spec.name,
        model_type=str(checkpoint.config.get("model_type")),
        config=attrs.asdict(family),
        parameters=parameters,
        dtypes=dtypes,
        mtp=_mtp(family, [name for name, tensor in expected.items() if tensor.group == "mtp" and name in names]),
        tied=family.tied,
        missing=list(found.missing),
        unused=list(found.unused),
        misshaped=[f"{name}: {got}, expected {wanted}" for name, got, wanted in found.misshaped],
        problems=[f"{name}: all zero" for name in found.all_zero]
        + [f"{name}: not finite" for name in found.non_finite],
        size_bytes=checkpoint.size_bytes,
        state_bytes_per_token=per_token,
        fixed_state_bytes=fixed,
    )


def _part(name: str) -> str:
    first = name.split(".", 1)[0]
    return {"embed_tokens": "embedding", "lm_head": "head"}.get(first, "layers")


def _mtp(family: Any, present: list[str]) -> str:
    if not family.mtp_layers or not present:
        return "none"
    own = any(name.endswith(("lm_head.weight", "shared_head.head.weight")) for name in present)
    return f"{family.mtp_layers} layer, {'own head' if own else 'shares the main head'}"
