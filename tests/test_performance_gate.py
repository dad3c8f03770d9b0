"""The performance gate: its verdict by hand, and a run of it against this very commit."""

from __future__ import annotations

import json
import pathlib
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gate import PARTS, judged
from tests.processes import ROOT, run_python

seconds = st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=9)


@given(seconds, st.floats(0.1, 10.0), st.floats(0.0, 0.5))
def test_a_part_that_always_takes_longer_is_slower(times: list[float], factor: float, threshold: float) -> None:
    found = judged({"other": times, "this": [factor * one for one in times]}, threshold)
    assert found["ratio"] == pytest.approx(factor)
    if abs(factor - 1 - threshold) > 1e-9:
        assert found["slower"] == (factor > 1 + threshold)


def test_single_slow_runs_do_not_count() -> None:
    found = judged({"other": [1.0, 1.0, 1.0, 1.0, 1.0], "this": [1.0, 1.0, 1.0, 9.0, 9.0]}, 0.03)
    assert (found["ratio"], found["slower"]) == (1.0, False)
    assert judged({"other": [1.0] * 3, "this": [1.031] * 3}, 0.03)["slower"]


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a checkout")
@pytest.mark.parametrize(("threshold", "status"), [("1000", 0), ("-0.999", 1)])
def test_it_runs_against_this_commit(threshold: str, status: int, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "gate.json"
    options = ("--commit", "HEAD", "--rounds", "1", "--tokens", "8", "--prompt", "16", "--json", file)
    done = run_python("-m", "benchmarks.gate", *options, "--threshold", threshold, cwd=ROOT, status=status)
    report = json.loads(file.read_text())
    assert tuple(report["parts"]) == PARTS
    assert all(part["same_tokens"] and part["other_ms"] > 0 < part["this_ms"] for part in report["parts"].values())
    assert ("slower than HEAD: plain decoding takes" in done.stderr) == bool(status)
    listed = subprocess.run(["git", "-C", ROOT, "worktree", "list"], capture_output=True, text=True, check=True).stdout
    assert "/other " not in listed
