"""Detect the storage format of each weight of a checkpoint from the files."""

from __future__ import annotations

import attrs

from specdec.checkpoints.names import canonical_names
from specdec.checkpoints.quantised import fp4, fp8, gguf, mlx, packed
from specdec.checkpoints.quantised.coding import Coding, Format
from specdec.checkpoints.quantised.hints import Hints
from specdec.checkpoints.quantised.parts import Parts, is_activation_scale, parts_of
from specdec.checkpoints.quantised.refused import refusal, refusals, unknown
from specdec.checkpoints.reader import Checkpoint
from specdec.errors import CheckpointError

# Tried in this order; dtypes keep them apart.
FORMATS: tuple[Format, ...] = (fp8.FORMAT, fp4.FORMAT, packed.PACKED, packed.PLAIN, mlx.FORMAT, gguf.FORMAT)


@attrs.frozen(kw_only=True)
class TensorFormat:
    """How one weight is stored.

    Attributes:
        format: name for display and counting: "bf16", "f32", "fp8-block 128x128", "fp8 per tensor", "fp8 per channel",
            "mxfp8", "nvfp4", "mxfp4", "int4 g128", "int8 per channel", "mlx-affine 4 bits g64", ...; the method's name
            if it is refused ("gptq", "unknown (U8)").
        shape: shape of the decoded weight.
        stored_bytes: bytes in the files, with scales and the like.
        tensors: names in the files of all its tensors, codes first.
        error: why it cannot be read, or None. It is not raised, so that a broken checkpoint can be described.
    """

    format: str
    shape: tuple[int, ...]
    stored_bytes: int
    tensors: tuple[str, ...]
    error: CheckpointError | None = None
    coding: Coding | None = attrs.field(default=None, repr=False, eq=False)

    @property
    def quantised(self) -> bool:
        """Whether it is decoded on load."""
        return self.coding is not None


class Formats(dict[str, TensorFormat]):
    """Canonical name -> format, and the tensors that belong to no weight."""

    activation_scales: tuple[str, ...]  # canonical names; also KV-cache scales


def formats_of(checkpoint: Checkpoint) -> Formats:
    """The format of every weight that may belong to the text model, by canonical name of the decoded weight.

    Reads only headers, ``config.json`` and a few tiny tensors (``weight_shape``). A weight stored in several tensors is
    one entry; activation scales have none. Plain tensors are entries too. A weight in a refused format is an entry with
    ``error``.

        >>> formats_of(checkpoint)["layers.0.mlp.gate_proj.weight"].format
        'fp8-block 128x128'

    Raises: CheckpointError when two tensors have one canonical name.
    """
    formats: Formats | None = checkpoint.derived.get("formats_of")
    if formats is None:
        formats = checkpoint.derived["formats_of"] = _formats_of(checkpoint)
    return formats


def _formats_of(checkpoint: Checkpoint) -> Formats:
    names = canonical_names(checkpoint.tensors)
    refused, left = refusals(checkpoint, names)
    found, plain = parts_of(checkpoint, left)
    configs = {id(config): config for config in map(checkpoint.config_of, checkpoint.tensors)}
    hints = {key: Hints.of(config) for key, config in configs.items()}
    formats = {
        name: _stored(checkpoint, (original,), checkpoint.tensors[original].dtype.lower())
        for name, original in plain.items()
        if not is_activation_scale(name)
    }
    for name, (method, tensors) in refused.items():
        formats[name] = _stored(checkpoint, tensors, method, refusal(checkpoint, tensors[0], method))
    for name, (parts, error) in found.items():
        formats[name] = _format(parts, hints[id(checkpoint.config_of(parts.codes))], error)
    ordered = Formats({name: formats.pop(name) for name in names if name in formats} | formats)
    ordered.activation_scales = tuple(filter(is_activation_scale, plain))
    return ordered


def _stored(
    checkpoint: Checkpoint, tensors: tuple[str, ...], format: str, error: CheckpointError | None = None
) -> TensorFormat:
    """An entry for a weight that is not decoded; the shape is its first tensor's."""
    return TensorFormat(
        format=format,
        shape=checkpoint.tensors[tensors[0]].shape,
        stored_bytes=sum(checkpoint.tensors[name].size for name in tensors),
        tensors=tensors,
        error=error,
    )


def _format(parts: Parts, hints: Hints, error: CheckpointError | None) -> TensorFormat:
    """The format of a weight stored in several tensors, or in one that is not floating-point."""
    raw = _stored(parts.checkpoint, (parts.codes, *parts.roles.values()), f"unknown ({parts.dtype})", error)
    format = next((one for one in FORMATS if one.looks_like(parts)), None)
    if error is not None or format is None:
        return attrs.evolve(raw, error=error or unknown(parts, hints))
    try:
        coding = format.coding(parts, hints)
    except CheckpointError as refused:
        return attrs.evolve(raw, format=format.name, error=refused)
    return attrs.evolve(raw, format=coding.label, shape=coding.shape, coding=coding)
