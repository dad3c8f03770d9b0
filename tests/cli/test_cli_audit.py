"""``specdec audit``, of the embedded model and of servers: what it says, what it reads, how it ends."""

from __future__ import annotations

import json

import pytest

from specdec.measuring.audit import AuditReport
from specdec.registry import BUILT_INS, Registry
from tests.completion_stub import Toy, json_reply, stub

pytestmark = pytest.mark.usefixtures("loaded_once")

MARGIN = ("-s", "verifier.name=margin", "-s", "verifier.margin=1.0")


@pytest.fixture
def audit(invoke):
    return lambda *args, **kwargs: invoke("audit", *args, registry=Registry(BUILT_INS, entry_points=()), **kwargs)


def test_an_exact_run_has_no_divergence_and_exit_status_0(audit):
    done = audit("-n", "30", "--ignore-eos")
    assert done.exit_code == 0, done.stderr
    assert "continuing a sample" in done.stderr
    text = " ".join(done.stdout.split())
    for part in (
        "30 tokens after a prompt of 8, against argmax",
        "guarantee exact, with bitwise parity",
        "divergences none",
        "run's own no deviations counted",
        "top-two gap (nats) positions divergences",
        "10 and more",
    ):
        assert part in text


def test_json_is_one_object_on_stdout_and_nothing_else(audit):
    done = audit("-p", "def f(", "-n", "20", "--ignore-eos", "-t", "0.8", "--seed", "3", "--json")
    assert done.exit_code == 0
    told = json.loads(done.stdout)
    assert (told["tokens"], told["temperature"], told["guarantee"], told["parity"]) == (20, 0.8, "exact", "bitwise")
    assert told["divergence"] == {"count": 0, "rate": 0.0, "first": None, "largest_gap": 0.0, "positions": []}
    assert sum(entry["positions"] for entry in told["gap_histogram"]) == 20
    assert told["broken_promise"] is False
    assert done.stderr == ""


def test_a_broken_promise_ends_with_status_1(audit, monkeypatch):
    monkeypatch.setattr(AuditReport, "broken_promise", True)
    done = audit("-n", "4")
    assert done.exit_code == 1
    assert "this is a bug" in done.stderr


@pytest.mark.parametrize(("tolerance", "status"), [("5.0", 0), ("0.0001", 1)])
def test_a_tolerance_decides_the_exit_status(tolerance, status, audit):
    """A lossy run promises nothing, so only the tolerance can fail it."""
    done = audit("-n", "80", "--ignore-eos", *MARGIN, "--tolerance", tolerance, "--json")
    assert done.exit_code == status
    told = json.loads(done.stdout)
    gaps = [found["gap"] for found in told["divergence"]["positions"]]
    assert told["tolerance"] == float(tolerance)
    assert told["beyond_tolerance"] == sum(gap > float(tolerance) for gap in gaps)
    assert ("beyond the tolerance" in done.stderr) == bool(status)
    assert bool(told["beyond_tolerance"]) == bool(status)


# --- servers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain():
    with stub(Toy()) as url:
        yield url


def test_a_bug_is_found_told_and_ends_with_status_1(audit, plain):
    with stub(Toy(depth=3, keeps=1)) as other:
        both = ("--server", plain, "--server", other, "-n", "12", "--per-class", "1")
        done = audit(*both)
        told = json.loads(audit(*both, "--json").stdout)
    assert done.exit_code == 1
    assert "5 requests got another token with a real gap: this is a bug" in done.stderr
    text = " ".join(done.stdout.split())
    for part in (
        f"plain toy at {plain}/v1",
        "5 requests, greedy, 12 tokens at most",
        "differ 5 of 5 requests (100.0%)",
        "verdicts 5 other token with a real gap",
        "first position 5 after the prompt",
        "plain against plain: 0 of 5 requests (0.0%)",
        "request position token plain decoding gap top-two gap verdict",
        "why: request 0:",
    ):
        assert part in text
    assert told["verdicts"]["other token with a real gap"] == told["differ"]["count"] == 5
    assert [one["position"] for one in told["differences"]] == [5] * 5


ROWS = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"text": "a", "finish_reason": "length", "logprobs": None}, "the answer has no log-probabilities"),
        ({"text": "", "finish_reason": "stop", "logprobs": ROWS}, "every answer is empty: nothing was compared"),
    ],
)
def test_answers_that_prove_nothing_are_no_audit(audit, choice, told):
    with stub(lambda asked: json_reply({"choices": [choice]})) as url:
        done = audit("--server", url, "--server", url, "-p", "a", "--json")
    assert done.exit_code == 2
    assert json.loads(done.stdout)["error"]["message"] == told
