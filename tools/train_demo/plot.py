"""Draw the losses of a run."""

from __future__ import annotations

import json
from pathlib import Path


def plot_losses(metrics: Path, target: Path) -> None:
    """Smoothed training losses and held-out losses over hours of training, as a PNG; skipped without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    phases = list(dict.fromkeys(record["phase"] for record in records))
    figure, axes = pyplot.subplots(1, len(phases), figsize=(7 * len(phases), 4.5), squeeze=False)
    for axis, phase in zip(axes[0], phases, strict=True):
        rows = [record for record in records if record["phase"] == phase]
        for name in sorted({key for row in rows for key in row if key.removeprefix("held_out_")[:3] in ("mai", "mtp")}):
            points = [(row["consumed_s"] / 60, row[name]) for row in rows if name in row]
            smooth, shown = points[0][1], []
            for minute, value in points:
                smooth = value if name.startswith("held_out") else 0.9 * smooth + 0.1 * value
                shown.append((minute, smooth))
            style = "o--" if name.startswith("held_out") else "-"
            axis.plot(*zip(*shown, strict=True), style, label=name, linewidth=1, markersize=3)
        axis.set(title=phase, xlabel="minutes", ylabel="nats per token")
        axis.legend(fontsize="small")
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(target, dpi=110)
    pyplot.close(figure)
