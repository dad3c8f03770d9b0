"""The weight audit: what a checkpoint lacks, has too much, has in another shape, or has as zeros, NaN or infinity."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import attrs
import torch

from specdec.checkpoints.locate import listed
from specdec.checkpoints.names import Names, canonical_names, text_config
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
    """

    shape: tuple[int, ...]
    optional: bool = False
    group: str = "model"


@attrs.frozen(kw_only=True)
class Audit:
    """What an audit found. Names are canonical; ``unused`` leaves vision and audio towers out (see ``ignored``)."""

    missing: list[str]
    unused: list[str]
    misshaped: list[tuple[str, tuple[int, ...], tuple[int, ...]]]  # name, got, expected
    unreadable: list[tuple[str, str]]  # name, stored dtype that is no floating-point weight
    all_zero: list[str]  # matrices only: a zero vector is an ordinary bias, or a norm stored as an offset from 1
    non_finite: list[str]
    ignored: list[str]  # names in the files
    errors: list[CheckpointError]  # what the lists mean, most telling first
    notices: list[str]  # one sentence each

    def raise_for_errors(self) -> None:
        """Raise what makes the checkpoint unusable. Raises: CheckpointError naming file, tensor and shapes."""
        if self.errors:
            raise self.errors[0]


class Weights:
    """Tensors by canonical name, loaded when they are asked for and not kept.

    A format that stores a weight in several tensors (``weight_packed``, ``weight_scale``, ...) will be joined to one
    name here, and its spec in ``audit``; so far every weight is one floating-point tensor.
    """

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, str]) -> None:
        self._checkpoint = checkpoint
        self._names = names

    def __getitem__(self, name: str) -> torch.Tensor:
        """A memory-mapped floating-point tensor. Raises: CheckpointError when there is none of that name."""
        original = self._names.get(name)
        if original is None:
            raise CheckpointError(
                f"the checkpoint has no tensor {name}", folder=self._checkpoint.path, nearest=nearest(name, self._names)
            )
        dtype = _unreadable(self._checkpoint, original)
        if dtype is not None:
            raise _quantised(self._checkpoint, original, dtype)
        return self._checkpoint.load(original)

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

    Args:
        checkpoint: an open one.
        expected: canonical name -> spec, from a family's ``tensors``.
    """
    names = canonical_names(checkpoint.names)
    missing = [name for name, spec in expected.items() if name not in names and not spec.optional]
    unused = [name for name in names if name not in expected]
    misshaped: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    unreadable: list[tuple[str, str]] = []
    all_zero: list[str] = []
    non_finite: list[str] = []
    for name in expected:
        if name not in names:
            continue
        original, wanted = names[name], expected[name].shape
        dtype = _unreadable(checkpoint, original)
        if dtype is not None:
            unreadable.append((name, dtype))
        elif not _same_shape(name, checkpoint.shape(original), wanted):
            misshaped.append((name, checkpoint.shape(original), wanted))
        else:
            finite, zero = _values(checkpoint.load(original))
            if not finite:
                non_finite.append(name)
            elif zero and len(wanted) > 1:
                all_zero.append(name)
    findings = _Findings(checkpoint, names, expected)
    return Audit(
        missing=missing,
        unused=unused,
        misshaped=misshaped,
        unreadable=unreadable,
        all_zero=all_zero,
        non_finite=non_finite,
        ignored=list(names.ignored),
        errors=[
            *findings.unreadable(unreadable),
            *findings.missing(missing, unused),
            *findings.misshaped(misshaped),
            *findings.non_finite(non_finite),
        ],
        notices=[*checkpoint.notices, *findings.all_zero(all_zero), *_unused_notices(unused)],
    )


def _values(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Whether all values are finite, and whether all are zero, in one pass over the stored bits.

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
    have changed the norms too.
    """
    if got == wanted or "conv" not in name:
        return got == wanted
    return {len(got), len(wanted)} == {2, 3} and {got, wanted} == {(got[0], 1, got[-1]), (got[0], got[-1])}


_FLOATS = ("BF16", "F16", "F32", "F64")


def _unreadable(checkpoint: Checkpoint, name: str) -> str | None:
    """The stored dtype of a tensor that is no plain floating-point weight, or None."""
    stored = checkpoint.stored_dtype(name)
    return None if stored in _FLOATS else stored


def _quantised(checkpoint: Checkpoint, name: str, dtype: str, others: int = 0) -> CheckpointError:
    also = f" (and {others} more like it)" if others else ""
    return CheckpointError(
        f"the tensor {name}{also} is stored as {dtype}: quantised formats are not read yet",
        file=checkpoint.file_of(name),
        format=_quantisation(checkpoint),
        try_="the checkpoint in bfloat16 that it was made from",
    )


