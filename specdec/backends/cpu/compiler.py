"""Build the C++ kernels with the local compiler on first use, cache the library and load it.

The kernels are not shipped in wheels because ``-march=native`` makes them several times faster. The cache key covers
sources, flags, compiler version and processor, so a different machine rebuilds instead of crashing.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import structlog
import torch  # noqa: F401  (load torch's OpenMP runtime first, so that the kernels' soname resolves to it)

from specdec.errors import ConfigError, UnsupportedError
from specdec.records.store import cache_folder

log = structlog.get_logger(__name__)

SOURCES = Path(__file__).with_name("kernels")
SWITCH = "SPECDEC_CPU_KERNELS"  # auto, torch (never build) or native (unavailable is an error)
TARGET = "SPECDEC_CPU_TARGET"  # the compiler's name of the processor to build for (x86-64-v3); default native
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-ffp-contract=off",  # multiply-adds are fused only where written, since fusing changes the bits
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-Wno-psabi",
)
OPENMP = "-fopenmp"
BUILD_SECONDS = 300  # a compiler that takes longer has hung
_TAIL = 2000  # characters of compiler output kept in an error report


@attrs.frozen
class KernelsUnavailable:
    """Why the native kernels cannot be used."""

    reason: str  # one line
    detail: str = ""  # the end of the compiler's output


@attrs.frozen
class Kernels:
    """The loaded library."""

    path: Path
    description: str
    library: ctypes.CDLL = attrs.field(repr=False, eq=False)

    def function(self, name: str, arguments: str, result: Any = None) -> Any:
        """Return a C function. ``arguments`` has one letter per argument: p pointer, i int64, f float."""
        kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
        found = getattr(self.library, name)
        found.argtypes = [kinds[letter] for letter in arguments]
        found.restype = result
        return found


def load_kernels() -> Kernels | KernelsUnavailable:
    """Return the native kernels, built if necessary, or the reason why they are unavailable.

    Raises: UnsupportedError when SPECDEC_CPU_KERNELS=native asks for them and they are unavailable.
    """
    wanted = os.environ.get(SWITCH, "auto")
    if wanted not in ("auto", "torch", "native"):
        raise ConfigError(f"{SWITCH} takes auto, torch or native, got {wanted!r}")
    if wanted == "torch":
        return KernelsUnavailable(f"{SWITCH}=torch")
    environment = (os.environ.get(name, "") for name in ("CXX", "PATH"))
    kernels = _load(*environment, str(cache_folder()), target_processor())
    if wanted == "native" and isinstance(kernels, KernelsUnavailable):
        raise UnsupportedError(
            f"{SWITCH}=native, but the native kernels are unavailable: {kernels.reason}",
            output=kernels.detail or None,
            try_="a C++17 compiler on PATH (or in CXX), or SPECDEC_CPU_KERNELS=auto",
        )
    return kernels


def target_processor() -> str:
    """Return the processor to build kernels for: SPECDEC_CPU_TARGET, or ``native``."""
    return os.environ.get(TARGET) or "native"


@functools.cache  # one attempt per process and environment; a failed build is not repeated for every model
def _load(cxx: str, path: str, cache: str, processor: str) -> Kernels | KernelsUnavailable:
    command = find_compiler(cxx, path)
    if isinstance(command, KernelsUnavailable):
        return command
    return build(command, Path(cache), processor)


def find_compiler(cxx: str, path: str) -> list[str] | KernelsUnavailable:
    """Return the C++ compiler command: CXX (with any arguments), else c++, g++ or clang++ on PATH."""
    if cxx:
        command = shlex.split(cxx)
        found = shutil.which(command[0], path=path)
        if found is None:
            return KernelsUnavailable(f"CXX={cxx!r} is not an executable")
        return [found, *command[1:]]
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name, path=path):
            return [found]
    return KernelsUnavailable("no C++ compiler: CXX is not set and c++, g++ and clang++ are not on PATH")


def build(command: Sequence[str], cache: Path, processor: str = "native") -> Kernels | KernelsUnavailable:
    """Return the library built by ``command`` for ``processor``, from the cache if possible."""
    version = _version(command)
    if version is None:
        return KernelsUnavailable(f"{command[0]} --version failed")
    machine = f"-mcpu={processor}" if platform.machine() in ("arm64", "aarch64") else f"-march={processor}"
    failure = KernelsUnavailable("")
    for openmp in ((OPENMP,), ()):  # Apple's clang has no OpenMP: build for one thread
        flags = [*FLAGS, machine, *openmp]
        target = cache / f"cpu-kernels-{_key(command, flags, version)}.so"
        threads = "" if openmp else "; one thread, as this compiler has no OpenMP"
        description = f"native C++ ({version}, {machine}{threads})"
        result = _cached(target, description) or _compile(command, flags, target, description)
        if isinstance(result, Kernels):
            return result
        failure = failure if failure.reason else result
        if OPENMP not in result.detail and "omp" not in result.detail:
            break
    return failure


def _cached(target: Path, description: str) -> Kernels | None:
    if not target.exists():
        return None
    try:
        return Kernels(target, description, ctypes.CDLL(str(target)))
    except OSError as error:  # truncated by a full disk, or built for another libc: rebuild
        log.warning("cached_kernels_unusable", path=str(target), error=str(error))
        return None


def _compile(
    command: Sequence[str], flags: Sequence[str], target: Path, description: str
) -> Kernels | KernelsUnavailable:
    started = time.perf_counter()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as folder:
            objects = [Path(folder, source.stem + ".o") for source in _units()]
            steps = [
                [*command, *flags, "-c", str(source), "-o", str(result)]
                for source, result in zip(_units(), objects, strict=True)
            ]
            library = Path(folder, "kernels.so")
            link = [*command, *flags, "-shared", *map(str, objects), "-o", str(library)]
            if failure := _run_all(steps) or _run_all([link]):
                return failure
            os.replace(library, target)  # atomic: other processes never see a partial library
        log.info("kernels_built", path=str(target), elapsed_s=round(time.perf_counter() - started, 1))
        return Kernels(target, description, ctypes.CDLL(str(target)))
    except OSError as error:
        return KernelsUnavailable(f"the kernels cannot be built or loaded in {target.parent}: {error}")


def _run_all(commands: Sequence[Sequence[str]]) -> KernelsUnavailable | None:
    """Run compiler commands in parallel; return the first failure, or None."""
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        for command in commands
    ]
    failure = None
    for command, process in zip(commands, running, strict=True):
        try:
            output, _ = process.communicate(timeout=BUILD_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            output += f"\nkilled after {BUILD_SECONDS} s"
        if process.returncode and failure is None:
            failure = KernelsUnavailable(
                f"{Path(command[0]).name} failed with exit status {process.returncode}",
                f"{shlex.join(command)}\n{output[-_TAIL:]}",
            )
    return failure


def _units() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


def _version(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.partition("\n")[0].strip()


def _key(command: Sequence[str], flags: Sequence[str], version: str) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    for part in (*command, *flags, version, _processor()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


@functools.cache
def _processor() -> str:
    """Identify the processor that ``-march=native`` builds for, as far as the system reports it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            wanted = ("flags", "Features", "model name", "CPU part")
            lines = {line.strip() for line in file if line.startswith(wanted)}
        return "\n".join(sorted(lines))
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
