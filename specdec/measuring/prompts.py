"""Prompts for measurements: four built-in classes, and a loader for the user's file.

The classes differ in how predictable their continuations are, which determines acceptance. ``factual`` and ``code`` are
texts to continue; ``verbose-thinking`` and ``instruction`` are user messages, put into the checkpoint's chat template
if it has one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs

from specdec.checking import Mismatch, between, checked, checked_fields, convert, rule
from specdec.errors import PromptError, did_you_mean
from specdec.files.reading import parse_json, read_text, why

if TYPE_CHECKING:
    from specdec.text import Tokenizer

FOLDER = Path(__file__).with_name("prompts")
CLASSES = ("factual", "verbose-thinking", "code", "instruction", "copy")
CHAT_CLASSES = ("verbose-thinking", "instruction")
PLAIN_CLASS = "prompts"  # class of a plain-text file
SAID = rule("text that is not empty", str.strip)
EXAMPLE = '{"class": "mail", "prompt": "Dear all,"}'

PromptSet = Mapping[str, Sequence["Prompt"]]  # class -> prompts, in measuring order


@attrs.frozen(kw_only=True, field_transformer=checked_fields)
class Prompt:
    """A text to continue, or a message to answer."""

    kind: Annotated[str, SAID] = attrs.field(default=PLAIN_CLASS, metadata={"key": "class"})  # its class
    text: Annotated[str, SAID] = attrs.field(metadata={"key": "prompt"})
    chat: bool = False  # a user message, for the chat template if there is one
    source: str = attrs.field(default="", eq=False, metadata={"key": False})  # "prompts.jsonl, line 3"

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids; the class ``verbose-thinking`` sets the template's ``enable_thinking``.

        Raises: PromptError as ``named``.
        """
        with self.named():
            if not (self.chat and tokenizer.has_chat_template):
                ids = tokenizer.encode(self.text)
            else:
                variables = {"enable_thinking": True} if self.kind == "verbose-thinking" else {}
                ids = tokenizer.encode_messages([{"role": "user", "content": self.text}], variables)
            if not ids:
                raise PromptError("the tokenizer makes no token of a prompt")
        return ids

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Let a PromptError raised inside name the prompt's file and line."""
        try:
            yield
        except PromptError as error:
            raise PromptError(error.message, **{"prompt": self.name, **error.facts}) from error

    @property
    def name(self) -> str:
        """The name in messages: file and line, or the first words."""
        return self.source or repr(self.text[:40])


def own_prompts() -> dict[str, list[Prompt]]:
    """The prompts that come with specdec, by class."""
    return {name: load_prompts(FOLDER / f"{name}.jsonl", chat=False)[name] for name in CLASSES}


@checked(PromptError)
def load_prompts(path: str | Path, *, chat: bool = False) -> dict[str, list[Prompt]]:
    """Read a user's file: JSON lines with ``prompt`` (and ``class`` and ``chat``), or plain text, one prompt per line.

    A file is JSON lines if its name ends in ``.jsonl`` or its first line begins with ``{``. Empty lines are skipped.
    Prompts without a class, plain text included, belong to the class ``prompts``. A prompt whose line does not say is a
    message if ``chat`` is true or its class is ``verbose-thinking`` or ``instruction``; messages go through the
    checkpoint's chat template if there is one.

    Raises: PromptError naming the file, and the line of a bad prompt.
    """
    file = Path(path)
    try:
        text = read_text(file)
    except (OSError, ValueError) as error:
        raise PromptError(f"the prompt file cannot be read: {why(error)}", file=file) from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise PromptError("the prompt file has no prompt", file=file, try_=f"a line such as {EXAMPLE}")
    json_lines = file.suffix == ".jsonl" or lines[0][1].lstrip().startswith("{")
    prompts: dict[str, list[Prompt]] = {}
    for number, line in lines:
        source = f"{file.name}, line {number}"
        if json_lines:
            try:
                data = parse_json(line)
                prompt = convert(data, Prompt, files=True)
            except (ValueError, Mismatch) as error:
                wrong = "cannot be used" if isinstance(error, Mismatch) else "is not JSON"
                message = f"a line of the prompt file {wrong}: {error}"
                raise PromptError(message, file=file, line=number, try_=EXAMPLE) from error
            kind = prompt.kind.strip()
            is_message = data.get("chat", chat or kind in CHAT_CLASSES)
            prompt = attrs.evolve(prompt, kind=kind, chat=is_message, source=source)
        else:
            prompt = Prompt(kind=PLAIN_CLASS, text=line.rstrip("\r"), chat=chat, source=source)
        prompts.setdefault(prompt.kind, []).append(prompt)
    return prompts


@checked(PromptError)
def choose_prompts(
    prompts: PromptSet,
    *,
    classes: Iterable[str] | None = None,
    per_class: Annotated[int, between(1, 2**31 - 1)] | None = None,
) -> dict[str, list[Prompt]]:
    """The prompts of these classes (all if None), the first ``per_class`` of each.

    Raises: PromptError for an unknown class, or if none is given.
    """
    names = list(prompts) if classes is None else list(dict.fromkeys(classes))
    for name in names:
        if name not in prompts:
            raise PromptError(
                f"there is no prompt class {name!r}.{did_you_mean(name, prompts)}", available=", ".join(prompts)
            )
    if not names:
        raise PromptError("no prompt class is chosen", available=", ".join(prompts))
    return {name: list(prompts[name][:per_class]) for name in names}
