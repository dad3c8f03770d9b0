"""Compile the CPU kernels into the wheel, one library per instruction set, where there is a C++ compiler.

Without one the wheel is pure Python. An editable installation has no libraries either: its kernels are compiled on
first use (docs/decisions.md).
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CPU = Path("specdec", "backends", "cpu")


class Kernels(BuildHookInterface[Any]):
    """The build hook of ``[tool.hatch.build.targets.wheel.hooks.custom]``."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        compiler, instruction_sets = self._module("compiler"), self._module("instruction_sets")
        try:
            found = compiler.find_compiler(os.environ.get("CXX", ""), os.environ.get("PATH", ""))
        except compiler.CompileError as error:
            self.app.display_warning(f"the wheel has no CPU kernels and runs anywhere: {error.reason}")
            return
        self._folder = tempfile.TemporaryDirectory(prefix="specdec-wheel-")
        for one in instruction_sets.of_this_architecture():
            library = Path(self._folder.name, f"{one.name}.so")
            if not one.packaged:
                continue
            try:
                compiler.compile_libraries(found, {library: one.flags})
            except compiler.CompileError as error:
                self.app.display_warning(f"the wheel has no CPU kernels for {one.name}: {error.reason}\n{error.detail}")
                continue
            self.app.display_info(f"compiled the CPU kernels for {one.name} ({found.version})")
            build_data["force_include"][str(library)] = str(CPU / "libraries" / library.name)
        if build_data["force_include"]:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()

    def _module(self, name: str) -> ModuleType:
        """A file of the package by itself: the package would import what is not installed where it is built."""
        spec = importlib.util.spec_from_file_location(name, Path(self.root) / CPU / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def _platform() -> str:
    """The platform tag of what the compiler makes by default; a universal Python still compiles for one processor."""
    name = sysconfig.get_platform().replace("universal2", platform.machine())
    return name.replace("-", "_").replace(".", "_")
