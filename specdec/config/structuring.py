"""Converts plain data to configuration classes, strictly: no casts, no unknown keys, errors with the key's path."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import attrs
import cattrs
from cattrs.cols import (
    is_any_set,
    is_mapping,
    is_mutable_sequence,
    is_sequence,
    list_structure_factory,
    mapping_structure_factory,
)
from cattrs.errors import (
    ClassValidationError,
    ForbiddenExtraKeysError,
    IterableValidationError,
    StructureHandlerNotFoundError,
)
from cattrs.gen import make_dict_structure_fn

from specdec.config.validators import FieldError
from specdec.config.values import Choice, TargetConfig, keys_of
from specdec.errors import ConfigError, PluginError, did_you_mean, nearest

T = TypeVar("T")
Hook = Callable[[Any, Any], Any]


def structure_options(options: Mapping[str, Any], config_class: type[T], path: str = "", source: str = "") -> T:
    """A plugin's options as its own config class: strict types, no unknown keys.

    Args:
        options: as written, ``Choice.options``.
        config_class: an attrs class or a dataclass.
        path: their table, such as ``drafter``; the prefix of keys in error messages.
        source: the file or override they come from, ``Choice.source``.
    Raises: ConfigError when the options are wrong, PluginError when the class itself cannot be read from TOML.
    """
    return structure(dict(options), config_class, tuple(path.split(".")) if path else (), lambda key: source)


def structure_choice(choice: Choice, config_class: type[T], path: str) -> T:
    """``structure_options`` for a ``Choice``."""
    return structure_options(choice.options, config_class, path, choice.source)


class _Mismatch(Exception):
    """A value of the wrong type; caught only by ``_problems``."""

    def __init__(self, takes: str, got: object, hint: str | None = None) -> None:
        self.takes, self.got, self.hint = takes, got, hint


@attrs.frozen
class _Problem:
    path: tuple[str, ...]
    text: str  # continues "key depth.depth "
    hint: str | None = None


def structure(data: Any, config_class: type[T], path: tuple[str, ...], source: Callable[[tuple[str, ...]], str]) -> T:
    """``data`` as ``config_class``.

    Args:
        path: of the table; the prefix of keys in error messages.
        source: where a key was written.

    Raises: ConfigError that names every wrong key; PluginError when the class cannot be read from TOML.
    """
    try:
        return _converter().structure(data, config_class)
    except StructureHandlerNotFoundError as error:
        raise PluginError(
            f"{config_class.__module__}.{config_class.__qualname__} cannot be read from TOML: {error}",
            try_="fields of int, float, bool, str, list, dict, attrs classes, or None beside one of them",
        ) from error
    except (ClassValidationError, IterableValidationError, ConfigError, _Mismatch) as error:
        problems = list(_problems(error, path, config_class))
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


def dotted(path: Sequence[str]) -> str:
    """``("generation", "stop", "[0]")`` as ``generation.stop[0]``."""
    return ".".join(path).replace(".[", "[")


def _problems(error: Exception, path: tuple[str, ...], owner: Any) -> Iterator[_Problem]:
    """Every leaf of cattrs' exception group, with its key's path. Unlike cattrs' formatter, keeps our error texts."""
    if isinstance(error, ClassValidationError):
        named, whole = error.group_exceptions()
        for inner, note in named:
            yield from _problems(inner, (*path, note.name), note.type)
        for inner in whole:
            yield from _problems(inner, path, error.cl)
    elif isinstance(error, IterableValidationError):
        items, whole = error.group_exceptions()
        for inner, item in items:
            place = f"[{item.index}]" if isinstance(item.index, int) else item.index
            yield from _problems(inner, (*path, place), item.type)
        for inner in whole:
            yield from _problems(inner, path, owner)
    elif isinstance(error, ForbiddenExtraKeysError):
        known = keys_of(error.cl)
        for key in sorted(error.extra_fields):
            takes = f"takes {', '.join(known)}" if known else "takes no options"
            yield _Problem((*path, key), f"is unknown.{did_you_mean(key, known)} {_table(path)} {takes}")
    elif isinstance(error, _Mismatch):
        yield _Problem(path, f"takes {error.takes}, got {_shown(error.got)}", error.hint)
    elif isinstance(error, FieldError):
        yield _Problem((*path, error.field), f"takes {error.takes}, got {_shown(error.got)}", error.facts.get("try"))
    elif isinstance(error, ConfigError):  # a class's own validator: its text is more specific
        yield _Problem(path, f"cannot be used: {error}")
    elif isinstance(error, KeyError):
        yield _Problem(path, "is required and missing")
    else:  # attrs' own validators append the field and its settings to the message
        text = str(error.args[0]) if error.args and isinstance(error.args[0], str) else str(error)
        yield _Problem(path, f"cannot be used: {text or type(error).__name__}")


def _table(path: tuple[str, ...]) -> str:
    return f"[{dotted(path)}]" if path else "The configuration"


def _shown(value: object) -> str:
    """A value with its TOML type: ``'4' (a string)``."""
    kinds: dict[type, str] = {str: "a string", bool: "a boolean", int: "an integer", float: "a number"}
    kinds |= {dict: "a table", list: "a list"}
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({kinds.get(type(value), type(value).__name__)})"


