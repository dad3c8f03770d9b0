"""The conformance kit: proves a plugin right, or shows the smallest case in which it is wrong.

    from specdec.testing import parametrize_checks

    @parametrize_checks(drafter=lambda env: MyDrafter(MyConfig(), env))
    def test_contract(check):
        check()

The same without pytest: ``specdec check NAME`` or ``check_plugin("NAME").raise_for_failures()``. Clauses and their
reasons stand in ``docs/contract``. Needs hypothesis (``pip install specdec-framework[testing]``), no weights and no
network.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.testing.models import Memory, StrictForwardPass, TableModel
    from specdec.testing.numerics import Fit, goodness_of_fit
    from specdec.testing.registry import (
        CONTRACT,
        Check,
        CheckFailure,
        DepthPolicySubject,
        DrafterSubject,
        ForwardPassSubject,
        OpsSubject,
        Outcome,
        Report,
        Status,
        Subject,
        VerifierSubject,
        check,
        check_plugin,
        expect,
        iter_checks,
        not_applicable,
        parametrize_checks,
    )

_HOME = {
    "specdec.testing.models": ("Memory", "StrictForwardPass", "TableModel"),
    "specdec.testing.numerics": ("Fit", "goodness_of_fit"),
    "specdec.testing.registry": (
        "CONTRACT",
        "Check",
        "CheckFailure",
        "DepthPolicySubject",
        "DrafterSubject",
        "ForwardPassSubject",
        "OpsSubject",
        "Outcome",
        "Report",
        "Status",
        "Subject",
        "VerifierSubject",
        "check",
        "check_plugin",
        "expect",
        "iter_checks",
        "not_applicable",
        "parametrize_checks",
    ),
}
_NAMES = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "CONTRACT",
    "Check",
    "CheckFailure",
    "DepthPolicySubject",
    "DrafterSubject",
    "Fit",
    "ForwardPassSubject",
    "Memory",
    "OpsSubject",
    "Outcome",
    "Report",
    "Status",
    "StrictForwardPass",
    "Subject",
    "TableModel",
    "VerifierSubject",
    "check",
    "check_plugin",
    "expect",
    "goodness_of_fit",
    "iter_checks",
    "not_applicable",
    "parametrize_checks",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'specdec.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return __all__
