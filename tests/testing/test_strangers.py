"""Broken plugins that were written from the contract alone are caught, and right but unusual ones are not.

``strangers/caught.json`` has the clause that catches each broken plugin, and the effort it takes.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdec.testing import Status, as_subject, check_plugin, iter_checks, run_check
from specdec.testing.checks import EFFORTS, EffortName
from specdec.testing.subjects import subject_of
from tests.selection import cases
from tests.testing.strangers import correct
from tests.testing.strangers.catch import BROKEN, FILE, checkable, plugin

pytestmark = pytest.mark.mutants

CAUGHT: dict[str, dict[str, str]] = json.loads(FILE.read_text())
LATER = [name for name, found in CAUGHT.items() if found.get("effort") == "full"]
MISSED: dict[str, str] = {"drafters.ByTheClock": "follows the time: caught only if the machine is busy in between"}
"""What nothing finds, and why."""

SAMPLE = ["policies.Explores", "processors.LegalByFirst", "backends.EditsConfig", "targets.InfoChanges"]
WHOLE = [name for name, found in CAUGHT.items() if found.get("effort") == "quick"][::12]


@pytest.mark.sample
def test_at_least_four_fifths_are_caught_quickly_and_nearly_all_at_full_effort() -> None:
    assert CAUGHT.keys() == BROKEN.keys(), "run python -m tests.testing.strangers.catch"
    assert {name for name, found in CAUGHT.items() if not found} == MISSED.keys()
    assert len(BROKEN) >= 150
    assert len(MISSED) <= 0.05 * len(BROKEN)
    assert len(MISSED) + len(LATER) <= 0.2 * len(BROKEN)


@pytest.mark.parametrize("name", cases(CAUGHT, sample=SAMPLE))
def test_a_broken_plugin_is_caught_by_its_clause(name: str) -> None:
    if name in MISSED:
        pytest.skip(MISSED[name])
    subject = subject_of(given := plugin(name))
    assert subject is not None
    check = next(check for check in iter_checks(subject) if check.id == CAUGHT[name]["clause"])
    effort: EffortName = "full" if name in LATER else "quick"
    seconds = EFFORTS["full"].seconds  # how fast the machine is must not decide
    found = run_check(check, as_subject(subject, given), effort=effort, seconds=seconds, shrink=False)
    assert found.status is Status.FAILED


@pytest.mark.parametrize("name", cases(WHOLE, sample=["policies.Explores"]))
def test_a_broken_plugin_is_caught_by_the_whole_kit(name: str) -> None:
    assert check_plugin(plugin(name), exit_first=True).failures


@pytest.mark.parametrize("kind", cases(correct.CORRECT, sample=0, name=lambda kind: kind.__name__))
def test_a_right_plugin_passes(kind: Any) -> None:
    check_plugin(checkable(correct.spec(kind)), effort="sample").raise_for_failures()
    check_plugin(checkable(correct.spec(kind)), seed=3).raise_for_failures()
