"""``specdec generate``: stream an answer or a continuation, and report its speed."""

from __future__ import annotations

import collections
import functools
import itertools
import pathlib
import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
import click

from specdec.cli import output
from specdec.cli.measuring import check_writable, plain_milliseconds, write_page
from specdec.cli.options import (
    ESCAPED,
    FILE,
    PATH,
    SAMPLE_PROMPT,
    SAMPLE_SETTINGS,
    TEXT,
    are_messages,
    chat_option,
    configured,
    ignore_eos,
    interruptible,
    load_model,
    read_text,
    whole_number,
)
from specdec.cli.run_report import FEWEST_COMPARED, report, three_lines
from specdec.config import GenerationConfig, RunConfig
from specdec.errors import PromptError, UnsupportedError, cut, shown

if TYPE_CHECKING:
    from specdec.contract import CycleRecord
    from specdec.decoding.parts import CallSettings
    from specdec.decoding.result import Result
    from specdec.hosting import TraceWriter
    from specdec.pipeline import LanguageModel
    from specdec.text import Tokenizer

COMPARED_RUNS = 3  # of each kind, with --compare; the fastest counts
QUICK_S = 2.0  # a generation that takes longer is compared with one of each kind


@click.command(context_settings={"allow_extra_args": True})
@click.option("-p", "--prompt", "text", type=TEXT, help="What to answer or continue; without it, text piped in.")
@click.option("--prompt-file", metavar="FILE", type=FILE, help="A UTF-8 file with the prompt; - for stdin.")
@click.option("--prompt-tokens", "token_ids", metavar="1,2,3", help="Token ids to continue.")
@chat_option
@click.option("--system", metavar="TEXT", type=TEXT, help="A system message; implies --chat.")
@configured()
@click.option(
    "--stop", multiple=True, type=ESCAPED, metavar="S", help=r"End before this string, such as '\n'; may be repeated."
)
@click.option("--json-schema", metavar="SCHEMA", type=TEXT, help="Constrain the output: a JSON schema, or its file.")
@ignore_eos
@click.option("--prediction", "prediction_file", metavar="FILE", type=PATH, help="Draft from a text like the output.")
@click.option("--stats", is_flag=True, help="Report everything that was counted, as tables.")
@click.option("--compare", is_flag=True, help="Run plain decoding as well, and compare speeds and tokens.")
@click.option("--trace", "trace_file", metavar="FILE", type=PATH, help="Record drafts and commits (JSON lines).")
@click.option("--html", "html_file", metavar="FILE", type=PATH, help="Write a page that shows each token's origin.")
@click.option("--strict-speculation", is_flag=True, help="Fail if no draft was verified.")
@output.json_option
@click.pass_context
def generate(
    ctx: click.Context,
    config: RunConfig,
    text: str | None,
    prompt_file: str | None,
    token_ids: str | None,
    chat: bool | None,
    system: str | None,
    prediction_file: pathlib.Path | None,
    stats: bool,
    compare: bool,
    trace_file: pathlib.Path | None,
    html_file: pathlib.Path | None,
    strict_speculation: bool,
    as_json: bool,
) -> None:
    """Answer or continue a prompt and report the speed.

    The text goes to stdout, the report to stderr. On a terminal, tokens that were drafted are green. Without MODEL and
    prompt, the embedded model continues a sample with a fixed seed, which is then compared with plain decoding. Ctrl-C
    ends the generation and keeps its output so far; a second Ctrl-C aborts.

    Where the checkpoint has a chat template, the prompt is a message in it, and --system goes before; --raw continues
    the prompt as it is. The embedded model continues text unless --chat or --system is given.

    --html writes one file that a browser shows without a server: each token's origin, what else was likely, and the
    cycles with their times.

    --prediction names a text that the output is expected to repeat, such as a file that it edits. Tokens are drafted
    from it where the output follows it; the output stays the same.

    --stats counts accepted tokens by lookahead position; 0 is the next token.

    --trace appends the prompt, every draft and what was committed to FILE; specdec accept --trace judges other drafters
    on it.
    """
    if ctx.args:
        hint = f"Did you mean --prompt {shlex.quote(cut(ctx.args[0], 100))}?"
        raise click.UsageError(f"Got unexpected extra argument {shown(ctx.args[0])}. {hint}")
    if chat is False and system is not None:
        raise click.UsageError("--raw and --system: a system message needs the chat template.")
    if token_ids is not None and (chat or system is not None):
        raise click.UsageError("--chat and --system take text, not --prompt-tokens.")
    prompt = _prompt(config, text, prompt_file, token_ids)
    sample = prompt is SAMPLE_PROMPT
    if sample:
        config = attrs.evolve(config, generation=sample_settings(config.generation))

    settings: CallSettings = {}
    if prediction_file is not None:
        settings["prediction"] = read_text(str(prediction_file))
    check_writable(html_file)
    check_writable(trace_file)

    from specdec.serving.page import ALTERNATIVES

    lm = load_model(config)
    recorded: list[CycleRecord] = []
    if html_file is not None and config.generation.logprobs is None:
        settings["logprobs"] = ALTERNATIVES  # the page shows what else was likely
    tokens = prompt
    if isinstance(prompt, str) and are_messages(lm, chat if system is None else True):
        if not prompt:  # the template would make a prompt of it
            raise PromptError("the prompt is empty", try_="--prompt TEXT")
        before = [] if system is None else [{"role": "system", "content": system}]
        tokens = lm.tokenizer.encode_messages([*before, {"role": "user", "content": prompt}])
    stream = lm.stream(tokens, **settings)
    trace = None
    colours = None if as_json or not output.coloured() else Colours(lm.tokenizer)
    watching: list[Callable[[CycleRecord], object]] = [] if colours is None else [colours.add]
    watching += [recorded.append] * (html_file is not None)
    if trace_file is not None:
        trace = _trace(trace_file, lm)
        watching.append(functools.partial(trace.cycle, trace.begin(stream.prompt)))
    if watching:
        stream.on_cycle = lambda cycle: [add(cycle) for add in watching]
    if sample and not as_json:
        click.echo(prompt, nl=False, err=True)
    try:
        with interruptible(stream):
            for piece in stream:
                if not as_json:
                    click.echo(piece if colours is None else colours.coloured(piece), nl=False)
            result = stream.result
    except BaseException:
        if sample and not as_json:
            click.echo(err=True)  # the error begins on a line of its own, behind the prompt
        raise
    finally:
        if not as_json:
            click.echo()
    data = result.to_dict()
    if as_json:
        output.print_json(data)
    else:
        if data["finish_reason"] == "stop" and len(data["tokens"]) == 1:
            click.echo(f"the model ended with its first token: {_how_prompted(lm, prompt, tokens)}", err=True)
        three_lines(data, _compared(lm, tokens, result, settings) if compare or sample else None)
        if stats:
            report(data)
    if html_file is not None:
        _write_page(html_file, lm, config, prompt, recorded, result)
    if trace is not None and trace.failure is not None:
        raise trace.failure
    speculation = data["stats"]["speculation"]
    if strict_speculation and not speculation["active"]:
        raise UnsupportedError(
            "the generation ran without speculation",
            drafter=speculation["drafter"],
            reason=speculation["reason"],
            try_="another drafter (specdec plugins lists them), or leave out --strict-speculation",
        )
    if data["finish_reason"] == "interrupted":
        ctx.exit(output.INTERRUPTED)