def _quantisation(checkpoint: Checkpoint) -> str | None:
    """What config.json says about quantisation, in a few words."""
    config = text_config(checkpoint.config)
    for key in ("quantization_config", "quantization"):
        if isinstance(given := config.get(key), Mapping):
            for method in ("quant_method", "quant_algo", "format", "mode", "bits"):
                if method in given:
                    return f"{given[method]} (config.json, {key}.{method})"
            return f"config.json, {key}"
    return None


class _Findings:
    """Turns lists of names into sentences for people."""

    def __init__(self, checkpoint: Checkpoint, names: Names, expected: Mapping[str, TensorSpec]) -> None:
        self._checkpoint = checkpoint
        self._names = names
        self._expected = expected

    def _file(self, name: str) -> Path:
        return self._checkpoint.file_of(self._names[name])

    def _source(self) -> Path:
        """What lists the tensors: the index, or the only file."""
        files = {self._checkpoint.file_of(name) for name in self._checkpoint.names}
        return files.pop() if len(files) == 1 else self._checkpoint.path / INDEX_FILE

    def unreadable(self, found: list[tuple[str, str]]) -> Iterator[CheckpointError]:
        if found:
            name, dtype = found[0]
            yield _quantised(self._checkpoint, self._names[name], dtype, len(found) - 1)

    def missing(self, missing: list[str], unused: list[str]) -> Iterator[CheckpointError]:
        """One error per group; a group that is absent altogether is explained as such."""
        groups: dict[str, list[str]] = {}
        for name in missing:
            groups.setdefault(self._expected[name].group, []).append(name)
        for group, names in sorted(groups.items(), key=lambda item: item[0] != "model"):
            if group == "mtp" and not any(name.startswith("mtp.") for name in self._names):
                yield self._no_mtp_head()
                continue
            first = names[0]
            more = f" (and {len(names) - 1} more: {listed(names[1:], _NAMED)})" if len(names) > 1 else ""
            yield CheckpointError(
                f"the tensor {first} {list(self._expected[first].shape)} is missing{more}",
                file=self._source(),
                nearest=self._nearest(first, unused),
                quantised=_quantisation(self._checkpoint),
                try_="a complete checkpoint whose tensors fit its config.json",
            )

    def _nearest(self, name: str, unused: list[str]) -> str | None:
        """The existing tensor that is most like ``name``: an unused one where there is one close to it."""
        # candidates of the same last word first: comparing with every expert of every layer would take seconds
        last = name.rsplit(".", 2)[-2:]
        alike = [other for other in unused if other.rsplit(".", 2)[-2:] == last]
        match = nearest(name, alike[:_COMPARED]) or nearest(name, unused[:_COMPARED])
        match = match or nearest(name, list(self._names)[:_COMPARED])
        if match is None:
            return None
        original = self._names[match]
        return f"{original} {list(self._checkpoint.shape(original))}"

    def _no_mtp_head(self) -> CheckpointError:
        config = text_config(self._checkpoint.config)
        key = next((key for key in _MTP_KEYS if config.get(key) is not None), None)
        promise = "" if key is None else f" ({key} = {config[key]})"
        wanted = next(name for name, spec in self._expected.items() if spec.group == "mtp")
        prefix = "mtp." if wanted.startswith("mtp.") else ".".join(wanted.split(".")[:2]) + "."
        return CheckpointError(
            f"config.json promises an MTP head{promise} but there are no {prefix}* tensors; "
            "conversions often strip them",
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
            f"the tensor {self._names[name]} has the shape {list(got)}, config.json implies {list(wanted)}{more}",
            file=self._file(name),
            try_=cure,
        )

    def non_finite(self, found: list[str]) -> Iterator[CheckpointError]:
        if found:
            also = f" (and {len(found) - 1} more: {listed(found[1:], _NAMED)})" if len(found) > 1 else ""
            yield CheckpointError(
                f"the tensor {self._names[found[0]]}{also} holds NaN or infinity",
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


def _tensors(names: list[str]) -> str:
    return "1 tensor" if len(names) == 1 else f"{len(names)} tensors"


def _patterns(names: Iterable[str], limit: int) -> str:
    """``layers.*.mlp.gate.bias (24)``: names that differ only in numbers are one entry."""
    names = list(names)
    counts = Counter(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names)
    single = {re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name): name for name in names}
    return listed([f"{name} ({n})" if n > 1 else single[name] for name, n in counts.items()], limit)
