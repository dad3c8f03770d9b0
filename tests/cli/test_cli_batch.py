"""``specdec batch``: a line for every prompt, with the result that it has alone."""

import itertools
import json
import pathlib
import signal
import weakref

import pytest

import specdec
from specdec.decoding.batch import Batch
from specdec.errors import NoMemoryError
from specdec.models.causal_lm import CausalLM

pytestmark = pytest.mark.usefixtures("loaded_once")


@pytest.fixture
def batch(invoke, tmp_path):
    """``batch(text, *options)`` runs the command on a file of prompts."""

    def run(text, *options):
        (tmp_path / "p.txt").write_text(text)
        command = ("batch", "demo", "--prompts", tmp_path / "p.txt", *options)
        return invoke(*command)

    return run


def test_every_prompt_has_a_line_with_its_own_result(batch, tmp_path):
    prompts = {"line 1": "def add(a, b):", "line 3": "Once upon a time", "line 4": "x = [1, 2,"}
    lines = {}
    for where in ((), ("-o", tmp_path / "out.jsonl")):
        options = ("--max-new-tokens", 12, "--max-batch", 2, *where)
        done = batch("def add(a, b):\n\nOnce upon a time\nx = [1, 2,\n", *options)
        assert done.exit_code == 0, done.output
        text = (tmp_path / "out.jsonl").read_text() if where else done.stdout
        lines = {data["source"]: data for data in map(json.loads, text.splitlines())}
        assert lines.keys() == {f"p.txt, {line}" for line in prompts}
    lm = specdec.load("demo")
    for line, prompt in prompts.items():
        assert lines[f"p.txt, {line}"]["tokens"] == list(lm.generate(prompt, max_new_tokens=12).tokens)


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="not Linux")
def test_a_full_disk_is_told_in_a_sentence(batch):
    done = batch("hello\n", "-o", "/dev/full", "-n", 4)
    assert done.exit_code == 2
    assert "the results cannot be written: No space left on device" in done.output
    assert "Traceback" not in done.output


def test_a_prompt_that_is_too_long_leaves_older_results(batch, tmp_path):
    (tmp_path / "out.jsonl").write_text("older\n")
    done = batch("hello\n" + "word " * 9000 + "\n", "-o", tmp_path / "out.jsonl")
    assert done.exit_code == 2
    assert "too long" in done.output
    assert "p.txt, line 2" in done.output
    assert (tmp_path / "out.jsonl").read_text() == "older\n"


@pytest.mark.parametrize(("room", "status"), [(2, 0), (1, 0), (0, 2)])
def test_where_memory_runs_short_fewer_prompts_run_at_once(batch, monkeypatch, room, status):
    """With no room for one state, each prompt is told apart, and nothing ends the file."""
    new_state, run, states = CausalLM.new_state, Batch.run, None

    def noted(batch, *args):
        nonlocal states
        states = weakref.WeakSet()
        return run(batch, *args)

    def limited(lm, *args):
        if states is not None and len(states) >= room:
            raise NoMemoryError("there is no memory for a state")
        state = new_state(lm, *args)
        if states is not None:
            states.add(state)
        return state

    monkeypatch.setattr(Batch, "run", noted)
    monkeypatch.setattr(CausalLM, "new_state", limited)
    done = batch("def add(a, b):\nOnce upon a time\nx = [1, 2,\n", "-n", 4, "--drafter", "none", "--ignore-eos")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.exit_code == status, done.output
    assert {line["source"] for line in lines} == {f"p.txt, line {number}" for number in (1, 2, 3)}
    if room:
        assert [len(line["tokens"]) for line in lines] == [4] * 3
    else:
        assert [line["error"]["type"] for line in lines] == ["NoMemoryError"] * 3
        assert "3 of 3 prompts failed, the first with:\nNoMemoryError: there is no memory for a state" in done.stderr


def test_an_interruption_writes_what_there_is(batch, monkeypatch):
    """One prompt is answered, two run, one waits: nothing that was generated is lost."""
    tick, ticks = Batch.tick, itertools.count()

    def interrupted(batch):
        if next(ticks) == 8:
            signal.raise_signal(signal.SIGINT)
        return tick(batch)

    monkeypatch.setattr(Batch, "tick", interrupted)
    prompts = "Once upon a time\ndef add(a, b):\nx = [1, 2,\nclass Stack:\n"
    done = batch(prompts, "-n", 40, "--max-batch", 2, "--drafter", "none")
    assert done.exit_code == 130, done.output
    assert "interrupted: 1 of 4 are finished, 2 cut short" in done.stderr
    first, *cut = map(json.loads, done.stdout.splitlines())
    assert (first["source"], first["finish_reason"]) == ("p.txt, line 1", "stop")
    assert [data["finish_reason"] for data in cut] == ["interrupted"] * 2
    whole = specdec.load("demo").generate("def add(a, b):", max_new_tokens=40)
    (tokens,) = (data["tokens"] for data in cut if data["source"] == "p.txt, line 2")
    assert tokens == list(whole.tokens[: len(tokens)])
    assert 0 < len(tokens) < 40
