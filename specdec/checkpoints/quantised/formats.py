"""Formats: how each weight of a checkpoint is stored, decided weight by weight from what the files hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import attrs

from specdec.checkpoints.names import canonical_names
from specdec.checkpoints.quantised import fp4, fp8, mlx, packed
from specdec.checkpoints.quantised.coding import Coding, Format
from specdec.checkpoints.quantised.hints import Hints
from specdec.checkpoints.quantised.parts import Parts, parts_of
from specdec.checkpoints.quantised.refused import refusals, unknown
from specdec.checkpoints.reader import Checkpoint
from specdec.errors import CheckpointError

# Each is asked in this order whether a weight's tensors look like it; dtypes keep them apart.
FORMATS: tuple[Format, ...] = (fp8.FORMAT, fp4.FORMAT, packed.PACKED, packed.PLAIN, mlx.FORMAT)


@attrs.frozen(kw_only=True)
class TensorFormat:
    """How one weight is stored.

    Attributes:
        format: for people and for counting: "bf16", "f32", "fp8-block 128x128", "fp8 per tensor", "fp8 per channel",
            "mxfp8", "nvfp4", "mxfp4", "int4 g128", "int8 per channel", "mlx-affine 4 bits g64", ...; the method's name
            where it is refused ("gptq", "unknown (U8)").
        shape: of the weight, decoded.
        stored_bytes: in the files, scales and the like included.
        tensors: names in the files of all tensors that make it up, codes first.
        error: why it cannot be read, or None. Nothing is raised, so that a broken checkpoint can be described.
    """

    format: str
    shape: tuple[int, ...]
    stored_bytes: int
    tensors: tuple[str, ...]
    error: CheckpointError | None = None
    coding: Coding | None = attrs.field(default=None, repr=False, eq=False)

    @property
    def quantised(self) -> bool:
        """Whether it is decoded when it is loaded."""
        return self.coding is not None


@attrs.frozen(eq=False)  # equal as mappings are
class Formats(Mapping[str, TensorFormat]):
    """Canonical name -> format, and what belongs to no weight."""

    _formats: dict[str, TensorFormat]
    activation_scales: tuple[str, ...]  # canonical names of scales of activations and of the KV cache
    ignored: tuple[str, ...]  # names in the files of vision and audio towers

    def __getitem__(self, name: str) -> TensorFormat:
        return self._formats[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._formats)

    def __len__(self) -> int:
        return len(self._formats)


def formats_of(checkpoint: Checkpoint) -> Formats:
    """The format of every weight that may belong to the text model: a mapping from canonical names of decoded weights.

    Only headers, ``config.json`` and a few tiny tensors (``weight_shape``) are read. A weight that several tensors
    make up is one entry, and those tensors have none of their own; neither have scales of activations. Plain tensors
    are entries too. A weight in a format that is refused is an entry with ``error``.

        >>> formats_of(checkpoint)["layers.0.mlp.gate_proj.weight"].format
        'fp8-block 128x128'

    Raises: CheckpointError when two tensors have one canonical name.
    """
    formats: Formats | None = checkpoint.derived.get("formats_of")
    if formats is None:
        formats = checkpoint.derived["formats_of"] = _formats_of(checkpoint)
    return formats


def _formats_of(checkpoint: Checkpoint) -> Formats:
    names = canonical_names(checkpoint.names)
    foreign, left = refusals(checkpoint, names)
    found = parts_of(checkpoint, left)
    hints = Hints.of(checkpoint.config)
    formats: dict[str, TensorFormat] = {}
    for name, original in found.plain.items():
        formats[name] = TensorFormat(
            format=checkpoint.stored_dtype(original).lower(),
            shape=checkpoint.shape(original),
            stored_bytes=_bytes(checkpoint, (original,)),
            tensors=(original,),
        )
    for name, refusal in foreign.items():
        formats[name] = TensorFormat(
            format=refusal.method,
            shape=checkpoint.shape(refusal.tensors[0]),
            stored_bytes=_bytes(checkpoint, refusal.tensors),
            tensors=refusal.tensors,
            error=refusal.error,
        )
    for name, parts in found.weights.items():
        formats[name] = _format(parts, hints, found.errors.get(name))
    ordered = {name: formats.pop(name) for name in names if name in formats}
    return Formats(ordered | formats, tuple(found.activation_scales), names.ignored)


def _format(parts: Parts, hints: Hints, error: CheckpointError | None) -> TensorFormat:
    """The format of one weight of several tensors (or of a lone one that is no floating-point tensor)."""
    tensors = (parts.codes, *parts.roles.values())
    size = _bytes(parts.checkpoint, tensors)
    name = f"unknown ({parts.dtype})"
    if error is None:
        for format in FORMATS:
            if not format.looks_like(parts):
                continue
            name = format.name
            try:
                coding = format.coding(parts, hints)
            except CheckpointError as refused:
                error = refused
                break
            return TensorFormat(
                format=coding.label, shape=coding.shape, stored_bytes=size, tensors=tensors, coding=coding
            )
    return TensorFormat(
        format=name, shape=parts.shape, stored_bytes=size, tensors=tensors, error=error or unknown(parts, hints)
    )


def _bytes(checkpoint: Checkpoint, names: Iterable[str]) -> int:
    return sum(checkpoint.size_of(name) for name in names)
