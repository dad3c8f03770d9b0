"""What was wrong with converted data, item by item, from the exceptions that a converter raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError, IterableValidationError

from specdec.checking.conversion import Mismatch, known_fields
from specdec.checking.validators import FieldError
from specdec.errors import ConfigError, did_you_mean

CANNOT_CONVERT = (ClassValidationError, IterableValidationError, ConfigError, Mismatch)
"""What a converter raises when the data is wrong."""


@attrs.frozen
class Problem:
    """What is wrong at one path; ``text`` continues a sentence that begins with the path."""

    path: tuple[str, ...]
    text: str
    hint: str | None = None


def dotted(path: Sequence[str]) -> str:
    """``("generation", "stop", "[0]")`` as ``generation.stop[0]``."""
    return ".".join(path).replace(".[", "[")


def problems_of(
    error: Exception, path: tuple[str, ...], owner: Any, shown: Callable[[object], str]
) -> Iterator[Problem]:
    """Every leaf of cattrs' exception group, with its key's path. Unlike cattrs' formatter, keeps our error texts.

    Args:
        owner: the type that was asked for.
        shown: a value as text.
    """
    if isinstance(error, ClassValidationError):
        named, whole = error.group_exceptions()
        for inner, note in named:
            yield from problems_of(inner, (*path, note.name), note.type, shown)
        for inner in whole:
            yield from problems_of(inner, path, error.cl, shown)
    elif isinstance(error, IterableValidationError):
        items, whole = error.group_exceptions()
        for inner, item in items:
            place = f"[{item.index}]" if isinstance(item.index, int) else str(item.index)
            yield from problems_of(inner, (*path, place), item.type, shown)
        for inner in whole:
            yield from problems_of(inner, path, owner, shown)
    elif isinstance(error, ForbiddenExtraKeysError):
        known = known_fields(error.cl)
        for key in sorted(map(str, error.extra_fields)):
            takes = f"takes {', '.join(known)}" if known else "takes no options"
            table = f"[{dotted(path)}]" if path else "The configuration"
            yield Problem((*path, key), f"is unknown.{did_you_mean(key, known)} {table} {takes}")
    elif isinstance(error, Mismatch):
        yield Problem(path, f"takes {error.takes}, got {shown(error.got)}", error.hint)
    elif isinstance(error, FieldError):
        yield Problem((*path, error.field), f"takes {error.takes}, got {shown(error.got)}", error.facts.get("try"))
    elif isinstance(error, ConfigError):  # a class's own validator: its text is more specific
        yield Problem(path, f"cannot be used: {error}")
    elif isinstance(error, KeyError):
        yield Problem(path, "is required and missing")
    else:  # attrs' own validators append the field and its settings to the message
        yield Problem(path, f"cannot be used: {_said(error)}")


def _said(error: Exception) -> str:
    try:
        text = str(error.args[0]) if error.args and isinstance(error.args[0], str) else str(error)
    except Exception:  # noqa: BLE001 - an exception of the caller's own object
        text = ""
    return text or type(error).__name__
