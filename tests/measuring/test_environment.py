"""The record of machine and versions: complete, plain data, and no commit of somebody else's repository."""

from __future__ import annotations

import json
import pathlib
import platform
import subprocess
import sys

import attrs
import pytest

import specdec
from specdec.contract import ModelInfo, Parity
from specdec.measuring import environment as source
from specdec.measuring.environment import Environment, commit, current_environment

INFO = ModelInfo(
    family="table",
    vocab_size=5,
    hidden_size=3,
    max_positions=64,
    mtp_layers=0,
    max_rows=4,
    parity=Parity.NUMERIC,
    backend="cpu",
    device="host",
    dtype="float32",
    kernels="none",
    fingerprint="abc",
)


def test_every_field_is_known_and_goes_into_json():
    record = current_environment(INFO, "demo")
    told = json.loads(json.dumps(attrs.asdict(record)))
    assert set(told) == {field.name for field in attrs.fields(Environment)}
    assert (told["specdec"], told["python"]) == (specdec.__version__, platform.python_version())
    assert (told["model"], told["family"], told["fingerprint"]) == ("demo", "table", "abc")
    assert (told["dtype"], told["parity"]) == ("float32", "numeric")
    assert told["cores"] >= 1
    assert told["threads"] >= 1
    assert all(version != "unknown" for version in told["libraries"].values())
    assert told["processor"]


def test_the_command_is_the_one_that_was_called(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/lib/specdec/__main__.py", "accept", "--json"])
    assert current_environment(INFO).command == "specdec accept --json"
    monkeypatch.setattr(sys, "argv", ["tool.py", "x"])
    assert current_environment(INFO).command == "tool.py x"


def _answers(head: str, status: str):
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, f"{head}\n" if "rev-parse" in command else status, "")

    return run


def test_a_commit_is_told_of_a_checkout_only(tmp_path, monkeypatch):
    inside = tmp_path / "site-packages"
    inside.mkdir()
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(source.subprocess, "run", _answers("abc1234", ""))
    assert commit(tmp_path) == "abc1234"
    assert commit(inside) is None  # installed inside another project's repository
    monkeypatch.setattr(source.subprocess, "run", _answers("abc1234", " M specdec/api.py"))
    assert commit(tmp_path) == "abc1234+"


@pytest.mark.parametrize("error", [FileNotFoundError("git"), subprocess.CalledProcessError(128, "git")])
def test_without_git_there_is_no_commit(error, tmp_path, monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise error

    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(source.subprocess, "run", fails)
    assert commit(pathlib.Path(tmp_path)) is None
