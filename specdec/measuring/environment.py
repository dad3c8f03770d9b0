"""Record where and with what a figure was measured, for every measuring command."""

from __future__ import annotations

import datetime
import platform
import sys
from pathlib import Path

import attrs
import psutil
import torch

from specdec._version import __version__
from specdec.records import machine

LIBRARIES = ("torch", "numpy", "tokenizers")


def _command() -> str:
    program = "specdec" if Path(sys.argv[0]).stem in ("specdec", "__main__") else sys.argv[0]
    return " ".join([program, *sys.argv[1:]])


@attrs.frozen(kw_only=True)
class Environment:
    """Machine, versions and model."""

    command: str = attrs.field(factory=_command)
    started: str = attrs.field(factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    specdec: str = __version__
    python: str = attrs.field(factory=platform.python_version)
    libraries: dict[str, str] = attrs.field(
        factory=lambda: {name: machine.library_version(name) or "unknown" for name in LIBRARIES}
    )
    system: str = attrs.field(factory=machine.system)
    processor: str = attrs.field(factory=machine.processor)
    cores: int = attrs.field(factory=machine.cores)  # available to this process
    memory_bytes: int = attrs.field(factory=lambda: machine.memory()[0])
    threads: int = attrs.field(factory=torch.get_num_threads)  # of torch and the native kernels
    load_1min: float = attrs.field(factory=lambda: psutil.getloadavg()[0])  # before the measurement
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
        return self.load_1min > 0.5
