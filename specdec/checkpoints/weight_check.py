"""The weight check: find missing, unused, misshaped, all-zero and non-finite tensors in a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from pathlib import Path

import attrs
import torch

from specdec.checkpoints.gguf.checkpoint import with_gguf_keys
from specdec.checkpoints.locate import is_gguf, listed
from specdec.checkpoints.names import canonical_name, text_config
from specdec.checkpoints.quantised import Formats, TensorFormat, declared_packed, formats_of, quantisation
from specdec.checkpoints.reader import INDEX_FILE, SINGLE_FILE, Checkpoint
from specdec.checkpoints.weights import unreadable
from specdec.errors import CheckpointError, nearest

_NAMED = 4  # names listed in a sentence
_MTP_KEYS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


@attrs.frozen
class TensorSpec:
    """A tensor that a model needs.

    Attributes:
        shape: shape implied by ``config.json``.
        group: "model", or the part it belongs to ("mtp"), whose absence has its own explanation.
        rounds: whether ``target.weights`` applies to it: a matrix that is not exact (see ``Weights.matrix``).
        plus: what is added to its values: 1.0 for a norm that is stored as an offset from 1.
    """

    shape: tuple[int, ...]
    group: str = "model"
    rounds: bool = False
    plus: float = 0.0


@attrs.frozen(kw_only=True)
class WeightCheck:
    """The result of a weight check. Names are canonical; a weight stored in several tensors has one name.

    ``unused`` excludes vision and audio towers, and activation scales (see ``notices``).
    """

    missing: list[str]
    unused: list[str]
    misshaped: list[tuple[str, tuple[int, ...], tuple[int, ...]]]  # name, got, expected
    unreadable: list[tuple[str, str, str]]  # name, unreadable format or one with broken scales, reason
    all_zero: list[str]  # matrices, and norms whose effective scale is 0; zero biases are normal
    non_finite: list[str]
    contradictions: list[str]  # between config.json and the files as a whole
    errors: list[CheckpointError]  # the most informative first; of the model without its MTP head
    head_errors: list[CheckpointError]  # of the MTP head, without which the model still runs
    notices: list[str]  # one sentence each

    def raise_for_errors(self) -> None:
        """Raise the first error, if any. Raises: CheckpointError naming file, tensor and shapes."""
        if self.errors:
            raise copy(self.errors[0])  # what was raised keeps its frames alive, and they keep this


def check_weights(checkpoint: Checkpoint, expected: Mapping[str, TensorSpec]) -> WeightCheck:
    """Compare a checkpoint with what a model needs, reading every expected value once.

    Of quantised weights it reads every scale, and every code if one can be NaN; nothing is kept decoded.

    Args:
        checkpoint: an open checkpoint.
        expected: canonical name -> spec, from ``specdec.models.weights.dry_run``.
    """
    formats = formats_of(checkpoint)
    missing = [name for name in expected if name not in formats]
    unused = [name for name in formats if name not in expected]
    misshaped: list[str] = []
    refused: dict[str, CheckpointError] = {}
    all_zero: list[str] = []
    non_finite: list[str] = []
    for name, spec in expected.items():
        if name not in formats:
            continue
        found = formats[name]
        error = unreadable(checkpoint, found)
        if error is not None:
            refused[name] = error
        elif not _same_shape(name, found.shape, spec.shape):
            misshaped.append(name)
        else:
            try:
                finite, zero = _values(checkpoint, found, -spec.plus)
            except CheckpointError as broken:
                refused[name] = broken
                continue
            if not finite:
                non_finite.append(name)
            elif zero and (len(spec.shape) > 1 or name.endswith("norm.weight") or spec.plus):
                all_zero.append(name)

    def errors_of(head: bool) -> list[CheckpointError]:
        """The errors of the MTP head's tensors, or of all others: one for each kind of finding."""
        findings = _Findings(checkpoint, formats, expected, head)
        found: list[tuple[Iterable[str], Callable[[list[str]], CheckpointError]]] = [
            (refused, lambda names: findings.unreadable([refused[name] for name in names])),
            (missing, lambda names: findings.missing(names, unused)),
            (misshaped, findings.misshaped),
            (non_finite, findings.non_finite),
        ]
        mine = [([name for name in names if (expected[name].group == "mtp") == head], error) for names, error in found]
        return [error(names) for names, error in mine if names]

    contradictions = list(_unpacked(checkpoint, formats))
    return WeightCheck(
        missing=missing,
        unused=unused,
        misshaped=[(name, formats[name].shape, expected[name].shape) for name in misshaped],
        unreadable=[(name, formats[name].format, error.message) for name, error in refused.items()],
        all_zero=all_zero,
        non_finite=non_finite,
        contradictions=[error.message for error in contradictions],
        errors=[*contradictions, *errors_of(head=False)],
        head_errors=errors_of(head=True),
        notices=[
            *checkpoint.notices,
            *_counted(
                (n for n in all_zero if len(expected[n].shape) > 1), "tensor is all zero", "tensors are all zero"
            ),
            *_counted(
                (n for n in all_zero if len(expected[n].shape) == 1),
                "norm has a scale of 0, so that nothing passes",
                "norms have a scale of 0, so that nothing passes",
            ),
            *_not_used((n for n in unused if n.startswith("mtp.")), "of an MTP head not used", 20),
            *_not_used(n for n in unused if not n.startswith("mtp.")),
            *_not_used(
                (n for n in formats.activation_scales if n not in expected),
                "with scales of activations or of the KV cache not used, on purpose: only weights are decoded",
            ),
        ],
    )


