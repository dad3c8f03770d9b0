"""Probe records: what ``specdec doctor`` found out about a checkpoint on this machine, kept for later loads.

A backend whose kernels have not been tested on this kind of device declares ``parity_needs_probe`` (see
``specdec.backends.ops.Capabilities``). Parity is then bitwise only if a record of exactly this checkpoint, device,
library and kernels is stored and shows no difference. A missing, outdated, foreign or broken record does not count;
``unproved`` returns the reason.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, Self

import attrs

from specdec.config import structure_options
from specdec.contract import ModelInfo
from specdec.errors import ConfigError, UnsupportedError
from specdec.records.machine import system
from specdec.records.store import Identity, Store

PROBES = Store("probe record", "probes", "SPECDEC_PROBES", private=True)

Kind = Literal["op", "pass", "state", "draft", "cycle"]
PROOF: frozenset[Kind] = frozenset(("op", "pass", "state"))  # kinds that a record needs to prove exactness


@attrs.frozen(kw_only=True)
class ProbeIdentity(Identity):
    """Everything that the bits of a pass may depend on."""

    max_rows: int
    system: str  # with its release: a driver or a system library may bring kernels

    @classmethod
    def of(cls, info: ModelInfo, **own: Any) -> Self:
        """The identity of a loaded target, here and now."""
        return super().of(info, max_rows=info.max_rows, system=system(), **own)


@attrs.frozen(kw_only=True)
class Finding:
    """One comparison of blocks of rows with the same rows computed one by one."""

    kind: Kind
    subject: str  # what was compared: an op with its shapes, the logits after n tokens
    rows: int  # the longest block; all lengths from 2 were compared unless the subject says otherwise
    differing: tuple[int, ...] = ()  # lengths of the blocks in which some bit differs
    first_row: int | None = None  # of the shortest such block
    difference: float | None = None  # largest absolute difference over all blocks; None if not finite
    where: str = ""  # the array that differs first, if there are several

    @property
    def equal(self) -> bool:
        """Whether all bits agree."""
        return not self.differing

    def blocks(self) -> str:
        """The lengths of the blocks that differ: ``2, 4 to 8``."""
        return _ranges(self.differing)

    def __str__(self) -> str:
        if self.equal:
            return f"{self.subject}: equal bits in blocks of up to {self.rows} rows"
        off = "no finite number" if self.difference is None else f"at most {self.difference:.3g}"
        row = "" if self.first_row is None else f", first in row {self.first_row}"
        where = f" ({self.where})" if self.where else ""
        return f"{self.subject}{where}: different bits in blocks of {self.blocks()} rows{row}; off by {off}"


def _ranges(numbers: tuple[int, ...]) -> str:
    """``2, 4 to 8``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{low}" if low == high else f"{low} to {high}" for low, high in runs)


@attrs.frozen(kw_only=True)
class RowCost:
    """The cost of a pass by its number of rows."""

    rows: int
    seconds: float  # median
    ratio: float  # to a pass of one row, the median of ratios taken milliseconds apart


@attrs.frozen(kw_only=True)
class ProbeRecord:
    """The findings of a probe, their date, and the identity they belong to."""

    identity: ProbeIdentity
    probed: str  # UTC, ISO 8601
    findings: tuple[Finding, ...]
    costs: tuple[RowCost, ...] = ()
    draft_step: float | None = None  # seconds of one step of the MTP head
    notes: tuple[str, ...] = ()  # what could not be compared, one sentence each

    @property
    def differing(self) -> tuple[Finding, ...]:
        """The comparisons in which some bit differs."""
        return tuple(finding for finding in self.findings if not finding.equal)

    @property
    def passed(self) -> bool:
        """Whether ops, whole passes and states were all compared and no bit differs."""
        return {finding.kind for finding in self.findings} >= PROOF and not self.differing and not self.notes


def stored_probe(info: ModelInfo) -> ProbeRecord | None:
    """The record of exactly this target on this machine, passed or not; None if there is none."""
    found = _find(info)
    return found if isinstance(found, ProbeRecord) else None


def unproved(info: ModelInfo, model: str) -> str | None:
    """Why no stored record proves that this target is exact here; None if one does.

    Args:
        model: the user's name of the checkpoint, for the command that makes a record.
    """
    found = _find(info)
    if isinstance(found, str):
        remedy = f"run specdec doctor {model} -s target.backend={info.backend} -s target.dtype={info.dtype}"
        return f"not probed on this machine{f' ({found})' if found else ''}: {remedy}"
    if found.passed:
        return None
    reasons = [str(finding) for finding in found.differing] or [*found.notes, "its probe was not complete"]
    return f"the probe of {found.probed[:10]} found it not exact: {reasons[0]}"


def _find(info: ModelInfo) -> ProbeRecord | str:
    return PROBES.find(ProbeIdentity.of(info), _parse)


def read_probe(path: Path) -> ProbeRecord:
    """Read a record written by ``write_probe``.

    Raises: OSError when the file cannot be read, ValueError when it is not a probe record.
    """
    return _parse(PROBES.read(path))


def _parse(data: dict[str, Any]) -> ProbeRecord:
    try:
        return structure_options(data, ProbeRecord)
    except ConfigError as error:
        raise ValueError(" ".join(error.message.split())) from error


def write_probe(record: ProbeRecord, folder: Path) -> Path:
    """Write a record under its own name, replacing the file atomically.

    Raises: UnsupportedError when its target has no fingerprint, or the folder cannot be written.
    """
    if not record.identity.model:
        raise UnsupportedError("a probe of a target without a fingerprint cannot be stored: it would fit any target")
    path = folder / f"{record.identity.key()}.json"
    try:
        PROBES.write(path, record.identity, attrs.asdict(record))
    except OSError as error:
        raise UnsupportedError(
            f"the probe cannot be stored: {error.strerror or error}",
            file=path,
            try_=f"--no-store, or {PROBES.switch}=FOLDER",
        ) from error
    return path


def finite(value: float) -> float | None:
    """``value``, or None if JSON cannot represent it (NaN, infinity)."""
    return value if math.isfinite(value) else None
