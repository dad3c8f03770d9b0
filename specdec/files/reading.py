"""Read files that may be damaged or hostile: regular files only, and never more than a stated number of bytes."""

from __future__ import annotations

import collections
import errno
import io
import json
import os
import re
import stat
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from specdec.errors import shown

NESTING_LIMIT = 64  # lists and objects within one another; code that walks a document may recurse
_DEEP = f"it is nested more than {NESTING_LIMIT} levels deep"
TEXT_LIMIT = 2**25  # bytes of a configuration, an index or a template; the largest index known has 10 MB
_KINDS = (
    (stat.S_ISREG, "a file"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class DuplicateKeyError(ValueError):
    """A JSON object with the same key twice; ``json`` alone would silently keep the last."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"it has the key {shown(key)} twice")


def kind(mode: int) -> str:
    """What a path of this mode is: "a file", "a folder", "a named pipe", ..."""
    return next((name for test, name in _KINDS if test(mode)), "something else")


def open_file(path: Path | str) -> io.BufferedReader:
    """Open a regular file for reading. Raises: OSError for anything else, at once: a pipe would block."""
    try:
        return open(path, "rb", opener=_open_regular)
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error)) from error


def _open_regular(path: str, flags: int) -> int:
    handle = os.open(path, flags | os.O_NONBLOCK)  # without it, opening a pipe waits for its writer
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, f"it is {kind(mode)}, not a file")
    except BaseException:
        os.close(handle)  # the stream, which closes it otherwise, does not exist yet
        raise
    return handle


def read_bytes(path: Path | str, limit: int = TEXT_LIMIT) -> bytes:
    """The content of a regular file. Raises: OSError, also for a file of more than ``limit`` bytes."""
    with open_file(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {limit:,} are read")
        content = stream.read(size + 1)
        if len(content) > size:  # a file that grows, or one of the system, whose size is unknown
            content += stream.read(limit + 1 - len(content))
        if len(content) > limit:
            raise OSError(errno.EFBIG, f"it has more than the {limit:,} bytes that are read")
        return content


def read_text(path: Path | str, limit: int = TEXT_LIMIT) -> str:
    """The text of a UTF-8 file. Raises: OSError; ValueError as ``decoded``."""
    return decoded(read_bytes(path, limit))


def decoded(data: bytes) -> str:
    """The text of UTF-8, with or without a byte order mark. Raises: ValueError that names the first wrong byte."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at = error.start + len(data) - len(error.object)  # which lacks a byte order mark
        raise ValueError(f"it is not UTF-8: byte {data[at]:#04x} at offset {at}") from error


def why(error: Exception) -> str:
    """Why a file cannot be used: in the words of the system without number and name, or of what reads it."""
    return getattr(error, "strerror", None) or str(error)


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON document.

    Raises: ValueError (``json.JSONDecodeError``, ``DuplicateKeyError``), also for nesting that is too deep, for an
    integer of too many digits, and for half of a surrogate pair, which is no text.
    """
    value = _parsed(lambda: json.loads(text, object_pairs_hook=_unique))
    if re.search(rb"\\u[dD][89a-fA-F]", text if isinstance(text, bytes) else text.encode()):  # else there is none
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])[1:-1]
            raise ValueError(f"a text in it has half of a surrogate pair ({half}), which is no character") from error
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML document. Raises: ValueError (``tomllib.TOMLDecodeError``), as ``parse_json``."""
    tables: dict[str, Any] = _parsed(lambda: tomllib.loads(text))
    if any(type(value) is int and not -(2**63) <= value < 2**63 for value in leaves(tables)):
        # Python reads hexadecimal ones of any length, and then cannot print them
        raise ValueError("an integer of TOML has 64 bits, and one in it has more")
    return tables


def leaves(document: Any) -> Iterator[Any]:
    """Every value in a document that is not a list or an object. Raises: ValueError if it is nested too deeply."""
    level = [document]
    for _ in range(NESTING_LIMIT):
        deeper: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                deeper += value.values()
            elif isinstance(value, list):
                deeper += value
            else:
                yield value
        if not deeper:
            return
        level = deeper
    raise ValueError(_DEEP)


def _parsed(parse: Callable[[], Any]) -> Any:
    try:
        value = parse()
    except RecursionError as error:
        raise ValueError(_DEEP) from error
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        # of Python itself, about an integer; its advice is a setting of the interpreter
        raise ValueError(f"an integer in it has more than {sys.get_int_max_str_digits():,} digits") from error
    for _ in leaves(value):
        pass
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        times = collections.Counter(key for key, _ in pairs)
        raise DuplicateKeyError(next(key for key in result if times[key] > 1))
    return result
