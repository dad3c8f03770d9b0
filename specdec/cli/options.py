"""Options shared by several commands, resolved into a configuration; reading of text; and Ctrl-C."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pathlib
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import click
from click.core import ParameterSource

from specdec.cli import output
from specdec.config import Override, RunConfig, layered, read_toml
from specdec.errors import ConfigError, PromptError, cut, shown
from specdec.files.reading import TEXT_LIMIT, decoded, why

if TYPE_CHECKING:
    from specdec.pipeline import LanguageModel

Command = Callable[..., Any]


class _Text(click.types.StringParamType):
    """Text in UTF-8, also in a locale of another encoding, which leaves its bytes as surrogates."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return os.fsencode(value).decode()
        except UnicodeError:
            self.fail("It is not valid UTF-8.", param, ctx)


class _Escaped(_Text):
    r"""Text in which ``\n``, ``\r``, ``\t`` and ``\\`` are escapes; other backslashes stay."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        plain = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}
        return re.sub(r"\\([nrt\\])", lambda match: plain[match[1]], super().convert(value, param, ctx))


class _Name(click.types.StringParamType):
    """The name of a file, model or plugin, which is not empty: that would mean the current folder, or nothing."""

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


TEXT, ESCAPED, NAME, FILE, PATH = _Text(), _Escaped(), _Name(str), _Name(str), _Name(pathlib.Path)
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

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
KEYS = {name: f"generation.{name}" for name in ("max_new_tokens", *SAMPLING, "stop", "ignore_eos")} | {
    "json_schema": "generation.processors",
    "model": "target.model",
    "weights": "target.weights",
    "drafter_part": "drafter",
    "verifier_part": "verifier",
    "depth_part": "depth",
}
"""Options that are short for a configuration key."""

PARTS: Mapping[str, tuple[str, str]] = {
    "drafter": ("NAME", "Drafter: mtp, ngram, none, ..."),
    "verifier": ("NAME", "Verifier: strict, rejection, ..."),
    "depth": ("N", "Draft tokens per cycle, or a depth policy."),
}
"""Options for the parts of a language model: metavar and help."""

WEIGHTS = (".gguf", ".bin", ".safetensors", ".json", ".pt", ".pth", ".ckpt")


def is_config(source: str) -> bool:
    """Whether MODEL is a configuration file, not a model."""
    path = pathlib.Path(source)
    return path.suffix == ".toml" or (path.suffix.lower() not in WEIGHTS and path.is_file())


chat_option = click.option(
    "--chat/--raw",
    default=None,
    help="Prompts are messages in the chat template, or text as it is (default: messages if there is a template; the "
    "embedded model continues text).",
)
temperature = click.option("-t", "--temperature", type=float, metavar="X", help="Sampling temperature; 0 is greedy.")
seed = click.option("--seed", type=int, metavar="S", help="Random seed; without one, a seed is drawn and shown.")
ignore_eos = click.option("--ignore-eos", is_flag=True, help="Continue after an end-of-text token.")


def add_options(command: Command, *options: Callable[[Command], Command]) -> Command:
    """Add options to a command, listed in this order."""
    return functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)


def max_new_tokens(help: str) -> Callable[[Command], Command]:
    """Add ``-n``."""
    return click.option("-n", "--max-new-tokens", type=int, metavar="N", help=help)


def integer(
    name: str, help: str, default: int | None = None, *, low: int = 1, high: int | None = LARGEST
) -> Callable[[Command], Command]:
    """An option that takes an integer of a range."""
    text = f"{help}." if default is None else f"{help} (default {default})."
    return click.option(name, type=click.IntRange(low, high), metavar="N", default=default, help=text)


def settings_option(example: str = "depth.depth=4", help: str = "Override a key") -> Callable[[Command], Command]:
    """Add ``-s KEY=VALUE``; the function gets ``settings``."""
    return click.option("-s", "--set", "settings", multiple=True, metavar="KEY=VALUE", help=f"{help}: {example}.")


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
                if "token_ids" in options and re.search(r"\s", source) and not os.path.exists(source):
                    raise click.UsageError(
                        f"There is no model {shown(source)}. Did you mean --prompt {shlex.quote(cut(source, 100))}?"
                    )
                options["model"] = source
            data: dict[str, Any] = {}
            if file is not None:
                try:
                    data = read_toml(file)
                except ConfigError as error:
                    kinds = 'a folder, a GGUF file, a hub id or "demo", or a configuration in TOML'
                    raise ConfigError(error.message, try_=None if file.suffix == ".toml" else kinds) from None
            generation = data.setdefault("generation", {})
            if new_tokens is not None and isinstance(generation, dict):
                generation.setdefault("max_new_tokens", new_tokens)
            flags = {name: options.pop(name) for name in list(options) if name in KEYS}
            overrides = [*map(Override.parse, settings), *flag_overrides(flags)]
            return command(config=layered(data, str(file), overrides), **options)

        parts = [
            click.option(f"--{name}", f"{name}_part", metavar=metavar, type=TEXT, help=help)
            for name, (metavar, help) in PARTS.items()
            if name not in own
        ]
        return add_options(
            resolved,
            click.argument("source", metavar="[MODEL]", required=False, type=FILE),
            click.option("-m", "--model", type=FILE, help='A folder, a hub id or "demo"; with a TOML file as MODEL.'),
            *parts,
            max_new_tokens(length_help),
            click.option("--weights", type=TEXT, metavar="FORMAT", help="Weight format: auto, decoded, int8 or int4."),
            temperature,
            click.option("--top-k", type=int, metavar="K", help="Sample from the K most likely tokens."),
            click.option("--top-p", type=float, metavar="P", help="Sample from the most likely tokens that sum to P."),
            click.option("--min-p", type=float, metavar="P", help="Leave out tokens below P times the most likely."),
            seed,
            settings_option(example),
        )

    return decorate


def flag_overrides(flags: Mapping[str, Any]) -> Iterator[Override]:
    """Overrides from the given options of ``KEYS``."""
    for name, value in flags.items():
        if value is not None and value is not False and value != ():
            if name == "depth_part" and re.fullmatch(r"[+-]?[0-9]{1,18}", value):
                value = int(value)
            elif name == "json_schema":
                value = [{"name": "grammar", "json_schema": value}]
            elif isinstance(value, tuple):
                value = list(value)
            yield Override(tuple(KEYS[name].split(".")), value, f"--{name.removesuffix('_part').replace('_', '-')}")


def refuse(names: Iterable[str], why: str) -> None:
    """Raises: UsageError for the first of these parameters that the command line has."""
    ctx = click.get_current_context()
    for param in ctx.command.params:
        if param.name in names and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE:
            option = next((name for name in param.opts if name.startswith("--")), "MODEL")
            raise click.UsageError(f"{option}: {why}")


def load_model(config: RunConfig) -> LanguageModel:
    """Load the model, with a spinner. Raises: SpecdecError."""
    import specdec

    with output.status(f"loading {config.target.model}"):
        return specdec.load(config=config)


# --- text ------------------------------------------------------------------------------------------------------------


def are_messages(lm: LanguageModel, chat: bool | None) -> bool:
    """Whether prompts go through the chat template: as ``--chat/--raw`` says, else where the checkpoint has one.

    The embedded model, which was trained on text more than on answers, continues text unless told otherwise.
    """
    if chat is None:
        return lm.config.target.model != "demo" and lm.tokenizer.has_chat_template
    return chat


def read_text(file: str) -> str:
    """Read a UTF-8 file, or the first 32 MiB of a pipe; "-" is standard input. Raises: PromptError."""
    name = "standard input" if file == "-" else repr(file)
    limit = max(TEXT_LIMIT, os.path.getsize(file) if os.path.isfile(file) else 0)
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if file == "-" else open(file, "rb") as stream:
            data = stream.read(limit + 1)
        if len(data) > limit:
            raise PromptError(f"{name} has no end within {limit:,} bytes", try_="a regular file")
        return decoded(data)
    except (OSError, ValueError) as error:
        raise PromptError(f"cannot read {name}: {why(error)}", try_="a UTF-8 text file that you may read") from error


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
