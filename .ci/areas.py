"""Which of the longer tests a change needs: one table of areas, decided from git.

    python3 .ci/areas.py COMMIT     the tests for what differs from COMMIT (work tree included), one path a line
    python3 .ci/areas.py --all      all of them

The short tests always run. A longer test (`addopts` in pyproject.toml names the markers) runs after a change of its
own file or of an area that it belongs to. A file that is in no row needs none.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
ALL = ("tests", "plugins")

# The first row whose prefix fits decides; tests and plugins stand for themselves.
AREAS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("specdec/backends/cuda/",), ("tests/backends/cuda",)),
    (("specdec/backends/metal/",), ("tests/backends/metal",)),
    (("specdec/backends/cpu/", "hatch_build.py"), ("tests/backends/cpu", "tests/models", "tests/decoding")),
    (("specdec/backends/",), ("tests/backends", "tests/models")),
    (("specdec/checkpoints/", "specdec/files/"), ("tests/checkpoints", "tests/files", "tests/models", "tests/fuzz")),
    (("specdec/models/",), ("tests/models", "tests/checkpoints", "tests/backends", "tests/drafters")),
    (("specdec/drafters/", "specdec/demo/"), ("tests/drafters", "tests/decoding")),
    (("specdec/testing/",), ("tests/testing", "plugins")),
    (("specdec/hosting/",), ("tests/hosting", "plugins")),
    (("specdec/measuring/", "specdec/cli/"), ("tests/measuring", "tests/cli")),
    (("specdec/serving/", "specdec/text/"), ("tests/serving", "tests/text", "tests/fuzz")),
    (("specdec/doctor/", "specdec/records/"), ("tests/records", "tests/cli", "tests/models")),
    (("specdec/config/", "specdec/checking/"), ("tests/config", "tests/cli", "tests/fuzz")),
    # the engine itself: decoding, verifiers, policies, processors, registry, and the modules at the top
    (("specdec/",), ("tests/decoding", "tests/verifiers", "tests/policies", "tests/processors", "tests/registry",
                     "tests/drafters", "tests/testing")),
    (("docs/", "examples/", "README.md", "CONTRIBUTING.md", "SECURITY.md"), ("tests/test_docs.py",)),
    (("benchmarks/",), ("tests/test_performance_gate.py",)),
)  # fmt: skip


def needed(path: str) -> tuple[str, ...]:
    """The tests that a change of this file needs, as paths or folders."""
    if path.startswith("tests/"):
        parts = path.split("/")
        folder = "/".join(parts[: 3 if parts[1] == "backends" else 2])
        if pathlib.PurePath(folder).suffix and not pathlib.PurePath(folder).name.startswith("test_"):
            return ("tests",)  # what all tests share
        return (folder,) if (ROOT / folder).exists() else ()
    if path.startswith("plugins/"):
        return ("plugins",)
    return next((tests for prefixes, tests in AREAS if path.startswith(prefixes)), ())


def changed(commit: str) -> list[str]:
    """The files that differ from ``commit``, deleted and untracked ones included."""
    git = ["git", "-C", str(ROOT)]
    names = subprocess.run([*git, "diff", "--name-only", "--no-renames", commit], capture_output=True, check=True)
    untracked = subprocess.run([*git, "ls-files", "--others", "--exclude-standard"], capture_output=True, check=True)
    return sorted({*names.stdout.decode().splitlines(), *untracked.stdout.decode().splitlines()})


def selected(paths: list[str]) -> list[str]:
    """The tests that these changes need; a folder stands for everything below it."""
    tests = {test for path in paths for test in needed(path)}
    return sorted(test for test in tests if not any(test.startswith(f"{other}/") for other in tests))


if __name__ == "__main__":
    if sys.argv[1:] == ["--all"]:
        print(*ALL, sep="\n")
    elif len(sys.argv) == 2:
        print(*selected(changed(sys.argv[1])), sep="\n")
    else:
        sys.exit(__doc__)