def _prompt(config: RunConfig, text: str | None, file: str | None, token_ids: str | None) -> str | list[int]:
    """The prompt, or what is piped in; ``SAMPLE_PROMPT`` if the embedded model gets neither.

    Raises: CheckpointError for a model that is not there, UsageError for no prompt or several, PromptError for an
        unreadable one.
    """
    from specdec.checkpoints.locate import is_hub_id, locate
    from specdec.registry import Kind, registry

    model, backends = config.target.model, [entry.spec.name for entry in registry().entries(Kind.BACKEND)]
    ours = config.target.backend in ("auto", *backends)  # another engine reads target.model as it likes
    if ours and not is_hub_id(model):
        locate(model)  # a mistake in its path comes first
    options = {"--prompt": text, "--prompt-file": file, "--prompt-tokens": token_ids}
    given = [option for option, value in options.items() if value is not None]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)}: give one prompt only.")
    if token_ids is not None:
        return _token_ids(token_ids)
    if file is not None:
        return read_text(file)
    if text is None and not sys.stdin.isatty():
        text = read_text("-") or None
    if text is None and model != "demo":
        raise click.UsageError(f"Give {model} a prompt: --prompt, --prompt-file, --prompt-tokens or standard input.")
    return SAMPLE_PROMPT if text is None else text


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


