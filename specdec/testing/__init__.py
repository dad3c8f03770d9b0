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
    from specdec.testing.checks import CONTRACT, Check, check, expect, not_applicable
    from specdec.testing.clauses import iter_checks
    from specdec.testing.numerics import Fit, goodness_of_fit
    from specdec.testing.pytest_plugin import parametrize_checks
    from specdec.testing.reports import CheckFailure, Outcome, Report, Status, check_plugin, check_subjects, run_check
    from specdec.testing.subjects import (
        DepthPolicySubject,
        DrafterSubject,
        ForwardPassSubject,
        LogitsProcessorSubject,
        ModelFamilySubject,
        ObserverSubject,
        OpsSubject,
        Subject,
        VerifierSubject,
        as_subject,
    )
    from specdec.testing.table_model import Memory, TableModel

_MODULES = ("table_model", "numerics", "subjects", "checks", "clauses", "reports", "pytest_plugin")

__all__ = [
    "CONTRACT",
    "Check",
    "CheckFailure",
    "DepthPolicySubject",
    "DrafterSubject",
    "Fit",
    "ForwardPassSubject",
    "LogitsProcessorSubject",
    "Memory",
    "ModelFamilySubject",
    "ObserverSubject",
    "OpsSubject",
    "Outcome",
    "Report",
    "Status",
    "Subject",
    "TableModel",
    "VerifierSubject",
    "as_subject",
    "check",
    "check_plugin",
    "check_subjects",
    "expect",
    "goodness_of_fit",
    "iter_checks",
    "not_applicable",
    "parametrize_checks",
    "run_check",
]


def __getattr__(name: str) -> Any:  # lazy: pytest imports this package in every run
    if name in __all__:
        for module in _MODULES:
            found = getattr(importlib.import_module(f"specdec.testing.{module}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module 'specdec.testing' has no attribute {name!r}")
