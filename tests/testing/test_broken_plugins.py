"""Every clause has a plugin that is wrong in that way, and its check finds it in the cases of quick effort."""

from functools import partial

import pytest
import torch

from specdec.testing import PluginSubject, Status, Subject, as_subject, check_plugin, iter_checks, run_check
from tests.selection import cases
from tests.testing.broken import drafters, families, observers, ops, policies, processors, targets, verifiers

pytestmark = pytest.mark.slow


def made(subject, kind):
    """What the kit takes for a class of the tables in ``broken``."""
    if subject is Subject.FORWARD_PASS:
        kind, options = kind
        return as_subject(subject, partial(targets.table, kind, **dict(options)))
    if subject is Subject.DRAFTER:
        return PluginSubject(kind=Subject.DRAFTER, make=kind)
    if subject is Subject.OPS:
        return as_subject(subject, lambda: kind(torch.float32))
    return as_subject(subject, kind.spec() if subject is Subject.MODEL_FAMILY else kind)


TABLES = {
    Subject.DRAFTER: drafters.BROKEN,
    Subject.VERIFIER: verifiers.BROKEN,
    Subject.FORWARD_PASS: targets.BROKEN,
    Subject.DEPTH_POLICY: policies.BROKEN,
    Subject.OPS: ops.BROKEN,
    Subject.LOGITS_PROCESSOR: processors.BROKEN,
    Subject.OBSERVER: observers.BROKEN,
    Subject.MODEL_FAMILY: families.BROKEN,
}
CASES = [(subject, kind, clause) for subject, table in TABLES.items() for kind, clause in table.items()]


def name(case):
    _, kind, clause = case
    return f"{clause}-{(kind[0] if isinstance(kind, tuple) else kind).__name__}"


@pytest.mark.parametrize("case", cases(CASES, sample=["P4-GrowsForEver", "L3-InPlace"], name=name))
def test_a_wrong_plugin_is_found_by_its_clause(case):
    subject, kind, clause = case
    check = next(check for check in iter_checks(subject) if check.id == clause)
    found = run_check(check, made(subject, kind), shrink=False, seconds=60.0)  # whatever the machine is busy with
    assert found.status is Status.FAILED, found


def test_the_right_drafter_that_they_derive_from_passes():
    check_plugin(PluginSubject(kind=Subject.DRAFTER, make=drafters.Honest), effort="sample").raise_for_failures()


@pytest.mark.sample
def test_every_clause_has_a_plugin_that_breaks_it():
    assert {check.id for check in iter_checks()} == {clause for *_, clause in CASES}
