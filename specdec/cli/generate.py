"""``specdec generate``: stream a continuation, then say how fast it was and what was accepted."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import click

from specdec.cli import output
from specdec.config import Override, RunConfig, load_config
from specdec.errors import PromptError, UnsupportedError

if TYPE_CHECKING:
    from rich.table import Table

SAMPLE_PROMPT = """\
class Stack:
    def __init__(self):
        self.items = []

"""
"""What the embedded model continues when nobody gives a prompt; it was trained on text and Python."""

INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it


@click.command()
@click.argument("config_file", metavar="[CONFIG]", required=False, type=click.Path(path_type=pathlib.Path))
@click.option("-p", "--prompt", help="Text to continue.")
@click.option("--prompt-file", metavar="FILE", help="A UTF-8 file with the text to continue; - for stdin.")
@click.option("--prompt-tokens", metavar="1,2,3", help="Token ids to continue.")
@click.option("--chat", is_flag=True, help="Put the prompt into the checkpoint's chat template.")
@click.option("-m", "--model", help='A folder, a hub id or "demo"; short for -s target.model=...')
@click.option("-n", "--max-new-tokens", type=int, metavar="N", help="How many tokens at most.")
@click.option("-t", "--temperature", type=float, metavar="X", help="0 is greedy.")
@click.option("--seed", type=int, metavar="S", help="One seed, one output.")
@click.option("--stop", multiple=True, metavar="S", help="End before this string; repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-text token.")
@click.option("-s", "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a key: depth.depth=4.")
@click.option("--strict-speculation", is_flag=True, help="Fail when no draft was verified.")
@output.json_option
@click.pass_context
def generate(
    ctx: click.Context,
    config_file: pathlib.Path | None,
    prompt: str | None,
    prompt_file: str | None,
    prompt_tokens: str | None,
    chat: bool,
    model: str | None,
    max_new_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    stop: tuple[str, ...],
    ignore_eos: bool,
    settings: tuple[str, ...],
    strict_speculation: bool,
    as_json: bool,
) -> None:
    """Continue a prompt and report the speed.

    The text goes to stdout, the report to stderr. Without CONFIG and prompt, the embedded model continues a sample.
    The report counts accepted tokens by lookahead position; 0 is the next token. Ctrl-C ends the generation and keeps
    what there is; a second Ctrl-C aborts.
    """
    flags: dict[str, Any] = {
        "target.model": model,
        "generation.max_new_tokens": max_new_tokens,
        "generation.temperature": temperature,
        "generation.seed": seed,
        "generation.stop": list(stop) or None,
        "generation.ignore_eos": ignore_eos or None,
    }
    config = load_config(config_file, [*settings, *_flag_overrides(flags)])
    given = _prompt(prompt, prompt_file, prompt_tokens, config)
    if chat and not isinstance(given, str):
        raise click.UsageError("--chat takes text, not --prompt-tokens.")
    if given is SAMPLE_PROMPT:
        click.echo(f"no prompt given: continuing a sample\n{SAMPLE_PROMPT}", err=True)

    import specdec

    with output.status(f"loading {config.target.model}"):
        lm = specdec.load(config=config)
    stream = lm.stream(given, chat=chat)
    with _interruptible(stream):
        for piece in stream:
            if not as_json:
                click.echo(piece, nl=False)
        result = stream.result
    told = result.to_dict()
    if as_json:
        output.print_json(told)
    else:
        click.echo()
        _report(told)
    speculation = told["stats"]["speculation"]
    if strict_speculation and not speculation["active"]:
        raise UnsupportedError(
            "the generation ran without speculation",
            drafter=speculation["drafter"],
            reason=speculation["reason"],
            **{"try": "another drafter (specdec plugins lists them), or leave out --strict-speculation"},
        )
    if told["finish_reason"] == "interrupted":
        ctx.exit(INTERRUPTED)


def _flag_overrides(flags: Mapping[str, Any]) -> Iterator[Override]:
    for key, value in flags.items():
        if value is not None:
            option = "--" + key.rpartition(".")[2].replace("_", "-")
            yield Override(tuple(key.split(".")), value, option)


def _prompt(text: str | None, file: str | None, tokens: str | None, config: RunConfig) -> str | list[int]:
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
def _interruptible(stream: _Stoppable) -> Iterator[None]:
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


# --- the report ------------------------------------------------------------------------------------------------------


def _report(told: Mapping[str, Any]) -> None:
    stats = told["stats"]
    console = output.console(stderr=True)
    console.print()
    console.print(output.facts(_summary(told)))
    if stats["offered"]:
        console.print()
        console.print(_acceptance(stats))
    for notice in told["notices"]:
        console.print(f"note: {notice}")


def _summary(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    stats, deviation = told["stats"], told["deviation"]
    produced, cycles, speculation = len(told["tokens"]), stats["cycles"], stats["speculation"]
    off = deviation["count"]
    rows = [
        ("speed", f"{stats['tokens_per_second']:.1f} tokens/s, {output.count(produced, 'token')} after a prompt of "
                  f"{told['prompt_tokens']}, ended by {told['finish_reason']!r}"),
        ("seconds", ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in stats["seconds"].items())),
        ("cycles", f"{cycles}, {produced / cycles:.2f} tokens each" if cycles else "0"),
        ("speculation", _speculation(speculation)),
        ("depth", ", ".join(f"{depth} ({n}x)" for depth, n in stats["depth"].items()) or "no draft"),
        ("guarantee", f"{told['guarantee']}, with {told['parity']} parity"),
        ("deviation", f"{output.count(off, 'token')} off the target's best, by {deviation['largest_gap']:.4g} nats at "
                      "most" if off else "none"),
    ]  # fmt: skip
    return rows


def _speculation(speculation: Mapping[str, Any]) -> str:
    state = "active" if speculation["active"] else "inactive"
    reason = f": {speculation['reason']}" if speculation["reason"] else ""
    return f"{state}, drafter {speculation['drafter']}{reason}"


def _acceptance(stats: Mapping[str, Any]) -> Table:
    """Position 0 is the next token. Conditional rate = accepted / reached, cumulative rate = accepted / offered."""
    columns = ("position", "offered", "reached", "accepted", "conditional", "cumulative")
    table = output.table(*columns, right=columns)
    for position, (offered, reached, accepted) in enumerate(
        zip(stats["offered"], stats["reached"], stats["accepted"], strict=True)
    ):
        table.add_row(
            str(position), str(offered), str(reached), str(accepted), _rate(accepted, reached), _rate(accepted, offered)
        )
    return table


def _rate(part: int, whole: int) -> str:
    return f"{part / whole:.3f}" if whole else "-"
