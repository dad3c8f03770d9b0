"""What the commands that measure share: a progress bar, files to write."""

from __future__ import annotations

import contextlib
import csv
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from specdec.cli import output
from specdec.errors import UnsupportedError


@contextlib.contextmanager
def progress(first: str, *, silent: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr; nothing when that is no terminal. ``first`` says what happens before the first generation."""
    if silent or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=output.console(stderr=True), transient=True) as bar:
        task = bar.add_task(first, total=None)
        yield lambda done, planned: bar.update(task, description="generating", completed=done, total=planned)


def check_writable(*files: pathlib.Path | None) -> None:
    """Say before a long run that a file cannot be written after it. Raises: UnsupportedError naming the file."""
    for file in files:
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise UnsupportedError("there is no folder to write the file into, or it is a folder itself", file=file)


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
