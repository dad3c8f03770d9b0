"""The pages of ``docs/contract``: signatures and headings come from the code, introductions and reasons from people.

``python -m tests.testing.contract_pages`` brings signatures and headings up to date; a new clause still needs its
reason.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
import re
import textwrap

from specdec.testing import Subject, iter_checks

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "docs" / "contract"
BLOCK = re.compile(r"<!-- signatures of ([\w.]+): (.+?) -->\n```python\n(.*?)```\n", re.S)
CLAUSE = re.compile(r"^## ([A-Z]\d+) (.+?)$\n\n(.+?)(?=^## |\Z)", re.S | re.M)
SPECIAL = ("__len__", "__getitem__")


def page(subject: Subject) -> pathlib.Path:
    return FOLDER / f"{subject.document}.md"


def signatures(module: str, names: str) -> str:
    """The public attributes and methods of classes, as the formatter lays them out."""
    return "\n\n".join(_signature(getattr(importlib.import_module(module), name)) for name in names.split(", "))


def _signature(class_: type) -> str:
    source = textwrap.dedent(inspect.getsource(class_))
    node, lines = ast.parse(source).body[0], source.splitlines()
    assert isinstance(node, ast.ClassDef)
    attributes, methods = [], []
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and not ast.unparse(item.target).startswith("_"):
            attributes.append(f"    {ast.unparse(item.target)}: {ast.unparse(item.annotation)}\n".replace("'", '"'))
        elif isinstance(item, ast.FunctionDef) and (item.name in SPECIAL or not item.name.startswith("_")):
            if "property" in [ast.unparse(decorator) for decorator in item.decorator_list]:
                attributes.append(f"    {item.name}: {ast.unparse(item.returns or ast.Constant(None))}  # a property\n")
            else:
                header = "\n".join(lines[item.lineno - 1 : item.body[0].lineno - 1]).split("  # noqa")[0]
                if len(header) > 116 and "\n" not in header:  # no room for the dots
                    header = header.replace("(", "(\n        ", 1).replace(") ->", "\n    ) ->")
                methods.append(f"{header} ...\n")
    between = "\n" if attributes and methods else ""
    return f"class {class_.__name__}:\n{''.join(attributes)}{between}{''.join(methods)}"


def headings(subject: Subject) -> dict[str, str]:
    """What heads each clause: its sentence, without the full stop."""
    return {one.id: one.sentence.replace("``", "`").removesuffix(".") for one in iter_checks(subject)}


def updated(subject: Subject) -> str:
    """The page with signatures and headings as the code has them now."""
    text, wanted = page(subject).read_text(encoding="utf-8"), headings(subject)

    def block(found: re.Match[str]) -> str:
        module, names, _ = found.groups()
        return f"<!-- signatures of {module}: {names} -->\n```python\n{signatures(module, names)}```\n"

    def heading(found: re.Match[str]) -> str:
        id_, sentence, body = found.groups()
        return f"## {id_} {wanted.get(id_, sentence)}\n\n{body}"

    return CLAUSE.sub(heading, BLOCK.sub(block, text))


if __name__ == "__main__":
    for subject in Subject:
        page(subject).write_text(updated(subject), encoding="utf-8")
