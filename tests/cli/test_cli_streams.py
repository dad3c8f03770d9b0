"""Standard streams that are closed, full or gone; control characters; and empty or impossible options."""

import io
import shlex
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.cli import output
from specdec.contract import CycleRecord
from specdec.errors import UnsupportedError, one_line
from specdec.files import streams
from specdec.measuring.drafts import DraftLog
from specdec.measuring.prompts import Prompt
from specdec.measuring.runs import Run
from tests.processes import HUNG, ROOT, run_python

FULL = "OutputError: standard output cannot be written: No space left on device"
INTERRUPT = """
import signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "specdec.cli.accept":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
from specdec.__main__ import run
run()
"""


def shell(command):
    """Exit status and output of a shell command, in which ``specdec`` is this tree's."""
    python = shlex.quote(sys.executable)
    script = f'set -o pipefail; specdec() {{ {python} -m specdec "$@"; }}; {command}'
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, capture_output=True, encoding="utf-8", timeout=HUNG, check=False
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("specdec --version >/dev/full", 2, FULL),
        ("echo hello | specdec chat demo -n 2 >/dev/full", 2, FULL),
        (r"printf 'a\377\n' | specdec chat demo -n 2", 0, "PromptError: the line is not valid UTF-8"),
        ("specdec --version >&-", 2, "standard output cannot be written: Bad file descriptor"),
    ],
)
def test_streams_of_a_process(command, status, said):
    code, printed = shell(command)
    assert code == status
    assert said in printed
    assert bool(said) == bool(printed)


def test_ctrl_c_during_imports():
    assert run_python("-c", INTERRUPT, status=130).stderr == "interrupted\n"


class Raw(io.RawIOBase):
    """Takes ``room`` bytes, then fails with ``error``."""

    def __init__(self, room, error):
        self.taken, self.room, self.error = b"", room, error

    def writable(self):
        return True

    def write(self, data):
        if self.room <= 0:
            raise self.error
        part = bytes(data)[: self.room]
        self.room -= len(part)
        self.taken += part
        return len(part)


@given(texts=st.lists(st.text(min_size=1), min_size=1), room=st.integers(0, 40), gone=st.booleans())
def test_a_stream_fails_once_and_keeps_what_it_took(texts, room, gone):
    raw = Raw(room, BrokenPipeError(32, "Broken pipe") if gone else OSError(28, "No space left on device"))
    for failed in (streams._output_failed, lambda error: None):
        raw.taken, raw.room = b"", room
        stream = streams._checked(io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8"), failed)
        failures = []
        for text in texts:
            try:
                stream.write(text)
                stream.flush()
            except (UnsupportedError, SystemExit) as error:
                failures.append(error)
        wanted = "".join(texts).encode("utf-8", "backslashreplace")
        assert raw.taken == wanted[:room]
        assert len(failures) == (len(wanted) > room and failed is streams._output_failed)
        assert not any(isinstance(error, SystemExit) is not gone for error in failures)


@given(st.text())
def test_text_from_a_checkpoint_stays_on_its_line(text):
    assert one_line(text).isprintable()
    stream = io.StringIO()
    console = output.console()
    console.file = stream
    output.lines(console, "note", [text])
    console.print(output.facts([("name", text)]))
    console.print(output.table(["name"], [[text]]))
    console.print(text)
    assert "".join(stream.getvalue().split("\n")).replace("\t", "").isprintable()


def test_a_log_that_fails_on_the_way_does_not_end_the_measurement():
    """Opening /dev/full works; writing does not."""

    class Tokenizer:
        def decode(self, tokens, *, skip_special):
            return "x"

    cycle = CycleRecord(1, 1, 1, 0, (2,), 0.0, 0.0, 0.0, (1,))
    run = Run(prompt=Prompt(kind="x", text="x"), prompt_tokens=(1,), tokens=(2,), cycles=(cycle,))
    log = DraftLog("/dev/full", Tokenizer())
    for _ in range(3):
        log.add(run)
    assert "No space left on device" in log.failure.message
