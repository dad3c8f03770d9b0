"""Measure which clause catches each broken plugin: ``python -m tests.testing.strangers.catch`` writes ``caught.json``.

The whole kit runs on each plugin, in a process of its own, at quick effort and to the first failure; what is not caught
is tried again at full effort. Names as arguments limit it to those plugins; the others keep their entries.
"""

from __future__ import annotations

import json
import multiprocessing
import pathlib
import sys
from types import ModuleType
from typing import Any

from specdec import BackendSpec
from specdec.testing import OpsSubject, check_plugin
from specdec.testing.checks import EffortName
from tests.testing.strangers import backends, drafters, observers, policies, processors, targets, verifiers

FILE = pathlib.Path(__file__).with_name("caught.json")
MODULES = (drafters, verifiers, targets, policies, processors, observers, backends)


def name_of(module: ModuleType, kind: type[Any]) -> str:
    return f"{module.__name__.rpartition('.')[2]}.{kind.__name__}"


BROKEN = {name_of(module, kind): (module, kind) for module in MODULES for kind in module.BROKEN}


def plugin(name: str) -> Any:
    """What the kit takes for the plugin."""
    module, kind = BROKEN[name]
    return checkable(module.spec(kind))


def checkable(spec: Any) -> Any:
    """The spec itself, or a backend's operations."""
    return OpsSubject(make=lambda: spec.factory(None).ops("float32")) if isinstance(spec, BackendSpec) else spec


def caught(name: str) -> dict[str, str]:
    """The effort and the first clause that finds something; nothing if none does."""
    efforts: tuple[EffortName, ...] = ("quick", "full")
    for effort in efforts:
        failures = check_plugin(plugin(name), effort=effort, exit_first=True).failures
        if failures:
            return {"effort": effort, "clause": failures[0].check.id}
    return {}


if __name__ == "__main__":
    asked = sys.argv[1:] or list(BROKEN)
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in asked:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found[name] = pool.apply(caught, (name,))
        sys.stdout.write(f"{name} {found[name]}\n")
        FILE.write_text(json.dumps({name: found.get(name, {}) for name in BROKEN}, indent=1) + "\n")
