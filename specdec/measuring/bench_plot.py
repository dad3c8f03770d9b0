"""The picture of a comparison: speed-up by class, where a cycle's time goes, and speed by length of the context."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.measuring.audit import require_matplotlib
from specdec.measuring.plots import COLOURS, save_figure

if TYPE_CHECKING:
    from specdec.measuring.bench import BenchReport

GREY = "#5f6368"


def plot_bench(report: BenchReport, path: str | Path) -> None:
    """Draw a comparison that has at least one prompt into a PNG file.

    Raises: UnsupportedError without matplotlib, or when the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    panels = 3 if report.frontiers else 2
    figure = Figure(figsize=(5.2 * panels, 4.6), layout="constrained")
    axes = figure.subplots(1, panels)
    warned = "SYNTHETIC ACCEPTANCE, A TIMING AND NOT A RESULT: " if report.synthetic is not None else ""
    partial = ", interrupted" if report.partial else ""
    figure.suptitle(
        f"{warned}{report.drafter}, depth {report.depth_policy}, verifier {report.verifier}, on "
        f"{report.environment.model or 'this model'} ({report.environment.dtype}){partial}"
    )
    _speedups(axes[0], report)
    _cycle(axes[1], report)
    if report.frontiers:
        _contexts(axes[2], report)
    for one in axes:
        one.set_axisbelow(True)
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
    save_figure(figure, path)


def _speedups(axes: Any, report: BenchReport) -> None:
    groups = [*report.classes, *([report.overall] if report.overall and len(report.classes) > 1 else [])]
    intervals = ", 95 % intervals" if any(group.interval is not None for group in groups) else ""
    for place, group in enumerate(groups):
        axes.barh(place, group.speedup, color=COLOURS[0] if group is not report.overall else GREY, height=0.6)
        end = group.speedup
        if group.interval is not None:
            low, high = group.interval
            spread = [[max(0.0, group.speedup - low)], [max(0.0, high - group.speedup)]]
            axes.errorbar(group.speedup, place, xerr=spread, color="#202124", capsize=3)
            end = max(end, high)
        axes.annotate(
            f"{group.speedup:.2f}x",
            (end, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            ha="left",
            fontsize=10,
        )
    axes.set_yticks(range(len(groups)), [f"{group.name} ({group.prompts})" for group in groups])
    axes.set_ylim(max(len(groups), 3) - 0.4, -0.6)  # the first on top; one bar alone does not fill the picture
    axes.margins(x=0.15)  # room for the figures beside the bars
    axes.axvline(1.0, color=GREY, linewidth=1, linestyle="--")
    axes.set(
        xlabel="speculative over plain tokens per second",
        title=f"Speed-up by class (prompts){intervals}\ndashed: plain decoding",
    )
    axes.grid(axis="x", color="#e3e5e8", linewidth=0.8)


def _cycle(axes: Any, report: BenchReport) -> None:
    columns = {
        "plain\nstep": {},  # not taken apart
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
    axes.grid(axis="y", color="#e3e5e8", linewidth=0.8)


def _contexts(axes: Any, report: BenchReport) -> None:
    lengths = [one.context for one in report.frontiers]
    for number, (name, values) in enumerate(
        (
            ("plain", [one.plain for one in report.frontiers]),
            ("speculative", [one.speculative for one in report.frontiers]),
        )
    ):
        axes.plot(lengths, values, marker="os"[number], color=(GREY, COLOURS[0])[number], label=name, linewidth=1.6)
    axes.set(xlabel="tokens of context", ylabel="tokens per second", title="Generation\nby length of the context")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_ylim(0, 1.15 * max(max(one.plain, one.speculative) for one in report.frontiers))
    axes.legend(frameon=False)
    axes.grid(axis="y", color="#e3e5e8", linewidth=0.8)
