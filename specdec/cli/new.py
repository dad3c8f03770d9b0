"""``specdec new KIND NAME``: the repository of a plugin, with tests, a package and a workflow.

The module is the example of the tutorial under the plugin's name, so an example is kept in one place. The other
files are the templates in ``template/``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import attrs
import click

from specdec._version import __version__
from specdec.cli import output
from specdec.errors import ConfigError, did_you_mean
from specdec.files.reading import why

_TEMPLATES = Path(__file__).parent / "template"
_SHIPPED = _TEMPLATES / "shipped"  # in a package: what pyproject.toml's ``force-include`` puts there
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LONGEST = 40  # characters of a name
_RESERVED = ("auto", "none", "framework")  # words of the configuration, and specdec's own distribution
_MAIN = '\n\nif __name__ == "__main__":'


@attrs.frozen
class _Template:
    """What a kind of plugin starts from."""

    source: str  # of the module, in the project's tree
    checked: str  # the argument of ``parametrize_checks`` for the module ``plugin``
    use: str = ""  # how `specdec generate` is told to use it
    object: str = ""  # in the module, with hooks; by default the module itself has them


KINDS: Mapping[str, _Template] = {
    "drafter": _Template("examples/first_drafter.py", "drafter=plugin.specdec_drafters()[0]", "-s drafter.name={name}"),
    "verifier": _Template(
        "examples/first_verifier.py", "verifier=plugin.specdec_verifiers()[0]", "-s verifier.name={name}"
    ),
    "depth-policy": _Template(
        "examples/first_depth_policy.py", "depth_policy=plugin.specdec_depth_policies()[0]", "-s depth.name={name}"
    ),
    "logits-processor": _Template(
        "examples/first_logits_processor.py",
        "logits_processor=plugin.specdec_logits_processors()[0]",
        "-s 'generation.processors=[{{name=\"{name}\"}}]'",
    ),
    "observer": _Template("examples/first_observer.py", "observer=plugin.CycleLog", object="CycleLog"),
    "backend": _Template(
        "examples/first_backend.py",
        'ops=lambda: plugin.specdec_backends()[0].factory(None).ops("float32")',
        "-s target.backend={name}",
    ),
    "model-family": _Template(
        "plugins/specdec-gpt2/specdec_gpt2/__init__.py",
        "model_family=plugin.specdec_models()[0]",
        "-s target.model=FOLDER",
    ),
    "target": _Template(
        "examples/first_target.py",
        'forward_pass=lambda: plugin.specdec_forward_pass(TargetConfig(backend="{name}"))',
        "-s target.backend={name}",
    ),
}


@click.command()
@click.argument("kind")
@click.argument("name")
@click.option("--into", metavar="FOLDER", help="The folder, new or empty; by default specdec-NAME.")
def new(kind: str, name: str, into: str | None) -> None:
    """Make the repository of a new plugin.

    KIND is drafter, verifier, depth-policy, logits-processor, observer, backend, model-family or target. NAME is the
    name that a configuration selects; the package is called specdec-NAME. The plugin works as it is: the example of the
    tutorial, to be replaced by your own code. Tests, a package and a GitHub workflow are around it.
    """
    files = repository(kind, name)
    folder = Path(into if into is not None else f"specdec-{name}")
    _write(folder, files)
    console = output.console()
    console.print(f"{folder}: a {kind.replace('-', ' ')} called {name}, in {len(files)} files")
    console.print(f"next: cd {folder} && pip install -e '.[test]' && pytest")


def repository(kind: str, name: str) -> dict[str, str]:
    """The files of a plugin's repository, path to text.

    Raises: ConfigError for an unknown kind, and for a name that is impossible or taken.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    if kind not in KINDS:
        raise ConfigError(f"there is no kind of plugin {kind!r}.{did_you_mean(kind, KINDS)}", kinds=", ".join(KINDS))
    _check_name(name)
    template, module = KINDS[kind], f"specdec_{name.replace('-', '_')}"
    source = _module(_source(template.source), name)
    values = {
        "kind": kind.replace("-", " "),
        "name": name,
        "module": module,
        "entry": f"{module}:{template.object}" if template.object else module,
        "checked": template.checked.format(name=name),
        "use": template.use.format(name=name),
        "dependencies": [f"specdec-framework>={__version__}", *_imported(source)],
    }
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True
    )
    files = {}
    for template_name in environment.list_templates(["jinja"]):
        path = template_name.removesuffix(".jinja")
        files[f".{path}" if path.startswith("git") else path] = environment.get_template(template_name).render(values)
    return {**files, "LICENSE": _source("LICENSE"), f"{module}/__init__.py": source}


def _check_name(name: str) -> None:
    """Raises: ConfigError for a name that cannot be a plugin's, or is one's already."""
    from specdec.registry import registry

    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        raise ConfigError(
            f"a plugin's name is lower-case letters and digits, in words joined by '-'; it begins with a letter "
            f"and has at most {_LONGEST} characters; got {name!r}",
            try_="my-drafter",
        )
    registered = registry()
    taken = {
        *_RESERVED,
        *(entry.spec.name for entry in registered.entries()),
        *(plugin.name for _, plugin in registered.hooks()),
    }
    if name in taken:
        raise ConfigError(f"the name {name!r} is taken", try_=f"my-{name}")


def _source(path: str) -> str:
    """A file of the project: shipped with a package, or where it is in a source tree."""
    root = _SHIPPED if _SHIPPED.is_dir() else Path(__file__).parents[2]
    return (root / path).read_text(encoding="utf-8")


# --- the module ------------------------------------------------------------------------------------------------------


def _module(example: str, name: str) -> str:
    """An example without its main program, with the plugin's name in place of its own."""
    text = example.partition(_MAIN)[0].rstrip("\n") + "\n"
    used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    for line, package in re.findall(r"^(import (\w+)(?:\.\w+)*\n)", text, re.MULTILINE):
        if package not in used:  # the main program needed it
            text = text.replace(line, "", 1)
    text = re.sub(r"\n{3,}(?=import|from)", "\n\n", text)
    match = re.search(r'(?:Spec\(\s*name=|backend == )"([\w-]+)"', text)
    old = match[1] if match else "cycle-log"  # an observer has no spec
    text = re.sub(rf"\bspecdec_{old.replace('-', '_')}\b", f"specdec_{name.replace('-', '_')}", text)
    return re.sub(rf'("|``|specdec-){old}(?="| =|:)', rf"\g<1>{name}", text)


def _imported(source: str) -> list[str]:
    """What a module imports that is neither Python's nor ours; each is a distribution of that name."""
    packages = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            packages.add(node.module.partition(".")[0])
    return sorted(packages - {"specdec"} - sys.stdlib_module_names)


# --- writing ---------------------------------------------------------------------------------------------------------


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write all files. Raises: ConfigError for a folder with files in it, or one that cannot be written."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} is there already, and it is not an empty folder", try_="--into FOLDER")
        for path, text in files.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {why(error)}", try_="--into FOLDER") from error
