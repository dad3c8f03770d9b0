"""Imports point one way, down the rooms, and importing specdec is free."""

from docs._ext import module_map
from tests.processes import run_python

MOST_MODULES = 11  # beside the rooms, at the top of the package


def test_every_module_is_in_a_room_and_the_top_stays_small():
    rooms = {room for line in module_map.ROOMS for room in line}
    assert set(module_map.room_imports()) == rooms
    assert len(list(module_map.PACKAGE.glob("*.py"))) <= MOST_MODULES


def test_no_import_points_upward():
    assert module_map.upward() == []


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside functions and for type checking count too."""
    edges = {name: set() for name in module_map.modules()}
    for one in module_map.imports():
        edges[one.importer].add(one.imported)
    assert module_map.circles(edges) == []


def test_what_is_imported_when_it_is_needed_and_not_before():
    code = """
import sys
import specdec
heavy = ("triton", "mlx", "transformers", "torch")
plugins = ("specdec.drafters.", "specdec.verifiers.", "specdec.policies.", "specdec.models.", "specdec.backends.")
loaded = [name for name in sys.modules if name.split(".")[0] in heavy or name.startswith(plugins)]
assert not loaded, loaded
from specdec import Drafter, DrafterSpec, between, hookimpl  # what a plugin's module imports
loaded = [name for name in sys.modules if name.split(".")[0] in heavy or name.startswith(plugins)]
assert not loaded, loaded
import logging
handlers = logging.getLogger().handlers + logging.getLogger("specdec").handlers
assert all(isinstance(handler, logging.NullHandler) for handler in handlers), handlers
import specdec.processors.grammar
assert "llguidance" not in sys.modules
import specdec.testing
list(specdec.testing.iter_checks())
assert "pytest" not in sys.modules
from specdec.cli import output
with output.progress("hidden"):
    assert "rich.progress" not in sys.modules
from specdec.registry import registry  # asking whether a backend can run starts none
for name in ("cpu", "cuda", "metal"):
    registry().backend(name).available()
started = [name for name in sys.modules if name in ("triton", "mlx.core") or name.endswith(("cuda.ops", "metal.ops"))]
assert not started, started
"""
    run_python("-c", code)