@functools.cache
def _converter() -> cattrs.Converter:
    """A converter stricter than cattrs: 2.9 is not an int, true is not 1, "7" is not 7, a string is not a list."""
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)
    converter.register_structure_hook(bool, _primitive(bool, "true or false"))
    converter.register_structure_hook(int, _primitive(int, "an integer"))
    converter.register_structure_hook(str, _string)
    converter.register_structure_hook(float, _number)
    converter.register_structure_hook(pathlib.Path, lambda value, _: pathlib.Path(_string(value, str)))
    converter.register_structure_hook(Choice, _choice)
    for predicate, factory in (
        (lambda kind: is_sequence(kind) or is_mutable_sequence(kind) or is_any_set(kind), _collection_factory),
        (_is_fixed_tuple, _fixed_tuple_factory),
        (is_mapping, _mapping_factory),
        (lambda kind: bool(attrs.has(kind)) or dataclasses.is_dataclass(kind), _record_factory),
        (_originates_in(Union, types.UnionType), _union_factory),
        (_originates_in(Literal), _literal_factory),
    ):
        converter.register_structure_hook_factory(predicate, factory)
    return converter


def _originates_in(*origins: Any) -> Callable[[Any], bool]:
    return lambda kind: get_origin(kind) in origins


def _primitive(kind: type, takes: str) -> Hook:
    def structure(value: Any, _: Any) -> Any:
        if type(value) is not kind:
            raise _Mismatch(takes, value)
        return value

    return structure


def _string(value: Any, _: Any) -> str:
    if type(value) is not str:
        quoted = f'"{str(value).lower() if isinstance(value, bool) else value}"'
        raise _Mismatch("a string", value, None if isinstance(value, list | Mapping) else f"quotes around it: {quoted}")
    return value


def _number(value: Any, _: Any) -> float:
    """A float; an int is accepted if nothing is lost, because people write ``temperature = 1``."""
    if type(value) is float and not math.isnan(value):
        return value
    if type(value) is int and abs(value) <= 2**53:
        return float(value)
    raise _Mismatch("a finite number" if type(value) is float else "a number", value)


def _collection_factory(kind: Any, converter: cattrs.Converter) -> Hook:
    """Lists, tuples of one type, and sets, all from a TOML list."""
    build = next((build for build in (tuple, frozenset, set) if (get_origin(kind) or kind) is build), list)
    item = (get_args(kind) or (Any,))[0]
    inner = list_structure_factory(list[item], converter)  # type: ignore[valid-type]

    def structure(value: Any, _: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise _Mismatch("a list", value)
        return build(inner(value, list[item]))  # type: ignore[valid-type]

    return structure


def _is_fixed_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple and get_args(kind)[-1:] != (...,)


def _fixed_tuple_factory(kind: Any, converter: cattrs.Converter) -> Hook:
    kinds = get_args(kind)

    def structure(value: Any, _: Any) -> Any:
        if not isinstance(value, list | tuple) or len(value) != len(kinds):
            raise _Mismatch(f"a list of {len(kinds)}", value)
        return tuple(converter.structure(item, wanted) for item, wanted in zip(value, kinds, strict=True))

    return structure


def _mapping_factory(kind: Any, converter: cattrs.Converter) -> Hook:
    inner = mapping_structure_factory(kind, converter)

    def structure(value: Any, wanted: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _Mismatch("a table", value)
        return inner(value, wanted)

    return structure


def _record_factory(kind: Any, converter: cattrs.Converter) -> Hook:
    keys = keys_of(kind)
    omitted: Any = {"source": cattrs.gen.override(omit=True)} if kind is TargetConfig else {}
    inner = make_dict_structure_fn(kind, converter, _cattrs_forbid_extra_keys=True, **omitted)

    def structure(value: Any, wanted: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _Mismatch("a table", value, f"{keys[0]} = ... inside the table" if keys else None)
        return inner(value, wanted)

    return structure


def _union_factory(kind: Any, converter: cattrs.Converter) -> Hook:
    """Tries the members in order; the first that takes the value wins. ``None`` means an omitted key."""
    members = [member for member in get_args(kind) if member is not type(None)]
    optional = len(members) < len(get_args(kind))

    def structure(value: Any, _: Any) -> Any:
        if value is None and optional:
            return None
        if len(members) == 1:
            return converter.structure(value, members[0])
        takes: list[str] = []
        for member in members:
            try:
                return converter.structure(value, member)
            except _Mismatch as error:
                takes.append(error.takes)
            except (ClassValidationError, IterableValidationError):
                takes.append(getattr(member, "__name__", str(member)))
        raise _Mismatch(" or ".join(takes), value)

    return structure


def _literal_factory(kind: Any, _: cattrs.Converter) -> Hook:
    choices = get_args(kind)

    def structure(value: Any, _: Any) -> Any:
        for choice in choices:
            if type(choice) is type(value) and choice == value:  # True == 1, but 1 is not one of the choices
                return choice
        hint = nearest(value, [c for c in choices if isinstance(c, str)]) if isinstance(value, str) else None
        raise _Mismatch(", ".join(map(repr, choices)), value, repr(hint) if hint else None)

    return structure


def _choice(value: Any, _: Any) -> Choice:
    """A plugin table: ``name`` plus the plugin's options."""
    if not isinstance(value, Mapping):
        raise _Mismatch("a table", value, f'name = "{value}" inside the table' if isinstance(value, str) else None)
    options = dict(value)
    name = options.pop("name", None)
    if type(name) is not str or not name:
        raise FieldError(Choice("?"), "name", "the name of a plugin", name)
    return Choice(name, options)
