"""How results look in a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterable


def html_table(rows: Iterable[tuple[str, str]], text: str | None = None) -> str:
    """Labels and values, below ``text`` if given; all escaped."""
    lines = [f"<tr><th>{html.escape(label)}</th><td>{html.escape(value)}</td></tr>" for label, value in rows]
    shown = "" if text is None else f"<pre>{html.escape(text)}</pre>"
    return f"{shown}<table>{''.join(lines)}</table>"
