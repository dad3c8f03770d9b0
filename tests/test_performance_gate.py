"""The performance gate: its verdict by hand, and a run of it against this very commit."""

import json
import subprocess

import pytest

from benchmarks.gate import PARTS
from tests.processes import ROOT, run_python


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a checkout")
@pytest.mark.parametrize(("threshold", "status"), [("1000", 0), ("-0.999", 1)])
def test_it_runs_against_this_commit(threshold, status, tmp_path):
    file = tmp_path / "gate.json"
    options = ("--commit", "HEAD", "--rounds", "1", "--tokens", "8", "--prompt", "16", "--json", file)
    options += ("--threshold", threshold)
    there = {"TMPDIR": str(tmp_path)}  # where the other commit is checked out
    done = run_python("-m", "benchmarks.gate", *options, cwd=ROOT, status=status, env=there)
    report = json.loads(file.read_text())
    assert tuple(report["parts"]) == PARTS
    assert all(part["same_tokens"] and part["other_ms"] > 0 < part["this_ms"] for part in report["parts"].values())
    assert ("slower than HEAD: plain decoding takes" in done.stderr) == bool(status)
    listed = subprocess.run(["git", "-C", ROOT, "worktree", "list"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in listed
