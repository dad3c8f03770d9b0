"""Comparisons with code that is not ours, as tests measured them, and ``docs/models.md``, which shows them.

A test calls ``record``; with ``SPECDEC_MODELS_MAP=FILE`` in the environment, ``tests/models/conftest.py`` collects
the records of a run and writes the page:

    SPECDEC_MODELS_MAP=docs/models.md pytest tests/models tests/test_mtp_drafts.py tests/checkpoints/quantised
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from specdec.plugins import Kind, registry

PROPERTY = "comparison"
MTP_RULES = {  # what the head is fed, and what a chained step feeds in place of the hidden state
    "qwen3_5": "embedding first, hidden state after the final norm; chains its output after `mtp.norm`",
    "qwen3_5_moe": "as qwen3_5, its layer with experts in a layout of its own",
    "qwen3_next": "as qwen3_5_moe",
    "deepseek_v3": "layer behind the last: embedding first, hidden state after the final norm; chains after "
    "`shared_head.norm`",
    "glm4_moe": "as deepseek_v3, with grouped-query attention",
}


@attrs.frozen
class Comparison:
    """One thing compared once: the largest difference over what was compared, 0.0 where all bits were equal."""

    subject: str  # a family, or a format
    what: str  # "logits", "MTP drafts", "decoded weights"
    against: str
    case: str  # the shape or file that was compared
    difference: float


def record(
    record_property: Callable[[str, object], None], subject: str, what: str, against: str, case: str, difference: float
) -> None:
    """Keep a comparison with the test's report (plain data: reports travel between processes)."""
    record_property(PROPERTY, [subject, what, against, case, float(difference)])


def recorded(properties: Iterable[tuple[str, Any]]) -> list[Comparison]:
    """The comparisons among a report's properties."""
    return [Comparison(*value) for name, value in properties if name == PROPERTY]


def page(comparisons: Iterable[Comparison], released: Mapping[str, tuple[str, float]]) -> str:
    """``docs/models.md``. ``released``: name of a model -> family, billions of parameters."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for one in comparisons:
        cases = found.setdefault((one.subject, one.what, one.against), {})
        cases[one.case] = max(cases.get(one.case, 0.0), one.difference)
    families = {entry.spec.name: entry.spec for entry in registry().entries(Kind.MODEL)}
    lines = [
        "# Families and formats",
        "",
        "This page is written by the tests (`tests/comparisons.py` says how); every figure is the largest one of that",
        "run. A difference is `max |ours - theirs| / max |theirs|` over all positions and the whole vocabulary, in",
        "float32, with the C++ kernels and the torch reference, whole prompts, chunks and token by token. Checkpoints",
        "are small ones with random weights in the published layouts; no released weights were run.",
        "",
        "## Families",
        "",
        "| family | `model_type` | released models whose `config.json` parses (parameters without MTP) | MTP head |",
        "| --- | --- | --- | --- |",
    ]
    for name, spec in families.items():
        models = [f"{model} ({billions:,.3f} B)" for model, (family, billions) in released.items() if family == name]
        types = ", ".join(f"`{model_type}`" for model_type in spec.model_types)
        lines.append(f"| {name} | {types} | {', '.join(models) or '-'} | {MTP_RULES.get(name, 'none')} |")
    lines += ["", "## Compared", "", "| family | what | with | checkpoints | largest difference |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for (subject, what, against), cases in found.items():
        if subject in families:
            lines.append(f"| {subject} | {what} | {against} | {len(cases)} | {max(cases.values()):.1e} |")
    lines += ["", "## Formats", ""]
    lines.append("Decoded weight by weight at load, bit for bit as the other decoder does it.")
    lines += ["", "| format | with | what |", "| --- | --- | --- |"]
    for (subject, _, against), cases in found.items():
        if subject not in families:
            if any(cases.values()):
                raise AssertionError(f"{subject} against {against} is not bit for bit: {cases}")
            lines.append(f"| {subject} | {against} | {', '.join(cases)} |")
    return "\n".join(lines) + "\n"
