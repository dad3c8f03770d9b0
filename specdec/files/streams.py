"""The standard streams of a process: closed ones are opened, and a write that fails has one meaning everywhere."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from specdec.errors import UnsupportedError
from specdec.files.reading import why


class OutputError(UnsupportedError):
    """Standard output cannot be written."""


class _Checked(io.RawIOBase):
    """A raw stream whose first failed write calls ``failed``; that write and all later ones are dropped.

    ``failed`` may raise. Later writes must not: the interpreter flushes what is left when it ends.
    """

    def __init__(self, stream: Any, failed: Any) -> None:
        self._stream = stream  # which would close the raw one with itself
        self._raw = getattr(stream.buffer, "raw", stream.buffer)  # without a buffer under python -u
        self._failed, self._dropping = failed, False

    def write(self, data: Any) -> int | None:
        if not self._dropping:
            try:
                written: int | None = self._raw.write(data)
            except OSError as error:
                self._dropping = True
                self._failed(error)
            else:
                return written
        return memoryview(data).nbytes

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return bool(self._raw.isatty())

    def fileno(self) -> int:
        return int(self._raw.fileno())


def prepare() -> None:
    """Make the standard streams of this process safe to use.

    A closed stdin is empty, and a closed stdout fails when it is written to. A failed write to stdout raises
    OutputError, or SystemExit with status 0 if the reader of a pipe has gone, as ``head`` goes. What cannot be
    written to stderr is dropped: it never ends a command.
    """
    for name, flags in (("stdin", os.O_RDONLY), ("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:  # closed: without a stand-in, the next file to be opened would get its number
            opened = os.open(os.devnull, flags)
            stream = open(opened, "r" if name == "stdin" else "w", encoding="utf-8", closefd=False)
            setattr(sys, name, stream)
    sys.stdout = _checked(sys.stdout, _output_failed)
    sys.stderr = _checked(sys.stderr, lambda error: None)


def _checked(stream: Any, failed: Any) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(_Checked(stream, failed)),
        encoding=stream.encoding,
        errors="backslashreplace",  # an unprintable character must not end a generation
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _output_failed(error: OSError) -> None:
    if isinstance(error, BrokenPipeError):
        raise SystemExit(0) from error
    raise OutputError(f"standard output cannot be written: {why(error)}") from error
