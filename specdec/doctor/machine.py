"""Report what is installed on this machine and what can run, without a model."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from specdec._version import __version__
from specdec.backends.choice import auto_backend
from specdec.backends.cpu.bandwidth import bandwidths
from specdec.backends.cpu.compiler import CompileError, find_compiler
from specdec.backends.cpu.instruction_sets import available
from specdec.backends.cpu.library import Kernels, load_kernels
from specdec.errors import SpecdecError, UnsupportedError
from specdec.files.keeping import exposed
from specdec.records import machine
from specdec.records.store import cache_folder
from specdec.registry import Kind, registry

_APPLE_ONLY = () if sys.platform == "darwin" else ("mlx-metal",)
_SHOWN_LIBRARIES = (*(name for name in machine.LIBRARIES if name not in _APPLE_ONLY), "numpy", "tokenizers")


def examine_machine() -> dict[str, Any]:
    """Inspect this machine: software, hardware, and what can run, as plain JSON data.

    Builds the native kernels if they are not cached. What is unknown is None, or an empty text.
    """
    backends = _backends()
    auto, auto_reason = _auto(backends)
    kernels = _kernels()
    stream, product = bandwidths(kernels) if isinstance(kernels, Kernels) else (None, None)
    cache, cache_problem = _cache()
    return {
        "specdec": __version__,
        "python": platform.python_version(),
        "system": machine.system(),
        "processor": machine.processor(),
        "cores": machine.cores(),
        "threads": torch.get_num_threads(),  # of torch and the native kernels
        "libraries": {name: machine.library_version(name) for name in _SHOWN_LIBRARIES},
        "compiler": _compiler(),  # its command, or why there is none
        "kernels": kernels.description if isinstance(kernels, Kernels) else kernels,
        "kernels_available": isinstance(kernels, Kernels),
        "instruction_set": kernels.instruction_set if isinstance(kernels, Kernels) else "",
        "instruction_sets": [one.name for one in available()],  # that this processor has, widest first
        "stream_bandwidth": stream,  # bytes per second that the kernels' threads read from memory
        "product_bandwidth": product,  # bytes of bfloat16 weights per second that a product with one row reads
        "backends": backends,
        "auto": auto,
        "auto_reason": auto_reason,
        "failures": [f"{failure} (during {failure.during})" for failure in registry().failures],
        # bytes; what is free is available to a program, including file caches
        "memory": dict(zip(("total", "free"), machine.memory(), strict=True)) | _device_memory(),
        "cache_folder": "" if cache is None else str(cache),
        "cache_bytes": 0 if cache is None else _size(cache),
        "cache_problem": cache_problem,
    }


def _backends() -> list[dict[str, Any]]:
    """The registered backends; ``reason``: why one cannot run here, or ""."""
    found: list[dict[str, Any]] = []
    for entry in registry().entries(Kind.BACKEND):
        spec: Any = entry.spec
        reason = registry().unavailable(spec)
        about = {"available": reason is None, "reason": reason or "", "help": spec.help}
        found.append({"name": spec.name, "origin": str(entry.origin), **about})
    return found


def _auto(backends: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the backend that ``auto`` chooses, and why not the others."""
    try:
        chosen, notices = auto_backend()
    except SpecdecError as error:
        return "", error.message
    against = [
        f"{backend['name']}: {backend['reason'] or 'can run, and is taken by name only'}"
        for backend in backends
        if backend["name"] != chosen
    ]
    return chosen, "; ".join(notices or against)


def _compiler() -> str:
    """The command that compiles native kernels, or why there is none."""
    try:
        return " ".join(find_compiler(os.environ.get("CXX", ""), os.environ.get("PATH", "")).command)
    except CompileError as error:
        return f"none: {error.reason}"


def _kernels() -> Kernels | str:
    """The native kernels, or why there are none."""
    try:
        kernels = load_kernels()
    except SpecdecError as error:
        return error.message
    return kernels if isinstance(kernels, Kernels) else f"torch reference: {kernels.reason}"


def _device_memory() -> dict[str, Any]:
    """The accelerator's name, total and free memory from CUDA or MLX; "", None and None without one."""
    name, total, free = "", None, None
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
    elif machine.library_version("mlx") is not None:
        with contextlib.suppress(ImportError):  # the package without its library
            import mlx.core as mx

            if mx.default_device().type == mx.DeviceType.gpu:
                info = mx.device_info()
                name = str(info.get("device_name", "GPU"))
                total = int(info.get("max_recommended_working_set_size", 0)) or None
                free = None if total is None else total - int(mx.get_active_memory())
    return {"device": name, "device_total": total, "device_free": free}


def _size(folder: Path) -> int:
    """Sum the bytes of all files in a folder; files that disappear or cannot be read do not count."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.stat(os.path.join(parent, name)).st_size
    return size


def _cache() -> tuple[Path | None, str]:
    """Return the cache folder and why it cannot be used, or ""."""
    try:
        folder = cache_folder()
    except UnsupportedError as error:
        return None, error.message
    try:
        return folder, _unwritable(folder) or (exposed(folder) or "" if folder.exists() else "")
    except OSError as error:
        return folder, str(error)


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
