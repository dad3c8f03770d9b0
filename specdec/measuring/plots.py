"""Plot measurements as PNG (matplotlib, the extra "plot").

Every function raises UnsupportedError if matplotlib is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from specdec.errors import import_extra

if TYPE_CHECKING:
    from specdec.measuring.acceptance import AcceptanceReport, ClassReport
    from specdec.measuring.bench import BenchReport
    from specdec.measuring.intervals import Interval

# Okabe and Ito's colour-blind-safe palette
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#5f6368"
SPREAD = 0.06  # horizontal offset between classes, to separate their error bars


def panels(title: str, *sizes: float, height: float = 4.6) -> tuple[Any, list[Any]]:
    """A figure with panels of these widths side by side."""
    figure = import_extra("matplotlib.figure", "plot").Figure(figsize=(sum(sizes), height), layout="constrained")
    figure.suptitle(title)
    axes = list(figure.subplots(1, len(sizes), squeeze=False)[0])
    for panel in axes:
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _grid(axes: Any, axis: str = "y") -> None:
    axes.grid(axis=axis, color="#e3e5e8", linewidth=0.8)


# --- acceptance ------------------------------------------------------------------------------------------------------


def plot_acceptance(report: AcceptanceReport, file: BinaryIO) -> None:
    """Acceptance by position and predicted speed-up by depth, one line per class."""
    groups = [group for group in report.classes if group.prompts]
    how = "greedy" if report.temperature == 0 else f"temperature {report.temperature:g}"
    partial = f", interrupted after {report.done} of {report.planned} prompts" if report.partial else ""
    known = any(one.interval is not None for group in groups for one in group.predictions)
    figure, (left, middle, right) = panels(
        f"Drafter {report.drafter} at depth {report.depth}, {how}, on {report.environment.model or 'this model'}"
        f"{partial}{'  (bars: 95 % intervals over prompts)' if known else ''}",
        *(4.7, 4.7, 4.7),
        height=5,
    )
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    for axes, name, title in (
        (left, "conditional", "Conditional: right, given that\nthe tokens before were"),
        (middle, "cumulative", "Cumulative: a token drafted here\nbecame output"),
    ):

        def rates(group: ClassReport, name: str = name) -> list[tuple[int, float | None, Interval]]:
            return [(one.position, getattr(one, name), getattr(one, f"{name}_interval")) for one in group.positions]

        _lines(axes, groups, rates)
        axes.set(xlabel="lookahead position (0 is the next token)", title=title, ylim=(0, 1.02))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _lines(right, groups, lambda group: [(one.depth, one.speedup, one.interval) for one in group.predictions])
    right.set_ylim(bottom=min(0.94, right.get_ylim()[0]))
    right.axhline(1.0, color=GREY, linewidth=1, linestyle="--")
    right.set(
        xlabel="depth (tokens drafted per cycle)", title="Speed-up predicted from the costs\ndashed: plain decoding"
    )
    right.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    for axes in (left, middle, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _grid(axes)
    handles, labels = left.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False)
    figure.savefig(file, format="png", dpi=120)


def _lines(
    axes: Any,
    groups: Sequence[ClassReport],
    values: Callable[[ClassReport], Sequence[tuple[int, float | None, Interval]]],
) -> None:
    for number, group in enumerate(groups):
        known = [(at, value, ends or (value, value)) for at, value, ends in values(group) if value is not None]
        shift = SPREAD * (number - (len(groups) - 1) / 2)
        below = [max(0.0, value - low) for _, value, (low, _) in known]
        above = [max(0.0, high - value) for _, value, (_, high) in known]
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


# --- bench -----------------------------------------------------------------------------------------------------------


def plot_bench(report: BenchReport, file: BinaryIO) -> None:
    """Speed-up by class and the breakdown of a cycle's time, of one or more prompts."""
    warned = "SYNTHETIC ACCEPTANCE, A TIMING AND NOT A RESULT: " if report.synthetic is not None else ""
    figure, axes = panels(
        f"{warned}{report.drafter}, depth {report.depth_policy}, verifier {report.verifier}, on "
        f"{report.environment.model or 'this model'} ({report.environment.dtype})"
        f"{', interrupted' if report.partial else ''}",
        *[5.2] * 2,
    )
    _speedups(axes[0], report)
    _cycle(axes[1], report)
    figure.savefig(file, format="png", dpi=120)


def _speedups(axes: Any, report: BenchReport) -> None:
    groups = [*report.classes, *([report.overall] if report.overall and len(report.classes) > 1 else [])]
    intervals = ", 95 % intervals" if any(group.interval is not None for group in groups) else ""
    for place, group in enumerate(groups):
        low, high = group.interval or (group.speedup, group.speedup)
        axes.barh(place, group.speedup, color=GREY if group is report.overall else COLOURS[0], height=0.6)
        if group.interval is not None:
            spread = [[max(0.0, group.speedup - low)], [max(0.0, high - group.speedup)]]
            axes.errorbar(group.speedup, place, xerr=spread, color="#202124", capsize=3)
        label = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "ha": "left", "fontsize": 10}
        axes.annotate(f"{group.speedup:.2f}x", (max(group.speedup, high), place), **label)
    axes.set_yticks(range(len(groups)), [f"{group.name} ({group.prompts})" for group in groups])
    axes.set_ylim(max(len(groups), 3) - 0.4, -0.6)  # the first on top; a single bar does not fill the panel
    axes.margins(x=0.15)  # room for the figures next to the bars
    axes.axvline(1.0, color=GREY, linewidth=1, linestyle="--")
    axes.set(
        xlabel="speculative over plain tokens per second",
        title=f"Speed-up by class (prompts){intervals}\ndashed: plain decoding",
    )
    _grid(axes, "x")


def _cycle(axes: Any, report: BenchReport) -> None:
    columns = {
        "plain\nstep": {},  # not broken down
        "cycle,\npredicted": {term.name: term.predicted_ms for term in report.terms},
        "cycle,\nmeasured": {term.name: term.measured_ms for term in report.terms},
    }
    if report.overall is not None:
        tokens = report.overall.tokens_per_cycle
        columns[f"measured,\nper token\n(of {tokens:.2f})"] = {
            term.name: term.measured_ms / tokens for term in report.terms
        }
    bottoms = [report.plain_step_ms or 0.0, *[0.0] * (len(columns) - 1)]
    axes.bar(0, bottoms[0], color=GREY, width=0.62)
    for number, name in enumerate(("verification", "drafting", "bookkeeping")):
        heights = [parts.get(name, 0.0) for parts in columns.values()]
        axes.bar(range(len(columns)), heights, bottom=bottoms, label=name, color=COLOURS[number], width=0.62)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for place, top in enumerate(bottoms):
        axes.annotate(f"{top:.2f}", (place, top), ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(columns)), list(columns))
    axes.set(ylabel="milliseconds", title="Where a cycle's time goes\n(means over the speculative runs)")
    axes.set_ylim(top=1.22 * max(bottoms))
    axes.legend(frameon=False, loc="upper left", ncols=3, fontsize=9, columnspacing=1.0, handlelength=1.2)
    _grid(axes)
