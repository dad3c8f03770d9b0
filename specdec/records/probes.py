"""Probe records: what ``specdec doctor`` found out about a checkpoint on this machine, kept for the loads that follow.

A backend whose kernels could not be tried on this kind of device declares ``parity_needs_probe`` (see
``specdec.backends.ops.Capabilities``): parity is then bitwise only where a record of exactly this checkpoint, device,
library and kernels is stored and nothing in it differs. Whatever is missing, older, foreign or broken counts as no
record (``unproved`` says which).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import threading
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs

from specdec._version import __version__
from specdec.config import structure_options
from specdec.errors import ConfigError, UnsupportedError
from specdec.records.folders import cache_folder

if TYPE_CHECKING:
    from specdec.contract import ModelInfo

FORMAT = 1
SWITCH = "SPECDEC_PROBES"  # a folder for probe records, or "off": keep none
LIBRARIES = ("torch", "mlx", "mlx-metal", "triton")  # whose kernels compute

Kind = Literal["op", "pass", "state", "draft", "cycle"]
PROOF: frozenset[Kind] = frozenset(("op", "pass", "state"))  # kinds that a record needs to stand for exactness


@attrs.frozen(kw_only=True)
class ProbeIdentity:
    """Everything that the bits of a pass may depend on, as far as it can be asked."""

    model: str  # ModelInfo.fingerprint
    backend: str
    device: str
    dtype: str
    kernels: str
    max_rows: int
    processor: str
    system: str  # with its release: a driver or a system library may bring kernels
    libraries: str  # versions of LIBRARIES, those that are installed
    specdec: str

    @classmethod
    def of(cls, info: ModelInfo) -> ProbeIdentity:
        """The identity of a loaded target, here and now."""
        return cls(
            model=info.fingerprint,
            backend=info.backend,
            device=info.device,
            dtype=info.dtype,
            kernels=info.kernels,
            max_rows=info.max_rows,
            processor=platform.processor() or platform.machine(),
            system=platform.platform(terse=True),
            libraries=_libraries(),
            specdec=__version__,
        )

    def key(self) -> str:
        """The file's name: of what was probed, not of the versions, so that an older record is found and told."""
        parts = (self.model, self.backend, self.device, self.dtype)
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()

    def differences(self, other: ProbeIdentity) -> list[str]:
        """``libraries mlx 0.32.3, here mlx 0.32.4`` for every part in which ``other`` differs."""
        ours, theirs = attrs.asdict(self), attrs.asdict(other)
        return [f"{name} {theirs[name]}, here {ours[name]}" for name in ours if theirs[name] != ours[name]]


def _libraries() -> str:
    found = []
    for name in LIBRARIES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


@attrs.frozen(kw_only=True)
class Finding:
    """One comparison of blocks of rows with the same rows one by one."""

    kind: Kind
    subject: str  # what was compared: an op with its shapes, the logits after so many tokens
    rows: int  # the longest block; all lengths from 2 were compared unless the subject says otherwise
    differing: tuple[int, ...] = ()  # lengths of the blocks in which some bit differs
    first_row: int | None = None  # of the shortest such block
    difference: float | None = None  # largest absolute difference over all blocks; None where it is not finite
    where: str = ""  # the array that differs first, where there are several

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
        return f"{self.subject}{where}: other bits in blocks of {self.blocks()} rows{row}; off by {off}"


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
    """What a pass of so many rows costs."""

    rows: int
    seconds: float  # median
    ratio: float  # to a pass of one row, the median of ratios taken milliseconds apart


@attrs.frozen(kw_only=True)
class ProbeRecord:
    """What was found, when, and what it belongs to."""

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


def probe_folder() -> Path | None:
    """Where records are kept: $SPECDEC_PROBES, else ``probes`` in specdec's cache folder. None: they are not kept."""
    chosen = os.environ.get(SWITCH)
    if chosen:
        return None if chosen == "off" else Path(chosen)
    return cache_folder() / "probes"


def stored_probe(info: ModelInfo) -> ProbeRecord | None:
    """The record of exactly this target on exactly this machine, whatever it says; None where there is none."""
    found = _look_up(info)
    return found if isinstance(found, ProbeRecord) else None


def unproved(info: ModelInfo, model: str) -> str | None:
    """Why no stored record shows that this target is exact here; None where one does.

    Args:
        model: what the user calls the checkpoint, for the command that makes a record.
    """
    found = _look_up(info)
    remedy = f"run specdec doctor {model} -s target.backend={info.backend} -s target.dtype={info.dtype}"
    if isinstance(found, str):
        return f"not probed on this machine{found}: {remedy}"
    if found.passed:
        return None
    reasons = [str(finding) for finding in found.differing] or [*found.notes, "its probe was not complete"]
    return f"the probe of {found.probed[:10]} found it not exact: {reasons[0]}"


def _look_up(info: ModelInfo) -> ProbeRecord | str:
    """The record that fits, or why there is none, to stand behind "not probed on this machine"."""
    folder = probe_folder()
    if folder is None:
        return f" ({SWITCH}=off)"
    if not info.fingerprint:
        return " (the target has no fingerprint)"
    identity = ProbeIdentity.of(info)
    path = folder / f"{identity.key()}.json"
    try:
        record = read_probe(path)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        return f" (the record {path} is broken: {error})"
    differences = identity.differences(record.identity)
    return f" as it is now ({'; '.join(differences)})" if differences else record


def read_probe(path: Path) -> ProbeRecord:
    """A record as ``write_probe`` wrote it.

    Raises: OSError when the file cannot be read, ValueError when it is no probe record.
    """
    told = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(told, dict) or told.pop("format", None) != FORMAT:
        raise ValueError(f"no probe record of format {FORMAT}")
    try:
        return structure_options(told, ProbeRecord)
    except ConfigError as error:
        raise ValueError(" ".join(error.message.split())) from error


def write_probe(record: ProbeRecord, folder: Path) -> Path:
    """Write a record under its own name, replacing the file atomically.

    Raises: UnsupportedError when it belongs to no checkpoint, or the folder cannot be written.
    """
    if not record.identity.model:
        raise UnsupportedError("a probe of a target without a fingerprint cannot be stored: it would fit any other")
    path = folder / f"{record.identity.key()}.json"
    text = json.dumps({"format": FORMAT, **attrs.asdict(record)}, indent=2, allow_nan=False)
    new = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            new.write_text(text + "\n", encoding="utf-8")
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UnsupportedError(
            f"the probe cannot be stored: {error.strerror or error}", file=path, try_=f"--no-store, or {SWITCH}=FOLDER"
        ) from error
    return path


def finite(value: float) -> float | None:
    """``value``, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None
