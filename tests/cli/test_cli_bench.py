"""``specdec bench``, with the embedded model: what it says, what it writes, what it refuses, how it ends."""

import html
import itertools
import json
import re
import sys

import attrs
import pytest

import specdec
from specdec.measuring import runs
from specdec.measuring.bench import BenchMeasurement
from tests.measuring.test_acceptance import COSTS

SHORT = ("--classes", "code,factual", "--per-class", "1", "--max-new-tokens", "8")


pytestmark = pytest.mark.usefixtures("loaded_once")


@pytest.fixture
def bench(invoke, monkeypatch):
    monkeypatch.setattr("specdec.measuring.bench.measure_costs", lambda lm: COSTS)
    return lambda *args: invoke("bench", *args)


def test_a_page_holds_tables_plot_and_data_of_an_imposed_acceptance(bench, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "bench.html"
    done = bench(*SHORT, "--classes", "code", "--html", str(file), "--synthetic", "0.9,0.5")
    assert "acceptance imposed (cumulative 0.9, 0.5): a timing, not a result" in done.stdout
    assert "same tokens" not in done.stdout
    assert done.exit_code == 0, done.stderr
    assert f"html: {file}" in done.stderr
    text = file.read_text(encoding="utf-8")
    assert "data:image/png;base64,iVBOR" in text
    assert not re.search(r"(src|href)=.(?!data:)|url\(|@import|<script>", text)  # nothing else is fetched or run
    data = json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)[0])
    tables = done.stdout.split("compared", 1)[1].split("\n\n", 1)[1]
    for line in tables.splitlines():  # what the terminal shows
        assert html.escape(line) in re.sub("<[^>]*>", "", text)
    assert data["synthetic"] == [0.9, 0.5]
    assert {term["name"] for term in data["terms"]} == {"verification", "drafting", "bookkeeping"}
    assert (data["environment"]["model"], data["equal"]) == ("demo", True)


def test_a_broken_promise_is_an_exit_status(bench, monkeypatch):
    compared = BenchMeasurement._compared

    def cut(self, prompt, runs):
        speculative = [attrs.evolve(run, tokens=run.tokens[:3]) for run in runs["speculative"]]
        return compared(self, prompt, runs | {"speculative": speculative})

    monkeypatch.setattr(BenchMeasurement, "_compared", cut)
    done = bench(*SHORT, "--classes", "code")
    assert done.exit_code == 1
    assert "OUTPUTS DIFFER on 1 of 1 prompts" in done.stdout
    assert "this is a bug" in done.stderr


def test_an_interruption_before_any_result_draws_no_picture(bench, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")

    def stop_at_once(run):
        run.stop()
        return ()

    monkeypatch.setattr(BenchMeasurement, "_warm_up", stop_at_once)
    done = bench(*SHORT, "--classes", "code", "--html", str(tmp_path / "a.html"))
    assert done.exit_code == 130
    assert "interrupted: this covers 0 prompts" in done.stderr
    assert "<img" not in (tmp_path / "a.html").read_text(encoding="utf-8")


def test_a_missing_matplotlib_is_told_before_anything_runs(bench, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(vars(specdec), "load", None)
    done = bench("--html", tmp_path / "a.html")
    assert done.exit_code == 2
    assert "specdec-framework[plot]" in done.stderr


def test_tables_for_people_and_reasons_of_many_runs_as_one_note(bench, monkeypatch):
    numbers = itertools.count()

    def run(*args, **settings):
        return attrs.evolve(generate(*args, **settings), inactive_reason=f"plain decoding is faster: {next(numbers)}")

    generate = runs.generate
    monkeypatch.setattr(runs, "generate", run)
    done = bench(*SHORT, "-s", "depth.depth=1")
    assert done.exit_code == 0, done.stderr
    text = " ".join(done.stdout.split())
    for part in (
        "drafter ngram, mtp, depth fixed, verifier strict, greedy",
        "2, 8 tokens each, 1 A B B A round",
        "All runs of every prompt gave the same tokens.",
        "verify 2 rows",
        "What would gain most:",
    ):
        assert part in text, part
    notes = [line for line in done.stdout.splitlines() if "plain decoding is faster" in line]
    assert len(notes) == 1
    assert notes[0].startswith("note: speculation was off at the end of 4 of 4 runs: ")
