"""``specdec audit --server`` and ``--engine``: what it says, what it reads, how it ends."""

from __future__ import annotations

import json

import pytest

from specdec.registry import BUILT_INS, Registry
from tests.completion_stub import Toy, json_reply, stub

pytestmark = pytest.mark.usefixtures("loaded_once")


@pytest.fixture
def audit(invoke):
    return lambda *args: invoke("audit", *args, registry=Registry(BUILT_INS, entry_points=()))


@pytest.fixture(scope="module")
def plain():
    with stub(Toy()) as url:
        yield url


def test_a_bug_is_found_told_and_ends_with_status_1(audit, plain, tmp_path):
    pytest.importorskip("matplotlib")
    with stub(Toy(depth=3, keeps=1)) as other:
        both = ("--server", plain, "--server", other, "-n", "12", "--per-class", "1")
        done = audit(*both, "--plot", tmp_path / "a.png")
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
        "request position plain speculative gap top-two gap verdict",
        "why: request 0:",
    ):
        assert part in text
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert told["verdicts"]["other token with a real gap"] == told["differ"]["count"] == 5
    assert [one["position"] for one in told["differences"]] == [5] * 5
    assert told["png"] is None


def test_the_same_server_twice_shows_its_noise(audit, plain):
    done = audit("--server", plain, "--server", plain, "-p", "one", "-n", "5", "--json")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["requests"], told["differ"]["count"], told["control"]["count"]) == (1, 0, 0)


def test_our_own_engine_is_one_of_them(audit):
    done = audit("--engine", "specdec", "-n", "8", "--per-class", "1", "--ignore-eos", "--json")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["requests"], told["tokens"], told["differ"]["count"], told["logprobs_apart"]) == (5, 40, 0, 0.0)
    assert told["rounding"]["tie_up_to"] == told["rounding"]["real_above"]
    assert told["drafted"] > 0


def test_an_audit_without_drafts_says_so(audit, plain):
    depth = ("-s", "depth.name=fixed", "-s", "depth.depth=0")
    done = audit("--engine", "specdec", "-n", "4", "-p", "def f(", *depth)
    assert done.exit_code == 0, done.stderr
    assert "nothing, so this says nothing about speculation" in done.stdout
    done = audit("--server", plain, "--server", plain, "-p", "one", "-n", "2", "--json")
    assert json.loads(done.stdout)["drafted"] is None


def test_a_lossy_verifier_of_ours_shows_its_tolerance(audit):
    lossy = ("-s", "verifier.name=margin", "-s", "verifier.margin=1.0")
    done = audit("--engine", "specdec", "-n", "60", "-p", "def f(", "--ignore-eos", *lossy, "--json")
    told = json.loads(done.stdout)
    assert told["differ"]["count"] == 1
    assert told["differences"][0]["gap"] <= 1.0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--server", "{}"], "give two, a plain and a speculative one, got 1"),
        (["--server", "{}", "--server", "nonsense"], "'nonsense' is not the URL of a server"),
        (["--server", "{}", "--server", "http://127.0.0.1:9"], "cannot be reached: Connection refused"),
        (["--server", "{}", "--server", "{}/other"], "answers 404 to /models: 'Not Found'"),
        (["--server", "{}", "--server", "{}", "-m", "toys"], "no model 'toys'. Did you mean 'toy'?"),
        (["--server", "{}", "--server", "{}", "--depth", "3"], "--depth: with --server"),
        (["--server", "{}", "--server", "{}", "--run", "x"], "--run: it is for specdec's own runs"),
        (["--server", "{}", "--server", "{}", "-s", "generation.top_k=3"], "it means nothing to a server"),
        (["--server", "{}", "--server", "{}", "-t", "1", "--tolerance", "1"], "these requests are sampled"),
        (["--server", "{}", "--server", "{}", "--prompts", "none.txt"], "prompt file cannot be read"),
        (["--server", "{}", "--server", "{}", "-p", "a", "--per-class", "1"], "leave them out"),
        (["--server", "{}", "--engine", "specdec"], "give one of them"),
        (["--engine", "specdec", "--timeout", "3"], "--timeout: it needs --server"),
        (["--server", "{}", "--server", "{}", "--timeout", "1e300"], "is not in the range"),
        (["--engine", "nemo"], "'nemo' is not one of"),
        (["--prompts", "x"], "--prompts: it needs --server or --engine"),
    ],
)
def test_wrong_input_is_refused(args, message, audit, plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = audit(*(arg.replace("{}", plain) for arg in args))
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_a_server_without_log_probabilities_is_refused(audit, plain):
    body = {"choices": [{"text": "a", "finish_reason": "length", "logprobs": None}]}
    with stub(lambda asked: json_reply(body)) as other:
        done = audit("--server", plain, "--server", other, "-p", "a", "--json")
    assert done.exit_code == 2
    assert json.loads(done.stdout)["error"]["message"] == "the answer has no log-probabilities"


def test_empty_answers_are_no_audit(audit):
    rows = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    body = {"choices": [{"text": "", "finish_reason": "stop", "logprobs": rows}]}
    with stub(lambda asked: json_reply(body)) as url:
        done = audit("--server", url, "--server", url, "-p", "a", "--json")
    assert done.exit_code == 2
    assert json.loads(done.stdout)["error"]["message"] == "every answer is empty: nothing was compared"


def test_a_missing_host_is_a_sentence(audit, monkeypatch):
    from specdec.errors import UnsupportedError
    from specdec.hosting import engines

    monkeypatch.setattr(engines.importlib.metadata, "version", _missing)
    done = audit("--engine", "transformers", "-p", "a")
    assert done.exit_code == 2
    assert "transformers is not installed" in done.stderr
    assert UnsupportedError.__name__ in done.stderr


def _missing(name):
    from importlib.metadata import PackageNotFoundError

    raise PackageNotFoundError(name)
