"""Shared by the measuring commands: prompt options, the measurement loop, and output files."""

from __future__ import annotations

import base64
import functools
import io
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from specdec.cli import output
from specdec.cli.options import FILE, PATH, Command, add_options, integer, interruptible, load_model
from specdec.config import RunConfig
from specdec.errors import UnsupportedError, import_extra

if TYPE_CHECKING:
    from rich.console import Console

    from specdec.measuring.drafts import DraftLog
    from specdec.measuring.environment import Environment
    from specdec.measuring.prompts import PromptSet
    from specdec.pipeline import LanguageModel

PLAIN_TOKENS = 24  # of the runs that say how fast plain decoding is


def measured(*, per_class: int | None) -> Callable[[Command], Command]:
    """Options for prompts and the page; the function gets ``prompts`` and ``html``.

    The file is checked before the command runs, since a measurement takes minutes.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def resolved(prompts_file: str | None, classes: str | None, per_class: int | None, **options: Any) -> Any:
            names = None if classes is None else [name.strip() for name in classes.split(",") if name.strip()]
            prompts = chosen_prompts(prompts_file, per_class, names, chat=options["config"].target.model != "demo")
            html = options.pop("html_file")
            if html is not None:
                import_extra("matplotlib", "plot")
            check_writable(html)
            return command(prompts=prompts, html=html, **options)

        return add_options(
            resolved,
            click.option(
                "--prompts",
                "prompts_file",
                metavar="FILE",
                type=FILE,
                help='Your prompts: plain text, one per line, or JSON lines with "class" and "prompt". They are '
                'messages if the checkpoint has a chat template; "chat": false marks a text to continue.',
            ),
            click.option("--classes", metavar="A,B", help="Measure only these prompt classes."),
            integer("--per-class", f"Prompts per class{'' if per_class else ' (default all)'}", per_class),
            click.option(
                "--html", "html_file", metavar="FILE", type=PATH, help="Write a page with tables and plot (matplotlib)."
            ),
        )

    return decorate


def chosen_prompts(
    file: str | None, per_class: int | None, classes: list[str] | None = None, *, chat: bool
) -> PromptSet:
    """Prompts of a file, or specdec's own; ``chat`` as for ``load_prompts``. Raises: PromptError."""
    from specdec.measuring.prompts import choose_prompts, load_prompts, own_prompts

    return choose_prompts(
        own_prompts() if file is None else load_prompts(file, chat=chat), classes=classes, per_class=per_class
    )


def measure(config: RunConfig, make: Callable[..., Any], first: str, *, silent: bool) -> Any:
    """Load the model and run ``make(lm, progress=..., model=...)``; the first Ctrl-C ends it early.

    ``first`` describes the work before the first generation; ``silent`` hides the progress bar.
    """
    lm = load_model(config)
    with output.progress(first, silent=silent) as advance:
        measurement = make(lm, progress=advance, model=config.target.model)
        with interruptible(measurement):
            return measurement.run()


def finish(
    ctx: click.Context,
    report: Any,
    html: pathlib.Path | None,
    *,
    show: Callable[[Any, Any], None],
    plot: Callable[[Any, BinaryIO], None] | None,
    as_json: bool,
    changed: str,
    done: str,
    log: DraftLog | None = None,
) -> None:
    """Print a report, write its page, and exit with its status.

    Args:
        show: prints the report on a console.
        plot: draws it; None if there is nothing to draw, and then no picture is written.
        changed: what a broken promise means here.
        done: how far an interrupted measurement got.
        log: was written on the way.
    """
    data = report.to_dict()
    files = {"log": None if log is None else log.path, "html": html}
    lost = None if log is None else log.failure
    if as_json:
        output.print_json({**data, **{name: str(file) if file else None for name, file in files.items()}})
    else:
        show(report, output.console())
    if html is not None:
        page = output.console(recorded=True)
        show(report, page)
        write_page(html, _page(f"specdec {ctx.info_name}", page, data, plot and functools.partial(plot, report)))
    for name, file in files.items():
        if file is not None and not as_json:
            click.echo(f"{name}: {file}", err=True)
    if lost is not None and not report.broken_promise:
        raise lost
    if report.broken_promise:
        promised = "the verifier promises the tokens of plain decoding and the backend its bits"
        log_lost = "" if lost is None else f" ({lost.message})"
        click.echo(f"{promised}, and {changed}{log_lost}: this is a bug", err=True)
        ctx.exit(output.BROKEN_PROMISE)
    if report.partial:
        output.interrupted(ctx, f"this covers {done}")


def _page(title: str, console: Console, data: Mapping[str, Any], plot: Callable[[io.BytesIO], None] | None) -> str:
    """A report as one HTML file: the plot, what a terminal shows, and the data, for a browser without a network."""
    from specdec.serving.page import embedded, style

    picture = ""
    if plot is not None:
        drawn = io.BytesIO()
        plot(drawn)
        source = base64.b64encode(drawn.getvalue()).decode()
        picture = f'<img src="data:image/png;base64,{source}" alt="Plot of the tables below" style="max-width: 100%">'
    tables = console.export_html(
        inline_styles=True, code_format='<pre tabindex="0" style="overflow-x: auto; font-size: .85rem">{code}</pre>'
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
        f"<style>{style()}</style>\n</head>\n<body>\n<header><h1>{title}</h1></header>\n<main>\n"
        f"{picture}\n{tables}\n</main>\n{embedded(data)}\n</body>\n</html>\n"
    )


def write_page(file: pathlib.Path, text: str) -> None:
    """Write an HTML file. Raises: UnsupportedError."""
    with output.os_errors("the page cannot be written", file=file):
        file.write_text(text, encoding="utf-8")


def plain_milliseconds(lm: LanguageModel) -> float:
    """Milliseconds of a token of plain decoding, with log-probabilities as the page shows them; the faster of two."""
    from specdec.measuring.runs import plain
    from specdec.serving.page import ALTERNATIVES

    arm = plain(lm)
    prompt = lm.tokenizer.encode("The ")
    settings: Any = {"max_new_tokens": PLAIN_TOKENS, "ignore_eos": True, "logprobs": ALTERNATIVES, "processors": ()}
    runs = [arm.generate(prompt, **settings).stats for _ in range(2)]
    return min(1e3 * stats.decode_seconds / stats.tokens for stats in runs)


def check_writable(file: pathlib.Path | None) -> None:
    """Check before a long run that its file can be written. Raises: UnsupportedError naming the file."""
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise UnsupportedError(
            "there is no folder to write the file into, or it is a folder itself",
            file=file,
            try_="a file's name" if file.is_dir() else f"mkdir -p {file.parent}",
        )


# --- lines of a report -----------------------------------------------------------------------------------------------


def sampling(report: Any) -> str:
    """``greedy``, or the temperature and the seed."""
    return "greedy" if report.temperature == 0 else f"temperature {report.temperature:g}, seed {report.seed}"


def environment(env: Environment) -> list[tuple[str, str]]:
    """Model and machine."""
    return [
        ("model", f"{env.model}, {env.family}, {env.dtype} on {env.device}"),
        (
            "machine",
            f"{env.processor}, {output.count(env.threads, 'thread')}, load {env.load_1min:.2f}; specdec {env.specdec}",
        ),
    ]


def between(ends: tuple[float, float] | None, form: str = ".3f", unit: str = "") -> str:
    """An interval, or ``-`` if there is none."""
    return "-" if ends is None else f"{ends[0]:{form}} to {ends[1]:{form}}{unit}"
