"""The rooms of ``specdec`` and their imports, read from the source. The architecture page and a test use it."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2] / "specdec"

ROOMS = (
    ("cli",),
    ("doctor",),
    ("measuring", "testing"),
    ("api",),
    ("pipeline",),
    ("decoding",),
    ("drafters", "verifiers", "policies", "processors"),
    ("models",),
    ("text", "backends"),
    ("checkpoints",),
    ("registry",),
    ("records",),
    ("sampling",),
    ("hookspecs",),
    ("config",),
    ("contract",),
    ("errors",),
)
"""Rooms and top-level modules, the topmost first. A room imports from lower lines only; those of one line are apart."""


def modules() -> dict[str, pathlib.Path]:
    """Every module of the package by its dotted name; a package's ``__init__`` has the package's name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str:
    """The room (or top-level module) that a module belongs to: the second part of its name."""
    return module.partition(".")[2].partition(".")[0]


def imports() -> dict[str, set[str]]:
    """The modules of ours that each module imports anywhere: at its top, in functions, and for type checking."""
    known = modules()
    return {name: set(_imported(name, path, known)) - {name} for name, path in known.items()}


def _imported(name: str, path: pathlib.Path, known: dict[str, pathlib.Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "specdec":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else str(node.module)


def upward() -> list[tuple[str, str]]:
    """Imports against ``ROOMS``: (module, what it imports). The package's own ``__init__`` names everything."""
    level = {room: number for number, line in enumerate(ROOMS) for room in line}
    found = []
    for module, imported in imports().items():
        here = room_of(module)
        if here in level:
            for other in sorted(imported):
                there = room_of(other)
                if there in level and there != here and level[there] <= level[here]:
                    found.append((module, other))
    return found


def circles() -> list[list[str]]:
    """Groups of modules that import each other, directly or not (Tarjan's strongly connected components)."""
    graph = imports()
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[-len(group) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return found
