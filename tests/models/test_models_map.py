"""``docs/models.md`` as it is committed names what there is: families, released models, formats. Figures may be old."""

from __future__ import annotations

import pathlib
import re

import pytest

from specdec.registry import Kind, registry
from tests.checkpoints.quantised import quantisers as q
from tests.comparisons import Comparison, page
from tests.models.test_public_configs import PUBLISHED

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "models.md"


def table(title: str) -> list[list[str]]:
    """Rows of the table under a heading, without its head."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return rows[2:]


def test_families_are_those_of_the_registry() -> None:
    families = {entry.spec.name: set(entry.spec.model_types) for entry in registry().entries(Kind.MODEL)}
    assert {name: set(re.findall(r"`([^`]*)`", types)) for name, types, _ in table("Families")} == families


def test_every_family_was_compared_with_transformers_and_every_head_with_the_oracle() -> None:
    compared = {(family, what): against for family, what, against, _, _ in table("Compared")}
    for family, _, head in table("Families"):
        assert compared[family, "logits"].startswith("transformers'")
        assert ((family, "MTP drafts") in compared) == (head != "none")
    assert all(float(difference) < 1e-3 for *_, difference in table("Compared"))


def test_released_models_are_those_whose_configs_are_tested() -> None:
    assert {name: float(billions) for name, _, billions in table("Released models")} == {
        name: billions for name, (_, billions, _) in PUBLISHED.items()
    }


def test_formats_are_those_that_decoders_are_tested_with() -> None:
    pytest.importorskip("compressed_tensors")
    from tests.checkpoints.quantised.test_quantised_compressed_tensors import CASES
    from tests.checkpoints.quantised.test_quantised_transformers import BLOCKS

    known = {q.label(name)[0] for name in q.QUANTISERS} | {label for _, _, label in CASES.values()}
    known |= {f"fp8-block {rows}x{columns}" for rows, columns in BLOCKS} | {"mxfp4"}
    listed = table("Formats")
    assert {name for name, _ in listed} == known
    assert len(listed) == len(known)


def test_a_format_that_differs_in_a_bit_is_not_put_on_the_page() -> None:
    same = Comparison("nvfp4", "decoded weights", "a numpy table", "to float32", 0.0)
    assert "| nvfp4 | a numpy table (1) |" in page([same], {})
    off = Comparison("nvfp4", "decoded weights", "a numpy table", "packed", 1e-9)
    with pytest.raises(AssertionError, match="nvfp4 against a numpy table is not bit for bit"):
        page([same, off], {})
