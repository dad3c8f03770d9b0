"""Options shared by several commands, resolved into a configuration and a prompt; and Ctrl-C."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pathlib
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, Protocol

import attrs
import click
from click.core import ParameterSource

from specdec.cli.completion import complete_key, complete_model, plugin_names
from specdec.config import Override, RunConfig, load_config, read_toml
from specdec.errors import ConfigError, PromptError, shown

Command = Callable[..., Any]


class _Text(click.types.StringParamType):
    """Text in UTF-8, also in a locale of another encoding, which leaves its bytes as surrogates."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        with contextlib.suppress(UnicodeError):  # bytes of no UTF-8 stay as they are, and the prompt is refused
            return os.fsencode(value).decode()
        return value


class _File(click.types.StringParamType):
    """The name of a file or model, which is not empty: that would mean the current folder."""

    def __init__(self, kind: Callable[[str], Any]) -> None:
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("It is empty.", param, ctx)
        return self._kind(value)


class Number(click.FloatRange):
    """A finite number of a range; click's lets NaN pass, and infinity where there is no end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


TEXT, FILE, PATH = _Text(), _File(str), _File(pathlib.Path)
LARGEST = 2**31 - 1  # of a count


def whole_number(text: str) -> int | None:
    """Parse a non-negative integer of at most 18 digits; None if invalid."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


SAMPLE_PROMPT = '''\
def read_lines(path):
    """'''
"""What the embedded model continues without a prompt; it was trained on text and Python."""

SAMPLE_SETTINGS: Mapping[str, Any] = {"temperature": 0.6, "seed": 27}
"""How it does so: greedy decoding of so small a model repeats itself."""

KEYS = {name: f"generation.{name}" for name in ("max_new_tokens", "temperature", "seed", "stop", "ignore_eos")} | {
    "model": "target.model",
    "drafter_part": "drafter",
    "verifier_part": "verifier",
    "depth_part": "depth",
}
"""Options that are short for a configuration key."""

PARTS: Mapping[str, tuple[str, Any, str]] = {
    "drafter": ("NAME", plugin_names("drafters"), "Drafter: mtp, ngram, none, ..."),
    "verifier": ("NAME", plugin_names("verifiers"), "Verifier: strict, rejection, ..."),
    "depth": ("N", plugin_names("depth_policies"), "Draft tokens per cycle, or a depth policy."),
}
"""Options for the parts of a language model: metavar, completion and help."""

WEIGHTS = (".gguf", ".bin", ".safetensors", ".json", ".pt", ".pth", ".ckpt")


def is_config(source: str) -> bool:
    """Whether MODEL is a configuration file, not a model."""
    path = pathlib.Path(source)
    return path.suffix == ".toml" or (path.suffix not in WEIGHTS and path.is_file())


ignore_eos = click.option("--ignore-eos", is_flag=True, help="Continue after an end-of-text token.")


def add_options(command: Command, *options: Callable[[Command], Command]) -> Command:
    """Add options to a command, listed in this order."""
    return functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)


def settings_option(example: str = "depth.depth=4", help: str = "Override a key") -> Callable[[Command], Command]:
    """Add ``-s KEY=VALUE``; the function gets ``settings``."""
    return click.option(
        "-s",
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        shell_complete=complete_key,
        help=f"{help}: {example}.",
    )


def configured(
    length_help: str = "Maximum new tokens.",
    *,
    new_tokens: int | None = None,
    example: str = "depth.depth=4",
    own: tuple[str, ...] = (),
) -> Callable[[Command], Command]:
    """Add MODEL and the options that override it, with those of ``KEYS``; the function gets ``config``.

    Args:
        length_help: of ``--max-new-tokens``.
        new_tokens: that option's default; the configuration's if None.
        example: of an override.
        own: keys of ``PARTS`` for which the command has an option of its own.
    """
    if new_tokens is not None:
        length_help = f"{length_help} (default {new_tokens})."

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def resolved(source: str | None, settings: tuple[str, ...], **options: Any) -> Any:
            file = pathlib.Path(source) if source is not None and is_config(source) else None
            if source is not None and file is None:
                if options["model"] is not None:
                    raise click.UsageError(f"{source!r} and --model: give one model.")
                options["model"] = source
            flags = {KEYS[name]: options.pop(name) for name in list(options) if name in KEYS}
            overrides = [*map(Override.parse, settings), *flag_overrides(flags)]
            return command(config=_config(file, overrides, new_tokens), **options)

        parts = [
            click.option(f"--{name}", f"{name}_part", metavar=metavar, type=TEXT, shell_complete=complete, help=help)
            for name, (metavar, complete, help) in PARTS.items()
            if name not in own
        ]
        return add_options(
            resolved,
            click.argument("source", metavar="[MODEL]", required=False, type=FILE, shell_complete=complete_model),
            click.option(
                "-m",
                "--model",
                type=FILE,
                shell_complete=complete_model,
                help='A folder, a hub id or "demo"; with a TOML file as MODEL.',
            ),
            *parts,
            click.option("-n", "--max-new-tokens", type=int, metavar="N", help=length_help),
            click.option("-t", "--temperature", type=float, metavar="X", help="Sampling temperature; 0 is greedy."),
            click.option("--seed", type=int, metavar="S", help="Random seed; the same seed gives the same output."),
            settings_option(example),
        )

    return decorate


