"""Compile the C++ kernels into one library per instruction set.

Used on first use (``library.py``) and by the build of the package (``hatch_build.py``), which reads this file alone, so
it imports the standard library only.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).with_name("kernels")
FLAGS = (
    "-std=c++20",  # std::atomic::wait
    "-O3",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",  # multiply-adds are fused only where written, since fusing changes the bits
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-Wno-psabi",
)
TOGETHER = ("attention", "blocks", "delta", "norms", "pack", "search", "tape")
"""Sources that are one unit, since most of the time of each would go into the headers that they share."""
BUILD_SECONDS = 300  # a compiler that takes longer has hung
_TAIL = 2000  # characters of compiler output kept in an error report


class CompileError(Exception):
    """Why there is no library.

    Attributes:
        detail: the end of the compiler's output.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason  # one line
        self.detail = detail


class Compiler(NamedTuple):
    """A C++ compiler."""

    command: tuple[str, ...]
    version: str  # the first line that it prints


def find_compiler(cxx: str, path: str) -> Compiler:
    """Return the C++ compiler: CXX (with any arguments), else c++, g++ or clang++ on PATH. Raises: CompileError."""
    command = _command(cxx, path)
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, errors="replace", timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        raise CompileError(f"{command[0]} --version failed") from None
    return Compiler(tuple(command), done.stdout.partition("\n")[0].strip())


def _command(cxx: str, path: str) -> list[str]:
    if cxx.strip():
        if found := shutil.which(cxx, path=path):  # a path with spaces, not quoted
            return [found]
        try:
            program, *arguments = shlex.split(cxx)
        except ValueError as error:
            raise CompileError(f"CXX={cxx!r} is not a command: {error}") from None
        found = shutil.which(program, path=path)
        if found is None:
            raise CompileError(f"CXX={cxx!r} is not an executable")
        return [found, *arguments]
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name, path=path):
            return [found]
    raise CompileError("no C++ compiler: CXX is not set and c++, g++ and clang++ are not on PATH")


def compile_libraries(compiler: Compiler, libraries: Mapping[Path, Sequence[str]]) -> None:
    """Compile the kernels into each of ``libraries``, a path with the flags of its instruction set, in parallel.

    The folders of the libraries are writable by this user alone; objects are put there as well.
    Raises: CompileError with the first failure; OSError.
    """
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: -source.stat().st_size)  # the longest first
    together = [source for source in sources if source.stem in TOGETHER]
    alone = [[source] for source in sources if source.stem not in TOGETHER]
    units, links = [], []
    for library, flags in libraries.items():
        command = [*compiler.command, *FLAGS, *flags]
        objects = []
        for *others, source in filter(None, (*alone, together)):
            objects.append(str(library.with_name(f"{library.name}-{source.stem}.o")))
            before = [part for other in others for part in ("-include", str(other))]
            units.append([*command, *before, "-c", str(source), "-o", objects[-1]])
        links.append([*command, "-shared", *objects, "-o", str(library)])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            for steps in (units, links):
                list(pool.map(_run, steps))
        finally:
            pool.shutdown(cancel_futures=True)


def _run(command: Sequence[str]) -> None:
    """Run a compiler command. Raises: CompileError with what it printed, OSError."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=BUILD_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise CompileError(f"{Path(command[0]).name} was killed after {BUILD_SECONDS} s", shlex.join(command)) from None
    if done.returncode:
        raise CompileError(
            f"{Path(command[0]).name} failed with exit status {done.returncode}",
            f"{shlex.join(command)}\n{done.stdout[-_TAIL:]}",
        )
