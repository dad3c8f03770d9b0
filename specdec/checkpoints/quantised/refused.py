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
# Last word of the codes tensor's name -> its siblings, and the method.
_CODES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "qweight": (("qzeros", "scales", "g_idx"), "gptq or awq"),
    "W_q": (("scale", "zero", "meta"), "hqq"),
    "codes": (("codebooks", "scales"), "aqlm"),
}


def refusals(
    checkpoint: Checkpoint, names: Mapping[str, str]
) -> tuple[dict[str, tuple[str, tuple[str, ...]]], dict[str, str]]:
    """Weights in refused methods, and the names (canonical -> in the files) that belong to none of them.

    The former by decoded name: the method, and the names in the files of its tensors, codes first.
    """
    declared = quantisation(checkpoint.config)
    found: dict[str, tuple[str, list[str]]] = {}  # decoded name -> method, canonical names
    for name, original in names.items():
        module, _, last = name.rpartition(".")
        if last in _CODES and (last != "codes" or f"{module}.codebooks" in names):
            siblings, method = _CODES[last]
            for known in ("gptq", "awq"):
                if last == "qweight" and declared is not None and declared.startswith(known):
                    method = known
            found[f"{module}.weight"] = method, [name, *(f"{module}.{word}" for word in siblings)]
        elif last == "weight" and checkpoint.tensors[original].dtype not in FLOATS:
            if f"{module}.SCB" in names:
                found[name] = "bitsandbytes", [name, f"{module}.SCB", f"{module}.weight_format"]
        elif ".weight." in name:
            weight = name.partition(".weight.")[0] + ".weight"
            rest = name.removeprefix(weight + ".")
            if rest.startswith(("absmax", "quant_map", "nested_", "quant_state")):
                found.setdefault(weight, ("bitsandbytes", [weight]))[1].append(name)
            elif rest in ("_data", "_scale", "_shift"):
                found.setdefault(weight, ("quanto", []))[1].append(name)
    left = dict(names)
    taken = {
        name: (method, tuple(left.pop(part) for part in parts if part in left))
        for name, (method, parts) in found.items()
    }
    return {name: refused for name, refused in taken.items() if refused[1]}, left


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
