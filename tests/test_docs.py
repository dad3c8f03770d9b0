"""The documentation is executed: snippets of README and docs, the examples, and the reference against the code.

Blocks of a page run in their order, in an empty folder and with plugins of their own:

* ``python``: in one namespace per page;
* ``bash`` and ``console``: lines that start with ``specdec``, through the command line's own entry point (``check``
  with a sample of its cases), scripts of Python, and ``pip install -e .``, after which the page's package is installed;
* ``toml``: must load as a configuration, unless it is ``pyproject.toml``;
* ``{literalinclude}``: what is included, with the caption as its name; further pieces belong to the same file.

A block whose first line is ``# NAME``, such as ``# run.toml``, is written to that file; Python is then not run.
``<!-- not run: REASON -->`` on the line before a block leaves it out. Pages under ``docs/contract`` have tests of their
own.
"""

import ast
import importlib.util
import inspect
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
from xml.etree import ElementTree

import attrs
import drawings
import module_map
import pytest
from click.testing import CliRunner

import specdec
from specdec import errors, hookspecs
from specdec.cli import main
from specdec.config import FieldError, load_config
from specdec.registry import Registry, use_registry
from tests.processes import HUNG, run_python
from tests.selection import cases

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
ELSEWHERE = DOCS / "contract"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted(page for page in DOCS.rglob("*.md") if ELSEWHERE not in page.parents),
]
SAMPLE = ("README.md",)
BLOCK = re.compile(
    r"^(?P<fence>```+)(?P<language>\w+|{literalinclude} \S+)\n(?P<body>.*?)^(?P=fence)$", re.MULTILINE | re.DOTALL
)
NOT_RUN = re.compile(r"<!-- not run: .+ -->\n\Z")


@attrs.frozen
class Block:
    language: str
    body: str
    line: int  # of the first line of the body


def blocks(page):
    text = page.read_text(encoding="utf-8")
    return [
        Block(found["language"], found["body"], text.count("\n", 0, found.start("body")) + 1)
        for found in BLOCK.finditer(text)
        if not NOT_RUN.search(text[: found.start()])
    ]


def commands(block):
    """The lines of a shell that are run."""
    lines = block.body.replace("\\\n", " ").splitlines() if block.language in ("bash", "console") else []
    typed = [line.removeprefix("$ ") for line in lines if block.language == "bash" or line.startswith("$ ")]
    return [line for line in typed if COMMAND.match(line)]


COMMAND = re.compile(r"(?:\w+=\S+ )*(?:specdec |python \w+\.py$|pip install -e \.$)")


def _name(page):
    return str(page.relative_to(ROOT))


def runs(page):
    return any(block.language in ("python", "toml") or commands(block) for block in blocks(page))


