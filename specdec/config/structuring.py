"""Converts plain data to configuration classes, strictly: no casts, no unknown keys, errors with the key's path."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from cattrs.errors import StructureHandlerNotFoundError

from specdec.checking import CANNOT_CONVERT, converter_for, dotted, problems_of
from specdec.config.values import Choice
from specdec.errors import ConfigError, PluginError, shown

T = TypeVar("T")


def structure_options(options: Mapping[str, Any], config_class: type[T], path: str = "", source: str = "") -> T:
    """A plugin's options as its own config class: strict types, no unknown keys.

    Args:
        options: as written, ``Choice.options``.
        config_class: an attrs class or a dataclass.
        path: their table, such as ``drafter``; the prefix of keys in error messages.
        source: the file or override they come from, ``Choice.source``.
    Raises: ConfigError when the options are wrong, PluginError when the class itself cannot be read from TOML.
    """
    return structure(options, config_class, tuple(path.split(".")) if path else (), lambda key: source)


def structure_choice(choice: Choice, config_class: type[T], path: str) -> T:
    """``structure_options`` for a ``Choice``. Options that a later layer has overridden are checked as well."""
    for overridden in choice.earlier:
        structure_options(overridden.options, config_class, path, overridden.source)
    return structure_options(choice.options, config_class, path, choice.source)


def structure(data: Any, config_class: type[T], path: tuple[str, ...], source: Callable[[tuple[str, ...]], str]) -> T:
    """``data`` as ``config_class``.

    Args:
        path: of the table; the prefix of keys in error messages.
        source: where a key was written.

    Raises: ConfigError that names every wrong key; PluginError when the class cannot be read from TOML.
    """
    try:
        return converter_for(files=True).structure(data, config_class)
    except StructureHandlerNotFoundError as error:
        raise PluginError(
            f"{config_class.__module__}.{config_class.__qualname__} cannot be read from TOML: {error}",
            try_="fields of int, float, bool, str, list, dict, attrs classes, or None beside one of them",
        ) from error
    except CANNOT_CONVERT as error:
        problems = list(problems_of(error, path, config_class, _in_toml))
        cause = error
    first = problems[0]
    if len(problems) == 1:
        raise ConfigError(
            f"key {dotted(first.path)} {first.text}" if first.path else f"the configuration {first.text}",
            asked_for_by=source(first.path) or None,
            try_=first.hint,
        ) from cause
    lines = []
    for problem in problems:
        origin = source(problem.path)
        hint = f" (try: {problem.hint})" if problem.hint else ""
        lines.append(f"\n  {f'{origin}: ' if origin else ''}key {dotted(problem.path)} {problem.text}{hint}")
    raise ConfigError(f"{len(problems)} keys of the configuration cannot be used{''.join(lines)}") from cause


def _in_toml(value: object) -> str:
    """A value with its TOML type: ``'4' (a string)``."""
    kinds: dict[type, str] = {str: "a string", bool: "a boolean", int: "an integer", float: "a number"}
    kinds |= {dict: "a table", list: "a list", datetime.date: "a date", datetime.time: "a time"}
    kinds |= {datetime.datetime: "a date and time"}
    text = shown(value, 60)
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, datetime.date | datetime.time):
        text = value.isoformat()
    return f"{text} ({kinds.get(type(value), type(value).__name__)})"
