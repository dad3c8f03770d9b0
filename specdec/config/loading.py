"""Loads a configuration from one TOML file plus overrides; every error names the key's path.

There are three layers, and later ones win: the defaults, the file, the overrides. A layer that changes the name of a
plugin table (``drafter``, ``verifier``, ``depth``) discards the options that lower layers set for the old name.
"""

from __future__ import annotations

import pathlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from specdec.checking import Mismatch, checked, checked_fields, convert, dotted
from specdec.config.values import PLUGIN_TABLES, RunConfig
from specdec.errors import ConfigError, shown
from specdec.files.reading import parse_toml, read_text, why

T = TypeVar("T")


@attrs.frozen(field_transformer=checked_fields)
class Override:
    """One ``key.path = value`` that wins over the file; ``source`` is the user's spelling."""

    path: tuple[str, ...]
    value: Any
    source: str

    @classmethod
    @checked()
    def parse(cls, text: str) -> Override:
        """``key.path=value``: the value is TOML, and a bare word is a string.

        Raises: ConfigError when there is no key, no value, or broken TOML that cannot be a bare word.
        """
        source = f"-s {text}"
        key, equals, raw = text.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        raw = raw.strip()
        if not equals or not all(path):
            raise ConfigError(
                f"an override is key.path=value, got {shown(text)}", try_="-s depth.depth=4, -s target.model=demo"
            )
        if not raw:
            raise ConfigError(f"the override of {key.strip()} has no value", try_=f"-s '{key.strip()}=\"\"'")
        return cls(path, _toml_value(raw, source), source)


def _toml_value(raw: str, source: str) -> Any:
    try:
        parsed = parse_toml(f"value = {raw}")
    except ValueError as error:
        if raw[0] in "[{\"'" or not isinstance(error, tomllib.TOMLDecodeError):
            unparsed = isinstance(error, tomllib.TOMLDecodeError)
            raise ConfigError(
                f"the value {shown(raw)} {'is not TOML' if unparsed else 'cannot be used'}: {error}",
                asked_for_by=source,
                try_='quote the strings in it: -s \'generation.stop=["a", "b"]\'' if unparsed else None,
            ) from error
        return raw
    return parsed["value"] if parsed.keys() == {"value"} else raw  # a line break must not smuggle in another key


@checked()
def load_config(path: str | pathlib.Path | None = None, overrides: Sequence[str | Override] = ()) -> RunConfig:
    """The defaults, then the file at ``path``, then ``overrides``.

    Raises: ConfigError that names the file, the key's path, what was got, and what would work.
    """
    return layered({} if path is None else read_toml(path), str(path), overrides)


def layered(data: Mapping[str, Any], file: str, overrides: Sequence[str | Override]) -> RunConfig:
    """As ``load_config``, for the tables of a file."""
    wins = [_named(Override.parse(text) if isinstance(text, str) else text) for text in overrides]
    top: dict[str, Any] = {}
    config = _merged(data, top, file)
    sources = dict.fromkeys(_paths(data), file)
    for win in wins:  # a value that a later override replaces is checked too
        _put(top, win.path, win.value)
        config = _merged(data, top, win.source)
        sources |= dict.fromkeys([win.path[0], dotted(win.path), *_paths(win.value, *win.path)], win.source)
    tables = {table: attrs.evolve(getattr(config, table), sources=sources) for table in ("target", *PLUGIN_TABLES)}
    return attrs.evolve(config, **tables).check_auto()


def _named(override: Override) -> Override:
    """``drafter=ngram`` and ``depth=4`` mean what they mean for ``specdec.load``."""
    table, value = override.path[0], override.value
    if len(override.path) > 1 or table not in PLUGIN_TABLES:
        return override
    if table == "depth" and type(value) is int:
        return attrs.evolve(override, value={"name": "fixed", "depth": value})
    return attrs.evolve(override, path=(table, "name")) if isinstance(value, str) else override


def _merged(data: Mapping[str, Any], top: Mapping[str, Any], source: str) -> RunConfig:
    """The defaults, then ``data`` of the file, then ``top`` of the overrides.

    Raises: ConfigError that blames ``source``, which has what was added last.
    """
    defaults = RunConfig().to_dict()
    merged = _merge(_merge({table: defaults[table] for table in PLUGIN_TABLES}, data), top)
    given = {key for layer in (data, top) if isinstance(layer.get("depth"), Mapping) for key in layer["depth"]}
    if "depth" in given and "name" not in given and isinstance(merged["depth"], dict):
        merged["depth"]["name"] = "fixed"  # a depth alone implies the policy, as in specdec.load(depth=4)
    return structure_options(merged, RunConfig, sources={"": source})


def read_toml(path: str | pathlib.Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises: ConfigError when it cannot be read, is not UTF-8 or not TOML.
    """
    try:
        return parse_toml(read_text(path))
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        raise ConfigError(
            f"there is no file {str(path)!r}" if missing else f"{str(path)!r} cannot be read as TOML: {why(error)}"
        ) from error


def _merge(low: Mapping[str, Any], high: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """``high`` over ``low``, table by table; a plugin table that changes its name starts empty."""
    merged = dict(low)
    for key, value in high.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            renamed = not path and key in PLUGIN_TABLES and value.get("name", below.get("name")) != below.get("name")
            merged[key] = dict(value) if renamed else _merge(below, value, (*path, key))
        else:
            merged[key] = value
    return merged


def _put(tables: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        below = tables.get(part)
        tables[part] = below = dict(below) if isinstance(below, Mapping) else {}
        tables = below
    tables[path[-1]] = value


def _paths(table: Any, *path: str) -> Iterator[str]:
    """The path of every key in a table and in those inside."""
    for key, value in table.items() if isinstance(table, Mapping) else ():
        yield dotted((*path, key))
        yield from _paths(value, *path, key)


# --- plain data as configuration classes ------------------------------------------------------------------------------


def structure_options(
    options: Mapping[str, Any], config_class: type[T], path: str = "", sources: Mapping[str, str] = {}
) -> T:
    """Plain data as a config class, such as a plugin's own: strict types, no unknown keys.

    Args:
        options: as written, such as ``Choice.options``.
        config_class: an attrs class.
        path: their table, such as ``drafter``; the prefix of keys in error messages.
        sources: the file or override that wrote each key, by path (``Choice.sources``).

    Raises: ConfigError that names the first wrong key; TypeError for a class that cannot be read from TOML.
    """
    try:
        made: T = convert(options, config_class, files=True)
    except Mismatch as error:
        error.path = (*filter(None, path.split(".")), *error.path)
        place = "key" if error.path else "the configuration"
        written = (sources.get(dotted(error.path[:length])) for length in range(len(error.path), -1, -1))
        source = next(filter(None, written), None)
        raise ConfigError(f"{place} {error}", asked_for_by=source, try_=error.hint) from error
    return made
