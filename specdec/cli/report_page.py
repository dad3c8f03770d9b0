"""A report as one HTML file: what the terminal shows, the plot, and the data, for a browser without a network."""

from __future__ import annotations

import base64
import html
import io
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from specdec.errors import UnsupportedError, printable

if TYPE_CHECKING:
    from rich.table import Column

_STYLE = """
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .9rem .15rem 0; text-align: left; vertical-align: top; }
th { color: var(--quiet); font-weight: 600; }
thead th, thead + tbody td, thead + tbody th { white-space: nowrap; }
thead th { border-bottom: 1px solid var(--edge-plain); }
.number { text-align: right; }
img { max-width: 100%; height: auto; background: #ffffff; border-radius: 8px; }
"""


class ReportPage:
    """Takes what a report prints, like the console of a terminal."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def print(self, shown: Any = "", /, *, style: str = "", soft_wrap: bool = False) -> None:
        """A table, or a text: ``bold`` for a heading, ``dim`` for a note."""
        from rich.table import Table

        if isinstance(shown, Table):
            self._parts.append(_table(shown.columns))
        elif shown:
            text = html.escape(printable(str(shown).strip()))
            about = ' class="quiet"' if style == "dim" else ""
            self._parts.append(f"<h2>{text}</h2>" if style == "bold" else f"<p{about}>{text}</p>")

    def write(
        self, file: pathlib.Path, title: str, data: Mapping[str, Any], plot: Callable[[io.BytesIO], None] | None
    ) -> None:
        """Write the file.

        Args:
            title: of the page.
            data: the whole report, kept in the page as JSON (the element ``data``).
            plot: draws the report as a PNG; None if there is nothing to draw.

        Raises: UnsupportedError if the file cannot be written, or a plot drawn.
        """
        from specdec.serving.page import embedded, style

        picture = ""
        if plot is not None:
            drawn = io.BytesIO()
            plot(drawn)
            source = base64.b64encode(drawn.getvalue()).decode()
            picture = f'<p><img src="data:image/png;base64,{source}" alt="Plot of the tables below"></p>'
        title = html.escape(title)
        text = (
            f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
            f"<style>{style()}{_STYLE}</style>\n</head>\n<body>\n<header><h1>{title}</h1></header>\n<main>\n"
            f"{picture}\n{chr(10).join(self._parts)}\n</main>\n{embedded(data)}\n</body>\n</html>\n"
        )
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UnsupportedError(f"the page cannot be written: {error.strerror or error}", file=file) from error


def _table(columns: list[Column]) -> str:
    """An HTML table; the first column holds the headings of the rows."""

    def cell(kind: str, column: Column, text: Any, scope: str = "") -> str:
        about = ' class="number"' if column.justify == "right" else ""
        return f"<{kind}{scope}{about}>{html.escape(printable(str(text))) or '&nbsp;'}</{kind}>"

    names = [str(column.header).replace("\n", " ") for column in columns]
    head = ""
    if any(names):
        cells = [cell("th", column, name, ' scope="col"') for column, name in zip(columns, names, strict=True)]
        head = f"<thead><tr>{''.join(cells)}</tr></thead>"
    rows = []
    for row in zip(*(list(column.cells) for column in columns), strict=True):
        first, *rest = zip(columns, row, strict=True)
        cells = [cell("th", *first, ' scope="row"'), *(cell("td", column, text) for column, text in rest)]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="wide" tabindex="0"><table>{head}<tbody>{"".join(rows)}</tbody></table></div>'
