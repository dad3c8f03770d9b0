"""What the commands print for people: tables on terminals of any width, and the lines of a run's report."""

from __future__ import annotations

import io
import re
import signal
import sys

import pytest

from specdec.cli import output
from specdec.cli.run_report import draft_line, speculation_line

POSITIONS = ("class", "position", "offered", "reached", "accepted", "cond.", "cumul.", "interval")
SPEEDS = ("class", "prompts", "plain", "spec.", "speed-up", "interval", "tokens per cycle", "accepted at 0")
CELLS = {
    POSITIONS: ("verbose-thinking", "0", "1234", "1234", "1234", "0.545", "0.545", "0.431 to 0.652"),
    SPEEDS: ("verbose-thinking", "27", "1234.5", "1234.5", "1.25x", "1.17 to 2.05x", "2.50", "0.853"),
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def printed(monkeypatch, columns, headings):
    """The lines of a table with one row, on a terminal of so many columns."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")  # "dumb" has 80 columns whatever COLUMNS says
    output.console().print(output.table(headings, [CELLS[headings]]))
    return re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()


@pytest.mark.parametrize("headings", [POSITIONS, SPEEDS], ids=["accept", "bench"])
@pytest.mark.parametrize("columns", [80, 105, 106, 120, 200])
def test_a_row_of_a_report_is_one_line_from_80_columns_on(monkeypatch, columns, headings):
    lines = printed(monkeypatch, columns, headings)
    assert max(map(len, lines)) <= columns
    assert "\u2026" not in "".join(lines), "cut off"
    assert " ".join(CELLS[headings]) in " ".join(lines[-1].split())
    if columns >= output.NARROW:
        assert " ".join(lines[0].split()) == " ".join(headings)


def test_a_narrower_terminal_folds_and_loses_nothing(monkeypatch):
    lines = printed(monkeypatch, 50, POSITIONS)
    assert "\u2026" not in "".join(lines)
    assert max(map(len, lines)) <= 50


@pytest.mark.parametrize(
    ("active", "reason", "line"),
    [
        (True, "", "active, drafter mtp"),
        (True, "plain is faster", "active, drafter mtp; off in the end: plain is faster"),
        (False, "no cycle ran", "inactive, drafter mtp: no cycle ran"),
    ],
)
def test_speculation_in_a_line(active, reason, line):
    assert speculation_line({"active": active, "drafter": "mtp", "reason": reason}) == line


def test_a_drafters_report_in_a_line():
    report = {"head": "pruned", "reason": "", "pruned_drafts": 5, "drafters": {"ngram": {"drafts": 1, "offered": 3}}}
    assert draft_line(report) == "head pruned, pruned drafts 5, ngram (drafts 1, offered 3)"


def test_ctrl_c_has_its_own_status(invoke, monkeypatch):
    """click's own is 1, which ``accept`` and ``bench`` have for outputs that differ."""
    module = sys.modules["specdec.cli.vocab"]  # the package's attribute of that name is the command
    monkeypatch.setattr(module, "load_config", lambda *args: signal.raise_signal(signal.SIGINT))
    done = invoke("vocab", "demo", "--text", "x", "-o", "y")
    assert done.exit_code == output.INTERRUPTED == 130
    assert done.stderr == "interrupted\n"
