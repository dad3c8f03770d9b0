"""Renders chat templates in Jinja's sandbox, with Hugging Face's environment and a bound on the text."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdec.errors import described

TEXT_LIMIT = 2**24  # characters of a rendered conversation, and of what an operator may build on the way


def rendered(source: str, variables: Mapping[str, Any]) -> str:
    """The text that a template makes of its variables. Raises: any Exception, which ``reason_and_line`` explains."""
    pieces, length = [], 0
    for piece in _compiled(source).generate(variables):
        pieces.append(piece)
        length += len(piece)
        _check_length(length)
    return "".join(pieces)


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}``, which marks the assistant's text for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The body, without the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also refuses the two operators that can build a huge value in one step."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for value, count in ((left, right), (right, left)):
            if operator == "*" and isinstance(value, str | list | tuple) and isinstance(count, int):
                _check_length(len(value) * count)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_length(left.bit_length() * right)
        return super().call_binop(context, operator, left, right)


def _check_length(length: int) -> None:
    if length > TEXT_LIMIT:
        raise jinja2.TemplateRuntimeError(f"it makes a text of more than {TEXT_LIMIT:,} characters")


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
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


def reason_and_line(error: Exception) -> tuple[str, int | None]:
    """Why a rendering failed, and the innermost template line; compiled templates keep their line numbers."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return error.message or "its syntax is wrong", error.lineno
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return str(error) if isinstance(error, jinja2.TemplateError) else described(error), line
