"""Every clause has a plugin that is wrong in that way only, and its check is what finds it."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from specdec.testing import DrafterSubject, OpsSubject, Status, Subject, iter_checks
from specdec.testing.registry import as_subject, check_subjects
from tests.testing.broken import drafters, ops, policies, targets, verifiers

EFFORT = {"D14": 1.0, "V5": 0.6}  # the two that draw thousands of times


def caught(subject, under_test) -> set[str]:
    """Ids of the checks that find something, the costly ones only where they are needed."""
    report = check_subjects("broken", {subject: under_test})
    bad = (Status.FAILED, Status.ADVICE)
    return {outcome.check.id for outcome in report.outcomes if outcome.status in bad}


def _drafter(kind):
    return DrafterSubject(make=kind, needs=kind.needs)


@pytest.mark.parametrize("kind", drafters.BROKEN, ids=lambda kind: kind.__name__)
def test_a_wrong_drafter_is_caught_by_its_clause(kind):
    assert caught(Subject.DRAFTER, _drafter(kind)) == drafters.BROKEN[kind]


@pytest.mark.parametrize("kind", verifiers.BROKEN, ids=lambda kind: kind.__name__)
def test_a_wrong_verifier_is_caught_by_its_clause(kind):
    assert caught(Subject.VERIFIER, as_subject(Subject.VERIFIER, kind)) == verifiers.BROKEN[kind]


@pytest.mark.parametrize("kind", policies.BROKEN, ids=lambda kind: kind.__name__)
def test_a_wrong_policy_is_caught_by_its_clause(kind):
    assert caught(Subject.DEPTH_POLICY, as_subject(Subject.DEPTH_POLICY, kind)) == policies.BROKEN[kind]


@pytest.mark.parametrize("case", targets.BROKEN, ids=lambda case: case[0].__name__)
def test_a_wrong_target_is_caught_by_its_clause(case):
    kind, options = case
    make = partial(targets.table, kind, **dict(options))
    assert caught(Subject.FORWARD_PASS, as_subject(Subject.FORWARD_PASS, make)) == targets.BROKEN[case]


@pytest.mark.parametrize("kind", ops.BROKEN, ids=lambda kind: kind.__name__)
def test_wrong_ops_are_caught_by_their_clause(kind):
    assert caught(Subject.OPS, OpsSubject(make=lambda: kind(torch.float32))) == ops.BROKEN[kind]


def test_every_clause_has_a_plugin_that_breaks_it():
    tables = [drafters.BROKEN, verifiers.BROKEN, policies.BROKEN, targets.BROKEN, ops.BROKEN]
    covered = {clause for table in tables for clauses in table.values() for clause in clauses}
    assert {check.id for check in iter_checks()} <= covered
