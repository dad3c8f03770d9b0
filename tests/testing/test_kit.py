"""The kit itself: documents, reports, known failures, pytest items, the numbers that it decides by."""

from __future__ import annotations

import importlib
import json
import re

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from specdec.backends.cpu.reference import ReferenceOps
from specdec.backends.ops import Ops
from specdec.contract import DepthPolicySpec, ForwardPass
from specdec.drafters.ngram import specdec_drafters as ngram_specs
from specdec.drafters.none import specdec_drafters as none_specs
from specdec.errors import ConfigError, UnknownNameError, UnsupportedError
from specdec.policies.fixed import specdec_depth_policies
from specdec.testing import (
    Check,
    CheckFailure,
    Memory,
    Status,
    Subject,
    TableModel,
    as_subject,
    check_plugin,
    expect,
    goodness_of_fit,
    iter_checks,
    parametrize_checks,
    run_check,
    strategies,
)
from specdec.testing.checks import LEAST, Broken, Run
from specdec.testing.numerics import chi_square_tail
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
        "the draft is too long",
        "smallest case",
        "got:",
        "expected:",
        "replay:",
        "docs/contract/drafter.md",
    ):
        assert part in text
    assert "length = " in text


def test_the_same_seed_finds_the_same_case():
    texts = [
        str(run_check(_check("D6"), as_subject(Subject.DRAFTER, drafters.CountsItsOwnCycles), seed=5).failure)
        for _ in range(2)
    ]
    assert texts[0] == texts[1]


def test_the_same_seed_draws_the_same_cases_whatever_modules_are_loaded(tmp_path, monkeypatch):
    def drawn():
        cases = []
        Run(seed=5, effort="full").explore(lambda **case: cases.append(case), examples=20, number=strategies.seeds)
        return cases

    before = drawn()
    numbers = ", ".join(str(number) for number in range(1_000_003, 1_000_703, 7))  # hypothesis reads such constants
    (tmp_path / "just_loaded.py").write_text(f"NUMBERS = [{numbers}]\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("just_loaded")
    assert drawn() == before


def test_a_known_failure_is_reported_with_its_reason_and_one_that_passes_fails():
    subject = as_subject(Subject.DRAFTER, drafters.TooLong)
    assert run_check(_check("D1"), subject, known="issue 12").status is Status.KNOWN
    outcome = run_check(_check("D2"), subject, known="issue 12")
    assert outcome.status is Status.FAILED
    assert "known failure, and it passes" in outcome.detail


def test_a_known_failure_that_is_no_check_is_an_error_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"no check 'D77'.*"):
        check_plugin(none_specs()[0], known_failures={"D77": "typo"})
    with pytest.raises(ConfigError, match="another kind of plugin"):
        parametrize_checks(drafter=none_specs()[0], known_failures={"V1": "reason"})


def test_an_exception_of_a_plugin_is_a_failure_with_its_place():
    class Crashes(drafters.Honest):
        def propose(self, context, depth):
            raise ZeroDivisionError("oh")

    text = str(run_check(_check("D3"), as_subject(Subject.DRAFTER, Crashes)).failure)
    assert "ZeroDivisionError: oh (propose, test_kit.py" in text


def test_a_plugin_that_fails_only_sometimes_is_reported_as_such():
    calls = []

    class Flaky(drafters.Honest):
        def propose(self, context, depth):
            calls.append(1)
            return super().propose(context, depth + (len(calls) == 7))

    assert run_check(_check("D1"), as_subject(Subject.DRAFTER, Flaky)).status is Status.FAILED


@pytest.mark.slow
def test_the_report_raises_with_every_failed_id():
    report = check_plugin(as_subject(Subject.DRAFTER, drafters.TooLong), only=["D1", "D2", "D13"])
    assert [outcome.check.id for outcome in report.failures] == ["D1", "D13"]
    with pytest.raises(CheckFailure, match="fails D1, D13"):
        report.raise_for_failures()
    assert json.loads(json.dumps(report.to_dict()))["counts"]["failed"] == 2


@pytest.mark.slow
def test_specs_names_and_objects_are_taken():
    assert check_plugin(ngram_specs()[0], options={"max_order": 3}, only=["D1"]).ok
    assert check_plugin("fixed").ok
    assert check_plugin(specdec_depth_policies()[0]).ok
    assert check_plugin(
        DepthPolicySpec(name="own", factory=lambda config: policies.GrowsForEver()), only=["P4"]
    ).failures
    with pytest.raises(UnknownNameError, match="Did you mean 'strict'"):
        check_plugin("strikt")
    with pytest.raises(ConfigError, match="another kind of plugin"):
        check_plugin("fixed", only=["D1"])


@parametrize_checks(drafter=lambda env: drafters.Honest(env), depth_policy=specdec_depth_policies()[0], effort="sample")
def test_the_decorator_gives_one_item_per_check(check):
    check()


@parametrize_checks(
    drafter=lambda env: drafters.ListOfTokens(env), known_failures={"D1": "tokens are a list"}, effort="sample"
)
@pytest.mark.slow
def test_known_failures_are_expected_by_the_decorator(check):
    check()


# --- what a plugin may leave out -------------------------------------------------------------------------------------


