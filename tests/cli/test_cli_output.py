"""What the commands print for people: tables on terminals of any width, and the lines of a run's report."""

from __future__ import annotations

import contextlib
import io
import re
import signal
import sys

import click
import pytest

from specdec.cli import main, output
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


@contextlib.contextmanager
def terminal(monkeypatch, columns, made=Terminal):
    """Standard output, and apart from it standard error, of so many columns; their lines afterwards."""
    streams, lines = (made(), made()), []
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", streams[0])
        patch.setattr("sys.stderr", streams[1])
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("TERM", "xterm")  # "dumb" has 80 columns whatever COLUMNS says
        yield lines
    for stream in streams:
        lines += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).splitlines()


def printed(monkeypatch, columns, headings):
    """The lines of a table with one row, on a terminal of so many columns."""
    with terminal(monkeypatch, columns) as lines:
        output.console().print(output.table(headings, [CELLS[headings]]))
    return lines


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


SHORT = ["-n", "12", "--depth", "2"]
ONE = ["--classes", "code", "--per-class", "1", *SHORT]
SENTENCES = ("error: ", "note: ", "why: ")  # of any length: the terminal breaks them
LOSSY = ["-s", "verifier.name=margin", "-s", "verifier.margin=2.0"]
TABLES = [
    ["info", "demo"],
    ["plugins"],
    ["generate", "-p", "def f(", "--stats", *SHORT],
    ["audit", "-p", "def f(x):", *SHORT, *LOSSY],
    *(
        pytest.param(command, marks=pytest.mark.slow)
        for command in (
            ["doctor"],
            ["doctor", "demo"],
            ["check", "ngram", "--effort", "sample", "--only", "D1", "--only", "D5"],
            ["bench", *ONE],
            ["accept", *ONE, "--ablate", "all"],
        )
    ),
]


@pytest.mark.parametrize("command", TABLES, ids=lambda command: "-".join(command[:2]))
def test_tables_of_commands_fit_80_columns_and_end_without_spaces_in_a_pipe(monkeypatch, loaded_once, command):
    """No word of a heading is cut or hyphenated; in a pipe a heading is one line."""
    headings, table = [], output.table

    def noted(names, rows, **how):
        headings.append(tuple(names))
        return table(names, rows, **how)

    monkeypatch.setattr(output, "table", noted)
    for made in (Terminal, io.StringIO):
        headings.clear()
        with terminal(monkeypatch, 80, made) as lines, contextlib.suppress(click.exceptions.Exit):
            main.main(command, standalone_mode=False)
        assert headings
        words = [line.split() for line in lines]
        every = {word for line in words for word in line}
        assert {word for names in headings for name in names for word in name.split()} <= every
        assert "\u2026" not in "".join(lines), "cut off"
        if made is Terminal:
            shown = [line.rsplit("\r", 1)[-1].rstrip() for line in lines if not line.startswith(SENTENCES)]
            assert max(map(len, shown)) <= 80
        else:
            assert [line for line in lines if line != line.rstrip()] == []
            for names in headings:
                assert " ".join(names).split() in words


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
