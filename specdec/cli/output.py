"""Shared by all commands: errors, JSON, tables, logging.

A SpecdecError becomes one message on stderr and exit status 2; with ``--json`` it is also the one object on stdout, and
``specdec -v`` puts the traceback before it. Any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import click

from specdec._version import __version__
from specdec.errors import SpecdecError, UnsupportedError, one_line, printable
from specdec.files.reading import why
from specdec.logs import get_logger

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

log = get_logger(__name__)
F = TypeVar("F", bound=Callable[..., Any])

INTERRUPTED = 130  # exit status after Ctrl-C
REFUSED = 2  # exit status after a SpecdecError
BROKEN_PROMISE = 1  # exit status when outputs differ although verifier and backend promise that they cannot
NARROW = 106  # narrower terminals get closer columns

_JSON = "specdec.json"  # keys in click's Context.meta, shared by nested contexts
_JSON_DONE = "specdec.json_done"
_VERBOSE = "specdec.verbose"


class Group(click.Group):
    """Loads plugins' commands for unknown names and for listings; turns our errors into messages."""

    extended = False  # whether plugins' commands are loaded

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse; ``--help`` is handled in here."""
        log_to_stderr()
        with _failures(None):
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with _failures(ctx):
            try:
                started = time.perf_counter()
                result = super().invoke(ctx)
                log.info("done", command=ctx.invoked_subcommand, elapsed_s=round(time.perf_counter() - started, 3))
                return result
            finally:
                sys.stdout.flush()  # what a plugin's command printed may still fail

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Our own command, else a plugin's; plugins are imported only if needed."""
        return super().get_command(ctx, cmd_name) or self._extend().commands.get(cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Our commands and the plugins'."""
        return sorted(self._extend().commands)

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
            click.echo(json.dumps(described(error)))
        if ctx is not None and ctx.meta.get(_VERBOSE):
            click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
        click.echo(f"{type(error).__name__}: {error}", err=True)
        raise click.exceptions.Exit(REFUSED) from error


@contextlib.contextmanager
def os_errors(message: str, **facts: object) -> Iterator[None]:
    """Turn an error of the system into an UnsupportedError that adds its reason to the message."""
    try:
        yield
    except OSError as error:
        raise UnsupportedError(f"{message}: {why(error)}", **facts) from error


# --- JSON ------------------------------------------------------------------------------------------------------------


def described(error: SpecdecError) -> dict[str, Any]:
    """An error as the object that stands for a result."""
    facts: dict[str, Any] = {"type": type(error).__name__, "message": error.message, "facts": error.facts}
    return {"error": {**facts, "tokens": list(error.tokens)} if error.tokens else facts}


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


def console(*, stderr: bool = False, recorded: bool = False) -> Console:
    """A rich console that prints strings literally: file names and names of tensors are neither markup nor escapes.

    A ``recorded`` one shows nothing, and can be exported as HTML.
    """
    from rich.console import Console

    class Literal(Console):
        def render_str(self, text: str, **style: Any) -> Text:
            return super().render_str(printable(text), **style)

    stream: Any = io.StringIO() if recorded else sys.stderr if stderr else sys.stdout
    return Literal(
        record=recorded,
        file=stream if stream.isatty() else cast(IO[str], _WithoutPadding(stream)),
        markup=False,
        emoji=False,
        highlight=False,
        width=None if stream.isatty() else 120,  # piped: a fixed width, wide enough for a sentence
    )


def coloured() -> bool:
    """Whether stdout shows colours: a terminal, unless NO_COLOR is set (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class _WithoutPadding:
    """A stream for a pipe: the spaces with which tables fill their last column are left out."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(re.sub(r" +$", "", text, flags=re.MULTILINE))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[str] | None = None) -> Table:
    """A table: ruled on a terminal, plain columns when piped; nothing is cut off.

    ``left`` names the text columns (by default the first); numbers are right-aligned. A narrow terminal wraps the
    headings of numbers at every word and separates columns by one space.
    """
    from rich import box
    from rich.table import Table

    ruled = sys.stdout.isatty() and sys.stderr.isatty()
    narrow = ruled and console().width < NARROW
    grid = Table(
        box=box.SIMPLE_HEAD if ruled else None,
        show_edge=not ruled,
        pad_edge=False,
        padding=(0, 0) if narrow else (0, 1, 0, 0) if ruled else (0, 1),
    )
    for number, heading in enumerate(headings):
        text = heading in (headings[:1] if left is None else left)
        grid.add_column(
            heading.replace(" ", "\n") if narrow and not text else heading,
            justify="left" if text else "right",
            no_wrap=number == 0,
            overflow="fold",
        )
    for row in rows:
        grid.add_row(*map(one_line, row))
    return grid


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Two columns, label and value, without a heading."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(one_line(label), one_line(value))
    return grid


def section(console: Console, title: str, table: Table, *explained: str) -> None:
    """A titled table with notes below it."""
    console.print()
    console.print(title, style="bold")
    console.print(table)
    for line in explained:
        console.print(line, style="dim")


def lines(console: Console, label: str, texts: Iterable[str]) -> None:
    """``label: text``, each on a line of its own whatever is in the text."""
    for text in texts:
        console.print(f"{label}: {one_line(text)}", soft_wrap=True)


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
    power = min(max(size.bit_length() - 1, 0) // 10, 3)
    return f"{size / 1024**power:.1f} {'_KMG'[power]}iB" if power else f"{size} bytes"


def interrupted(ctx: click.Context, what: str) -> NoReturn:
    """Report that Ctrl-C ended the command early, and exit."""
    click.echo(f"interrupted: {what}", err=True)
    ctx.exit(INTERRUPTED)


# --- progress --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def status(message: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner on stderr, whose message the function changes; nothing if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda changed: None
        return
    with console(stderr=True).status(message) as shown:
        yield shown.update


@contextlib.contextmanager
def progress(first: str, *, silent: bool = False, then: str = "generating") -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr, driven by (done, planned); nothing if stderr is not a terminal.

    ``first`` describes the work before the first call, ``then`` what is counted.
    """
    if silent or not sys.stderr.isatty():
        yield lambda done, planned: None
        return
    from rich.progress import BarColumn, Progress, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), "{task.fields[counted]}", TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(first, total=None, counted="")
        yield lambda done, planned: bar.update(
            task, description=then, completed=done, total=planned, counted=f"{done} of {planned}"
        )


# --- logging ---------------------------------------------------------------------------------------------------------


class _ToStderr(logging.Handler):
    """Writes to the stderr of the moment, which a caller may have redirected since."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(f"[{record.levelname.lower()}] {printable(record.getMessage())}", err=True)


_LOG = _ToStderr()


def configure(verbose: int) -> None:
    """Send logs to stderr: warnings; with ``-v`` choices and phases; with ``-vv`` every cycle too."""
    context = click.get_current_context()
    context.meta[_VERBOSE] = verbose > 0
    log_to_stderr(verbose)
    log.info("specdec", version=__version__, python=platform.python_version(), command=context.invoked_subcommand)
    log.debug("arguments", given=sys.argv[1:], folder=os.getcwd())


def log_to_stderr(verbose: int = 0) -> None:
    """Show the library's log; before the options are known, as for ``--help``, its warnings."""
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG)
    logger = logging.getLogger("specdec")
    logger.addHandler(_LOG)  # once, however often this is called
    logger.setLevel(level)
