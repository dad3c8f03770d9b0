"""Processes that tests start."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Collection, Mapping

ROOT = pathlib.Path(__file__).resolve().parent.parent
HUNG = 600  # seconds; a process that takes longer has hung, however busy the machine is


def run_python(
    *arguments: object,
    status: int = 0,
    cwd: pathlib.Path | None = None,
    env: Mapping[str, str] | None = None,
    without: Collection[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with ``arguments``, and check the exit status.

    The process has our environment, with ``env`` added and the variables in ``without`` removed, and imports this tree.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    inherited = {name: value for name, value in os.environ.items() if name not in without}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        cwd=cwd,
        env={**inherited, "PYTHONPATH": path, "PYTHONUTF8": "1", **(env or {})},
        capture_output=True,
        encoding="utf-8",
        timeout=HUNG,
    )
    assert done.returncode == status, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def run_specdec(*arguments: object, status: int = 0, **options: object) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own; options as for ``run_python``."""
    return run_python("-m", "specdec", *arguments, status=status, **options)  # type: ignore[arg-type]