class LacksOps(ReferenceOps):
    """With an operation left as ``Ops`` has it, with one that is not written, and with one that refuses."""

    project_heads = Ops.project_heads

    def route(self, x, weight, routing, bias=None):
        raise NotImplementedError("no experts here")

    def new_latent(self, capacity, dims):
        raise UnsupportedError("no latent attention here")


def _outcome(id_: str, given: object):
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


def test_an_op_that_refuses_only_some_cases_is_a_failure():
    class FewExperts(ReferenceOps):
        def route(self, x, weight, routing, bias=None):
            if routing.groups > 1:
                raise UnsupportedError("no groups")
            return super().route(x, weight, routing, bias)

    outcome = _outcome("O17", lambda: FewExperts(torch.float32))
    assert outcome.status is Status.FAILED
    assert "no groups" in outcome.detail


def test_a_target_that_gives_no_hidden_states_between_layers_passes():
    model = TableModel.random(5, layers=0)
    assert _outcome("F9", model).status is Status.PASSED
    assert _outcome("F17", model).status is Status.PASSED
    assert _outcome("F21", model).status is not Status.FAILED


def test_a_target_without_draft_heads_and_a_drafter_without_a_snapshot_are_told():
    class NoHeads(TableModel):
        def draft_head(self, tokens):
            return ForwardPass.draft_head(self, tokens)

    outcome = _outcome("F19", NoHeads.random(5, mtp=True))
    assert outcome.status is Status.NOT_APPLICABLE
    assert "offers no pruned draft head" in outcome.detail
    assert _outcome("F19", TableModel.random(5)).status is Status.NOT_APPLICABLE
    outcome = _outcome("D17", ngram_specs()[0])
    assert outcome.status is Status.NOT_APPLICABLE
    assert "snapshot" in outcome.detail


# --- the command -----------------------------------------------------------------------------------------------------


def _command(*arguments: str):
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

    subjects = ([("broken", Subject.DEPTH_POLICY, as_subject(Subject.DEPTH_POLICY, policies.GrowsForEver))], [])
    monkeypatch.setattr(reports, "registered_subjects", lambda *arguments: subjects)
    done = _command("broken")
    assert done.exit_code == 1
    assert "fails P4" in done.stdout
    assert "specdec check broken --seed 0 --effort quick --only P4" in done.stdout


@pytest.mark.slow
def test_an_unknown_name_ends_with_status_two():
    assert "Did you mean 'strict'" in run_specdec("check", "strikt", status=2).stderr


# --- the models ------------------------------------------------------------------------------------------------------


def test_the_table_model_follows_its_table():
    table = np.array([[0.1, 0.9], [1.0, 0.0]])
    model = TableModel(table)
    assert model.distribution([0]) == pytest.approx([0.1, 0.9])
    assert model.distribution([0, 1]) == pytest.approx([1.0, 0.0])
    state = model.new_state(8)
    logits = model.decode(state, [0, 1]).need_logits().rows()
    assert np.exp(logits) == pytest.approx(np.array([[0.1, 0.9], [1.0, 0.0]]))


def test_only_attention_can_be_cut_anywhere():
    reached = {}
    for memory in Memory:
        model = TableModel.random(4, memory=memory)
        state = model.new_state(32)
        model.prefill(state, [0, 1, 2])
        for token in (1, 2, 3):
            model.decode(state, [token])
            model.commit(state, 1)
        reached[memory] = model.rewind(state, 5)
    assert reached == {Memory.ATTENTION: 5, Memory.CONVOLUTION: 3, Memory.RECURRENT: 3}


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statistic", "freedom", "tail"),
    [(3.841, 1, 0.05), (18.307, 10, 0.05), (23.209, 10, 0.01), (124.342, 100, 0.05), (1.0, 2, 0.60653), (0.0, 5, 1.0)],
)
def test_the_chi_square_tail_has_the_values_of_the_tables(statistic, freedom, tail):
    assert chi_square_tail(statistic, freedom) == pytest.approx(tail, rel=2e-3)


def test_goodness_of_fit_has_the_false_alarms_it_states():
    rng, probs = np.random.default_rng(1), np.array([0.4, 0.3, 0.2, 0.0996, 0.0004])
    values = [goodness_of_fit(rng.multinomial(2_000, probs), probs).p_value for _ in range(600)]
    assert 0.02 < np.mean(np.array(values) < 0.05) < 0.09


def test_an_impossible_outcome_fails_at_once():
    fit = goodness_of_fit([10, 10, 1], [0.5, 0.5, 0.0])
    assert fit.impossible == (2,)
    assert not fit.passes(1e-9)


def test_explore_shrinks_and_keeps_the_global_generators():
    before = repr(np.random.get_state())
    import hypothesis.strategies as st

    def body(numbers):
        expect(sum(numbers) < 100, "too large", got=sum(numbers))

    with pytest.raises(Broken) as caught:
        Run(3).explore(body, examples=200, numbers=st.lists(st.integers(0, 60)))
    assert sum(caught.value.case["numbers"]) == 100
    assert repr(np.random.get_state()) == before


def _check(id_: str) -> Check:
    return next(check for check in iter_checks() if check.id == id_)


def test_some_cases_are_drawn_even_when_there_is_no_time() -> None:
    drawn: list[int] = []
    run = Run(seconds=0.0)
    run.explore(lambda case: drawn.append(case), case=st.integers())
    assert list(run.repeat(9, least=3)) == [0, 1, 2]
    assert len(drawn) == LEAST
