"""Break the engine at random places and count how often the tests notice.

    python tools/kill_rate.py [--count 300] [--seed 1] [--json FILE] [--commit COMMIT] [--same FILE]

Mutants are drawn by one seed over the files that decide what is generated. Each is one edit of the syntax tree: a
comparison, an operator, a condition, a constant or a statement. The tests of those rooms run until one fails, on two
workers; a mutant that hangs is killed too. ``--commit`` breaks and tests another commit of this repository, so that two
trees can be compared; ``--same FILE`` repeats the mutants of an earlier record whose lines still stand.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILES = (
    "specdec/decoding/*.py",
    "specdec/verifiers/*.py",
    "specdec/sampling.py",
    "specdec/policies/*.py",
    "specdec/drafters/mtp.py",
    "specdec/models/causal_lm.py",
    "specdec/contract.py",
)
# the mutant's own room first, then the quickest: one failure ends a run
TESTS = ("tests/verifiers", "tests/policies", "tests/decoding", "tests/testing", "tests/drafters", "tests/registry",
         "tests/models", "tests/records")  # fmt: skip
SECONDS = 1800  # after so long without an end the tests hang

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
}  # fmt: skip


def mutations(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """The edits of one node: a name, and a function that edits a copy of it in place."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
        yield "comparison", lambda n: n.ops.__setitem__(0, COMPARED[type(n.ops[0])]())
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in COMPUTED:
        yield "operator", lambda n: setattr(n, "op", COMPUTED[type(n.op)]())
    if isinstance(node, ast.BoolOp):
        yield "and/or", lambda n: setattr(n, "op", ast.Or() if isinstance(n.op, ast.And) else ast.And())
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield "condition", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
    if isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        yield "constant", lambda n: setattr(n, "value", not n.value if type(n.value) is bool else n.value + 1)
    if isinstance(node, ast.FunctionDef | ast.If | ast.For | ast.While | ast.With):
        for at, statement in enumerate(node.body):
            call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
            if call or isinstance(statement, ast.Assign | ast.AugAssign):
                yield f"statement {at} left out", lambda n, at=at: n.body.__setitem__(at, ast.Pass())


def sites(root: pathlib.Path) -> list[dict[str, Any]]:
    """Every possible mutant: its file, its node in the order of a walk, the line it changes, and the kind of edit."""
    found = []
    for path in sorted({path for pattern in FILES for path in root.glob(pattern)}):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for number, node in enumerate(ast.walk(ast.parse(text))):
            for kind, _ in mutations(node):
                changed = node.body[int(kind.split()[1])] if kind.startswith("statement") else node  # type: ignore[attr-defined]
                code = lines[changed.lineno - 1].strip()  # type: ignore[attr-defined]
                found.append({"file": str(path.relative_to(root)), "node": number, "kind": kind, "code": code})
    return found


def apply(root: pathlib.Path, mutant: dict[str, Any]) -> None:
    """Write the mutant into its file."""
    path = root / mutant["file"]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    node = list(ast.walk(tree))[mutant["node"]]
    dict(mutations(node))[mutant["kind"]](node)
    path.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")


def killed(tree: pathlib.Path, mutant: dict[str, Any]) -> bool:
    """Whether the tests fail, or hang, with this mutant."""
    path = tree / mutant["file"]
    text = path.read_text(encoding="utf-8")
    try:
        apply(tree, mutant)
        room = "tests/" + pathlib.Path(mutant["file"]).parts[1]
        tests = [test for test in sorted(TESTS, key=lambda test: test != room) if (tree / test).exists()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        try:
            done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return True
        return done.returncode != 0
    finally:
        path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--same", type=pathlib.Path, help="an earlier --json file")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trees = [pathlib.Path(folder, str(worker)) for worker in range(2)]
        for tree in trees:
            tree.mkdir()
            archive = subprocess.run(["git", "-C", ROOT, "archive", options.commit], capture_output=True, check=True)
            subprocess.run(["tar", "-x", "-C", tree], input=archive.stdout, check=True)
        drawn = sites(trees[0])
        if options.same:
            earlier = {(m["kind"], m["code"]) for m in json.loads(options.same.read_text())["mutants"]}
            drawn = [mutant for mutant in drawn if (mutant["kind"], mutant["code"]) in earlier]
        random.Random(options.seed).shuffle(drawn)
        drawn = drawn[: options.count]

        def judge(worker: int) -> None:
            for mutant in drawn[worker::2]:
                mutant["killed"] = killed(trees[worker], mutant)
                outcome = "killed" if mutant["killed"] else "survived"
                print(f"{outcome}: {mutant['file']}: {mutant['kind']}: {mutant['code']}", flush=True)

        with concurrent.futures.ThreadPoolExecutor(2) as workers:
            list(workers.map(judge, range(2)))
    kills = sum(mutant["killed"] for mutant in drawn)
    print(f"{kills} of {len(drawn)} mutants killed at {options.commit}")
    if options.json:
        options.json.write_text(
            json.dumps({"seed": options.seed, "commit": options.commit, "mutants": drawn}, indent=1)
        )


if __name__ == "__main__":
    main()
