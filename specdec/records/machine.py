"""Facts about this machine and its installed libraries, for records, reports and measurements."""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import psutil

LIBRARIES = ("torch", "mlx", "mlx-metal", "triton")  # libraries that provide kernels


@functools.cache
def processor() -> str:
    """The CPU's name if the system reports one (Linux, macOS), else its architecture.

    On Linux with its family and model: a virtual machine may call processors of several generations "AMD EPYC".
    """
    name = ""
    try:
        if sys.platform == "darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            name = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        else:
            text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
            facts = dict(re.findall(r"^(cpu family|model name|model)\s*:\s*(.*\S)", text, re.MULTILINE))
            name = facts.get("model name", "")
            if facts.keys() >= {"cpu family", "model name", "model"}:
                name += f" (family {facts['cpu family']}, model {facts['model']})"
    except (OSError, subprocess.SubprocessError):
        pass
    return name or platform.processor() or platform.machine()


def system() -> str:
    """The operating system and its release."""
    return platform.platform(terse=True)


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory() -> tuple[int, int]:
    """Bytes of main memory: total, and available to programs (file caches included)."""
    found = psutil.virtual_memory()
    return found.total, found.available


def library_version(name: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def library_versions(names: Sequence[str] = LIBRARIES) -> str:
    """``torch 2.13.0, triton 3.9.0``: those of ``names`` that are installed."""
    versions = ((name, library_version(name)) for name in names)
    return ", ".join(f"{name} {version}" for name, version in versions if version is not None)
