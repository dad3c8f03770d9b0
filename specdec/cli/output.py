"""Shared by all commands: errors, JSON, tables, logging.

A SpecdecError becomes one message on stderr and exit status 2; with ``--json`` it is also the one object on stdout, and
``specdec -v`` puts the traceback before it. Any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
import structlog

from specdec.errors import SpecdecError, did_you_mean

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

F = TypeVar("F", bound=Callable[..., Any])

INTERRUPTED = 130  # exit status after Ctrl-C
BROKEN_PROMISE = 1  # exit status when outputs differ although verifier and backend promise that they cannot
NARROW = 106  # narrower terminals get closer columns

_JSON = "specdec.json"  # keys in click's Context.meta, shared by nested contexts
_JSON_DONE = "specdec.json_done"
_VERBOSE = "specdec.verbose"


class Failed(click.ClickException):
    """A SpecdecError shown to the user."""

    exit_code = 2

    def __init__(self, error: SpecdecError, *, verbose: bool) -> None:
        lines = traceback.format_exception(error) if verbose else []
        super().__init__("".join([*lines, f"{type(error).__name__}: {error}"]))

    def show(self, file: Any = None) -> None:
        """Print the message as it is; it already starts with an error prefix."""
        click.echo(self.message, file=file if file is not None else sys.stderr)


class Group(click.Group):
    """Loads plugins' commands for unknown names and for listings; turns our errors into messages."""

    extended = False  # whether plugins' commands are loaded

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse; ``--help`` is handled in here."""
        with _failures(None):
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with _failures(ctx):
            return super().invoke(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Our own command, else a plugin's; plugins are imported only if needed."""
        return super().get_command(ctx, cmd_name) or self._extend().commands.get(cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Our commands and the plugins'."""
        return sorted(self._extend().commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command at the start of ``args``, or a usage error with the nearest name."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"No such command {args[0]!r}.{did_you_mean(args[0], self.commands)}")
        return super().resolve_command(ctx, args)

    def _extend(self) -> Group:
        if not self.extended:
            from specdec.registry import registry

            registry().add_commands(self)
            self.extended = True
        return self


@contextlib.contextmanager
def _failures(ctx: click.Context | None) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:  # click would exit with 1, which here means a broken promise
        click.echo("interrupted", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    except SpecdecError as error:
        if ctx is not None and ctx.meta.get(_JSON) and not ctx.meta.get(_JSON_DONE):
            described = {"type": type(error).__name__, "message": error.message, "facts": error.facts}
            click.echo(json.dumps({"error": described}))
        raise Failed(error, verbose=ctx is not None and bool(ctx.meta.get(_VERBOSE))) from error


# --- JSON ------------------------------------------------------------------------------------------------------------


def json_option(command: F) -> F:
    """Add ``--json``; the function gets it as ``as_json``."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
        ctx.meta[_JSON] = value
        return value

    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        callback=remember,
        is_eager=True,  # parsed before another option can fail
        help="One JSON object on stdout, everything else on stderr.",
    )(command)


def print_json(value: object) -> None:
    """Print the one JSON object. Values that JSON lacks (NaN, enums, paths) fail loudly."""
    click.echo(json.dumps(value, allow_nan=False))  # ASCII: safe on every terminal and pipe
    click.get_current_context().meta[_JSON_DONE] = True


# --- text ------------------------------------------------------------------------------------------------------------


def console(*, stderr: bool = False) -> Console:
    """A rich console that prints strings literally: file names and model text are not markup."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(
        file=stream,
        markup=False,
        emoji=False,
        highlight=False,
        width=None if stream.isatty() else 120,  # piped: a fixed width, wide enough for a sentence
    )


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[str] | None = None) -> Table:
    """A table: ruled on a terminal, plain columns when piped; nothing is cut off.

    ``left`` names the text columns (by default the first); numbers are right-aligned. A narrow terminal wraps headings
    at every word and separates columns by one space.
    """
    from rich import box
    from rich.table import Table

    ruled = sys.stdout.isatty() and sys.stderr.isatty()
    narrow = ruled and console().width < NARROW
    made = Table(
        box=box.SIMPLE_HEAD if ruled else None,
        show_edge=not ruled,
        pad_edge=False,
        padding=(0, 0) if narrow else (0, 1, 0, 0) if ruled else (0, 1),
    )
    for number, heading in enumerate(headings):
        made.add_column(
            heading.replace(" ", "\n") if narrow else heading,
            justify="left" if heading in (headings[:1] if left is None else left) else "right",
            no_wrap=number == 0,
            overflow="fold",
        )
    for row in rows:
        made.add_row(*row)
    return made


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Two columns, label and value, without a heading."""
    from rich.table import Table

    made = Table.grid(padding=(0, 2))
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for label, value in rows:
        made.add_row(label, value)
    return made


def section(console: Console, title: str, table: Table, *explained: str) -> None:
    """A titled table with notes below it."""
    console.print()
    console.print(title, style="bold")
    console.print(table)
    for line in explained:
        console.print(line, style="dim")


def share(rate: float | None) -> str:
    """``0.345``, or ``-`` if the rate is unknown."""
    return "-" if rate is None else f"{rate:.3f}"


def count(number: int, noun: str) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def amount(size: int | None) -> str:
    """Bytes: ``3.2 MiB``."""
    if size is None:
        return "unknown"
    number, unit = float(size), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{size} bytes" if unit == "bytes" else f"{number:.1f} {unit}"


def broken_promise(ctx: click.Context, found: str) -> NoReturn:
    """Report that output changed which must not, and exit."""
    click.echo(
        f"the verifier promises the tokens of plain decoding and the backend its bits, and {found}: this is a bug",
        err=True,
    )
    ctx.exit(BROKEN_PROMISE)


# --- progress --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def status(message: str) -> Iterator[None]:
    """Show a spinner on stderr; nothing if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    with console(stderr=True).status(message):
        yield


@contextlib.contextmanager
def progress(
    first: str, *, silent: bool = False, then: str = "generating"
) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar on stderr, driven by (done, planned); None if stderr is not a terminal.

    ``first`` describes the work before the first call, ``then`` what is counted.
    """
    if silent or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[counted]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(first, total=None, counted="")
        yield lambda done, planned: bar.update(
            task, description=then, completed=done, total=planned, counted=f"{done} of {planned}"
        )


# --- logging ---------------------------------------------------------------------------------------------------------


def configure(verbose: int) -> None:
    """Send logs to stderr: warnings; with ``-v`` events; with ``-vv`` everything."""
    from specdec.registry import tracing

    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:  # an unprintable character must not end a generation
            reconfigure(errors="backslashreplace")
    click.get_current_context().meta[_VERBOSE] = verbose > 0
    level = {0: logging.INFO if tracing() else logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),  # the current stderr, not the one at import
        cache_logger_on_first_use=False,
    )
