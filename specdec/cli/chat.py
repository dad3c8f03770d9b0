"""``specdec chat``: a conversation that keeps its state between turns."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from specdec.cli import output
from specdec.cli.options import FILE, TEXT, configured, interruptible, load_model, whole_number
from specdec.cli.run_report import promise, speculation_line
from specdec.config import Override, RunConfig
from specdec.errors import ConfigError, PromptError, SpecdecError, did_you_mean, shown
from specdec.files.streams import OutputError

if TYPE_CHECKING:
    from specdec.decoding.conversation import Conversation
    from specdec.decoding.result import Result
    from specdec.pipeline import LanguageModel

ANSWER_TOKENS = 1024
PROMPT, MORE = "> ", ". "
LEAVING = ("exit", "bye")  # other words for /quit


@click.command()
@configured("Maximum tokens per answer", new_tokens=ANSWER_TOKENS)
@click.option("--system", metavar="TEXT", type=TEXT, help="A system message.")
@click.option(
    "--template",
    "variables",
    multiple=True,
    metavar="KEY=VALUE",
    type=TEXT,
    help="Set a variable of the chat template: enable_thinking=false.",
)
@click.option("--load", "load_file", metavar="FILE", type=FILE, help="Continue a saved conversation.")
def chat(config: RunConfig, system: str | None, variables: tuple[str, ...], load_file: str | None) -> None:
    """Chat with a model.

    Answers go to stdout, everything else to stderr. The conversation's state is kept between turns: only new tokens
    run through the model. A line that ends with a backslash continues on the next; /help lists the commands. Ctrl-C
    stops an answer and keeps it; Ctrl-D (end of input) quits.
    """
    from specdec.decoding.conversation import Conversation

    try:
        template = {".".join(override.path): override.value for override in map(Override.parse, variables)}
    except ConfigError as error:
        raise ConfigError(
            "--template takes KEY=VALUE, such as enable_thinking=false", got=", ".join(map(shown, variables))
        ) from error
    lm = load_model(config)
    conversation = Conversation(lm, system=system, template=template)
    if load_file is not None:
        conversation.load(_path(load_file))
    Chat(lm, conversation, config).run()


class Chat:
    """The chat loop: reads lines, runs commands and answers messages until /quit or end of input."""

    def __init__(self, lm: LanguageModel, conversation: Conversation, config: RunConfig) -> None:
        self._lm = lm
        self._conversation = conversation
        self._config = config
        self._last: Result | None = None
        self._quit = False
        self._settings: dict[str, Any] = {}  # by /set
        self._saved: set[pathlib.Path] = set()  # files that are this conversation's own, so that /save replaces them
        self._console = output.console(stderr=True)
        self._commands: dict[str, tuple[str, str, Callable[[str], None]]] = {
            "regenerate": ("", "answer the last message again", self._regenerate),
            "rewind": ("[N]", "forget the last N turns (1)", self._rewind),
            "system": ("[TEXT]", "show or replace the system message; none removes it", self._system),
            "save": ("FILE", "write the conversation with its state", self._save),
            "save!": ("FILE", "the same, replacing a file", self._replace),
            "load": ("FILE", "continue a saved conversation", self._load),
            "clear": ("", "forget the whole conversation, except for the system message", self._clear),
            "set": ("KEY=VALUE", "change a setting of the answers: temperature=0.8, seed=3", self._set),
            "stats": ("", "speed and acceptance of the last answer and of the conversation", self._stats),
            "help": ("", "this list; start a message with // for a literal /", self._help),
            "quit": ("", "leave (also /exit, /bye and Ctrl-D)", self._leave),
        }

    def run(self) -> None:
        """Talk until the end."""
        self._console.print(output.facts(self._introduction()))
        output.lines(self._console, "note", self._lm.notices)
        self._say("/help lists the commands\n")
        for line in _lines(lambda: self._quit):
            try:
                self._take(line)
            except OutputError:
                raise
            except SpecdecError as error:  # the conversation is unchanged
                self._say(f"{type(error).__name__}: {error}")
            except KeyboardInterrupt:
                self._say("\naborted")

    def _take(self, line: str) -> None:
        if re.search("[\udc80-\udcff]", line):  # bytes that are not UTF-8, as the streams keep them
            raise PromptError("the line is not valid UTF-8")
        text = line.strip()
        if text.startswith("//"):
            self._answer(text[1:])
        elif text.startswith("/"):
            name, _, argument = text[1:].partition(" ")
            name = "quit" if name in LEAVING else name
            if name not in self._commands:
                hint = did_you_mean(name, [*self._commands, *LEAVING]).replace("'", "")
                raise PromptError(
                    f"there is no command /{name}.{hint}",
                    commands=", ".join(f"/{known}" for known in self._commands),
                    try_=f"/{text} for a message that starts with /",
                )
            self._commands[name][2](argument.strip())
        elif text:
            self._answer(line)

    def _answer(self, text: str) -> None:
        answer = self._conversation.ask(text, **self._settings)
        begun = False
        with interruptible(answer):
            try:
                for piece in answer:
                    visible = piece if begun else piece.lstrip("\r\n")  # no blank lines before an answer
                    begun = begun or bool(visible)
                    click.echo(visible, nl=False)
            finally:
                click.echo()
        self._last = result = answer.result
        if not result.tokens:
            self._say("(stopped before the first token; the message is dropped)")
        elif note := {
            "interrupted": "(stopped; the answer so far is kept)",
            "length": f"(cut after {output.count(len(result.tokens), 'token')}; /set max_new_tokens=N allows more)",
            "context": f"(the model's {self._lm.capacity} tokens are used up; /rewind makes room)",
        }.get(result.finish_reason):
            self._say(note)

    def _introduction(self) -> list[tuple[str, str]]:
        lm, info = self._lm, self._lm.info
        depth = "".join(f" {value}" for key, value in self._config.depth.options.items() if key == "depth")
        runs = f"{info.family}, computes in {info.dtype} on {info.device or info.backend}, {lm.capacity} tokens"
        return [
            ("model", f"{self._config.target.model}: {runs}"),
            ("drafter", f"{lm.drafter.title}, {lm.depth.spec.name} depth{depth}"),
            ("output", promise(lm.verifier.guarantee.value, info.parity.value)),
        ]

    # --- commands --------------------------------------------------------------------------------------------------

    def _rewind(self, argument: str) -> None:
        turns = whole_number(argument or "1")
        if turns is None:
            raise PromptError(f"/rewind takes a number of turns, got {shown(argument)}", try_="/rewind 1")
        self._forget(turns)
        self._say(f"{output.count(self._conversation.turns, 'turn')} left")

    def _forget(self, turns: int) -> None:
        self._conversation.rewind(turns)
        self._saved.clear()  # files that have these turns are no longer this conversation's own

    def _regenerate(self, _: str) -> None:
        messages = self._conversation.messages
        self._forget(1)
        if not self._settings.get("temperature", self._config.generation.temperature):
            self._say("(greedy decoding gives the same answer; /set temperature=0.8 samples)")
        self._answer(messages[-2]["content"])

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = None if text == "none" else text
        self._say(f"system message: {self._conversation.system or 'none'}")

    def _clear(self, _: str) -> None:
        if self._conversation.turns:
            self._forget(self._conversation.turns)
        self._last = None
        self._say("the conversation is empty")

    def _set(self, argument: str) -> None:
        if not argument:
            current = ", ".join(f"{key}={value}" for key, value in self._settings.items())
            raise PromptError(
                f"/set takes KEY=VALUE, a key of [generation]{f'; set so far: {current}' if current else ''}"
            )
        try:
            override = Override.parse(argument)
        except ConfigError as error:
            example = 'temperature=0.8 or stop=["a", "b"]'
            raise PromptError(
                f"/set takes KEY=VALUE, such as {example}, got {shown(argument)}",
                reason=error.message if "=" in argument else None,
            ) from error
        key = override.path[-1]
        settings = {**self._settings, key: override.value}
        if override.path not in ((key,), ("generation", key)):
            raise PromptError(f"/set takes a key of [generation], got {shown('.'.join(override.path))}")
        from specdec.decoding.parts import override_generation

        try:
            override_generation(self._config.generation, settings)
        except PromptError as error:
            raise PromptError(error.message.removeprefix("generation."), **error.facts) from None
        self._settings = settings
        self._say(f"{key} is {shown(override.value)}")

    def _save(self, argument: str) -> None:
        file = _path(argument, "save").absolute()
        if file not in self._saved and os.path.lexists(file) and not file.is_dir():
            raise PromptError(
                f"there is a file {shown(argument)} already", try_=f"/save! {argument}, which replaces it"
            )
        self._replace(argument)

    def _replace(self, argument: str) -> None:
        file = _path(argument, "save")
        self._conversation.save(file)
        self._saved.add(file.absolute())
        self._say(f"saved {output.count(self._conversation.turns, 'turn')}")

    def _load(self, argument: str) -> None:
        self._conversation.load(_path(argument))
        self._saved.clear()
        self._last = None
        messages = self._conversation.messages
        self._say(f"loaded {output.count(self._conversation.turns, 'turn')}")
        if messages and messages[-1]["role"] == "assistant":
            self._say(f"{PROMPT}{messages[-2]['content']}\n{messages[-1]['content']}")

    def _stats(self, _: str) -> None:
        totals, used = self._conversation.stats, len(self._conversation.tokens)
        drafted, accepted = sum(totals.offered), sum(totals.accepted)
        rows = [
            ("turns", f"{self._conversation.turns}, {used} of {self._lm.capacity} tokens used"),
            ("generated", f"{output.count(totals.tokens, 'token')} in {output.count(totals.cycles, 'cycle')}"),
        ]
        if drafted:
            rows.append(
                ("accepted", f"{accepted} of {output.count(drafted, 'drafted token')} ({accepted / drafted:.0%})")
            )
        if self._last is not None:
            last, stats = self._last, self._last.stats
            tokens = f"{output.count(len(last.tokens), 'token')}, {stats.tokens_per_second:.1f} tokens/s"
            rows += [
                ("last answer", f"{tokens}, ended by {last.finish_reason!r}"),
                ("its prompt", f"{last.prompt_tokens} tokens, of which {stats.prefilled} ran through the model"),
                ("speculation", speculation_line(stats.speculation())),
            ]
            if last.generation.temperature > 0:
                rows.append(("sampled", f"temperature {last.generation.temperature:g}, seed {last.generation.seed}"))
        self._console.print(output.facts(rows))

    def _help(self, _: str) -> None:
        rows = [(f"/{name} {takes}".rstrip(), what) for name, (takes, what, _) in self._commands.items()]
        self._console.print(output.facts([*rows, ("Ctrl-C", "stop the answer and keep it")]))

    def _leave(self, _: str) -> None:
        self._quit = True

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)


def _path(name: str, command: str = "load") -> pathlib.Path:
    if not name:
        raise PromptError(f"/{command} takes a file name", try_=f"/{command} talk.session")
    if "\0" in name:  # the system looks up the user of ~NAME before it sees a file
        raise PromptError(f"/{command} takes a file name, which cannot have a NUL character")
    return pathlib.Path(os.path.expanduser(name))


def _line_editor() -> Callable[[str], str]:
    """How a terminal's lines are read: with history; where prompt_toolkit is there, a paste is one message."""
    try:
        from prompt_toolkit import PromptSession
    except ImportError:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (importing it gives input() line editing and history)
        return input
    session: PromptSession[str] = PromptSession()  # Enter sends, and a bracketed paste keeps its lines
    return session.prompt


def _lines(done: Callable[[], bool]) -> Iterator[str]:
    """Yield messages and commands: lines of stdin, joined at a trailing backslash, until ``done`` or end of input.

    A terminal shows a prompt and allows line editing; Ctrl-C there discards the line.
    """
    terminal = sys.stdin.isatty()
    read: Callable[[str], str] = input
    if terminal:
        read = _line_editor()
    elif hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    parts: list[str] = []
    while not done():
        try:
            line = read(MORE if parts else PROMPT) if terminal else sys.stdin.readline()
        except EOFError:
            click.echo(err=True)
            return
        except KeyboardInterrupt:
            if not terminal:
                raise
            click.echo("\n(/quit or Ctrl-D leaves)", err=True)
            parts = []
            continue
        if not terminal:
            if not line:
                break
            line = line.removesuffix("\n")
        parts.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            yield "\n".join(parts)
            parts = []
    if parts:
        yield "\n".join(parts)
