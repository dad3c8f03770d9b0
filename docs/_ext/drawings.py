"""Drawings of the documentation as inline SVG: ``{drawing} cycle`` and so on.

Colours come from the page (``currentColor`` and the classes in ``_static/site.css``), so that a drawing can be read
in light and dark. ``rooms`` is drawn from the imports in the code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import module_map


class Svg:
    """A picture of a fixed size in user units; it scales to the width of the page."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size, self._title = (width, height), title
        self._parts: list[str] = []

    def box(self, x: float, y: float, w: float, text: str = "", *, h: float = 32, look: str = "") -> None:
        """A rounded box with centred text; ``look`` is a class of ``site.css``."""
        self._parts.append(f'<rect class="box {look}" x="{x}" y="{y}" width="{w}" height="{h}" rx="5"/>')
        if text:
            self.text(x + w / 2, y + h / 2 + 5, text, look=f"middle mono {look}")

    def text(self, x: float, y: float, text: str, *, look: str = "") -> None:
        self._parts.append(f'<text class="{look}" x="{x}" y="{y}">{escape(text)}</text>')

    def arrow(self, *points: tuple[float, float], look: str = "") -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline class="arrow {look}" points="{path}" marker-end="url(#head)"/>')

    def __str__(self) -> str:
        width, height = self._size
        return (
            f'<div class="drawing"><svg viewBox="0 0 {width} {height}" style="max-width: {width}px" role="img" '
            f'aria-label="{escape(self._title)}"><title>{escape(self._title)}</title>'
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
            ' orient="auto">'
            '<path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>' + "".join(self._parts) + "</svg></div>"
        )


def cycle() -> str:
    """One cycle at depth 3, of which two draft tokens are accepted."""
    svg = Svg(580, 330, "One cycle: draft, verify, decide, commit")
    columns = [152 + 104 * i for i in range(4)]
    for y, step, what in (
        (40, "1 draft", "a cheap guess"),
        (110, "2 verify", "one pass, 4 rows"),
        (190, "3 decide", "the target's choice"),
        (270, "4 commit", "3 new tokens"),
    ):
        svg.text(8, y + 14, step, look="bold")
        svg.text(8, y + 33, what, look="faint small")
    svg.text(columns[0] + 42, 28, "pending", look="middle faint small")
    svg.text(columns[2] + 42, 28, "draft", look="middle faint small")
    svg.box(columns[0] - 12, 100, columns[3] - columns[0] + 108, look="frame", h=52)
    for x, token, look in zip(columns, (",", "b", ")", "->"), ("plain", "wait", "wait", "wait"), strict=True):
        svg.box(x, 40, 84, token, look=look)
        svg.arrow((x + 42, 74), (x + 42, 107))
        svg.box(x, 110, 84, token, look="plain")
        svg.arrow((x + 42, 144), (x + 42, 187))
    looks = ("keep", "keep", "drop", "none")
    for x, token, look in zip(columns, ("b ✓", ") ✓", ": ≠ ->", "unused"), looks, strict=True):
        svg.box(x, 190, 84, token, look=look)
    for x, token, look in zip(columns, ("b", ")", ":", "->"), ("keep", "keep", "plain", "drop"), strict=True):
        svg.box(x, 270, 84, token, look=look)
        if look != "drop":
            svg.arrow((x + 42, 224), (x + 42, 267))
    svg.text(columns[2] + 42, 321, "pending", look="middle faint small")
    svg.text(columns[3] + 42, 321, "dropped", look="middle faint small")
    return str(svg)


def rejection() -> str:
    """What a commit of 3 of 4 rows does to a KV cache and to a recurrent state."""
    svg = Svg(580, 330, "A KV cache and a recurrent state when three of four rows are kept")
    left, cell = 116, 57

    def cache(y: float, looks: Sequence[str]) -> None:
        for i, (look, text) in enumerate(zip(looks, ("0", "1", "…", "n-2", ",", "b", ")", "->"), strict=True)):
            svg.box(left + i * cell, y, cell - 6, text, look=look)

    svg.text(8, 24, "KV cache", look="bold")
    svg.text(8, 62, "after the pass", look="small")
    svg.text(8, 112, "after commit", look="small")
    svg.text(left + 2 * cell - 3, 32, "committed", look="middle faint small")
    svg.text(left + 6 * cell - 3, 32, "provisional", look="middle faint small")
    cache(42, ["plain"] * 4 + ["wait"] * 4)
    cache(92, ["plain"] * 4 + ["keep"] * 3 + ["drop"])
    svg.text(left + 7.5 * cell - 3, 143, "forgotten", look="middle faint small")

    svg.text(8, 186, "Recurrent state", look="bold")
    svg.text(8, 224, "after the pass", look="small")
    svg.text(8, 290, "after commit", look="small")
    svg.box(left, 204, 150, "after n-2", look="plain")
    svg.box(left + 300, 204, 150, "after ->", look="wait")
    svg.arrow((left + 152, 220), (left + 297, 220))
    svg.text(left + 225, 210, "4 rows", look="middle faint small")
    svg.box(left + 300, 270, 150, "after )", look="keep")
    svg.arrow((left + 75, 238), (left + 75, 286), (left + 297, 286))
    svg.text(left + 186, 276, "the 3 kept rows", look="middle faint small")
    svg.text(left + 225, 321, "Had all 4 been kept, the two buffers would change roles.", look="middle faint small")
    return str(svg)