def _how_prompted(lm: LanguageModel, prompt: str | list[int], tokens: str | list[int]) -> str:
    """What to try after an empty answer."""
    if tokens is not prompt:
        return "the prompt was a message in the chat template; --raw continues it as text"
    if lm.tokenizer.has_chat_template:
        return "the prompt was not in the chat template; --chat puts it there"
    return "the checkpoint has no chat template, so the prompt was continued as text"


def sample_settings(config: GenerationConfig) -> GenerationConfig:
    """``config``, with the sample's settings where it has the defaults."""
    defaults = GenerationConfig()
    if any(getattr(config, name) != getattr(defaults, name) for name in SAMPLE_SETTINGS):
        return config
    return attrs.evolve(config, **SAMPLE_SETTINGS)


def _compared(
    lm: LanguageModel, prompt: str | list[int], result: Result, settings: CallSettings
) -> dict[str, Any] | None:
    """Both speeds, in tokens per second, and whether plain decoding gives the same tokens."""
    if result.finish_reason == "interrupted" or lm.drafter.spec.name == "none":
        return None
    from specdec.measuring.runs import plain

    count = output.count(len(result.tokens), "token")
    rounds = COMPARED_RUNS if result.stats.decode_seconds < QUICK_S else 1
    if len(result.tokens) < FEWEST_COMPARED:
        rounds = 1
    more = f" and {output.count(rounds - 1, 'more speculative run')}" if rounds > 1 else ""
    click.echo(f"comparing: {output.count(rounds, 'plain run')}{more} of {count}", err=True)
    other, seed = plain(lm), result.generation.seed
    settings["seed"] = seed
    speeds: dict[str, list[float]] = {"speculative": [result.stats.tokens_per_second], "plain": []}
    same = True
    with output.progress("comparing", then="runs") as advance:
        for done in range(rounds):
            if done:
                speeds["speculative"].append(lm.generate(prompt, **settings).stats.tokens_per_second)
            again = other.generate(prompt, seed=seed)
            speeds["plain"].append(again.stats.tokens_per_second)
            same = same and again.tokens == result.tokens
            advance(done + 1, rounds)
    return {"same": same, **{arm: max(rates) for arm, rates in speeds.items()}}


def _write_page(
    file: pathlib.Path, lm: LanguageModel, config: RunConfig, prompt: Any, recorded: list[CycleRecord], result: Result
) -> None:
    """Write the page of this generation. Raises: UnsupportedError."""
    from specdec.serving.page import PageCycles, described, page

    cycles, logprobs = PageCycles(lm), iter(result.logprobs or ())
    data = {
        **described(lm, config.target.model),
        "prompt": prompt if isinstance(prompt, str) else lm.tokenizer.decode(prompt, skip_special=False),
        "ended": f"ended by {result.finish_reason}",
        "plain_ms": plain_milliseconds(lm),
        "cycles": [cycles.add(one, list(itertools.islice(logprobs, len(one.emitted)))) for one in recorded],
    }
    write_page(file, page(data))
    click.echo(f"page: {file}", err=True)


class Colours:
    """Colours text by the tokens that it came from."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from specdec.decoding.origins import Origins

        self._origins = Origins(tokenizer)
        self._parts: collections.deque[tuple[str, bool]] = collections.deque()  # text, and whether it was drafted

    def add(self, record: CycleRecord) -> None:
        """Note a cycle."""
        self._parts += [(token.text, token.origin == "drafted") for token in self._origins.add(record)]

    def coloured(self, text: str) -> str:
        """The next text of the stream: drafted tokens green."""
        pieces = []
        while text and self._parts:
            part, drafted = self._parts.popleft()
            shown = part[: len(text)]
            if len(shown) < len(part):
                self._parts.appendleft((part[len(shown) :], drafted))
            text = text[len(shown) :]
            pieces.append(click.style(shown, fg="green") if drafted and shown else shown)
        return "".join(pieces) + text


def _trace(file: pathlib.Path, lm: LanguageModel) -> TraceWriter:
    """A recording of the generation. Raises: UnsupportedError if the file cannot be opened."""
    from specdec.hosting import TraceWriter

    config, size = lm.config, lm.info.vocab_size
    facts = {"model": config.target.model, "verifier": config.verifier.name}
    return TraceWriter(file, host="specdec", drafter=config.drafter, vocab_size=size, **facts)
