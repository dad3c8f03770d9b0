"""What was in a new user's way at the command line."""

import pytest
from click.shell_completion import BashComplete

from specdec.cli import main
from specdec.cli.chat import _line_editor


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