def mtp_pairs() -> str:
    """Which pairs the MTP head has seen, which wait, and which entries are provisional."""
    svg = Svg(584, 296, "True pairs and chained entries of the MTP head")
    step, left = 74, 62
    at = [left + step * i for i in range(7)]
    for y, name in ((50, "token"), (110, "hidden"), (190, "pair")):
        svg.text(4, y, name, look="small")
    svg.text(at[4] + 27, 20, "pending", look="middle faint small")
    svg.text((at[5] + at[6] + 54) / 2, 20, "draft", look="middle faint small")
    for i, x in enumerate(at):
        svg.box(x, 30, 54, f"t{i}" if i < 5 else f"x{i - 4}", look="plain" if i < 5 else "wait")
    for i, x in enumerate(at[:6]):
        true = i < 4
        svg.box(x, 90, 54, f"h{i}" if true else f"g{i - 3}", look="plain" if true else "none")
        svg.arrow((x + 20, 124), (x + 20, 167))
        svg.arrow((x + step + 10, 64), (x + 64, 82), (x + 64, 140), (x + 46, 167), look="faint")
        look = "keep" if i < 2 else "due" if true else "wait"
        svg.box(x, 170, 62, f"h{i},t{i + 1}" if true else f"g{i - 3},x{i - 3}", look=look)
    for first, last, name, note in (
        (0, 1, "in the head's cache", "true pairs"),
        (2, 3, "waiting", "true pairs"),
        (4, 5, "chained", "provisional"),
    ):
        svg.arrow((at[first], 212), (at[first], 218), (at[last] + 62, 218), (at[last] + 62, 212), look="bracket")
        svg.text((at[first] + at[last] + 62) / 2, 240, name, look="middle")
        svg.text((at[first] + at[last] + 62) / 2, 258, note, look="middle faint small")
    svg.text(
        4,
        288,
        "h: hidden states of the target, g: of the head itself. One pass over the waiting pairs gives x1.",
        look="faint small",
    )
    return str(svg)


def rooms() -> str:
    """The rooms of ``specdec/`` by height: every import points down."""
    edges = module_map.room_imports()
    levels = module_map.levels(edges)
    counts = Counter(map(module_map.room, module_map.modules()))
    width, gap, high = 104, 12, 72
    total = max(640, max(map(len, levels)) * (width + gap))
    svg = Svg(total, len(levels) * high - 20, "The rooms of specdec and what they import")
    where: dict[str, float] = {}  # the middle of each box
    for level in levels:
        above = {name: [where[other] for other in where if name in edges[other]] for name in level}
        level.sort(key=lambda name: sum(above[name]) / len(above[name]) if above[name] else total / 2)
        for j, name in enumerate(level):
            where[name] = total / 2 + (j - (len(level) - 1) / 2) * (width + gap)
    height = {name: i * high + 4 for i, level in enumerate(levels) for name in level}
    for name, below in edges.items():
        for other in sorted(below):
            if not any(other in edges[between] for between in below):  # the others are reached through a room between
                svg.arrow((where[name], height[name] + 38), (where[other], height[other] - 2), look="faint")
    for name, x in where.items():
        svg.box(x - width / 2, height[name], width, look="room", h=38)
        svg.text(x, height[name] + 17, name, look="middle bold small")
        svg.text(x, height[name] + 31, f"{counts[name]} module{'s' * (counts[name] > 1)}", look="middle faint tiny")
    return str(svg)


DRAWINGS: dict[str, Callable[[], str]] = {
    "cycle": cycle,
    "rejection": rejection,
    "mtp-pairs": mtp_pairs,
    "rooms": rooms,
}


def setup(app: Any) -> dict[str, bool]:
    """Register the directive ``drawing``."""
    from docutils import nodes
    from sphinx.util.docutils import SphinxDirective

    class Drawing(SphinxDirective):
        required_arguments = 1

        def run(self) -> list[Any]:
            return [nodes.raw("", DRAWINGS[self.arguments[0]](), format="html")]

    app.add_directive("drawing", Drawing)
    return {"parallel_read_safe": True}
