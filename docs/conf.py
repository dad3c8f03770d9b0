"""Sphinx configuration: MyST Markdown, furo; built with ``sphinx-build -n -W docs OUT``. Needs no network."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent / "_ext"))

import specdec

project = "specdec"
author = "the specdec authors"
copyright = "the specdec authors, Apache-2.0"
version = release = specdec.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "drawings",
    "specdec_reference",
]
exclude_patterns = ["_build"]
smartquotes = False  # `--json` in a docstring must not become a dash
html_theme = "furo"
html_title = f"specdec {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
copybutton_prompt_text = "$ "

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autoclass_content = "class"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
nitpick_ignore_regex = [
    # other projects: their pages are not linked
    ("py:.*", r"(torch|numpy|np|click|attr|attrs|pluggy|rich|tokenizers)\..*"),
    ("py:.*", r"(collections\.abc|os|pathlib|typing|types)\..*"),
    ("py:.*", r"(Path|Any|NDArray|Float32|Float64|Array|Tensor|Validator|ChatTemplate)"),
    ("py:class", r"Before|check=.*"),  # checks in an annotation
    ("py:.*", r"specdec\.checkpoints\..*\.StoredWeights"),  # what Weights reads; a family does not
]


def setup(app: Any) -> None:
    """Keep one-line docstrings of attributes from napoleon, which reads ``What failed so far: plugins`` as a type."""
    kept: dict[str, list[str]] = {}

    def keep(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
        if what in ("attribute", "property", "data"):
            kept[name] = list(lines)

    def restore(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
        if name in kept:
            lines[:] = kept.pop(name)

    app.connect("autodoc-process-docstring", keep, priority=400)
    app.connect("autodoc-process-docstring", restore, priority=600)
