"""The pytest plugin: ``parametrize_checks`` and an option.

Registered by the entry point ``specdec`` in the group ``pytest11``. Imports nothing of the kit unless it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from specdec.testing.checks import EffortName

T = TypeVar("T")

_seed: int = 0  # --specdec-seed


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option of the kit."""
    group = parser.getgroup("specdec")
    group.addoption("--specdec-seed", metavar="N", type=int, default=0, help="seed of the cases that checks draw")


def pytest_configure(config: pytest.Config) -> None:
    """Read the option."""
    global _seed
    _seed = config.getoption("--specdec-seed")


def parametrize_checks(
    *,
    drafter: Any = None,
    verifier: Any = None,
    forward_pass: Any = None,
    depth_policy: Any = None,
    ops: Any = None,
    logits_processor: Any = None,
    observer: Any = None,
    model_family: Any = None,
    known_failures: Mapping[str, str] | None = None,
    effort: EffortName = "quick",
) -> Callable[[T], T]:
    """Decorate a test ``def test_contract(check): check()``, which pytest runs once for each check.

    Args:
        drafter: a DrafterSpec, or a factory that takes the sequence's ``env`` or nothing; the others likewise.
        observer: an object with the hook ``specdec_cycle``, or a factory of one.
        model_family: a ModelSpec.
        known_failures: ``{id: reason}``. A listed check that passes is a failure.
        effort: "sample", "quick" or "full": all checks together take at most 5, 30 or 600 seconds of one core.
    Raises: ConfigError for a known failure whose id no check here has.
    """
    from specdec.errors import ConfigError
    from specdec.testing.checks import Check
    from specdec.testing.clauses import expect_ids, iter_checks
    from specdec.testing.reports import Status, run_check
    from specdec.testing.subjects import Subject, as_subject

    known = dict(known_failures or {})
    plugins = (drafter, verifier, forward_pass, depth_policy, ops, logits_processor, observer, model_family)
    chosen = {subject: one for subject, one in zip(Subject, plugins, strict=True) if one is not None}
    if not chosen:
        raise ConfigError("parametrize_checks needs something to check", **{"try": "parametrize_checks(drafter=...)"})
    expect_ids(known, chosen)

    @cache  # clauses of one plugin share a run
    def under_test(subject: Subject) -> Any:
        return as_subject(subject, chosen[subject])

    def run(check: Check) -> None:
        replay = f"pytest -k {check.id} --specdec-seed {_seed}"
        outcome = run_check(check, under_test(check.subject), seed=_seed, effort=effort, replay=replay)
        if outcome.failure is not None:
            raise outcome.failure
        if outcome.status is Status.NOT_APPLICABLE:
            pytest.skip(outcome.detail)

    checks = [check for subject in chosen for check in iter_checks(subject)]
    expected = {id_: (pytest.mark.xfail(reason=reason, strict=True),) for id_, reason in known.items()}
    items = [pytest.param(partial(run, check), id=check.id, marks=expected.get(check.id, ())) for check in checks]
    mark: Any = pytest.mark.parametrize("check", items)
    return mark  # type: ignore[no-any-return]
