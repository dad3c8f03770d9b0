"""The kit itself: documents, reports, known failures, pytest items, the numbers that it decides by."""

import json
import re

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from specdec.backends.cpu.reference import ReferenceOps
from specdec.backends.ops import Ops
from specdec.contract import ForwardPass
from specdec.drafters.none import specdec_drafters as none_specs
from specdec.errors import ConfigError, UnsupportedError
from specdec.policies.fixed import specdec_depth_policies
from specdec.testing import Status, Subject, TableModel, as_subject, expect, iter_checks, parametrize_checks, run_check
from specdec.testing.checks import LEAST, Broken, Run
from tests.processes import run_specdec
from tests.testing import contract_pages
from tests.testing.broken import drafters, policies

# --- the written contract --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", Subject, ids=lambda subject: subject.document)
def test_every_clause_is_headed_by_its_sentence_and_has_a_reason(subject):
    text = contract_pages.page(subject).read_text(encoding="utf-8")
    clauses = contract_pages.CLAUSE.findall(text)
    assert [id_ for id_, *_ in clauses] == re.findall(r"^## (\S+)", text, re.M)
    assert {id_ for id_, *_ in clauses} == {check.id for check in iter_checks(subject)}
    assert text == contract_pages.updated(subject), "run python -m tests.testing.contract_pages"


# --- failures and known failures -------------------------------------------------------------------------------------


def test_a_failure_says_clause_case_and_replay():
    outcome = run_check(_check("D1"), as_subject(Subject.DRAFTER, drafters.TooLong))
    text = str(outcome.failure)
    assert outcome.status is Status.FAILED
    for part in (
        "D1 A draft has at most ``depth`` tokens",
        "draft longer than asked for",
        "smallest case",
        "got:",
        "expected:",
        "replay:",
        "docs/contract/drafter.md",
    ):
        assert part in text
    assert "length = " in text


def test_a_known_failure_that_is_no_check_is_an_error_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"no check 'D77'.*"):
        parametrize_checks(drafter=none_specs()[0], known_failures={"D77": "typo"})
    with pytest.raises(ConfigError, match="no check 'V1' of a drafter"):
        parametrize_checks(drafter=none_specs()[0], known_failures={"V1": "reason"})


def test_an_exception_of_a_plugin_is_a_failure_with_its_place():
    class Crashes(drafters.Honest):
        def propose(self, context, depth):
            raise ZeroDivisionError("oh")

    text = str(run_check(_check("D3"), as_subject(Subject.DRAFTER, Crashes), shrink=False).failure)
    assert "ZeroDivisionError: oh (propose, test_kit.py" in text


@parametrize_checks(
    depth_policy=policies.GrowsForEver, effort="sample", known_failures={"P4": "it grows for ever, on purpose"}
)
def test_a_known_failure_is_expected_and_may_not_pass(check):
    check()


@parametrize_checks(depth_policy=specdec_depth_policies()[0], effort="sample")
def test_the_decorator_gives_one_item_per_check(check):
    check()


# --- what a plugin may leave out -------------------------------------------------------------------------------------


class LacksOps(ReferenceOps):
    """With an operation left as ``Ops`` has it, with one that is not written, and with one that refuses."""

    project_heads = Ops.project_heads

    def route(self, x, weight, routing, bias=None):
        raise NotImplementedError("no experts here")

    def new_latent(self, capacity, dims):
        raise UnsupportedError("no latent attention here")


def _outcome(id_, given):
    check = _check(id_)
    return run_check(check, as_subject(check.subject, given))


def test_ops_that_a_backend_lacks_are_told_and_no_failure():
    outcomes = {
        id_: _outcome(id_, lambda: LacksOps(torch.float32)) for id_ in ("O16", "O17", "O18", "O19", "O20", "O12")
    }
    skipped = {id_: outcome.detail for id_, outcome in outcomes.items() if outcome.status is Status.NOT_APPLICABLE}
    assert skipped.keys() == {"O16", "O17", "O18", "O19"}
    for id_, reason in {"O16": "no project_heads", "O17": "no experts here", "O19": "no latent attention"}.items():
        assert reason in skipped[id_]
    assert outcomes["O20"].status is outcomes["O12"].status is Status.PASSED


def test_a_target_that_gives_no_hidden_states_between_layers_passes():
    model = TableModel.random(5, layers=0)
    assert _outcome("F9", model).status is Status.PASSED
    assert _outcome("F21", model).status is Status.PASSED


def test_a_target_without_draft_heads_is_told():
    class NoHeads(TableModel):
        def draft_head(self, tokens):
            return ForwardPass.draft_head(self, tokens)

    outcome = _outcome("F19", NoHeads.random(5, mtp=True))
    assert outcome.status is Status.NOT_APPLICABLE
    assert "offers no pruned draft head" in outcome.detail
    assert _outcome("F19", TableModel.random(5)).status is Status.NOT_APPLICABLE


# --- the command -----------------------------------------------------------------------------------------------------


def _command(*arguments):
    from specdec.cli.check import check

    return CliRunner().invoke(check, list(arguments))


def test_the_command_prints_one_object_and_says_by_its_status_how_it_went():
    done = _command("ngram", "--json", "--effort", "sample", "-s", "max_order=3")
    assert done.exit_code == 0, done.output
    outcomes = json.loads(done.stdout)
    assert outcomes["ok"]
    assert [check["id"] for check in outcomes["checks"]] == [check.id for check in iter_checks(Subject.DRAFTER)]


def test_the_command_fails_a_broken_plugin(monkeypatch):
    from specdec.testing import reports

    subjects = ([as_subject(Subject.DEPTH_POLICY, policies.GrowsForEver)], [])
    monkeypatch.setattr(reports, "registered_subjects", lambda *arguments: subjects)
    done = _command("broken", "--only", "P4", "--effort", "sample")
    assert done.exit_code == 1
    assert "fails P4" in done.stdout
    assert "specdec check broken --seed 0 --effort sample --only P4" in done.stdout


@pytest.mark.slow
def test_an_unknown_name_ends_with_status_two():
    assert "Did you mean 'strict'" in run_specdec("check", "strikt", status=2).stderr


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_explore_shrinks_and_keeps_the_global_generators():
    before = repr(np.random.get_state())
    import hypothesis.strategies as st

    def body(numbers):
        expect(sum(numbers) < 100, "too large", got=sum(numbers))

    with pytest.raises(Broken) as caught:
        Run(3).explore(body, examples=200, numbers=st.lists(st.integers(0, 60)))
    assert sum(caught.value.case["numbers"]) == 100
    assert repr(np.random.get_state()) == before


def _check(id_):
    return next(check for check in iter_checks() if check.id == id_)


def test_some_cases_are_drawn_even_when_there_is_no_time():
    drawn = []
    run = Run(seconds=0.0)
    run.explore(lambda case: drawn.append(case), case=st.integers())
    assert list(run.repeat(9, least=3)) == [0, 1, 2]
    assert len(drawn) == LEAST
