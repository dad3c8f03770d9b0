"""Converts plain data to configuration classes, strictly: no casts, no unknown keys, errors with the key's path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from specdec.checking import Mismatch, Problem, convert, dotted, error_of
from specdec.config.values import Choice
from specdec.errors import ConfigError, PluginError

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
    """``structure_options`` for a ``Choice``."""
    return structure_options(choice.options, config_class, path, choice.source)


def structure(data: Any, config_class: type[T], path: tuple[str, ...], source: Callable[[tuple[str, ...]], str]) -> T:
    """``data`` as ``config_class``.

    Args:
        path: of the table; the prefix of keys in error messages.
        source: where a key was written.

    Raises: ConfigError that names every wrong key; PluginError when the class cannot be read from TOML.
    """
    try:
        made: T = convert(data, config_class, files=True)
    except (TypeError, NameError) as error:
        raise PluginError(
            f"{config_class.__module__}.{config_class.__qualname__} cannot be read from TOML: {error}",
            try_="fields of int, float, bool, str, list, dict, attrs classes, or None beside one of them",
        ) from error
    except Mismatch as error:
        several = len(error.problems) > 1

        def sentence(problem: Problem) -> str:
            key = (*path, *problem.path)
            where = f"{source(key)}: " if several and source(key) else ""
            return f"{where}{f'key {dotted(key)}' if key else 'the configuration'} {problem.sentence()}"

        written = source((*path, *error.problems[0].path)) or None
        raise error_of(
            error.problems, ConfigError, sentence, "keys of the configuration", asked_for_by=written
        ) from error
    return made