def _unpacked(checkpoint: Checkpoint, formats: Formats) -> Iterator[CheckpointError]:
    """Refuse plain weights under a config.json that says they are quantised: one of the two is wrong."""
    declared = declared_packed(checkpoint.config)
    if declared is None or any(found.quantised or found.error is not None for found in formats.values()):
        return
    matrices = [found for found in formats.values() if len(found.shape) > 1]
    kinds = ", ".join(sorted({found.format for found in matrices}))
    yield CheckpointError(
        f"config.json says that the weights are quantised, and all {len(matrices)} matrices in the files are plain "
        f"({kinds}): they may be codes without their scales",
        config=declared,
        file=checkpoint.path / "config.json",
        try_="the weights that this config.json came with; or, if they were decoded, a config.json without that key",
    )


def stripped_head(checkpoint: Checkpoint, prefix: str) -> str:
    """Say that config.json promises an MTP head and the files have no tensor under ``prefix``."""
    config = text_config(checkpoint.config)
    key = next((key for key in _MTP_KEYS if config.get(key) is not None), None)
    promise = "" if key is None else f" ({key!r} = {config[key]})"
    who = "mlx-lm leaves them out" if converted_by_mlx_lm(checkpoint) else "conversions often leave them out"
    others = sorted({file.name for file in checkpoint.path.glob("*.safetensors") if file not in checkpoint.files})
    beside = f"; not listed among the weights: {listed(others)}" if others else ""
    said = f"config.json promises an MTP head{promise} but there are no {prefix}* tensors; {who}{beside}"
    return with_gguf_keys(checkpoint.path, said, checkpoint.derived.get("gguf"))


def converted_by_mlx_lm(checkpoint: Checkpoint) -> bool:
    """Whether names or shapes show a conversion by mlx-lm. A GGUF file's experts have the same names."""
    return not is_gguf(checkpoint.path) and any(
        ".switch_mlp." in name
        or any(tensor.endswith(".scales") for tensor in found.tensors[1:])
        or ("conv1d" in name and len(found.shape) == 3 and found.shape[1:] == (found.shape[1], 1) != (1, 1))
        for name, found in formats_of(checkpoint).items()
    )


def _values(checkpoint: Checkpoint, found: TensorFormat, nothing: float = 0.0) -> tuple[bool, bool]:
    """Whether all values are finite, and whether all are ``nothing``. Raises: CheckpointError for an invalid scale.

    A plain tensor takes one pass over the stored bits: minimum and maximum propagate NaN and expose infinities, and
    torch computes them in the stored dtype, vectorised and without a copy.
    """
    if found.coding is not None:
        return found.coding.check()
    ends = [torch.stack(torch.aminmax(piece)) for piece in checkpoint.pieces(found.tensors[0]) if piece.numel()]
    if not ends:
        return True, False
    found_ends = torch.stack(ends)
    return bool(torch.isfinite(found_ends).all()), bool((found_ends == nothing).all())


