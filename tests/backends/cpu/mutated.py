"""Kernels with a change that must be noticed."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from specdec.backends.cpu.compiler import FLAGS, SOURCES, CompileError, find_compiler
from specdec.backends.cpu.instruction_sets import InstructionSet
from specdec.backends.cpu.library import Kernels

Build = Callable[[str, str], Kernels]
"""``build(old, new)``: the library whose changed source has ``new`` for ``old``."""


def mutated(folder: Path, source: str, instruction_set: InstructionSet, others: Sequence[str] = ()) -> Build:
    """Builds libraries of a changed ``source`` and of ``others`` (by default all), named without suffix."""
    try:
        command = find_compiler(os.environ.get("CXX", ""), os.environ.get("PATH", "")).command
    except CompileError as error:
        pytest.skip(error.reason)
    compiler = [*command, *FLAGS, "-O1", *instruction_set.flags, f"-I{SOURCES}"]
    names = others or sorted(file.stem for file in SOURCES.glob("*.cpp") if file.stem != source)
    objects = [str(folder / f"{name}.o") for name in names]
    for name, made in zip(names, objects, strict=True):
        subprocess.run([*compiler, "-c", str(SOURCES / f"{name}.cpp"), "-o", made], check=True)

    def build(old: str, new: str) -> Kernels:
        text = (SOURCES / f"{source}.cpp").read_text()
        assert old in text
        changed = folder / f"{len(list(folder.iterdir()))}.cpp"
        changed.write_text(text.replace(old, new))
        library = changed.with_suffix(".so")
        subprocess.run([*compiler, "-shared", str(changed), *objects, "-o", str(library)], check=True)
        return Kernels(library, instruction_set.name, "a mutant", ctypes.CDLL(str(library)))

    return build
