"""What imports what in ``specdec/``, read from the source: for the drawing of the rooms and the test of import order.

A *room* is what a reader sees at the top of ``specdec/``: a folder, or a module beside the folders.
"""

from __future__ import annotations

import ast
import functools
import pathlib
from collections.abc import Iterator

import attrs

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "specdec"

ROOMS = (
    ("cli",),
    ("doctor",),
    ("measuring", "serving", "testing"),
    ("hosting",),
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
    ("exchange",),
    ("checking",),
    ("files",),
    ("errors", "locks", "logs"),
)
"""The order of the rooms, the topmost first: a room imports from later lines only."""


@attrs.frozen
class Import:
    """One import statement's target: ``importer`` needs ``imported`` (both dotted module names)."""

    importer: str
    imported: str
    kind: str
    """``load`` when the module is imported, ``typing`` for type checkers only, ``call`` inside a function."""
    line: int


def modules(package: pathlib.Path = PACKAGE) -> dict[str, pathlib.Path]:
    """Every module of the package by its dotted name, ``specdec.drafters`` for a folder's ``__init__``."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def imports(package: pathlib.Path = PACKAGE) -> list[Import]:
    """Every import of one of the package's modules by another, in the order of the files."""
    known = modules(package)
    found: dict[Import, None] = {}
    for name, path in known.items():
        for target, kind, line in _statements(ast.parse(path.read_text(encoding="utf-8")), "load"):
            while target and target not in known:  # ``from specdec.errors import ConfigError`` names a module's member
                target = target.rpartition(".")[0]
            if target and target != name:
                found[Import(name, target, kind, line)] = None
    return list(found)


def _statements(node: ast.AST, kind: str) -> Iterator[tuple[str, str, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, kind, child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
            yield from ((f"{child.module}.{alias.name}", kind, child.lineno) for alias in child.names)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            yield from _statements(child, "typing")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _statements(child, "call")
        else:
            yield from _statements(child, kind)


def room(module: str) -> str:
    """The room of a module: ``drafters`` for ``specdec.drafters.mtp``, ``specdec`` for the package itself."""
    return (module.split(".") + [""])[1] or module


def room_imports(kinds: tuple[str, ...] = ("load", "typing", "call")) -> dict[str, set[str]]:
    """For each room the rooms that it imports. The package's ``__init__``, ``__main__`` and version do not count."""
    edges: dict[str, set[str]] = {room(name): set() for name in modules()}
    for one in imports():
        here, there = room(one.importer), room(one.imported)
        if one.kind in kinds and here != there:
            edges[here].add(there)
    for left_out in ("specdec", "__main__", "_version"):
        edges.pop(left_out, None)
    return {name: {other for other in others if other in edges} for name, others in edges.items()}


def upward() -> list[Import]:
    """The imports against ``ROOMS``; the package itself gives what ``api`` gives, and stands beside it."""
    height = {name: number for number, line in enumerate(ROOMS) for name in line}
    height["specdec"] = height["api"]
    return [
        one
        for one in imports()
        if (here := room(one.importer)) != (there := room(one.imported))
        and here != "specdec"
        and here in height
        and height.get(there, len(ROOMS)) <= height[here]
    ]


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of names that import each other in a circle, each group sorted; empty where imports point one way."""
    reach = {name: _reachable(name, edges) for name in edges}
    groups = {
        tuple(sorted({name, *(o for o in reach[name] if name in reach[o])})) for name in edges if name in reach[name]
    }
    return [list(group) for group in sorted(groups)]


def modules_markdown() -> str:
    """Every module in import order, a fold per room: importers first, what they import below them."""
    known = modules()
    edges: dict[str, set[str]] = {name: set() for name in known}
    for one in imports():
        edges[one.importer].add(one.imported)
    lines = []
    for here in (name for line in ROOMS for name in line):
        own = {name: {o for o in edges[name] if room(o) == here} for name in known if room(name) == here}
        others = sorted({room(o) for name in own for o in edges[name]} - {here, "specdec", "_version"})
        title = f"{here} ({len(own)}), imports {', '.join(others) or 'nothing'}"
        lines += [f":::{{dropdown}} {title}", "| module | |", "|---|---|"]
        for name in (name for row in levels(own) for name in row):
            path = known[name].relative_to(PACKAGE).as_posix()
            lines.append(f"| `{path}` | {_summary(known[name])} |")
        lines += [":::", ""]
    return "\n".join(lines)


def _summary(path: pathlib.Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("``", "`").replace("|", "\\|").replace("<", "&lt;")


def _reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(edges[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += edges.get(name, ())
    return seen


def levels(edges: dict[str, set[str]]) -> list[list[str]]:
    """Names by height: the last list imports none of the others, each list imports from those after it only.

    Names in a circle share a height.
    """
    reach = {name: _reachable(name, edges) for name in edges}
    height: dict[str, int] = {}

    def of(name: str) -> int:
        if name not in height:
            below = [other for other in edges[name] if name not in reach[other]]
            height[name] = 0
            height[name] = max((of(other) + 1 for other in below), default=0)
        return height[name]

    for name in edges:
        of(name)
    for group in circles(edges):
        top = max(height[name] for name in group)
        height |= dict.fromkeys(group, top)
    return [sorted(n for n in edges if height[n] == h) for h in range(max(height.values()), -1, -1)]
