"""What the commands that measure share: how much to generate, a progress bar, files to write."""

from __future__ import annotations

import contextlib
import csv
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import click

from specdec.cli import output
from specdec.config import Override, RunConfig, load_config, read_toml
from specdec.errors import UnsupportedError

if TYPE_CHECKING:
    from specdec.measuring.prompts import PromptSet

BROKEN_PROMISE = 1  # exit status when outputs differ although verifier and backend promise that they cannot
LENGTH_KEY = ("generation", "max_new_tokens")


def config_of_length(file: pathlib.Path | None, overrides: Sequence[Override], new_tokens: int) -> RunConfig:
    """The configuration, with ``new_tokens`` to generate per prompt where neither the file nor an option says."""
    config = load_config(file, overrides)
    given = any(override.path == LENGTH_KEY for override in overrides)
    if not given and file is not None:
        given = LENGTH_KEY[1] in read_toml(file).get(LENGTH_KEY[0], {})
    if given:
        return config
    return attrs.evolve(config, generation=attrs.evolve(config.generation, max_new_tokens=new_tokens))


@contextlib.contextmanager
def progress(
    first: str, *, silent: bool = False, then: str = "generating"
) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr, moved by (done, planned); None when that is no terminal.

    ``first`` says what happens before the first call, ``then`` what is counted.
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
    with Progress(*columns, console=output.console(stderr=True), transient=True) as bar:
        task = bar.add_task(first, total=None, counted="")
        yield lambda done, planned: bar.update(
            task, description=then, completed=done, total=planned, counted=f"{done} of {planned}"
        )


def chosen_prompts(file: str | None, classes: str | None, per_class: int | None) -> PromptSet:
    """The prompts of ``--prompts``, ``--classes`` and ``--per-class``. Raises: PromptError as the loader does."""
    from specdec.measuring.prompts import choose_prompts, load_prompts, own_prompts

    prompts = own_prompts() if file is None else load_prompts(file)
    wanted = None if classes is None else [name.strip() for name in classes.split(",") if name.strip()]
    return choose_prompts(prompts, classes=wanted, per_class=per_class)


def check_writable(*files: pathlib.Path | None, plot: pathlib.Path | None = None) -> None:
    """Say before a long run that a file cannot be written after it, or a plot not drawn.

    Raises: UnsupportedError naming the file, or matplotlib.
    """
    if plot is not None:
        from specdec.measuring.audit import require_matplotlib

        require_matplotlib()
    for file in (*files, plot):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise UnsupportedError("there is no folder to write the file into, or it is a folder itself", file=file)


def named_files(files: Mapping[str, pathlib.Path | None]) -> dict[str, str | None]:
    """What was written, for ``--json``."""
    return {name: str(file) if file else None for name, file in files.items()}


def tell_files(files: Mapping[str, pathlib.Path | None]) -> None:
    """What was written, for people, on stderr."""
    for name, file in files.items():
        if file is not None:
            click.echo(f"{name}: {file}", err=True)


def write_csv(rows: Iterable[Mapping[str, Any]], file: pathlib.Path) -> None:
    """A table with the first row's keys as heading; nothing but an empty file for no rows. Raises: UnsupportedError."""
    kept = list(rows)
    try:
        with file.open("w", newline="", encoding="utf-8") as target:
            if kept:
                writer = csv.DictWriter(target, fieldnames=list(kept[0]))
                writer.writeheader()
                writer.writerows(kept)
    except OSError as error:
        raise UnsupportedError(f"the table cannot be written: {error.strerror or error}", file=file) from error
