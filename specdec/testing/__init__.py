"""The conformance kit: checks a plugin against its contract and shows the smallest failing case.

    from specdec.testing import parametrize_checks

    @parametrize_checks(drafter=lambda env: MyDrafter(MyConfig(), env))
    def test_contract(check):
        check()

Without pytest: ``specdec check NAME`` or ``check_plugin("NAME").raise_for_failures()``. ``docs/contract`` explains the
clauses. Needs hypothesis (``pip install specdec-framework[testing]``) but no weights and no network.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.testing.checks import CONTRACT as CONTRACT
    from specdec.testing.checks import Check as Check
    from specdec.testing.checks import check as check
    from specdec.testing.checks import expect as expect
    from specdec.testing.checks import not_applicable as not_applicable
    from specdec.testing.clauses import iter_checks as iter_checks
    from specdec.testing.distributions import goodness_of_fit as goodness_of_fit
    from specdec.testing.pytest_plugin import parametrize_checks as parametrize_checks
    from specdec.testing.reports import CheckFailure as CheckFailure
    from specdec.testing.reports import Outcome as Outcome
    from specdec.testing.reports import Report as Report
    from specdec.testing.reports import Status as Status
    from specdec.testing.reports import check_plugin as check_plugin
    from specdec.testing.reports import run_check as run_check
    from specdec.testing.subjects import ModelFamilySubject as ModelFamilySubject
    from specdec.testing.subjects import PluginSubject as PluginSubject
    from specdec.testing.subjects import Subject as Subject
    from specdec.testing.subjects import as_subject as as_subject
    from specdec.testing.table_model import Memory as Memory
    from specdec.testing.table_model import TableModel as TableModel

_MODULES = ("table_model", "distributions", "subjects", "checks", "clauses", "reports", "pytest_plugin")


def __getattr__(name: str) -> Any:  # lazy: pytest imports this package in every run
    for module in () if name.startswith("_") else _MODULES:
        found = getattr(importlib.import_module(f"specdec.testing.{module}"), name, None)
        if found is not None:
            return found
    raise AttributeError(f"module 'specdec.testing' has no attribute {name!r}")
