"""What the commands that generate share: a prompt from the command line, options as overrides, Ctrl-C."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, Protocol

import click

from specdec.config import Override, RunConfig
from specdec.errors import PromptError

SAMPLE_PROMPT = """\
class Stack:
    def __init__(self):
        self.items = []

"""
"""What the embedded model continues when nobody gives a prompt; it was trained on text and Python."""


def flag_overrides(flags: Mapping[str, Any]) -> Iterator[Override]:
    for key, value in flags.items():
        if value is not None:
            option = "--" + key.rpartition(".")[2].replace("_", "-")
            yield Override(tuple(key.split(".")), value, option)


def prompt_of(text: str | None, file: str | None, tokens: str | None, config: RunConfig) -> str | list[int]:
    given = [
        name
        for name, value in (("--prompt", text), ("--prompt-file", file), ("--prompt-tokens", tokens))
        if value is not None
    ]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} are one prompt too many.")
    if text is not None:
        return text
    if tokens is not None:
        return _token_ids(tokens)
    if file is not None:
        return _read(file)
    if config.target.model == "demo":
        return SAMPLE_PROMPT
    raise click.UsageError(f"Give {config.target.model} a prompt: --prompt, --prompt-file or --prompt-tokens.")


def _token_ids(text: str) -> list[int]:
    ids: list[int] = []
    for number, word in enumerate(text.split(",") if text.strip() else (), start=1):
        word = word.strip()
        if not (word.isascii() and word.isdigit()):
            raise PromptError(
                f"--prompt-tokens: number {number} is {word!r}, and a token id is a whole number from 0",
                **{"try": "--prompt-tokens 1,2,3"},
            )
        ids.append(int(word))
    return ids  # none at all: the model's own error for an empty prompt


def _read(file: str) -> str:
    try:
        data = sys.stdin.buffer.read() if file == "-" else pathlib.Path(file).read_bytes()
        return data.decode()
    except OSError as error:
        raise PromptError(f"cannot read the prompt file {file!r}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PromptError(
            f"the prompt file {file!r} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}"
        ) from error


class _Stoppable(Protocol):
    def stop(self) -> None: ...


@contextlib.contextmanager
def interruptible(stream: _Stoppable) -> Iterator[None]:
    """The first Ctrl-C ends the stream after its present cycle, the second raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():  # only there do signals arrive
        yield
        return
    former = signal.getsignal(signal.SIGINT)

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stream.stop()

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
