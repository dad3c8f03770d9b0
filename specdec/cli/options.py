"""Options shared by several commands, resolved into a configuration and a prompt; and Ctrl-C."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Protocol

import attrs
import click

from specdec.config import Override, RunConfig, load_config, read_toml
from specdec.errors import PromptError

Command = Callable[..., Any]

PATH = click.Path(path_type=pathlib.Path)
SAMPLE_PROMPT = """\
class Stack:
    def __init__(self):
        self.items = []

"""
"""What the embedded model continues without a prompt; it was trained on text and Python."""

KEYS = {name: f"generation.{name}" for name in ("max_new_tokens", "temperature", "seed", "stop", "ignore_eos")} | {
    "model": "target.model"
}
"""Options that are short for a configuration key."""

ignore_eos = click.option("--ignore-eos", is_flag=True, help="Continue after an end-of-text token.")


def add_options(command: Command, *options: Callable[[Command], Command]) -> Command:
    """Add options to a command, listed in this order."""
    return functools.reduce(lambda made, option: option(made), reversed(options), command)


def settings_option(example: str = "depth.depth=4", help: str = "Override a key") -> Callable[[Command], Command]:
    """Add ``-s KEY=VALUE``; the function gets ``settings``."""
    return click.option("-s", "--set", "settings", multiple=True, metavar="KEY=VALUE", help=f"{help}: {example}.")


def configured(
    length_help: str = "How many tokens at most.",
    *,
    length: str = "--max-new-tokens",
    new_tokens: int | None = None,
    example: str = "depth.depth=4",
) -> Callable[[Command], Command]:
    """Add CONFIG and the options that override it, with those of ``KEYS``; the function gets ``config``.

    Args:
        length: the option for the number of tokens; ``length_help`` describes it.
        new_tokens: that option's default; the configuration's if None.
        example: of an override.
    """
    if new_tokens is not None:
        length_help = f"{length_help}; {new_tokens} if unset."

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def resolved(config_file: pathlib.Path | None, settings: tuple[str, ...], **options: Any) -> Any:
            flags = {KEYS[name]: options.pop(name) for name in list(options) if name in KEYS}
            overrides = [*map(Override.parse, settings), *flag_overrides(flags)]
            return command(config=_config(config_file, overrides, new_tokens), **options)

        return add_options(
            resolved,
            click.argument("config_file", metavar="[CONFIG]", required=False, type=PATH),
            click.option("-m", "--model", help='A folder, a hub id or "demo"; short for -s target.model=...'),
            click.option("-n", length, "max_new_tokens", type=int, metavar="N", help=length_help),
            click.option("-t", "--temperature", type=float, metavar="X", help="0 is greedy."),
            click.option("--seed", type=int, metavar="S", help="Random seed; the same seed gives the same output."),
            settings_option(example),
        )

    return decorate


def flag_overrides(flags: Mapping[str, Any]) -> Iterator[Override]:
    """Overrides from the given options, by key."""
    for key, value in flags.items():
        if value is not None and value is not False and value != ():
            option = "--" + key.rpartition(".")[2].replace("_", "-")
            yield Override(tuple(key.split(".")), list(value) if isinstance(value, tuple) else value, option)


def _config(file: pathlib.Path | None, overrides: list[Override], new_tokens: int | None) -> RunConfig:
    """The configuration, generating ``new_tokens`` unless the file or an override sets another number."""
    config = load_config(file, overrides)
    given = any(override.path == ("generation", "max_new_tokens") for override in overrides) or (
        file is not None and "max_new_tokens" in read_toml(file).get("generation", {})
    )
    if given or new_tokens is None:
        return config
    return attrs.evolve(config, generation=attrs.evolve(config.generation, max_new_tokens=new_tokens))


# --- prompts ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class PromptOptions:
    """``--prompt``, ``--prompt-file``, ``--prompt-tokens`` and ``--chat`` as given."""

    text: str | None
    file: str | None
    tokens: str | None
    chat: bool

    def read(self, config: RunConfig) -> str | list[int]:
        """The prompt. Raises: UsageError for none or several, PromptError for an unreadable one."""
        values = {"--prompt": self.text, "--prompt-file": self.file, "--prompt-tokens": self.tokens}
        given = [option for option, value in values.items() if value is not None]
        if len(given) > 1:
            raise click.UsageError(f"{' and '.join(given)}: give one prompt only.")
        if self.tokens is not None:
            if self.chat:
                raise click.UsageError("--chat takes text, not --prompt-tokens.")
            return _token_ids(self.tokens)
        if self.text is not None:
            return self.text
        if self.file is not None:
            return _read(self.file)
        if config.target.model != "demo":
            raise click.UsageError(f"Give {config.target.model} a prompt: --prompt, --prompt-file or --prompt-tokens.")
        click.echo("no prompt given: continuing a sample", err=True)
        return SAMPLE_PROMPT


def prompted(command: Command) -> Command:
    """Add the options of ``PromptOptions``; the function gets them as ``asked``."""

    @functools.wraps(command)
    def resolved(
        prompt: str | None, prompt_file: str | None, prompt_tokens: str | None, chat: bool, **options: Any
    ) -> Any:
        return command(asked=PromptOptions(prompt, prompt_file, prompt_tokens, chat), **options)

    return add_options(
        resolved,
        click.option("-p", "--prompt", help="Text to continue."),
        click.option("--prompt-file", metavar="FILE", help="A UTF-8 file with the text to continue; - for stdin."),
        click.option("--prompt-tokens", metavar="1,2,3", help="Token ids to continue."),
        click.option("--chat", is_flag=True, help="Put the prompt into the checkpoint's chat template."),
    )


def _token_ids(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    for number, word in enumerate(words, start=1):
        if not (word.isascii() and word.isdigit()):
            raise PromptError(
                f"--prompt-tokens: number {number} is {word!r}, and a token id is a whole number from 0",
                try_="--prompt-tokens 1,2,3",
            )
    return list(map(int, words))  # an empty list gets the model's error for an empty prompt


def _read(file: str) -> str:
    if file == "-":
        return decoded(sys.stdin.buffer.read(), "-")
    return read_text(file)


def read_text(file: str) -> str:
    """Read a UTF-8 file. Raises: PromptError with the position of a bad byte."""
    try:
        data = pathlib.Path(file).read_bytes()
    except OSError as error:
        raise PromptError(f"cannot read {file!r}: {error.strerror or error}") from error
    return decoded(data, file)


def decoded(data: bytes, name: str) -> str:
    """Decode UTF-8 bytes. Raises: PromptError."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise PromptError(f"{name!r} is not UTF-8: byte {data[error.start]:#04x} at offset {error.start}") from error


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


class _Stoppable(Protocol):
    def stop(self) -> None: ...


@contextlib.contextmanager
def interruptible(stream: _Stoppable) -> Iterator[None]:
    """The first Ctrl-C ends the stream after its current cycle, the second raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
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
