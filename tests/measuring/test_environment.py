"""The record of machine and versions: complete, plain data, and no commit of somebody else's repository."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

from specdec.measuring import environment as source
from specdec.measuring.environment import commit


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
