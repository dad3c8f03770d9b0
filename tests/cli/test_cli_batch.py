"""``specdec batch``: a line for every prompt, with the result that it has alone."""

from __future__ import annotations

import json
import pathlib

import pytest
from click.testing import CliRunner

import specdec
from specdec.cli import main


def test_every_prompt_has_a_line_with_its_own_result(tmp_path):
    prompts = {"line 1": "def add(a, b):", "line 3": "Once upon a time", "line 4": "x = [1, 2,"}
    (tmp_path / "p.txt").write_text("def add(a, b):\n\nOnce upon a time\nx = [1, 2,\n")
    lines = {}
    for where in ((), ("-o", str(tmp_path / "out.jsonl"))):
        command = ["batch", "demo", "--prompts", str(tmp_path / "p.txt"), "--max-new-tokens", "12", "--max-batch", "2"]
        done = CliRunner().invoke(main, [*command, *where])
        assert done.exit_code == 0, done.output
        text = (tmp_path / "out.jsonl").read_text() if where else done.stdout
        lines = {data["source"]: data for data in map(json.loads, text.splitlines())}
        assert lines.keys() == {f"p.txt, {line}" for line in prompts}
    lm = specdec.load("demo")
    for line, prompt in prompts.items():
        assert lines[f"p.txt, {line}"]["tokens"] == list(lm.generate(prompt, max_new_tokens=12).tokens)


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="not Linux")
def test_a_full_disk_is_told_in_a_sentence(tmp_path):
    (tmp_path / "p.txt").write_text("hello\n")
    done = CliRunner().invoke(
        main, ["batch", "demo", "--prompts", str(tmp_path / "p.txt"), "-o", "/dev/full", "-n", "4"]
    )
    assert done.exit_code == 2
    assert "the results cannot be written: No space left on device" in done.output
    assert "Traceback" not in done.output


def test_a_prompt_that_is_too_long_leaves_older_results(tmp_path):
    (tmp_path / "p.txt").write_text("hello\n" + "word " * 9000 + "\n")
    (tmp_path / "out.jsonl").write_text("older\n")
    done = CliRunner().invoke(
        main, ["batch", "demo", "--prompts", str(tmp_path / "p.txt"), "-o", str(tmp_path / "out.jsonl")]
    )
    assert done.exit_code == 2
    assert "too long" in done.output
    assert "p.txt, line 2" in done.output
    assert (tmp_path / "out.jsonl").read_text() == "older\n"
