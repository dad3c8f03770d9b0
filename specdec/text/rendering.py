"""Render chat templates: run as a script, in a process of its own, because a template is untrusted code.

A template can loop for years or double a string thirty times, and Jinja's sandbox bounds neither: any filter, method or
operator may be the one that takes the memory. Here the kernel counts both, so the list of such operations need not be
complete. The process renders one request after the other until its input ends.

A request is ``(source, variables)`` in marshal's format, a reply a JSON object with "text", or "error" and "line"; each
follows its length in 8 bytes.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import marshal
import resource
import signal
import sys
from typing import Any

SECONDS = 3  # of processor time, for one template
MEMORY = 2**30  # bytes of address space
TEXT, TEXT_EACH = 2**16, 8  # most characters of a rendered conversation: a constant, and per byte of the request


def _serve() -> None:
    # only from here on: the folders with Jinja come as arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asked
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while header := source.read(8):
        length = int.from_bytes(header, "little")
        template, variables = marshal.loads(source.read(length))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
        reply = json.dumps(_rendered(template, variables, TEXT + TEXT_EACH * length)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.write(len(reply).to_bytes(8, "little") + reply)
        sink.flush()


def _rendered(source: str, variables: dict[str, Any], most: int) -> dict[str, Any]:
    import jinja2

    try:
        text = _compiled(source).render(variables)
    except MemoryError:
        return {"error": f"it takes more than {MEMORY >> 20} MiB of memory"}
    except jinja2.TemplateSyntaxError as error:
        return {"error": error.message, "line": error.lineno}
    except Exception as error:  # noqa: BLE001 - expressions in a template can raise anything
        return {"error": _reason(error), "line": _template_line(error)}
    if len(text) > most:
        return {"error": f"it renders {len(text):,} characters, and {most:,} are taken for these messages"}
    return {"text": text}


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
    """A compiled template in a sandboxed environment that matches Hugging Face's."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}...{% endgeneration %}``, which marks the assistant's text for training."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            """The body, without the two tags."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
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
    import jinja2

    raise jinja2.TemplateError(message)


def _reason(error: Exception) -> str:
    import jinja2

    text = (str(error) or type(error).__name__)[:TEXT]
    return text if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {text}"


def _template_line(error: BaseException) -> int | None:
    """The innermost template line in a traceback; compiled templates keep their line numbers."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


if __name__ == "__main__":
    sys.path[:0] = sys.argv[1:]
    _serve()
