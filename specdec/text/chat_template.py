"""Chat templates: the Jinja sources of a checkpoint, rendered in a sandbox."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdec.checkpoints import read_json
from specdec.errors import CheckpointError, PromptError


@attrs.frozen
class ChatTemplate:
    """A Jinja source and its file."""

    source: str
    file: Path

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text of a conversation. Raises: PromptError with the template's file and line when rendering fails."""
        line: int | None
        try:
            return _compiled(self.source).render(variables)
        except jinja2.TemplateSyntaxError as error:
            reason, line = error.message, error.lineno
        except Exception as error:  # noqa: BLE001 - expressions in a template can raise anything
            reason, line = _reason(error), _template_line(error)
        raise PromptError(f"the chat template failed: {reason}", file=self.file, line=line)


def read_chat_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, ChatTemplate]:
    """Every chat template of a folder by name; a separate file wins over tokenizer_config.json."""
    templates: dict[str, ChatTemplate] = {}

    def take(value: Any, file: Path) -> None:
        """A template, or a list of ``{"name": ..., "template": ...}``."""
        entries = value if isinstance(value, list) else [{"name": "default", "template": value}]
        for entry in entries:
            name, source = (entry.get("name"), entry.get("template")) if isinstance(entry, Mapping) else (None, None)
            if not isinstance(name, str) or not isinstance(source, str):
                raise CheckpointError("a chat template is text, or a list of {name, template}", file=file, got=entry)
            templates[name] = ChatTemplate(source, file)

    if tokenizer_config.get("chat_template") is not None:
        take(tokenizer_config["chat_template"], folder / "tokenizer_config.json")
    file = folder / "chat_template.json"
    if file.is_file():
        take(read_json(file).get("chat_template"), file)
    for file in [folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))]:
        if file.is_file():
            try:
                source = file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{file.name} cannot be read: {error}", file=file) from error
            templates["default" if file.name == "chat_template.jinja" else file.stem] = ChatTemplate(source, file)
    return templates


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}``, which marks an assistant's words for training; renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The body, without the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    """A compiled template in a sandboxed environment that matches Hugging Face's."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, with the arguments of Hugging Face's filter; Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _reason(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {text}"


def _template_line(error: BaseException) -> int | None:
    """The innermost template line in a traceback; compiled templates keep their line numbers."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
