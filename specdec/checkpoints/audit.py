"""The weight audit: what a checkpoint lacks, has too much, has in another shape, or has as zeros, NaN or infinity."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import torch

from specdec.checkpoints.locate import listed
from specdec.checkpoints.names import text_config
from specdec.checkpoints.quantised import (
    FLOATS,
    Formats,
    StoredMatrix,
    TensorFormat,
    alike,
    check,
    decode,
    formats_of,
    quantisation,
)
from specdec.checkpoints.reader import INDEX_FILE, Checkpoint
from specdec.errors import CheckpointError, nearest

_NAMED = 4  # names in one sentence
_MTP_KEYS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
_COMPARED = 1000  # names that a missing one is compared with


@attrs.frozen
class TensorSpec:
    """What a family expects of one tensor.

    Attributes:
        shape: as ``config.json`` implies it.
        optional: absent without an error.
        group: "model", or the part that it belongs to ("mtp"), whose absence has its own explanation.
        mlx_shape: its shape where mlx-lm converted the checkpoint, when that is another one. A family that gives it
            also reads what mlx-lm changes with it: norms that are offsets from 1 hold the factor itself then.
        replaced_by: canonical name of a tensor that stands for this one where the files have it.
    """

    shape: tuple[int, ...]
    optional: bool = False
    group: str = "model"
    mlx_shape: tuple[int, ...] | None = None
    replaced_by: str = ""

    def required(self, formats: Mapping[str, TensorFormat]) -> bool:
        """Whether a checkpoint without the tensor is incomplete."""
        return not self.optional and self.replaced_by not in formats


@attrs.frozen(kw_only=True)
class Audit:
    """What an audit found. Names are canonical; a weight that is stored in several tensors has one.

    ``unused`` leaves out vision and audio towers (see ``ignored``) and scales of activations (see ``notices``).
    """

    missing: list[str]
    unused: list[str]
    misshaped: list[tuple[str, tuple[int, ...], tuple[int, ...]]]  # name, got, expected
    unreadable: list[tuple[str, str, str]]  # name, format that is not read or whose scales are broken, reason
    all_zero: list[str]  # matrices only: a zero vector is an ordinary bias, or a norm stored as an offset from 1
    non_finite: list[str]
    ignored: list[str]  # names in the files
    errors: list[CheckpointError]  # what the lists mean, most telling first
    notices: list[str]  # one sentence each
    headless: str = ""  # why the MTP head is not used, where mlx-lm converted the checkpoint

    def raise_for_errors(self) -> None:
        """Raise what makes the checkpoint unusable. Raises: CheckpointError naming file, tensor and shapes."""
        if self.errors:
            raise self.errors[0]


class Weights:
    """Weights by canonical name, loaded or decoded when they are asked for and not kept.

    A weight that is stored in several tensors (``weight_packed``, ``weight_scale``, ...) has one name,
    ``X.weight``, and its parts have none.

    Args:
        checkpoint: an open one.
        names: ``canonical_names`` of it; a plain tensor that they lack is not there.
        dtype: what quantised weights are decoded to: computed in float32, rounded once. bfloat16, which they are meant
            to replace, unless the model computes in another one. Floating-point tensors stay in their own.
        keeps: formats that ``stored`` leaves packed (``StoredMatrix.format``); the backend's ``Ops.keeps``.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Mapping[str, str],
        *,
        dtype: torch.dtype = torch.bfloat16,
        keeps: Collection[str] = frozenset(),
    ) -> None:
        self._checkpoint = checkpoint
        self._names = {
            name: found for name, found in formats_of(checkpoint).items() if name in names or found.tensors[1:]
        }
        self._dtype = dtype
        self._keeps = frozenset(keeps)

    def __getitem__(self, name: str) -> torch.Tensor:
        """A memory-mapped floating-point tensor, or a quantised one decoded into memory of its own.

        Raises: CheckpointError when there is none of that name, or it is in a format that is not read.
        """
        found = self._found(name)
        if found.coding is not None:
            return decode(found.coding, self._dtype)
        error = found.error or _not_floating(self._checkpoint, found.tensors[0])
        if error is not None:
            raise error
        return self._checkpoint.load(found.tensors[0])

    def _found(self, name: str) -> TensorFormat:
        found = self._names.get(name)
        if found is None:
            raise CheckpointError(
                f"the checkpoint has no tensor {name}", folder=self._checkpoint.path, nearest=nearest(name, self._names)
            )
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight, decoded. Raises: CheckpointError when there is none of that name."""
        return self._found(name).shape

    def stored(self, name: str) -> torch.Tensor | StoredMatrix:
        """A matrix for ``Ops.weight``: packed where the backend keeps its format, else as ``weights[name]`` gives it.

        Raises: CheckpointError as ``weights[name]`` does.
        """
        coding = self._found(name).coding
        if coding is None or coding.kept_as not in self._keeps or len(coding.shape) != 2:
            return self[name]
        return coding.stored(0, self._dtype)

    def stored_stack(self, names: str | Sequence[str]) -> Sequence[torch.Tensor] | Sequence[StoredMatrix]:
        """Matrices for ``Ops.stack``: of several weights, or those that one weight ``[E, N, K]`` holds.

        Packed where the backend keeps the format of all of them; otherwise none is. Raises: CheckpointError likewise.
        """
        if not isinstance(names, str):
            return alike([self.stored(name) for name in names])
        coding = self._found(names).coding
        if coding is None or coding.kept_as not in self._keeps or len(coding.shape) != 3:
            return self[names].unbind()
        return alike([coding.stored(index, self._dtype) for index in range(coding.shape[0])])

    def get(self, name: str) -> torch.Tensor | None:
        """A tensor, or None when the checkpoint has none of that name."""
        return self[name] if name in self._names else None

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def audit(checkpoint: Checkpoint, expected: Mapping[str, TensorSpec]) -> Audit:
    """Compare a checkpoint with what a family expects, and look at every expected value once.

    Of quantised weights every scale is looked at, and every code where one can be NaN; none is kept decoded.

    Args:
        checkpoint: an open one.
        expected: canonical name -> spec, from a family's ``tensors``.
    """
    formats = formats_of(checkpoint)
    findings = _Findings(checkpoint, formats, expected)
    headless = _headless(findings, formats, expected)
    if headless:
        expected = {name: spec for name, spec in expected.items() if spec.group != "mtp"}
    missing = [name for name, spec in expected.items() if name not in formats and spec.required(formats)]
    unused = [name for name in formats if name not in expected]
    misshaped: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    unreadable: list[tuple[str, str, str]] = []
    refused: list[CheckpointError] = []
    all_zero: list[str] = []
    non_finite: list[str] = []
    for name in expected:
        if name not in formats:
            continue
        found, spec = formats[name], expected[name]
        wanted = spec.shape
        error = found.error or (None if found.quantised else _not_floating(checkpoint, found.tensors[0]))
        if error is not None:
            unreadable.append((name, found.format, error.message))
            refused.append(error)
        elif found.shape != spec.mlx_shape and not _same_shape(name, found.shape, wanted):
            misshaped.append((name, found.shape, wanted))
        else:
            try:
                finite, zero = _values(checkpoint, found)
            except CheckpointError as broken:
                unreadable.append((name, found.format, broken.message))
                refused.append(broken)
                continue
            if not finite:
                non_finite.append(name)
            elif zero and len(wanted) > 1:
                all_zero.append(name)
    return Audit(
        missing=missing,
        unused=unused,
        misshaped=misshaped,
        unreadable=unreadable,
        all_zero=all_zero,
        non_finite=non_finite,
        ignored=list(formats.ignored),
        errors=[
            *findings.unreadable(refused),
            *findings.missing(missing, unused),
            *findings.misshaped(misshaped),
            *findings.non_finite(non_finite),
        ],
        notices=[
            *checkpoint.notices,
            *filter(None, [headless]),
            *findings.all_zero(all_zero),
            *_unused_notices(unused),
            *_activation_notices(name for name in formats.activation_scales if name not in expected),
        ],
        headless=headless,
    )


def _headless(findings: _Findings, formats: Formats, expected: Mapping[str, TensorSpec]) -> str:
    """Why a checkpoint that mlx-lm converted has no MTP head to use; "" where it has, or mlx-lm is not the reason.

    mlx-lm leaves heads out, and the promise in config.json. Other tools put them back; where the conversion changed the
    norms of the layers, no name and no shape tells whether they changed the head's too.
    """
    head = [name for name, spec in expected.items() if spec.group == "mtp"]
    if not head or not _by_mlx_lm(formats):
        return ""
    if not any(name in formats for name in head):
        promised = not all(expected[name].optional for name in head)
        return f"{findings.promise(head)}; mlx-lm leaves them out" if promised else ""
    if any(name in formats and spec.mlx_shape == formats[name].shape for name, spec in expected.items()):
        return (
            "the MTP head is not used: mlx-lm's conversion adds 1 to the norms of the layers, and nothing in the files "
            "tells whether that was done to the head's"
        )
    return ""


def _by_mlx_lm(formats: Formats) -> bool:
    """Whether names or shapes are those of mlx-lm's conversion."""
    return any(
        ".switch_mlp." in name
        or any(tensor.endswith(".scales") for tensor in found.tensors[1:])
        or ("conv1d" in name and len(found.shape) == 3 and found.shape[1:] == (found.shape[1], 1) != (1, 1))
        for name, found in formats.items()
    )


