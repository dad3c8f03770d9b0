"""Every clause has a plugin that is wrong in that way, and its check is what finds it.

The tables in ``broken`` name the clause that is meant first, then those that the same mistake may break too.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from specdec.testing import DrafterSubject, OpsSubject, Status, Subject, as_subject, iter_checks, run_check
from tests.selection import cases
from tests.testing.broken import drafters, families, observers, ops, policies, processors, targets, verifiers

pytestmark = pytest.mark.mutants
PATIENCE = 600.0  # seconds for the clause that is meant: how fast the machine is must not decide


def caught(subject, under_test, meant) -> set[str]:
    """Ids of the checks that find something; those that are not meant look for a shorter time."""
    found = set()
    for check in iter_checks(subject):
        effort, seconds = ("quick", PATIENCE) if check.id == meant else ("sample", None)
        status = run_check(check, under_test, effort=effort, seconds=seconds, shrink=False).status
        if status in (Status.FAILED, Status.ADVICE):
            found.add(check.id)
    return found


def assert_caught(subject, under_test, clauses) -> None:
    """Found by the clause that is meant, and by none that the mistake has nothing to do with."""
    found = caught(subject, under_test, clauses[0])
    assert clauses[0] in found
    assert found <= set(clauses)


def some(kinds, sample):
    return cases(kinds, name=lambda kind: kind.__name__, sample=sample)


def _drafter(kind):
    return DrafterSubject(make=kind)


@pytest.mark.parametrize("kind", some(drafters.BROKEN, 3))
def test_a_wrong_drafter_is_caught_by_its_clause(kind):
    meant = drafters.BROKEN[kind][0]  # others find it too: all of them run long sessions
    check = next(check for check in iter_checks(Subject.DRAFTER) if check.id == meant)
    assert run_check(check, _drafter(kind), seconds=PATIENCE, shrink=False).status in (Status.FAILED, Status.ADVICE)


@pytest.mark.parametrize("kind", some(verifiers.BROKEN, ["AcceptsTheImpossible"]))
def test_a_wrong_verifier_is_caught_by_its_clause(kind):
    clauses = verifiers.BROKEN[kind]
    assert_caught(Subject.VERIFIER, as_subject(Subject.VERIFIER, kind), clauses)


@pytest.mark.parametrize("kind", some(policies.BROKEN, 4))
def test_a_wrong_policy_is_caught_by_its_clause(kind):
    clauses = policies.BROKEN[kind]
    assert_caught(Subject.DEPTH_POLICY, as_subject(Subject.DEPTH_POLICY, kind), clauses)


@pytest.mark.parametrize("kind", some(processors.BROKEN, 2))
def test_a_wrong_processor_is_caught_by_its_clause(kind):
    clauses = processors.BROKEN[kind]
    assert_caught(Subject.LOGITS_PROCESSOR, as_subject(Subject.LOGITS_PROCESSOR, kind), clauses)


@pytest.mark.parametrize("kind", some(observers.BROKEN, 1))
def test_a_wrong_observer_is_caught_by_its_clause(kind):
    clauses = observers.BROKEN[kind]
    assert_caught(Subject.OBSERVER, as_subject(Subject.OBSERVER, kind), clauses)


@pytest.mark.parametrize("kind", some(families.BROKEN, 2))
def test_a_wrong_family_is_caught_by_its_clause(kind):
    clauses = families.BROKEN[kind]
    assert_caught(Subject.MODEL_FAMILY, as_subject(Subject.MODEL_FAMILY, kind.spec()), clauses)


@pytest.mark.parametrize("case", cases(targets.BROKEN, name=lambda case: case[0].__name__, sample=4))
def test_a_wrong_target_is_caught_by_its_clause(case):
    kind, options = case
    make = partial(targets.table, kind, **dict(options))
    clauses = targets.BROKEN[case]
    assert_caught(Subject.FORWARD_PASS, as_subject(Subject.FORWARD_PASS, make), clauses)


@pytest.mark.parametrize("kind", some(ops.BROKEN, 4))
def test_wrong_ops_are_caught_by_their_clause(kind):
    clauses = ops.BROKEN[kind]
    assert_caught(Subject.OPS, OpsSubject(make=lambda: kind(torch.float32)), clauses)


@pytest.mark.sample
def test_every_clause_has_a_plugin_that_breaks_it():
    tables = [drafters.BROKEN, verifiers.BROKEN, policies.BROKEN, targets.BROKEN, ops.BROKEN]
    tables += [processors.BROKEN, observers.BROKEN, families.BROKEN]
    covered = {clause for table in tables for clauses in table.values() for clause in clauses}
    assert {check.id for check in iter_checks()} <= covered
