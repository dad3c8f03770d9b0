"""Refuse known formats that are not read, naming each weight's tensor and method."""

from __future__ import annotations

from collections.abc import Mapping

from specdec.checkpoints.quantised.hints import Hints, quantisation
from specdec.checkpoints.quantised.parts import FLOATS, Parts
from specdec.checkpoints.reader import Checkpoint
from specdec.errors import CheckpointError

_ORIGINAL = (
    "the checkpoint in bfloat16 that it was made from, or one in FP8, NVFP4, MXFP4, compressed-tensors or MLX's layout"
)
# What a tensor of a method is called behind the name of its module, and the module's codes and the method.
_MARKS: Mapping[str, tuple[str, str]] = {
    "qweight": ("qweight", "gptq or awq"),
    "W_q": ("W_q", "hqq"),
    "codebooks": ("codes", "aqlm"),
    "SCB": ("weight", "bitsandbytes"),
    "weight.absmax": ("weight", "bitsandbytes"),
    "weight._data": ("weight._data", "quanto"),
}


def refusals(
    checkpoint: Checkpoint, names: Mapping[str, str]
) -> tuple[dict[str, tuple[str, tuple[str, ...]]], dict[str, str]]:
    """Weights in refused methods, and the names (canonical -> in the files) that belong to none of them.

    The former by decoded name: the method, and the names in the files of its tensors, codes first.
    """
    declared = quantisation(checkpoint.config) or ""
    found: dict[str, tuple[str, list[str]]] = {}  # by module
    for module, part in map(_split, names):
        codes, method = _MARKS.get(part, ("", ""))
        original = names.get(f"{module}.{codes}")
        if original is not None and checkpoint.tensors[original].dtype not in FLOATS:
            known = next((one for one in method.split(" or ") if declared.startswith(one)), method)
            found[module] = known, [original]
    left: dict[str, str] = {}
    for name, original in names.items():
        module, part = _split(name)
        if module not in found or part == "bias":
            left[name] = original
        elif original != found[module][1][0]:
            found[module][1].append(original)
    return {f"{module}.weight": (method, tuple(tensors)) for module, (method, tensors) in found.items()}, left


def _split(name: str) -> tuple[str, str]:
    """A tensor's module, and the rest of its name: ``qweight``, or ``weight.absmax``."""
    module, weight, rest = name.partition(".weight.")
    if weight:
        return module, f"weight.{rest}"
    module, _, rest = name.rpartition(".")
    return module, rest


def refusal(checkpoint: Checkpoint, name: str, method: str) -> CheckpointError:
    """An error that refuses a tensor of a known method."""
    return CheckpointError(
        f"the tensor {name} is quantised with {method}, which is not read",
        file=checkpoint.tensors[name].file,
        config=quantisation(checkpoint.config),
        try_=_ORIGINAL,
    )


def unknown(parts: Parts, hints: Hints) -> CheckpointError:
    """An error that refuses a weight of unknown format."""
    siblings = ", ".join(parts.roles.values())
    beside = f" with {siblings} beside it" if siblings else " with no scale beside it"
    return CheckpointError(
        f"the tensor {parts.codes} is stored as {parts.dtype} {list(parts.shape)}{beside}: no known format",
        file=parts.checkpoint.tensors[parts.codes].file,
        config=hints.method,
        try_=_ORIGINAL,
    )