def flag_overrides(flags: Mapping[str, Any]) -> Iterator[Override]:
    """Overrides from the given options, by key."""
    for key, value in flags.items():
        if value is not None and value is not False and value != ():
            option = "--" + key.rpartition(".")[2].replace("_", "-")
            if isinstance(value, tuple):
                value = list(value)
            yield Override(tuple(key.split(".")), _depth(value) if key == "depth" else value, option)


def _depth(text: str) -> int | str:
    """A number of draft tokens, which the policy checks, or the name of a policy. Raises: ConfigError."""
    if re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        return int(text)
    with contextlib.suppress(ValueError):
        float(text)
        raise ConfigError(
            f"--depth takes a whole number of draft tokens or the name of a depth policy, got {shown(text)}",
            try_="--depth 4, --depth adaptive",
        )
    return text


def _config(file: pathlib.Path | None, overrides: list[Override], new_tokens: int | None) -> RunConfig:
    """The configuration, generating ``new_tokens`` unless the file or an override sets another number."""
    config = load_config(file, overrides)
    sets_length = any(override.path == ("generation", "max_new_tokens") for override in overrides) or (
        file is not None and "max_new_tokens" in read_toml(file).get("generation", {})
    )
    if sets_length or new_tokens is None:
        return config
    return attrs.evolve(config, generation=attrs.evolve(config.generation, max_new_tokens=new_tokens))


def refuse(names: Iterable[str], why: str) -> None:
    """Raises: UsageError for the first of these parameters that the command line has."""
    ctx = click.get_current_context()
    for param in ctx.command.params:
        if param.name in names and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE:
            option = next((name for name in param.opts if name.startswith("--")), "MODEL")
            raise click.UsageError(f"{option}: {why}")


# --- prompts ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class PromptOptions:
    """``--prompt``, ``--prompt-file``, ``--prompt-tokens`` and ``--chat`` as given."""

    text: str | None
    file: str | None
    tokens: str | None
    chat: bool

    def read(self, config: RunConfig) -> str | list[int]:
        """The prompt; ``SAMPLE_PROMPT`` if none is given to the embedded model.

        Raises: CheckpointError for a model that is not there, UsageError for no prompt or several, PromptError for an
            unreadable one.
        """
        from specdec.checkpoints.locate import is_hub_id, locate
        from specdec.registry import Kind, registry

        model, backends = config.target.model, [entry.spec.name for entry in registry().entries(Kind.BACKEND)]
        ours = config.target.backend in ("auto", *backends)  # another engine reads target.model as it likes
        if ours and not is_hub_id(model):
            locate(model)  # a mistake in its path comes first
        if self.tokens is not None:
            self._one()
            if self.chat:
                raise click.UsageError("--chat takes text, not --prompt-tokens.")
            return _token_ids(self.tokens)
        text = self.chosen_text()
        if text is not None:
            return text
        if model != "demo":
            raise click.UsageError(f"Give {model} a prompt: --prompt, --prompt-file or --prompt-tokens.")
        return SAMPLE_PROMPT

    def chosen_text(self) -> str | None:
        """The text of ``--prompt`` or ``--prompt-file``. Raises: UsageError for several, PromptError for a bad file."""
        self._one()
        return self.text if self.file is None else _read(self.file)

    def _one(self) -> None:
        values = {"--prompt": self.text, "--prompt-file": self.file, "--prompt-tokens": self.tokens}
        options = [option for option, value in values.items() if value is not None]
        if len(options) > 1:
            raise click.UsageError(f"{' and '.join(options)}: give one prompt only.")


def prompted(command: Command) -> Command:
    """Add the options of ``PromptOptions``; the function gets them as ``asked``."""

    @functools.wraps(command)
    def resolved(
        prompt: str | None, prompt_file: str | None, prompt_tokens: str | None, chat: bool, **options: Any
    ) -> Any:
        return command(prompt_options=PromptOptions(prompt, prompt_file, prompt_tokens, chat), **options)

    return add_options(
        resolved,
        click.option("-p", "--prompt", type=TEXT, help="Text to continue."),
        click.option(
            "--prompt-file", metavar="FILE", type=FILE, help="A UTF-8 file with the text to continue; - for stdin."
        ),
        click.option("--prompt-tokens", metavar="1,2,3", help="Token ids to continue."),
        click.option("--chat", is_flag=True, help="Put the prompt into the checkpoint's chat template."),
    )


def _token_ids(text: str) -> list[int]:
    tokens = []  # an empty list gets the model's error for an empty prompt
    for number, word in enumerate(text.split(",") if text.strip() else [], start=1):
        token = whole_number(word.strip())
        if token is None:
            raise PromptError(
                f"--prompt-tokens: number {number} is {shown(word.strip())}, and a token id is a whole number from 0",
                try_="--prompt-tokens 1,2,3",
            )
        tokens.append(token)
    return tokens


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
