"""``specdec generate``: what goes where, what the flags mean, how it ends."""

import json
import re
import signal

import pytest

from specdec.cli.options import SAMPLE_PROMPT, SAMPLE_SETTINGS
from specdec.config import Choice
from specdec.errors import PromptError


def test_text_goes_to_stdout_and_the_report_to_stderr(invoke, asked):
    options = ("generate", "--prompt", "def f([b]", "-n", 24)
    done = invoke(*options, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    told = json.loads(done.stdout)  # one object and nothing else
    done = invoke(*options, "--stats")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == told["text"] + "\n"
    assert asked[0].prompt == "def f([b]"
    stats = told["stats"]
    assert stats["speculation"]["active"] is True
    for text in (
        "tokens/s: 24 tokens",
        "the tokens of plain decoding (exact",
        f"{sum(stats['accepted'])} of {sum(stats['offered'])} drafted tokens kept (ngram, mtp)",
        "prefill ",
        "active, drafter ngram, mtp",
        "exact, with bitwise parity",
        "note: [not markup] slow kernels",
    ):
        assert text in done.stderr
    rows = [line.split() for line in done.stderr.splitlines()]
    at = rows.index(["position", "offered", "reached", "accepted", "conditional", "cumulative"])
    for place in (0, 1):
        offered, reached, accepted = (stats[name][place] for name in ("offered", "reached", "accepted"))
        shares = [f"{accepted / reached:.3f}", f"{accepted / offered:.3f}"]
        assert rows[at + 1 + place] == [str(place), str(offered), str(reached), str(accepted), *shares]


def test_without_config_and_prompt_the_embedded_model_continues_a_sample(invoke, asked):
    done = invoke("generate", "--json")
    assert done.exit_code == 0
    assert asked[0].prompt == SAMPLE_PROMPT
    assert asked[0].config.target.model == "demo"
    assert {name: getattr(asked[0].config.generation, name) for name in SAMPLE_SETTINGS} == SAMPLE_SETTINGS
    assert invoke("generate", "--json", "-t", "0.5").exit_code == 0  # what is asked for wins
    assert (asked[1].config.generation.temperature, asked[1].config.generation.seed) == (0.5, None)


def test_flags_and_overrides_reach_the_configuration(invoke, asked, tmp_path):
    pytest.importorskip("llguidance")
    path = tmp_path / "run.toml"
    path.write_text('[target]\nmodel = "file"\n[drafter]\nname = "ngram"\nmax_order = 3\n[generation]\nseed = 1\n')
    flags = ["-n", 5, "-t", 0.5, "-s", "drafter.max_order=4", "--stop", 'a"b', "--stop", r"\n\\n\d", "-m", "a/flag"]
    flags += ["--top-k", 4, "--top-p", 0.9, "--min-p", 0.1, "--weights", "int4", "--json-schema", "{}"]
    done = invoke("generate", path, "--prompt", "x", *flags, "--ignore-eos")
    assert done.exit_code == 0, done.stderr
    config = asked[0].config
    assert config.drafter == Choice("ngram", {"max_order": 4})
    assert config.target.model == "a/flag"
    generation = config.generation
    assert (generation.max_new_tokens, generation.temperature, generation.seed) == (5, 0.5, 1)
    assert (generation.top_k, generation.top_p, generation.min_p) == (4, 0.9, 0.1)
    assert (generation.stop, generation.ignore_eos) == (('a"b', "\n\\n\\d"), True)
    assert (generation.processors, config.target.weights) == ((Choice("grammar", {"json_schema": "{}"}),), "int4")


@pytest.mark.parametrize(
    ("options", "stdin", "prompt"),
    [
        (["--prompt-file", "file", "--chat"], None, {"user": "schön\n"}),
        (["--prompt", "x", "--system", "Be brief."], None, {"system": "Be brief.", "user": "x"}),
        (["a/model", "--prompt", "x"], None, {"user": "x"}),
        (["a/model", "--prompt", "x", "--raw"], None, "x"),
        (["a/model", "--prompt-tokens", "1,2"], None, [1, 2]),
        (["--prompt-file", "-"], "from stdin", "from stdin"),
        ([], "piped", "piped"),
        (["--prompt", "x"], "piped", "x"),
        (["--prompt-tokens", " 1 , 2,3 "], None, [1, 2, 3]),
    ],
)
def test_where_a_prompt_comes_from(invoke, demo, asked, tmp_path, monkeypatch, options, stdin, prompt):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("schön\n", encoding="utf-8-sig")
    done = invoke("generate", *options, "-n", 2, stdin=stdin)
    assert done.exit_code == 0, done.stderr
    if isinstance(prompt, dict):
        prompt = demo.tokenizer.encode_messages([{"role": role, "content": text} for role, text in prompt.items()])
    assert asked[0].prompt == prompt
    assert invoke("generate", "--prompt", "x", "-n", 2, "--prediction", "file").exit_code == 0
    assert asked[-1].prediction == "schön\n"
    assert "cannot read 'none'" in invoke("generate", "--prompt", "x", "--prediction", "none").stderr
    assert (
        "cannot read standard input: it is not UTF-8: byte 0xff at offset 0" in invoke("generate", stdin=b"\xff").stderr
    )


@pytest.mark.usefixtures("loaded_once")
def test_a_comparison_says_what_it_runs_and_gives_no_ratio_of_few_tokens(invoke):
    for options, told, ratio in (
        (("-n", 8), "comparing: 1 plain run of 8 tokens", "too few for a ratio (64 or more)"),
        (
            ("-n", 64, "-t", 0.7, "--ignore-eos"),
            "plain runs and 2 more speculative runs of 64 tokens",
            " times plain decoding: ",
        ),
    ):
        done = invoke("generate", "-p", "def f(x):", "--compare", "--depth", 2, *options)
        assert done.exit_code == 0, done.stderr
        assert told in done.stderr
        assert ratio in " ".join(done.stderr.split())
        assert "the same" in done.stderr
    assert re.search(r"sampled +temperature 0.7, seed \d+", done.stderr)


@pytest.mark.usefixtures("loaded_once")
def test_the_report_counts_what_came_from_a_prediction_and_names_filters_without_effect(invoke, tmp_path):
    (tmp_path / "same").write_text(invoke("generate", "-p", "def f(x):", "-n", 24).stdout)
    options = ("--prediction", tmp_path / "same", "--top-k", 5, "--min-p", 0.1, "--depth", 2)
    for drafter, named in (("mtp", "mtp; "), ("none", "")):
        done = invoke("generate", "-p", "def f(x):", "-n", 24, *options, "--drafter", drafter)
        assert done.exit_code == 0, done.stderr
        assert re.search(rf"kept \({named}[1-9]\d* of \d+ from the prediction\)", " ".join(done.stderr.split()))
        assert "note: top_k and min_p: without effect at temperature 0" in done.stderr


@pytest.mark.usefixtures("loaded_once")
def test_an_answer_that_is_empty_says_why_and_an_error_begins_a_line(invoke, monkeypatch):
    for option, told in (
        ("--raw", "not in the chat template; --chat puts it"),
        ("--chat", "--raw continues it as text"),
    ):
        done = invoke("generate", "-p", "def f(", option, "-s", "generation.logit_bias={2=1e6}")
        assert done.exit_code == 0, done.stderr
        assert "the model ended with its first token: the prompt was" in done.stderr
        assert told in done.stderr

    def fails(stream):
        yield "text"
        raise PromptError("something")

    monkeypatch.setattr("specdec.decoding.stream.Stream.__iter__", fails)
    done = invoke("generate", "-p", "x")
    assert (done.exit_code, done.stdout) == (2, "text\n")
    done = invoke("generate")  # the sample, whose prompt is echoed
    assert done.stderr == f"{SAMPLE_PROMPT}\nPromptError: something\n"


@pytest.mark.usefixtures("loaded_once")
def test_strict_speculation_fails_after_the_output_and_says_why(invoke):
    args = ["generate", "--prompt", "def f(", "-n", 8, "-s", "drafter.name=none"]
    assert invoke(*args).exit_code == 0
    done = invoke(*args, "--strict-speculation", "--json")
    assert done.exit_code == 2
    assert json.loads(done.stdout)["stats"]["speculation"]["active"] is False  # still one object
    assert "drafter 'none' was chosen" in done.stderr
    assert invoke("generate", "--prompt", "def f(", "-n", 8, "--depth", 2, "--strict-speculation").exit_code == 0


def test_one_interrupt_keeps_what_was_generated(invoke, asked, ctrl_c):
    command = ("generate", "--prompt", "def f(", "-n", 60, "-s", "generation.ignore_eos=true")
    whole, before = json.loads(invoke(*command, "--json").stdout)["text"], signal.getsignal(signal.SIGINT)
    ctrl_c(2)
    done = invoke(*command, "--json")
    assert done.exit_code == 130
    told = json.loads(done.stdout)
    assert told["finish_reason"] == "interrupted"
    assert 0 < len(told["text"]) < len(whole)
    assert whole.startswith(told["text"])
    assert signal.getsignal(signal.SIGINT) is before
    ctrl_c(2)
    done = invoke(*command)
    assert done.stdout == told["text"] + "\n"
    assert "ended by 'interrupted'" in done.stderr


def test_a_second_interrupt_aborts_a_stream_that_does_not_end(invoke, asked, ctrl_c, monkeypatch):
    ctrl_c(2, 3)
    monkeypatch.setattr("specdec.decoding.stream.Stream.stop", lambda stream: None)
    done = invoke("generate", "--prompt", "def f(", "-n", 60, "-s", "generation.ignore_eos=true")
    assert done.exit_code == 130
    assert "interrupted" in done.stderr
    assert done.stdout
