"""Pictures of what was measured (matplotlib, the extra "plot")."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import UnsupportedError
from specdec.measuring.audit import require_matplotlib

if TYPE_CHECKING:
    from collections.abc import Callable

    from specdec.measuring.acceptance import AcceptanceReport, ClassReport, Interval

# Okabe and Ito's colours, which most colour-blind people can tell apart
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
SPREAD = 0.06  # sideways between classes, so that their error bars can be told apart


def plot_acceptance(report: AcceptanceReport, path: str | Path) -> None:
    """Draw acceptance by position and predicted speed-up by depth, a line per class, into a PNG file.

    Raises: UnsupportedError without matplotlib, or when the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    groups = [group for group in report.classes if group.prompts]
    figure = Figure(figsize=(14, 5), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    how = "greedy" if report.temperature == 0 else f"temperature {report.temperature:g}"
    partial = f", interrupted after {report.done} of {report.planned} prompts" if report.partial else ""
    known = any(one.interval is not None for group in groups for one in group.predictions)
    bars = "  (bars: 95 % intervals over prompts)" if known else ""
    figure.suptitle(
        f"Drafter {report.drafter} at depth {report.depth}, {how}, on {report.environment.model or 'this model'}"
        f"{partial}{bars}"
    )

    def rates(name: str) -> Callable[[ClassReport], list[tuple[float, float | None, Interval]]]:
        return lambda group: [
            (place.position, getattr(place, name), getattr(place, f"{name}_interval")) for place in group.positions
        ]

    for axes, name, title in (
        (left, "conditional", "Conditional: right, given that\nthe tokens before were"),
        (middle, "cumulative", "Cumulative: a token drafted here\nbecame output"),
    ):
        _lines(axes, groups, rates(name))
        axes.set(xlabel="lookahead position (0 is the next token)", title=title, ylim=(0, 1.02))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _lines(right, groups, lambda group: [(one.depth, one.speedup, one.interval) for one in group.predictions])
    right.set_ylim(bottom=min(0.94, right.get_ylim()[0]))
    right.axhline(1.0, color="#5f6368", linewidth=1, linestyle="--")
    right.set(
        xlabel="depth (tokens drafted per cycle)", title="Speed-up predicted from the costs\ndashed: plain decoding"
    )
    right.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    for axes in (left, middle, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y", color="#e3e5e8", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    handles, labels = left.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False)
    save_figure(figure, path)


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a PNG. Raises: UnsupportedError when the file cannot be written."""
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise UnsupportedError(f"the plot cannot be written: {error.strerror or error}", file=path) from error


def _lines(
    axes: Any, groups: list[ClassReport], values: Callable[[ClassReport], list[tuple[float, float | None, Interval]]]
) -> None:
    for number, group in enumerate(groups):
        known = [(at, value, interval) for at, value, interval in values(group) if value is not None]
        shift = SPREAD * (number - (len(groups) - 1) / 2)
        ends = [interval or (value, value) for _, value, interval in known]
        below = [max(0.0, value - low) for (_, value, _), (low, _) in zip(known, ends, strict=True)]
        above = [max(0.0, high - value) for (_, value, _), (_, high) in zip(known, ends, strict=True)]
        axes.errorbar(
            [at + shift for at, _, _ in known],
            [value for _, value, _ in known],
            yerr=[below, above],
            label=f"{group.name} ({group.prompts} prompt{'' if group.prompts == 1 else 's'})",
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            markersize=5,
            linewidth=1.6,
            elinewidth=1,
            capsize=2,
        )
