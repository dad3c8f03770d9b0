"""Sphinx configuration: MyST Markdown, furo, warnings are errors (``sphinx-build -n -W docs OUT``). Needs no network."""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent / "_ext"))

import specdec

project = "specdec"
author = "the specdec authors"
copyright = "the specdec authors, Apache-2.0"  # noqa: A001  (Sphinx's name)
version = release = specdec.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "specdec_reference"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"specdec {release}"

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
suppress_warnings = [
    "toc.empty_glob",  # a folder of pages that is not written yet is no error
    "myst.xref_missing",  # links out of docs/ to files of the repository; tests/test_docs.py checks that they exist
]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autoclass_content = "class"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
nitpick_ignore_regex = [
    ("py:.*", r"(torch|numpy|np|click|attr|attrs|pluggy|rich)\..*"),  # other projects: their pages are not linked
    ("py:.*", r"(collections\.abc|pathlib|typing|types)\..*"),
    ("py:.*", r"(Path|Any|NDArray|Float32|Float64|Float64Like|Array|NOTHING|T|S)"),
    ("py:.*", r"specdec\.(contract|sampling|backends\.ops)\.(Float32|Float64|Array)"),
]
