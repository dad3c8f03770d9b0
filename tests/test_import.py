"""Importing specdec is free: no plugin, no tensor library's kernels, no logging set up."""

from __future__ import annotations

from tests.processes import run_python


def test_importing_specdec_loads_no_plugin_and_no_heavy_module():
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
import structlog
assert not structlog.is_configured()
"""
    run_python("-c", code)