def _values(checkpoint: Checkpoint, found: TensorFormat) -> tuple[bool, bool]:
    """Whether all values are finite, and whether all are zero. Raises: CheckpointError for a scale without meaning."""
    if found.coding is not None:
        condition = check(found.coding)
        return condition.finite, condition.zero
    return _plain_values(checkpoint.load(found.tensors[0]))


def _plain_values(tensor: torch.Tensor) -> tuple[bool, bool]:
    """``_values`` of a floating-point tensor, in one pass over the stored bits.

    Minimum and maximum propagate NaN and expose infinities; torch computes them in the stored dtype, vectorised and in
    parallel, without a copy, so this costs what reading the memory costs.
    """
    if tensor.numel() == 0:
        return True, False
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high)), bool((low == 0) & (high == 0))


def _same_shape(name: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Equal, or a depthwise convolution ``[C, 1, kc]`` stored as ``[C, kc]`` or the other way round.

    ``[C, kc, 1]`` is not accepted although it has as many values: that is MLX's layout, and conversions that use it
    have changed the norms too. A family that knows that says so in ``TensorSpec.mlx_shape``.
    """
    if got == wanted or "conv" not in name:
        return got == wanted
    return {len(got), len(wanted)} == {2, 3} and {got, wanted} == {(got[0], 1, got[-1]), (got[0], got[-1])}


def _not_floating(checkpoint: Checkpoint, name: str) -> CheckpointError | None:
    """The refusal of a tensor of integers or the like, None for a floating-point one."""
    stored = checkpoint.stored_dtype(name)
    if stored in FLOATS:
        return None
    return CheckpointError(
        f"the tensor {name} is stored as {stored}, which is no weight and no known quantised format",
        file=checkpoint.file_of(name),
        config=quantisation(checkpoint.config),
        try_="the checkpoint in bfloat16 that it was made from",
    )


class _Findings:
    """Turns lists of names into sentences for people."""

    def __init__(self, checkpoint: Checkpoint, formats: Formats, expected: Mapping[str, TensorSpec]) -> None:
        self._checkpoint = checkpoint
        self._formats = formats
        self._expected = expected

    def _original(self, name: str) -> str:
        """The tensor in the files that holds a weight's values or codes."""
        return self._formats[name].tensors[0]

    def _file(self, name: str) -> Path:
        return self._checkpoint.file_of(self._original(name))

    def _source(self) -> Path:
        """What lists the tensors: the index, or the only file."""
        files = {self._checkpoint.file_of(name) for name in self._checkpoint.names}
        return files.pop() if len(files) == 1 else self._checkpoint.path / INDEX_FILE

    def unreadable(self, refused: list[CheckpointError]) -> Iterator[CheckpointError]:
        """The first refusal, with the number of the others."""
        more = len(refused) - 1
        if more < 1:
            yield from refused
            return
        also = "1 more weight is refused" if more == 1 else f"{more} more weights are refused"
        yield CheckpointError(refused[0].message, **refused[0].facts, also=also)  # a copy: formats keep the original

    def missing(self, missing: list[str], unused: list[str]) -> Iterator[CheckpointError]:
        """One error per group; a group that is absent altogether is explained as such."""
        groups: dict[str, list[str]] = {}
        for name in missing:
            groups.setdefault(self._expected[name].group, []).append(name)
        for group, names in sorted(groups.items(), key=lambda item: item[0] != "model"):
            if group == "mtp" and not any(name.startswith("mtp.") for name in self._formats):
                yield self._no_mtp_head()
                continue
            first = names[0]
            more = f" (and {len(names) - 1} more: {listed(names[1:], _NAMED)})" if len(names) > 1 else ""
            yield CheckpointError(
                f"the tensor {first} {list(self._expected[first].shape)} is missing{more}",
                file=self._source(),
                nearest=self._nearest(first, unused),
                quantised=quantisation(self._checkpoint.config),
                try_="a complete checkpoint whose tensors fit its config.json",
            )

    def _nearest(self, name: str, unused: list[str]) -> str | None:
        """The existing tensor that is most like ``name``: an unused one where there is one close to it."""
        # candidates of the same last word first: comparing with every expert of every layer would take seconds
        last = name.rsplit(".", 2)[-2:]
        alike = [other for other in unused if other.rsplit(".", 2)[-2:] == last]
        match = nearest(name, alike[:_COMPARED]) or nearest(name, unused[:_COMPARED])
        match = match or nearest(name, list(self._formats)[:_COMPARED])
        if match is None:
            return None
        return f"{self._original(match)} {list(self._formats[match].shape)}"

    def promise(self, head: list[str]) -> str:
        """That the tensors ``head`` of an MTP head are absent."""
        key = self._mtp_key()
        promise = "" if key is None else f" ({key} = {text_config(self._checkpoint.config)[key]})"
        prefix = "mtp." if head[0].startswith("mtp.") else ".".join(head[0].split(".")[:2]) + "."
        return f"config.json promises an MTP head{promise} but there are no {prefix}* tensors"

    def _mtp_key(self) -> str | None:
        config = text_config(self._checkpoint.config)
        return next((key for key in _MTP_KEYS if config.get(key) is not None), None)

    def _no_mtp_head(self) -> CheckpointError:
        head, key = [name for name, spec in self._expected.items() if spec.group == "mtp"], self._mtp_key()
        return CheckpointError(
            f"{self.promise(head)}; conversions often strip them",
            file=self._source(),
            try_=f"the original checkpoint, or {key or _MTP_KEYS[0]} = 0 in config.json and another drafter",
        )

    def misshaped(self, found: list[tuple[str, tuple[int, ...], tuple[int, ...]]]) -> Iterator[CheckpointError]:
        if not found:
            return
        # an MLX layout explains all the others
        mlx = [entry for entry in found if len(entry[2]) > 1 and entry[1] == (entry[2][0], entry[2][-1], 1)]
        name, got, wanted = (mlx or found)[0]
        more = f" ({len(found)} tensors have other shapes)" if len(found) > 1 else ""
        cure = "config.json and weights of one and the same model"
        if mlx:
            cure = "the original checkpoint: this is MLX's layout, whose norms are changed too"
        yield CheckpointError(
            f"the tensor {self._original(name)} has the shape {list(got)}, config.json implies {list(wanted)}{more}",
            file=self._file(name),
            try_=cure,
        )

    def non_finite(self, found: list[str]) -> Iterator[CheckpointError]:
        if found:
            also = f" (and {len(found) - 1} more: {listed(found[1:], _NAMED)})" if len(found) > 1 else ""
            yield CheckpointError(
                f"the tensor {self._original(found[0])}{also} holds NaN or infinity",
                file=self._file(found[0]),
                try_="download the file again; if that does not help, the checkpoint is broken",
            )

    def all_zero(self, found: list[str]) -> Iterator[str]:
        if found:
            verb = "tensor is" if len(found) == 1 else "tensors are"
            yield f"{len(found)} {verb} all zero: {listed(found, _NAMED)}"


def _unused_notices(unused: Iterable[str]) -> Iterator[str]:
    """The MTP head in a sentence of its own, then the rest with layers and experts counted as one pattern."""
    unused = list(unused)
    mtp = [name for name in unused if name.startswith("mtp.")]
    if mtp:
        yield f"{_tensors(mtp)} of an MTP head not used: {_patterns(mtp, 20)}"
    others = [name for name in unused if not name.startswith("mtp.")]
    if others:
        yield f"{_tensors(others)} not used: {_patterns(others, _NAMED)}"


def _activation_notices(names: Iterable[str]) -> Iterator[str]:
    """One sentence for all scales of activations, keys and values."""
    names = list(names)
    if names:
        yield (
            f"{_tensors(names)} with scales of activations or of the KV cache not used, on purpose: only weights are "
            f"decoded: {_patterns(names, _NAMED)}"
        )


def _tensors(names: list[str]) -> str:
    return "1 tensor" if len(names) == 1 else f"{len(names)} tensors"


def _patterns(names: Iterable[str], limit: int) -> str:
    """``layers.*.mlp.gate.bias (24)``: names that differ only in numbers are one entry."""
    names = list(names)
    counts = Counter(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names)
    single = {re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name): name for name in names}
    return listed([f"{name} ({n})" if n > 1 else single[name] for name, n in counts.items()], limit)
