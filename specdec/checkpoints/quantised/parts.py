"""Group the tensors of a checkpoint into weights, by name and dtype."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from specdec.checkpoints.reader import Checkpoint
from specdec.errors import CheckpointError

FLOATS = ("BF16", "F16", "F32", "F64")
_FUSED = (".experts.gate_up_proj", ".experts.down_proj")  # stacks of matrices, stored without ".weight"

# Role -> what a sibling's name has after "X.".
_ROLES: Mapping[str, tuple[str, ...]] = {
    "scale": ("weight_scale_inv", "weight_scale", "scale"),
    "scale_2": ("weight_scale_2",),
    "global_scale": ("weight_global_scale",),
    "shape": ("weight_shape",),
    "zero_point": ("weight_zero_point",),
    "g_idx": ("weight_g_idx",),
    "mlx_scale": ("scales",),  # MLX's three; "bias" is a parameter of the layer, "biases" belong to the groups
    "mlx_bias": ("biases",),
    "mlx_global_scale": ("global_scale",),
}
# The same after "X" for stacks that are parameters themselves: with or without "weight_".
_BARE_ROLES = {
    role: [f"_{part}" for word in words if word.startswith("weight_") for part in (word.removeprefix("weight_"), word)]
    for role, words in _ROLES.items()
}
_BARE_ROLES["scale"].append("_scales")
_BARE_CODES = ("_packed", "_weight_packed", "_blocks")
# Scales of activations and of the KV cache, which decoded weights do not use.
_ACTIVATION_SCALES = frozenset(
    f"{what}_{kind}"
    for what in ("input", "output", "activation", "q", "k", "v", "kv", "prob")
    for kind in ("scale", "global_scale", "zero_point")
)


def is_activation_scale(name: str) -> bool:
    """Whether a tensor scales activations, keys or values rather than weights."""
    last = name.rpartition(".")[2]
    return last in _ACTIVATION_SCALES or last.endswith(
        ("_proj_input_scale", "_proj_input_global_scale", "_proj_activation_scale")
    )


@attrs.frozen(kw_only=True)
class Parts:
    """The tensors of one weight.

    Attributes:
        name: canonical name of the decoded weight.
        codes: name in the files of the tensor with the values or codes.
        roles: role ("scale", "scale_2", "zero_point", ...) -> name in the files.
    """

    checkpoint: Checkpoint
    name: str
    codes: str
    roles: Mapping[str, str]

    @property
    def dtype(self) -> str:
        """The dtype of the codes, as safetensors spells it."""
        return self.checkpoint.tensors[self.codes].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The codes' shape."""
        return self.checkpoint.tensors[self.codes].shape

    def dtype_of(self, role: str) -> str | None:
        """The dtype of a sibling; None if there is none."""
        return self.checkpoint.tensors[self.roles[role]].dtype if role in self.roles else None

    def shape_of(self, role: str) -> tuple[int, ...]:
        """The shape of a sibling. Raises: CheckpointError if there is none."""
        return self.checkpoint.tensors[self.original(role)].shape

    def original(self, role: str) -> str:
        """The name of a sibling in the files. Raises: CheckpointError if there is none."""
        if role not in self.roles:
            wanted = _ROLES[role]
            raise self.error(
                f"the tensor {self.codes} ({self.dtype} {list(self.shape)}) needs "
                f"{'one of ' if len(wanted) > 1 else ''}{', '.join(wanted)} with it, but the files have none"
            )
        return self.roles[role]

    def error(self, message: str, **facts: object) -> CheckpointError:
        """An error that refuses this weight."""
        facts.setdefault("try_", "the checkpoint in bfloat16 that it was made from")
        return CheckpointError(message, file=self.checkpoint.tensors[self.codes].file, **facts)


def parts_of(
    checkpoint: Checkpoint, names: Mapping[str, str]
) -> tuple[dict[str, tuple[Parts, CheckpointError | None]], dict[str, str]]:
    """Group the tensors of a checkpoint by weight; ``names`` maps canonical names to those in the files.

    Returns: for every weight that is not a plain floating-point tensor, by its decoded name, the parts and why they
    contradict each other, if they do; and ``names`` without them.
    """
    weights: dict[str, tuple[Parts, CheckpointError | None]] = {}
    taken: set[str] = set()
    for name, original in names.items():
        if checkpoint.tensors[original].dtype in FLOATS:
            continue
        stem = _stem(name, names)
        if stem is None:
            continue
        decoded, roles, twice = _siblings(stem, names)
        parts = Parts(
            checkpoint=checkpoint, name=decoded, codes=original, roles={role: names[n] for role, n in roles.items()}
        )
        error = None
        if decoded in weights or (decoded in names and decoded != name):
            also = weights[decoded][0].codes if decoded in weights else names[decoded]
            error = parts.error(f"the tensors {also} and {original} mean the same weight ({decoded})")
        elif twice is not None:
            error = parts.error(f"the tensor {original} has two scales: {names[twice[0]]} and {names[twice[1]]}")
        weights[decoded] = parts, error
        taken.add(name)
        taken.update(roles.values())
    return weights, {name: original for name, original in names.items() if name not in taken and name not in weights}


def _stem(name: str, names: Mapping[str, str]) -> str | None:
    """The module (``X`` of ``X.weight_packed``) or parameter (``X`` of ``X_blocks``) of a codes tensor."""
    module, _, last = name.rpartition(".")
    if last in ("weight", "weight_packed"):
        return module
    if name.endswith(_FUSED):
        return name
    for suffix in _BARE_CODES:
        if last.endswith(suffix):
            stem = name.removesuffix(suffix)
            if any(stem + scale in names for scale in _BARE_ROLES["scale"]):
                return stem
    return None


def _siblings(stem: str, names: Mapping[str, str]) -> tuple[str, dict[str, str], tuple[str, str] | None]:
    """Name of the decoded weight, role -> canonical name, and two names of one role if any clash."""
    fused = stem.endswith(_FUSED)
    dotted = not fused and any(f"{stem}.{last}" in names for last in ("weight", "weight_packed"))
    roles: dict[str, str] = {}
    twice: tuple[str, str] | None = None
    for role, words in _ROLES.items():
        candidates = [f"{stem}.{word}" for word in words]
        if not dotted:
            candidates += [stem + suffix for suffix in _BARE_ROLES.get(role, ())]
        found = [candidate for candidate in candidates if candidate in names]
        if found:
            roles[role] = found[0]
        if len(found) > 1:
            twice = (found[0], found[1])
    return (f"{stem}.weight" if dotted else stem), roles, twice


def only(parts: Parts, *roles: str) -> None:
    """Refuse siblings that have no meaning in a format. Raises: CheckpointError naming one."""
    for role, name in parts.roles.items():
        if role not in roles:
            raise parts.error(
                f"the tensor {name} is stored with {parts.codes} ({parts.dtype}), where it has no known meaning"
            )
