"""What the commands print for people: tables on terminals of any width, and the lines of a run's report."""

import contextlib
import io
import re

import click
import pytest

from specdec.cli import main, output
from specdec.cli.run_report import draft_line


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


SHORT = ["-n", "12", "--depth", "2"]
ONE = ["--classes", "code", "--per-class", "1", *SHORT]
SENTENCES = ("error: ", "note: ", "why: ")  # of any length: the terminal breaks them
TABLES = [
    ["info", "demo"],
    ["plugins"],
    ["generate", "-p", "def f(", "--stats", *SHORT],
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


def test_a_drafters_report_in_a_line():
    report = {"head": "pruned", "reason": "", "pruned_drafts": 5, "drafters": {"ngram": {"drafts": 1, "offered": 3}}}
    assert draft_line(report) == "head pruned, pruned drafts 5, ngram (drafts 1, offered 3)"