@pytest.fixture
def own_process(tmp_path, monkeypatch):
    """An empty folder; what a page registers, imports and installs there is gone afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    former, modules = use_registry(Registry()), dict(sys.modules)
    for name in [*modules]:
        if name.startswith(("first_", "specdec_gpt2")):  # another test has imported the example
            del sys.modules[name]
    try:
        yield
    finally:
        use_registry(former)
        for name in sys.modules.keys() - modules.keys():
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
                del sys.modules[name]
        sys.modules.update(modules)


@pytest.mark.docs
@pytest.mark.usefixtures("own_process")
@pytest.mark.parametrize("page", cases(filter(runs, PAGES), name=_name, sample=SAMPLE))
def test_the_snippets_of_a_page_run(page, monkeypatch):
    namespace = {"__name__": "snippet"}
    included = pathlib.Path()
    for block in blocks(page):
        name = re.match(r"# ([\w-]+\.(?:toml|py))\n", block.body)
        if name is not None and block.language in ("toml", "python"):
            pathlib.Path(name[1]).write_text(block.body, encoding="utf-8")
        if block.language.startswith("{literalinclude}"):
            caption = re.search(r"^:caption: (\S+)$", block.body, re.MULTILINE)
            included = pathlib.Path(caption[1]) if caption else included
            with included.open("a", encoding="utf-8") as file:
                file.write(_included(page.parent / block.language.split()[1], block.body) + "\n\n")
        elif block.language == "toml" and (name is None or name[1] != "pyproject.toml"):
            file_name = name[1] if name else "unnamed.toml"
            pathlib.Path(file_name).write_text(block.body, encoding="utf-8")
            load_config(file_name)
        elif block.language == "python" and name is None:
            if "llguidance" in _needs(block.body) and importlib.util.find_spec("llguidance") is None:
                pytest.skip("needs llguidance (pip install 'specdec-framework[grammar]')")
            code = "\n" * (block.line - 1) + block.body  # tracebacks name the line of the page
            exec(compile(code, str(page), "exec"), namespace)
        for line in commands(block):
            _run(line, page, monkeypatch)


def _included(path, options):
    """What Sphinx includes of a file of Python."""
    text = path.read_text(encoding="utf-8")
    wanted = dict(re.findall(r"^:([\w-]+): (.+)$", options, re.MULTILINE))
    if "pyobject" in wanted:
        [found] = [node for node in ast.parse(text).body if getattr(node, "name", "") == wanted["pyobject"]]
        first = min(node.lineno for node in (found, *found.decorator_list))
        return "\n".join(text.splitlines()[first - 1 : found.end_lineno])
    start = text.index(wanted["start-at"]) if "start-at" in wanted else 0
    return text[start : text.index(wanted["end-before"], start) if "end-before" in wanted else None]


def _run(line, page, monkeypatch):
    words = shlex.split(line, comments=True)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    if words[0] == "python":
        run_python(words[1])
    elif words[0] == "pip":
        offline = ["--no-deps", "--no-index", "--no-build-isolation"]
        run_python("-m", "pip", "install", *offline, "--target", "site", ".")
        monkeypatch.syspath_prepend(str(pathlib.Path("site").absolute()))
        use_registry(Registry())
    else:
        sample = ["--effort", "sample"] if words[1] == "check" else []
        outcome = CliRunner().invoke(main, [*words[1:], *sample], input="")
        assert outcome.exit_code == 0, f"{page.name}: {line}\n{outcome.output}\n{outcome.exception!r}"


def _needs(body):
    return ["llguidance"] if '"grammar"' in body else []


EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if not path.name.startswith("first_"))


@pytest.mark.docs
@pytest.mark.usefixtures("own_process")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(example, monkeypatch, capsys):
    if "mlx_lm" in example.name:
        pytest.importorskip("mlx_lm")
    monkeypatch.setattr(sys, "argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip()


# --- README and the gate ---------------------------------------------------------------------------------------------


def test_the_gate_runs_the_commands_of_the_readme():
    setup, tests = blocks(ROOT / "README.md")[0].body.splitlines()
    assert setup.startswith("python3 -m venv .venv && .venv/bin/pip install -c constraints.txt .")
    assert setup.endswith("specdec generate")
    assert "pip install -c constraints.txt -e '.[dev]'" in tests
    assert ".venv/bin/pytest" in tests
    command = [ROOT / ".ci" / "run", "--commands"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HUNG)
    assert printed.stdout.splitlines() == [setup, tests]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_areas_of_the_gate_are_those_of_the_tree():
    """Every row names files that exist, and every room of the package is in a row."""
    areas = runpy.run_path(str(ROOT / ".ci" / "areas.py"))
    for prefixes, tests in areas["AREAS"]:
        assert all((ROOT / path).exists() for path in (*prefixes, *tests))
    assert all(areas["needed"](f"specdec/{room.name}/x.py") for room in (ROOT / "specdec").iterdir() if room.is_dir())
    assert areas["selected"](["tests/decoding/test_batch.py", "tests/conftest.py", "README.md"]) == ["tests"]
    assert areas["selected"](["specdec/backends/metal/ops.py"]) == ["tests/backends/metal"]


# --- links -----------------------------------------------------------------------------------------------------------


LINK = re.compile(r"\[[^\]]*\]\((?!\w+:)(?P<target>[^)#\s]+)[^)]*\)")


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_to_files_lead_somewhere(page):
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    targets = [found["target"] for found in LINK.finditer(text)]
    assert [target for target in targets if not (page.parent / target).exists()] == []


# --- architecture ----------------------------------------------------------------------------------------------------


def files_entered(call):
    """Files of specdec, apart from ``backends/``, in which a function starts during ``call``."""
    package = pathlib.Path(specdec.__file__).parent
    found = set()

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(str(package)):
            found.add(pathlib.Path(frame.f_code.co_filename).relative_to(package).as_posix())

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {file for file in found if not file.startswith("backends/")}


def test_the_architecture_lists_the_files_on_the_way_to_the_first_token():
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    section = text.partition("\n## The way to the first token\n")[2].partition("\n## ")[0]
    on_the_way, beside = (
        re.findall(r"^\| `([\w/.]+)` \|", part, re.MULTILINE) for part in section.split("\nBeside the way")
    )
    lm = specdec.load("demo", depth=2)
    next(lm.stream("def add"))  # what is imported or compiled once is no part of the way
    entered = files_entered(lambda: next(lm.stream("def add")))
    assert len(on_the_way) <= 10
    assert len(entered) <= 21
    assert set(on_the_way) <= entered
    assert [file for file in entered - set(on_the_way) if not file.startswith(tuple(beside))] == []
    assert [name for name in beside if not any(file.startswith(name) for file in entered)] == []


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_a_drawing_is_well_formed_and_takes_its_colours_from_the_page(name):
    drawn = drawings.DRAWINGS[name]()
    ElementTree.fromstring(drawn)
    assert not re.search(r"fill=|stroke=|#[0-9a-f]{3}", drawn.replace("url(#head)", ""))


def test_the_list_of_modules_has_every_module():
    listed = re.findall(r"^\| `([\w/.]+)` \| \S", module_map.modules_markdown(), re.MULTILINE)
    files = {path.relative_to(module_map.PACKAGE).as_posix() for path in module_map.PACKAGE.rglob("*.py")}
    assert set(listed) == files - {"__init__.py", "__main__.py", "_version.py"}
    assert len(listed) == len(set(listed))


# --- the reference ---------------------------------------------------------------------------------------------------


def test_the_reference_describes_every_hook():
    text = (REFERENCE / "hooks.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## `(\w+)\(([^)]*)\)`$", text, re.MULTILINE)
    hooks = [
        (name, ", ".join(inspect.signature(hook).parameters))
        for name, hook in vars(hookspecs).items()
        if name.startswith("specdec_")
    ]
    assert headings == hooks


def test_the_reference_lists_every_error():
    text = (REFERENCE / "errors.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", text, re.MULTILINE))
    classes = {
        name: cls.__bases__[0].__name__
        for name, cls in vars(errors).items()
        if inspect.isclass(cls) and cls.__module__ == "specdec.errors"
    }
    classes |= {FieldError.__name__: FieldError.__bases__[0].__name__}  # of specdec.config
    assert listed == classes


def test_the_reference_of_the_python_api_has_every_public_name():
    text = (REFERENCE / "api.md").read_text(encoding="utf-8")
    listed = {name.rpartition(".")[2] for name in re.findall(r"auto(?:class|function):: (\S+)", text)}
    covered = listed | {"SpecdecError", "hookimpl", "__version__"}  # in the errors' module; a marker; a string
    assert set(specdec.__all__) - covered == set()


def test_getting_started_shows_the_output_of_a_real_run():
    page = (DOCS / "getting-started.md").read_text(encoding="utf-8")
    shown = page.partition("generate`: begin -->")[2].partition("<!-- output")[0]
    report = CliRunner().invoke(main, ["generate", "--max-new-tokens", "8", "--stats"])
    labels = re.findall(r"^([a-z]+)  ", report.stderr, re.MULTILINE)
    assert len(labels) > 5
    assert [label for label in labels if f"\n{label}  " not in shown] == [], "run `just sample-output`"