def _same_shape(name: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Equal, or a depthwise convolution ``[C, 1, kc]`` stored as ``[C, kc]``, or vice versa.

    ``[C, kc, 1]`` is not accepted: that is MLX's layout, and conversions that use it have changed the norms too. A
    family that reads it asks for that shape.
    """
    if got == wanted or "conv" not in name:
        return got == wanted
    return {len(got), len(wanted)} == {2, 3} and {got, wanted} == {(got[0], 1, got[-1]), (got[0], got[-1])}


@attrs.frozen
class _Findings:
    """Turn lists of names into messages, about the MTP head (``head``) or the rest of the model."""

    checkpoint: Checkpoint
    formats: Formats
    expected: Mapping[str, TensorSpec]
    head: bool

    def _original(self, name: str) -> str:
        """The tensor in the files with a weight's values or codes."""
        return self.formats[name].tensors[0]

    def _file(self, name: str) -> Path:
        return self.checkpoint.tensors[self._original(name)].file

    def _source(self) -> Path:
        """The file that lists the tensors, or where an MTP head was taken from."""
        if self.head and self.checkpoint.head.path is not None:
            return self.checkpoint.head.path
        path = self.checkpoint.path
        files = (path, path / INDEX_FILE, path / SINGLE_FILE)  # a GGUF file, or what is in a folder
        return next((file for file in files if file.is_file()), files[-1])

    def unreadable(self, refused: list[CheckpointError]) -> CheckpointError:
        """The first refusal, with the number of others."""
        more = len(refused) - 1
        also = "1 more weight is refused" if more == 1 else f"{more} more weights are refused" if more else None
        return CheckpointError(refused[0].message, **{**refused[0].facts, "also": also})  # formats keep the original

    def missing(self, names: list[str], unused: list[str]) -> CheckpointError:
        cure = "a complete checkpoint whose tensors fit its config"
        if (canonical := canonical_name(names[0])) != names[0]:
            cure = f"{canonical} in the family's build: names are looked up without model. or language_model."
        return CheckpointError(
            f"the tensor {names[0]} {list(self.expected[names[0]].shape)} is missing{_more(names)}",
            file=self._source(),
            nearest=self._nearest(names[0], unused),
            quantised=quantisation(self.checkpoint.config),
            try_=cure,
        )

    def _nearest(self, name: str, unused: list[str]) -> str | None:
        """The existing tensor most like ``name``, preferring a similar unused one."""
        # candidates with the same last word first: comparing with every expert of every layer would take seconds
        last = name.rsplit(".", 2)[-2:]
        alike = [other for other in unused if other.rsplit(".", 2)[-2:] == last]
        match = nearest(name, alike) or nearest(name, unused) or nearest(name, self.formats)
        if match is None:
            return None
        original = self._original(match)
        return f"{match} {list(self.formats[match].shape)}{'' if original == match else f', stored as {original}'}"

    def misshaped(self, names: list[str]) -> CheckpointError:
        shapes = {name: (self.formats[name].shape, self.expected[name].shape) for name in names}
        # an MLX layout explains all other misfits
        mlx = [name for name, (got, wanted) in shapes.items() if len(wanted) > 1 and got == (wanted[0], wanted[-1], 1)]
        name = (mlx or names)[0]
        got, wanted = map(list, shapes[name])
        more = f" ({len(names)} tensors have other shapes)" if len(names) > 1 else ""
        cure = "config.json and weights of one and the same model"
        if mlx:
            cure = "the original checkpoint: this is MLX's layout, whose norms are changed too"
        return CheckpointError(
            f"the tensor {self._original(name)} has the shape {got}, config.json implies {wanted}{more}",
            file=self._file(name),
            try_=cure,
        )

    def non_finite(self, names: list[str]) -> CheckpointError:
        return CheckpointError(
            f"the tensor {self._original(names[0])}{_more(names)} holds NaN or infinity",
            file=self._file(names[0]),
            try_="download the file again; if that does not help, the checkpoint is broken",
        )


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more: {listed(names[1:], _NAMED)})" if len(names) > 1 else ""


def _counted(names: Iterable[str], single: str, several: str, limit: int = _NAMED) -> Iterator[str]:
    """One sentence about some tensors; names that differ only in numbers share a pattern, ``layers.*.bias (24)``."""
    names = list(names)
    patterns: dict[str, list[str]] = {}
    for name in names:
        patterns.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), []).append(name)
    if names:
        shown = [f"{pattern} ({len(same)})" if same[1:] else same[0] for pattern, same in patterns.items()]
        yield f"{len(names)} {single if len(names) == 1 else several}: {listed(shown, limit)}"


def _not_used(names: Iterable[str], what: str = "not used", limit: int = _NAMED) -> Iterator[str]:
    return _counted(names, f"tensor {what}", f"tensors {what}", limit)
