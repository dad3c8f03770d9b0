"""The pytest plugin of the kit: a line that says what runs, ``--specdec-contract`` and ``--specdec-seed``.

Registered by the entry point ``specdec`` in the group ``pytest11``; the checks do not need it.
"""

from __future__ import annotations

import sys

import pytest

contract: str | None = None
"""The contract to test against, over what the tests claim; None where the command line does not say."""
seed: int = 0
"""The seed of all drawn cases."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Our options."""
    group = parser.getgroup("specdec")
    group.addoption(
        "--specdec-contract", metavar="DATE", default=None, help="test plugins against this contract, such as 2027.1"
    )
    group.addoption("--specdec-seed", metavar="N", type=int, default=0, help="seed of the cases that checks draw")


def pytest_configure(config: pytest.Config) -> None:
    """Take the options over."""
    global contract, seed
    contract, seed = config.getoption("--specdec-contract"), config.getoption("--specdec-seed")


def pytest_report_collectionfinish() -> str | list[str]:
    """One line: contract, seed, and which backends this machine runs. None in a run that does not use the kit."""
    if "specdec.testing.registry" not in sys.modules:  # installed is not used: other people's runs stay as they are
        return []
    from specdec.registry import Kind, registry
    from specdec.testing.registry import CONTRACT

    backends = []
    for entry in registry().entries(Kind.BACKEND):
        available = getattr(entry.spec, "available", lambda: None)
        try:
            reason = available()
        except Exception as error:  # noqa: BLE001  (a header shows what is broken, it does not break)
            reason = f"{type(error).__name__}: {error}"
        backends.append(entry.spec.name if reason is None else f"{entry.spec.name} (not here: {reason})")
    return f"specdec: contract {contract or CONTRACT}, seed {seed}, backends: {', '.join(backends) or 'none'}"
