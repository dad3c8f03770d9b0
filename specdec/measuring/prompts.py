"""Prompts for measurements: four built-in classes, and a loader for the user's file.

The classes differ in how predictable their continuations are, which determines acceptance. ``factual`` and ``code`` are
texts to continue; ``verbose-thinking`` and ``instruction`` are user messages, put into the checkpoint's chat template
if it has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs

from specdec.checking import between, checked, checked_fields
from specdec.errors import PromptError, did_you_mean, shown
from specdec.files.reading import parse_json, read_bytes

if TYPE_CHECKING:
    from specdec.text import Tokenizer

FOLDER = Path(__file__).with_name("prompts")
CLASSES = ("factual", "verbose-thinking", "code", "instruction", "copy")
CHAT_CLASSES = ("verbose-thinking", "instruction")
PLAIN_CLASS = "prompts"  # class of a plain-text file
KEYS = ("class", "prompt", "chat")
EXAMPLE = '{"class": "mail", "prompt": "Dear all,"}'

PromptSet = Mapping[str, Sequence["Prompt"]]  # class -> prompts, in measuring order


@attrs.frozen(kw_only=True, field_transformer=checked_fields)
class Prompt:
    """A text to continue, or a message to answer."""

    kind: str  # its class
    text: str
    chat: bool = False  # a user message, for the chat template if there is one
    source: str = attrs.field(default="", eq=False)  # "prompts.jsonl, line 3"

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids; the class ``verbose-thinking`` sets the template's ``enable_thinking``.

        Raises: PromptError that names the prompt's file and line.
        """
        try:
            if not (self.chat and tokenizer.has_chat_template):
                ids = tokenizer.encode(self.text)
            else:
                variables = {"enable_thinking": True} if self.kind == "verbose-thinking" else {}
                ids = tokenizer.encode_messages([{"role": "user", "content": self.text}], variables)
        except PromptError as error:
            raise PromptError(error.message, prompt=self.name, **error.facts) from error
        if not ids:
            raise PromptError("the tokenizer makes no token of a prompt", prompt=self.name)
        return ids

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
        text = read_bytes(file).decode("utf-8-sig")
    except OSError as error:
        raise PromptError(f"the prompt file cannot be read: {error.strerror or error}", file=file) from error
    except UnicodeDecodeError as error:
        at = error.object[: error.start].count(b"\n") + 1
        raise PromptError(
            f"the prompt file is not UTF-8: byte {error.object[error.start]:#04x}", file=file, line=at
        ) from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise PromptError("the prompt file has no prompt", file=file, try_=f"a line such as {EXAMPLE}")
    json_lines = file.suffix == ".jsonl" or lines[0][1].lstrip().startswith("{")
    prompts: dict[str, list[Prompt]] = {}
    for number, line in lines:
        source = f"{file.name}, line {number}"
        if json_lines:
            try:
                wrong = _wrong(data := parse_json(line), line)
            except ValueError as error:
                wrong = f"a line of the prompt file is not JSON: {error}"
            if wrong:
                raise PromptError(wrong, file=file, line=number, try_=EXAMPLE)
            kind = data.get("class", PLAIN_CLASS).strip()
            prompt = Prompt(
                kind=kind, text=data["prompt"], chat=data.get("chat", chat or kind in CHAT_CLASSES), source=source
            )
        else:
            prompt = Prompt(kind=PLAIN_CLASS, text=line.rstrip("\r"), chat=chat, source=source)
        prompts.setdefault(prompt.kind, []).append(prompt)
    return prompts


def _wrong(data: Any, line: str) -> str:
    """What is wrong with a line of JSON; empty if nothing is."""
    if not isinstance(data, dict):
        return f"a line of the prompt file is not a JSON object: {line.strip()[:40]}"
    for key in data.keys() - KEYS:
        return f"a prompt has the keys {', '.join(KEYS)}, got {shown(key, 40)}.{did_you_mean(key, KEYS)}"
    for key, default in (("prompt", ""), ("class", PLAIN_CLASS)):
        value = data.get(key, default)
        if not isinstance(value, str) or not value.strip():
            return f"{key!r} is a string that is not empty, got {shown(value if key in data else None, 40)}"
    if not isinstance(chat := data.get("chat", False), bool):
        return f"'chat' is true or false, got {shown(chat, 40)}"
    return ""


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
