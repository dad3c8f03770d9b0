"""``specdec new``: a repository of every kind installs, passes its own tests, the kit, and the linters."""

import importlib.metadata
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
from click.testing import CliRunner

from specdec.cli import main
from specdec.cli.new import KINDS, repository
from tests.processes import HUNG, ROOT, run_python, run_specdec

PROGRAMS = pathlib.Path(sys.executable).parent


def run_new(*arguments, status=0):
    """The command's output, of both streams."""
    done = CliRunner().invoke(main, ["new", *map(str, arguments)])
    assert done.exit_code == status, done.output
    return done.output


def module_of(folder):
    [module] = folder.glob("specdec_*/__init__.py")
    return module


@pytest.fixture
def lint():
    """``lint(folder, "ruff", "check", ...)`` runs a program of the development environment in a folder."""

    def run(folder, program, *arguments):
        if not (PROGRAMS / program).exists():
            pytest.skip(f"needs {program}")
        command = [PROGRAMS / program, *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HUNG)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


# --- the files -------------------------------------------------------------------------------------------------------


def test_the_files_of_a_repository_are_clean(tmp_path, lint):
    for kind in KINDS:
        folder = tmp_path / kind
        assert "next: cd" in run_new(kind, "far-away", "--into", folder)
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        assert project["name"] == "specdec-far-away"
        module, _, plugin = project["entry-points"]["specdec"]["far-away"].partition(":")
        assert module_of(folder).parent.name == module
        assert not plugin or f"class {plugin}" in module_of(folder).read_text()
        assert "__main__" not in module_of(folder).read_text()
        assert all(text.endswith("\n") and not text.endswith("\n\n") for text in repository(kind, "far-away").values())
        for name in project["dependencies"][1:]:
            assert importlib.metadata.version(name)
    lint(tmp_path, "ruff", "check", "--isolated", "--select", "E4,E7,E9,F", "--line-length", "120", ".")
    folder = tmp_path / "drafter"  # these files are the same for every kind
    lint(folder, "check-jsonschema", "--builtin-schema", "vendor.github-workflows", ".github/workflows/ci.yml")
    lint(folder, "check-jsonschema", "--builtin-schema", "vendor.dependabot", ".github/dependabot.yml")
    lint(folder, "zizmor", "--offline", "--no-progress", ".github")


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_folder_with_files_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("kept")
    assert "not an empty folder" in run_new("drafter", "far-away", "--into", tmp_path, status=2)
    assert "not an empty folder" in run_new("drafter", "far-away", "--into", tmp_path / "mine", status=2)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


# --- installed, as a stranger would ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_repository_passes_its_own_tests_and_the_kit(kind, tmp_path):
    """Built by pip without a network into a folder, where its entry point is found; then what its README says."""
    folder, site = tmp_path / "made", tmp_path / "site"
    run_new(kind, "far-away", "--into", folder)
    run_python(
        *("-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps"),
        *("--no-build-isolation", "--target", site, folder),
    )
    env = {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), "SPECDEC_STRICT_PLUGINS": "1"}
    [use] = re.findall(r"^\$ specdec generate (.*)$", (folder / "README.md").read_text(), re.MULTILINE) or [""]
    if "FOLDER" not in use:
        run_specdec("generate", *shlex.split(use), "--max-new-tokens", "4", cwd=tmp_path, env=env)
    tests = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=folder, env=env)
    assert re.search(r"\d+ passed", tests.stdout), tests.stdout
    checked = run_specdec("check", "far-away", "--effort", "sample", cwd=tmp_path, env=env)
    assert "far-away passes" in checked.stdout
