"""``specdec chat``: a conversation that keeps its state between turns."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import click

from specdec.cli import output
from specdec.cli.options import FILE, TEXT, configured, interruptible, whole_number
from specdec.cli.run_report import acceptance_table, speculation_line
from specdec.config import Override, RunConfig
from specdec.errors import PromptError, SpecdecError, did_you_mean, shown

if TYPE_CHECKING:
    from specdec.decoding.conversation import Conversation
    from specdec.decoding.result import Result
    from specdec.pipeline import LanguageModel

ANSWER_TOKENS = 1024
PROMPT, MORE = "> ", ". "


@click.command()
@configured("Tokens of one answer", new_tokens=ANSWER_TOKENS)
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
    import specdec
    from specdec.decoding.conversation import Conversation

    with output.status(f"loading {config.target.model}"):
        lm = specdec.load(config=config)
    conversation = Conversation(lm, system=system, template=_template_variables(variables))
    if load_file is not None:
        conversation.load(_path(load_file))
    Chat(lm, conversation, config).run()


def _template_variables(given: Sequence[str]) -> dict[str, Any]:
    variables: dict[str, Any] = {}
    for text in given:
        override = Override.parse(text)
        variables[".".join(override.path)] = override.value
    return variables


class Chat:
    """The chat loop: reads lines, runs commands and answers messages until /quit or end of input."""

    def __init__(self, lm: LanguageModel, conversation: Conversation, config: RunConfig) -> None:
        self._lm = lm
        self._conversation = conversation
        self._config = config
        self._last: Result | None = None
        self._quit = False
        self._settings: dict[str, Any] = {}  # by /set
        self._console = output.console(stderr=True)
        self._commands: dict[str, tuple[str, str, Callable[[str], None]]] = {
            "rewind": ("[N]", "forget the last N turns (1)", self._rewind),
            "save": ("FILE", "write the conversation with its state", self._save),
            "load": ("FILE", "continue a saved conversation", self._load),
            "clear": ("", "forget the whole conversation, except for the system message", self._clear),
            "set": ("KEY=VALUE", "change a setting of the answers: temperature=0.8, seed=3", self._set),
            "stats": ("", "speed and acceptance of the last answer and of the conversation", self._stats),
            "help": ("", "this list; start a message with // for a literal /", self._help),
            "quit": ("", "leave (also Ctrl-D)", self._leave),
        }

    def run(self) -> None:
        """Talk until the end."""
        self._console.print(output.facts(self._introduction()))
        output.lines(self._console, "note", self._lm.notices)
        self._say("/help lists the commands\n")
        for line in _lines(lambda: self._quit):
            try:
                self._take(line)
            except SpecdecError as error:  # the conversation is unchanged
                self._say(f"{type(error).__name__}: {error}")
            except KeyboardInterrupt:
                self._say("\naborted")

    def _take(self, line: str) -> None:
        text = line.strip()
        if text.startswith("//"):
            self._answer(text[1:])
        elif text.startswith("/"):
            name, _, argument = text[1:].partition(" ")
            if name not in self._commands:
                hint = did_you_mean(name, self._commands).replace("'", "")
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
        with interruptible(answer):
            try:
                for piece in answer:
                    click.echo(piece, nl=False)
            finally:
                click.echo()
        self._last = result = answer.result
        if not result.tokens:
            self._say("(stopped before the first token; the message is dropped)")
        elif note := {
            "interrupted": "(stopped; the answer so far is kept)",
            "length": f"(cut after {output.count(len(result.tokens), 'token')}; -n sets the limit)",
            "context": f"(the model's {self._lm.capacity} tokens are used up; /rewind makes room)",
        }.get(result.finish_reason):
            self._say(note)

    def _introduction(self) -> list[tuple[str, str]]:
        lm, info = self._lm, self._lm.info
        depth = ", ".join(f"{key} {value}" for key, value in self._config.depth.options.items())
        parity = info.parity.value + (f" ({info.parity_reason})" if info.parity_reason else "")
        runs = f"{info.family}, {info.dtype} on {info.device or info.backend}, {lm.capacity} tokens"
        return [
            ("model", f"{self._config.target.model}: {runs}"),
            ("drafter", f"{lm.drafter.spec.name}, depth policy {lm.depth.spec.name}{f' ({depth})' if depth else ''}"),
            ("verifier", f"{self._config.verifier.name}, guarantee {lm.verifier.guarantee.value}"),
            ("parity", parity),
        ]

    # --- commands --------------------------------------------------------------------------------------------------

    def _rewind(self, argument: str) -> None:
        turns = whole_number(argument or "1")
        if turns is None:
            raise PromptError(f"/rewind takes a number of turns, got {shown(argument)}")
        self._conversation.rewind(turns)
        self._say(f"{output.count(self._conversation.turns, 'turn')} left")

    def _clear(self, _: str) -> None:
        if self._conversation.turns:
            self._conversation.rewind(self._conversation.turns)
        self._last = None
        self._say("the conversation is empty")

    def _set(self, argument: str) -> None:
        if not argument:
            given = ", ".join(f"{key}={value}" for key, value in self._settings.items())
            raise PromptError(f"/set takes KEY=VALUE, a key of [generation]{f'; set so far: {given}' if given else ''}")
        override = Override.parse(argument)
        key = override.path[-1]
        wanted = {**self._settings, key: override.value}
        if override.path not in ((key,), ("generation", key)):
            raise PromptError(f"/set takes a key of [generation], got {shown('.'.join(override.path))}")
        from specdec.decoding.parts import override_generation

        override_generation(self._config.generation, wanted)
        self._settings = wanted
        self._say(f"{key} is {override.value}")

    def _save(self, argument: str) -> None:
        self._conversation.save(_path(argument, "save"))
        self._say(f"saved {output.count(self._conversation.turns, 'turn')}")

    def _load(self, argument: str) -> None:
        self._conversation.load(_path(argument))
        self._last = None
        messages = self._conversation.messages
        self._say(f"loaded {output.count(self._conversation.turns, 'turn')}")
        if messages and messages[-1]["role"] == "assistant":
            self._say(f"{PROMPT}{messages[-2]['content']}\n{messages[-1]['content']}")

    def _stats(self, _: str) -> None:
        totals, used = self._conversation.stats, len(self._conversation.tokens)
        rows = [
            ("turns", f"{self._conversation.turns}, {used} of {self._lm.capacity} tokens used"),
            ("generated", f"{output.count(totals.tokens, 'token')} in {output.count(totals.cycles, 'cycle')}"),
        ]
        if self._last is not None:
            last, stats = self._last, self._last.stats
            made = f"{output.count(len(last.tokens), 'token')}, {stats.tokens_per_second:.1f} tokens/s"
            rows += [
                ("last answer", f"{made}, ended by {last.finish_reason!r}"),
                ("its prompt", f"{last.prompt_tokens} tokens, of which {stats.prefilled} ran through the model"),
                ("speculation", speculation_line(stats.speculation())),
            ]
        self._console.print(output.facts(rows))
        if totals.offered:
            self._say("\nacceptance over the conversation, by lookahead position:")
            self._console.print(acceptance_table(attrs.asdict(totals)))

    def _help(self, _: str) -> None:
        rows = [(f"/{name} {takes}".rstrip(), what) for name, (takes, what, _) in self._commands.items()]
        self._console.print(output.facts([*rows, ("Ctrl-C", "stop the answer and keep it")]))

    def _leave(self, _: str) -> None:
        self._quit = True

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)


def _path(name: str, command: str = "load") -> pathlib.Path:
    if not name:
        raise PromptError(f"/{command} takes a file name")
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
        sys.stdin.reconfigure(
            encoding="utf-8", errors="replace"
        )  # a stray byte in piped text must not end the conversation
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
