"""Record where and with what a figure was measured, for every measuring command."""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from specdec._version import __version__
from specdec.records import machine

if TYPE_CHECKING:
    from specdec.contract import ModelInfo

LIBRARIES = ("torch", "numpy", "tokenizers")
_PACKAGE = Path(__file__).resolve().parent.parent


@attrs.frozen(kw_only=True)
class Environment:
    """Machine, versions and model. Unknown values are None."""

    command: str  # the command line
    started: str  # UTC, ISO 8601
    specdec: str  # version
    commit: str | None  # of the specdec checkout, with "+" for modified files; None if installed
    python: str
    libraries: dict[str, str]  # versions
    system: str
    processor: str
    cores: int  # available to this process
    memory_bytes: int | None
    threads: int  # of torch and the native kernels
    load_1min: float | None  # the load average before the measurement
    model: str
    family: str
    fingerprint: str
    backend: str
    device: str
    dtype: str
    kernels: str
    parity: str

    @property
    def busy(self) -> bool:
        """Whether any programs used more than half a core in the minute before this record was made."""
        return self.load_1min is not None and self.load_1min > 0.5


def current_environment(info: ModelInfo, model: str = "") -> Environment:
    """The current record, for a loaded target."""
    import torch

    return Environment(
        command=" ".join(
            ["specdec" if Path(sys.argv[0]).stem in ("specdec", "__main__") else sys.argv[0], *sys.argv[1:]]
        ),
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        specdec=__version__,
        commit=commit(_PACKAGE.parent),
        python=platform.python_version(),
        libraries={name: machine.library_version(name) or "unknown" for name in LIBRARIES},
        system=machine.system(),
        processor=machine.processor(),
        cores=machine.cores(),
        memory_bytes=machine.memory()[0],
        threads=torch.get_num_threads(),
        load_1min=machine.load_1min(),
        model=model,
        family=info.family,
        fingerprint=info.fingerprint,
        backend=info.backend,
        device=info.device,
        dtype=info.dtype,
        kernels=info.kernels,
        parity=info.parity.value,
    )


def commit(folder: Path) -> str | None:
    """The short commit of the checkout with root ``folder``, followed by "+" if tracked files are modified.

    None if ``folder`` is not a checkout's root: an installed package may lie inside another repository.
    """
    if not (folder / ".git").exists():
        return None
    try:
        head = _git(folder, "rev-parse", "--short", "HEAD")
        return head + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):  # no git, no commit yet, or a checkout of another user
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()
