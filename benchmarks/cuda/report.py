"""Report targets, figures and ratios as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from benchmarks.cuda.shapes import AGAINST_TRANSFORMERS, SHAPES

FIELDS = ("decode_of_bound", "verify_4", "draft", "speedup")
TITLES = {
    "decode_of_bound": "decode / bandwidth bound",
    "verify_4": "verify(4) / decode",
    "draft": "draft step, pruned / decode",
    "speedup": 'net speed-up, profile "mixed"',
}


@attrs.frozen(kw_only=True)
class Line:
    """One target."""

    shape: str
    quantity: str
    target: float
    least: bool  # True: the figure should reach the target; False: stay below
    figure: float | None  # None: not measured
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """The figure over the target."""
        return None if self.figure is None else self.figure / self.target

    @property
    def met(self) -> bool | None:
        if self.figure is None:
            return None
        return self.figure >= self.target if self.least else self.figure <= self.target

    def to_dict(self) -> dict[str, Any]:
        return {**attrs.asdict(self), "ratio": self.ratio, "met": self.met}


def lines(results: Mapping[str, Mapping[str, Any]]) -> Iterator[Line]:
    """Every target, with its figure if measured."""
    for name, shape in SHAPES.items():
        model = results.get("models", {}).get(name, {})
        speedup, note = _speedup(model)
        figures = {
            "decode_of_bound": _at(model, "decode", "of_bound"),
            "verify_4": _at(model, "verify", "4", "of_decode"),
            "draft": _at(model, "draft", "pruned", "of_decode"),
            "speedup": speedup,
        }
        for field in FIELDS:
            target = getattr(shape.targets, field)
            if target is not None:
                yield Line(
                    shape=name,
                    quantity=TITLES[field],
                    target=target,
                    least=field in ("decode_of_bound", "speedup"),
                    figure=figures[field],
                    note=note if field == "speedup" else "",
                )
    for name in SHAPES:
        found = results.get("transformers", {}).get(name, {})
        for arm, target in AGAINST_TRANSFORMERS.items():
            yield Line(
                shape=name,
                quantity=f"{arm} / transformers' generate",
                target=target,
                least=True,
                figure=_at(found, "ratio", arm),
                note=found.get("best_setting", ""),
            )


def _speedup(model: Mapping[str, Any]) -> tuple[float | None, str]:
    """The best depth's speed-up: from generations if any were timed, else from the identity over passes."""
    generation = model.get("generation", {})
    if generation:
        speedup, depth = max((entry["made"]["speedup"], depth) for depth, entry in generation.items())
        bare = generation[depth]["made"]["speedup_over_graph_decode"]
        return speedup, f"depth {depth}; {bare:.2f} over a decode as a graph"
    identity = model.get("speedup_by_identity")
    if identity:
        return identity["speedup"], f"depth {identity['best_depth']}, added up from passes: no generation was timed"
    return None, ""


def _at(tree: Any, *keys: str) -> float | None:
    for key in keys:
        if not isinstance(tree, Mapping) or key not in tree:
            return None
        tree = tree[key]
    return float(tree)


def print_table(results: Mapping[str, Mapping[str, Any]], *, real: bool) -> list[Line]:
    """Print the table last, where readers look first."""
    found = list(lines(results))
    print(f"\n{'shape':6} {'quantity':34} {'target':>9} {'figure':>8} {'ratio':>6}")
    for line in found:
        sign = ">=" if line.least else "<="
        figure, ratio, verdict = "-", "-", "not measured"
        if line.figure is not None and line.ratio is not None:
            figure, ratio, verdict = f"{line.figure:.3f}", f"{line.ratio:.2f}", "met" if line.met else "MISSED"
        print(
            f"{line.shape:6} {line.quantity:34} {sign} {line.target:<6} {figure:>8} {ratio:>6}  "
            + verdict
            + (f"  ({line.note})" if line.note else "")
        )
    if not real:
        print("\nnot a measurement: kernels were interpreted on the host, and the shape is a toy")
    return found
