"""What was in a new user's way at the command line."""

from __future__ import annotations

import collections

import pytest
from click.shell_completion import BashComplete

from specdec.cli import main
from specdec.cli.chat import _line_editor

TWO_MEANINGS = {"--depth"}
"""accept measures one depth, where others take a policy too."""


def options():
    """Command, names and parameter of every option."""
    for command in main.commands.values():
        for one in command.params:
            if one.opts[0].startswith("-"):
                yield command.name, one


def test_an_option_has_one_name_everywhere():
    """And a name one meaning, but for those whose help says otherwise."""
    names, meanings = collections.defaultdict(set), collections.defaultdict(set)
    for _, option in options():
        if option.name != "as_json":
            names[option.name].add(tuple(sorted(option.opts)))
        for name in option.opts:
            meanings[name].add((option.name, option.multiple))
    assert {name: found for name, found in names.items() if len(found) > 1} == {}
    assert {name for name, found in meanings.items() if len(found) > 1} == TWO_MEANINGS
    assert all(sum(name.startswith("--") for name in option.opts) == 1 for _, option in options())


@pytest.mark.parametrize("command", sorted(main.commands))
def test_verbose_says_something_on_every_command(invoke, no_load, command):
    """Even if the command then fails."""
    assert "[info]" not in invoke(command, "--no-such-option").stderr
    assert "[info] specdec version=" in invoke("-v", command, "--no-such-option").stderr
    assert "[debug] arguments" in invoke("-vv", command, "--no-such-option").stderr


@pytest.mark.parametrize(
    ("words", "begun", "found"),
    [([], "gen", {"generate"}), (["generate"], "--dr", {"--drafter"}), (["serve", "--engine"], "spec", {"specdec"})],
)
def test_the_shell_completes_commands_and_options(words, begun, found):
    items = BashComplete(main, {}, "specdec", "_SPECDEC_COMPLETE").get_completions(words, begun)
    assert {item.value for item in items} == found


def test_a_paste_of_several_lines_is_one_message_and_lines_have_a_history():
    """As a terminal sends them: a bracketed paste and Enter, a line and Enter, Ctrl-D."""
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        read = _line_editor()
        keys.send_text("\x1b[200~def f(x):\n    return x\x1b[201~\rsecond\r\x04")
        messages = [read("> "), read("> ")]
        with pytest.raises(EOFError):
            read("> ")
    assert messages == ["def f(x):\n    return x", "second"]
    assert read.__self__.history.get_strings() == messages
