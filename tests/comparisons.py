"""Comparisons with code that is not ours, as tests measured them, and ``docs/models.md``, which shows them.

A test calls ``record``; with ``SPECDEC_MODELS_MAP=FILE`` in the environment, ``tests/models/conftest.py`` collects
the records of a run and writes the page. The tests that record something are enough:

    SPECDEC_MODELS_MAP=docs/models.md pytest tests/models tests/drafters/test_mtp_drafts.py \\
        tests/checkpoints/quantised -k "equal or after_prefill or decoded"
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from specdec.registry import Kind, registry

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

    subject: str  # a family, or a format as ``formats_of`` calls it
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
    """``docs/models.md``. ``released``: name of a model -> family, billions of parameters.

    Raises: AssertionError for a format whose weights were not the same bits.
    """
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for one in comparisons:
        cases = found.setdefault((one.subject, one.what, one.against), {})
        cases[one.case] = max(cases.get(one.case, 0.0), one.difference)
    families = {entry.spec.name: entry.spec for entry in registry().entries(Kind.MODEL)}
    rows = [
        (name, ", ".join(f"`{model_type}`" for model_type in spec.model_types), MTP_RULES.get(name, "none"))
        for name, spec in families.items()
    ]
    compared = sorted(
        (subject, what, against, str(len(cases)), f"{max(cases.values()):.1e}")
        for (subject, what, against), cases in found.items()
        if subject in families
    )
    models = [(model, family, f"{billions:,.3f}") for model, (family, billions) in released.items()]
    decoders: dict[str, list[str]] = {}
    for (subject, _, against), cases in found.items():
        if subject in families:
            continue
        if any(cases.values()):
            raise AssertionError(f"{subject} against {against} is not bit for bit: {cases}")
        decoders.setdefault(subject, []).append(f"{against} ({len(cases)})")
    formats = [(subject, ", ".join(sorted(decoders[subject]))) for subject in sorted(decoders)]
    return (
        _INTRODUCTION
        + _section("Families", ("family", "`model_type`", "MTP head"), rows)
        + _section("Compared", ("family", "what", "with", "checkpoints", "largest difference"), compared, _DIFFERENCE)
        + _section("Released models", ("model", "family", "billions of parameters, MTP left out"), models, _RELEASED)
        + _section("Formats", ("format", "decoded alike by (cases)"), formats, _FORMATS)
    )


def _section(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], text: str = "") -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return f"\n## {title}\n\n{text}" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


_INTRODUCTION = """\
# Families and formats

What specdec reads, and what it was compared with. This page is written by the tests (see `tests/comparisons.py`).
Models of other families run [through transformers](how-to/run-any-transformers-model.md). Qwen3.8 has the layout of
`qwen3_5`; Qwen3.8-Flash-Next (`qwen4_exp`) is another architecture and is not read. Gemma 4's dense models (31B,
E4B, E2B) are read, the text part of them; those with experts (26B-A4B) are refused by the key of `config.json` that
says so, and its assistants are not drafters yet.
"""
_DIFFERENCE = """\
The checkpoints are small, with random weights in the published layouts. A difference is
`max |ours - theirs| / max |theirs|` over all positions and the whole vocabulary, in float32, with the C++ kernels and
the torch reference. The table shows the largest over all checkpoints: for logits over whole prompts, chunks and single
tokens, for MTP heads over drafts after prompts of several lengths. The most likely token of the logits was always the
same.

"""
_RELEASED = """\
For these models `config.json`, written from the published values, can be read, and the tensors that it implies add up
to the published number of parameters. [](released-models.md) has models whose weights were run.

"""
_FORMATS = """\
Weights are decoded one by one, so formats may be mixed in any family. The decoded bits are the same as those of the
decoders in the table. [](how-to/load-a-quantised-checkpoint.md) lists the tensors of each format.

"""
