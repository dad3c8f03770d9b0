"""``specdec accept``, with the embedded model: what it says, what it writes, what it refuses, how it ends."""

import itertools
import json
import os
import signal

import pytest

from specdec.measuring.runs import Measurement

pytestmark = pytest.mark.usefixtures("loaded_once")

SHORT = ("--per-class", "1", "-n", "8", "--depth", "2")


@pytest.fixture
def accept(invoke):
    return lambda *args, **kwargs: invoke("accept", *args, **kwargs)


def test_tables_for_people(accept):
    done = accept(*SHORT)
    assert done.exit_code == 0, done.stderr
    text = " ".join(done.stdout.split())
    for part in (
        "drafter ngram, mtp at depth 2, greedy, verifier strict",
        "5 prompts, 2 of them in the chat template, at most 8 tokens each",
        "class position offered reached accepted cond. cumul. interval",
        "Conditional = accepted / reached: right, given that the tokens before were.",
        "Cumulative = accepted / offered: the share of drafted tokens that became output",
        "depth cycle (ms) plain steps break-even",
        "class depth 1 depth 2",
        "class verdict best depth speed-up interval tokens per cycle decided by",
        "worth trying",
        "too few prompts for an interval (8 or more)",
    ):
        assert part in text
    for name in ("factual", "verbose-thinking", "code", "instruction", "copy", "all"):
        assert text.count(f" {name} ") >= 3
    assert "The MTP head with one mistake" not in text


def test_a_file_of_ones_own_and_a_log(accept, tmp_path):
    (tmp_path / "mine.txt").write_text("def f(x):\nOnce upon a time\n")
    done = accept("--prompts", tmp_path / "mine.txt", "-n", "8", "--log", tmp_path / "log.jsonl", "--json")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert [(group["name"], group["prompts"]) for group in told["classes"]] == [("prompts", 2)]
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {row["prompt"] for row in rows} == {"mine.txt, line 1", "mine.txt, line 2"}
    assert len(rows) == told["overall"]["positions"][0]["offered"]
    assert sum(row["accepted"] > 0 for row in rows) == told["overall"]["positions"][0]["accepted"]
    for row in rows:
        agreeing = [a == b for a, b in zip(row["drafted"], row["actual"], strict=False)]
        assert all(agreeing[: row["accepted"]])
        assert row["mismatch"] is None or row["mismatch"] == row["accepted"] < len(row["drafted"])
        assert [len(row[name]) for name in ("drafted_text", "actual_text")] == [len(row["drafted"]), len(row["actual"])]
    for row, later in itertools.pairwise(row for row in rows if row["prompt"].endswith("line 1")):
        assert later["position"] == row["position"] + row["accepted"] + 1
        said = "".join(row["actual_text"][: row["accepted"] + 1])
        assert later["context"].endswith(said) or row["mismatch"] is None  # then a token followed the draft


def test_a_changed_output_is_told_and_ends_with_status_1(accept, monkeypatch):
    from specdec.measuring.ablations import AblatedLM

    right = AblatedLM.decode

    def wrong(self, state, tokens, *args, **named):
        return right(self, state, [token ^ 1 for token in tokens], *args, **named)

    monkeypatch.setattr(AblatedLM, "decode", wrong, raising=False)
    done = accept("--classes", "code", *SHORT, "--ablate", "no-rotary")
    assert done.exit_code == 1
    assert "this is a bug" in done.stderr
    assert "0 of 1" in done.stdout


def test_ctrl_c_reports_what_was_measured_so_far(accept, monkeypatch):
    done_runs = []
    right = Measurement._generate

    def run(self, *args):
        found = right(self, *args)
        done_runs.append(found)
        if len(done_runs) == 3:  # as the terminal sends it
            os.kill(os.getpid(), signal.SIGINT)
        return found

    monkeypatch.setattr(Measurement, "_generate", run)
    done = accept("--per-class", "2", "-n", "6")
    assert done.exit_code == 130
    assert "interrupted: this covers 3 of 10 prompts" in done.stderr
    assert "3 of 10 prompts, interrupted" in " ".join(done.stdout.split())
    done_runs.clear()
    told = accept("--per-class", "2", "-n", "6", "--json")
    assert told.exit_code == 130
    assert json.loads(told.stdout)["partial"] is True
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_drafter_is_judged_on_recorded_traffic(invoke, accept, tmp_path):
    trace = tmp_path / "trace.jsonl"
    for prompt in ("def f(x):", "Once upon a time"):
        settings = ["-n", "24", "-s", "drafter.name=ngram", "-s", "generation.ignore_eos=true"]
        made = invoke("generate", "--trace", trace, "-p", prompt, *settings)
        assert made.exit_code == 0, made.stderr
    done = accept("--trace", trace, "-s", "drafter.name=ngram", "--depth", "3", "--json")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["done"], report["tokens"], report["hosts"]) == (2, 48, ["specdec"])
    assert report["passes"] == 48 - sum(report["accepted"]) == 48 - report["saved"]
    done = accept("--trace", trace, "-s", "drafter.name=none")
    assert "48 instead of 48: 1.00 tokens per pass" in " ".join(done.stdout.split())
    assert "left out" not in done.stdout
    whole = trace.read_text()
    trace.write_text(whole[:-3])
    done = accept("--trace", trace, "-s", "drafter.name=none")
    assert f"line {whole.count(chr(10))}, the last one, which is incomplete" in " ".join(done.stdout.split())
