"""Renders chat templates in Jinja's sandbox, with Hugging Face's environment and bounds on the text and the time."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from time import thread_time
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdec.errors import described

TEXT_LIMIT = 2**24  # characters of a rendered conversation, and of what an operator may build on the way
SECONDS = 5.0  # of processor time for a rendering
_end: ContextVar[float] = ContextVar("_end")


def rendered(source: str, variables: Mapping[str, Any]) -> str:
    """The text that a template makes of its variables. Raises: any Exception, which ``reason_and_line`` explains."""
    template = _compiled(source)
    _end.set(thread_time() + SECONDS)
    return _joined(template.generate(variables))


def _joined(pieces: Iterable[str]) -> str:
    kept, length = [], 0
    for piece in pieces:
        kept.append(piece)
        length += len(piece)
        _check_length(length)
        _Sandbox.check_time()
    return "".join(kept)


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}``, which marks the assistant's text for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The body, without the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Generator(CodeGenerator):
    """Looks at the clock in each block, so in each iteration of a loop and each call of a macro, and bounds ``~``."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.check_time()")
        super().blockvisit(nodes, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - the name of the node
        self.write("environment.bounded(")
        super().visit_Concat(node, frame)
        self.write(")")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also bounds the time and the operators that can build a huge value in a few steps."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**"})

    @staticmethod
    def check_time() -> None:
        """Raises: TemplateRuntimeError after ``SECONDS``."""
        if thread_time() > _end.get():
            raise jinja2.TemplateRuntimeError(f"it takes more than {SECONDS:g} seconds")

    @staticmethod
    def bounded(value: Any) -> Any:
        """``value``, if it is not too long. Raises: TemplateRuntimeError."""
        if isinstance(value, str | list | tuple):
            _check_length(len(value))
        return value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for value, count in ((left, right), (right, left)):
            if operator == "*" and isinstance(value, str | list | tuple) and isinstance(count, int):
                _check_length(len(value) * count)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_length(left.bit_length() * right)
        return self.bounded(super().call_binop(context, operator, left, right))


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
    form = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return _joined(form.iterencode(value))


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
