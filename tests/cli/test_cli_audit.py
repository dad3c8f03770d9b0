"""``specdec audit``: what it says, what it reads, how it ends."""

import json

import pytest

from tests.completion_stub import Toy, json_reply, stub


@pytest.fixture
def audit(invoke):
    return lambda *args, **kwargs: invoke("audit", *args, **kwargs)


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


def test_equal_tokens_with_other_log_probabilities_are_told(audit, plain):
    """As those of a wrong temperature, which changes no greedy token."""
    with stub(Toy(depth=2, rounded=lambda row: row * 1.5)) as other:
        done = audit("--server", plain, "--server", other, "-n", "12", "--per-class", "1")
    assert done.exit_code == 0
    assert "0 of 5 requests" in " ".join(done.stdout.split())
    assert "log-probabilities of equal tokens in the same context differ by" in done.stderr
    assert "which rounding does not explain" in done.stderr


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
