"""Report what is installed on this machine and what can run, without a model."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import attrs
import torch

from specdec._version import __version__
from specdec.backends.choice import auto_backend
from specdec.backends.cpu.compiler import Kernels, find_compiler, load_kernels
from specdec.contract import BackendSpec
from specdec.errors import SpecdecError
from specdec.records import machine
from specdec.records.probes import PROBES
from specdec.records.store import cache_folder
from specdec.registry import Kind, registry

_APPLE_ONLY = () if sys.platform == "darwin" else ("mlx-metal",)
_SHOWN_LIBRARIES = (*(name for name in machine.LIBRARIES if name not in _APPLE_ONLY), "numpy", "tokenizers")


@attrs.frozen(kw_only=True)
class BackendStatus:
    """One registered backend."""

    name: str
    origin: str
    available: bool
    reason: str  # why it cannot run here, or ""
    help: str


@attrs.frozen(kw_only=True)
class Memory:
    """Memory sizes in bytes; None if unknown."""

    total: int | None
    free: int | None  # available to a program, including file caches
    device: str = ""  # the accelerator's name, if there is one
    device_total: int | None = None
    device_free: int | None = None


@attrs.frozen(kw_only=True)
class MachineReport:
    """Software and hardware of this machine, and what can run."""

    specdec: str
    python: str
    system: str
    processor: str
    cores: int
    threads: int  # used by torch and the native kernels
    libraries: dict[str, str | None]  # versions; None: not installed
    compiler: str  # the command that builds native kernels, or why there is none
    kernels: str  # the native kernels, or why there are none
    kernels_available: bool
    backends: tuple[BackendStatus, ...]
    auto: str  # the backend that target.backend = "auto" chooses, or ""
    auto_reason: str
    failures: tuple[str, ...]  # plugins, or parts of them, that do not work
    memory: Memory
    cache_folder: str
    cache_bytes: int
    cache_problem: str  # why the cache folder cannot be used, or ""
    probe_folder: str | None  # None: probes are not stored

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return attrs.asdict(self)


def examine_machine() -> MachineReport:
    """Inspect this machine. Builds the native kernels if they are not cached."""
    backends = _backends()
    auto, auto_reason = _auto(backends)
    compiler, kernels, kernels_available = _native()
    cache = cache_folder()
    probes = PROBES.folder()
    return MachineReport(
        specdec=__version__,
        python=platform.python_version(),
        system=machine.system(),
        processor=machine.processor(),
        cores=machine.cores(),
        threads=torch.get_num_threads(),
        libraries={name: machine.library_version(name) for name in _SHOWN_LIBRARIES},
        compiler=compiler,
        kernels=kernels,
        kernels_available=kernels_available,
        backends=backends,
        auto=auto,
        auto_reason=auto_reason,
        failures=tuple(f"{failure} (during {failure.during})" for failure in registry().failures),
        memory=_memory(),
        cache_folder=str(cache),
        cache_bytes=_size(cache),
        cache_problem=_unwritable(cache),
        probe_folder=None if probes is None else str(probes),
    )


def _backends() -> tuple[BackendStatus, ...]:
    found = []
    for entry in registry().entries(Kind.BACKEND):
        spec = entry.spec
        assert isinstance(spec, BackendSpec)
        try:
            reason = spec.available()
        except Exception as error:  # noqa: BLE001 - a broken plugin is listed, not raised
            reason = f"{type(error).__name__}: {error}"
        found.append(
            BackendStatus(
                name=spec.name, origin=str(entry.origin), available=reason is None, reason=reason or "", help=spec.help
            )
        )
    return tuple(found)


def _auto(backends: tuple[BackendStatus, ...]) -> tuple[str, str]:
    """Return the backend that ``auto`` chooses, and why not the others."""
    try:
        chosen, notices = auto_backend()
    except SpecdecError as error:
        return "", error.message
    if notices:
        return chosen, "; ".join(notices)
    against = [
        f"{backend.name}: {backend.reason or 'can run, and is taken by name only'}"
        for backend in backends
        if backend.name != chosen
    ]
    return chosen, "; ".join(against)


def _native() -> tuple[str, str, bool]:
    """Describe the compiler and the native kernels, and whether the kernels are available."""
    found = find_compiler(os.environ.get("CXX", ""), os.environ.get("PATH", ""))
    compiler = " ".join(found) if isinstance(found, list) else f"none: {found.reason}"
    try:
        kernels = load_kernels()
    except SpecdecError as error:
        return compiler, error.message, False
    if isinstance(kernels, Kernels):
        return compiler, kernels.description, True
    return compiler, f"torch reference: {kernels.reason}", False


def _memory() -> Memory:
    total, free = machine.memory()
    device, device_total, device_free = _device_memory()
    return Memory(total=total, free=free, device=device, device_total=device_total, device_free=device_free)


def _device_memory() -> tuple[str, int | None, int | None]:
    """Return the accelerator's name, total and free memory from CUDA or MLX; ``"", None, None`` without one."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return torch.cuda.get_device_name(), total, free
    if machine.library_version("mlx") is not None:
        try:
            import mlx.core as mx

            if mx.default_device().type == mx.DeviceType.gpu:
                info = mx.device_info()
                most = int(info.get("max_recommended_working_set_size", 0)) or None
                used = int(mx.get_active_memory())
                return str(info.get("device_name", "GPU")), most, None if most is None else most - used
        except ImportError:  # the package without its library
            pass
    return "", None, None


def _size(folder: Path) -> int:
    """Sum the bytes of all files in a folder; files that disappear or cannot be read do not count."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.stat(os.path.join(parent, name)).st_size
    return size


def _unwritable(folder: Path) -> str:
    """Return why ``folder``, which may not exist yet, cannot be written to, or ""."""
    at = folder
    while not at.exists() and at != at.parent:
        at = at.parent
    if not at.is_dir():
        return f"{at} is no folder"
    if not os.access(at, os.W_OK):
        return f"{at} cannot be written"
    free = shutil.disk_usage(at).free
    return "" if free > 2**26 else f"the disk of {at} has {free >> 20} MiB left"
