"""Checks values against declared types without loss: 2.9 is not an integer, true is not 1, "7" is not 7.

One converter serves files and callers: the keys of a configuration, the arguments of public calls, the fields of attrs
classes. An annotation is the only place where a type is written down, so a new key or parameter is checked as well.
From a caller come types that a file lacks, and they are taken when nothing is lost: NumPy's numbers, subclasses of
``str`` and ``int``, sequences, 1-d arrays. Errors name the place.
"""

from __future__ import annotations

import collections.abc
import enum
import functools
import inspect
import math
import numbers
import operator
import os
import pathlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs

from specdec.errors import ConfigError, SpecdecError, described, did_you_mean, nearest, shown, typed

P = ParamSpec("P")
R = TypeVar("R")
Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]
_LISTS = (list, tuple, collections.abc.Sequence, collections.abc.MutableSequence)
_ANY_ORDER = (set, frozenset, AbstractSet, collections.abc.Iterable, collections.abc.Collection)


def dotted(path: Sequence[str]) -> str:
    """``("generation", "stop", "[0]")`` as ``generation.stop[0]``."""
    return ".".join(path).replace(".[", "[")


@attrs.define
class Mismatch(Exception):
    """A value that cannot be converted.

    Attributes:
        takes: what its place takes instead of ``got``.
        hint: what would work.
        text: what is wrong, where that is not the type.
        path: where it is inside the value that was to be converted.
    """

    takes: str = ""
    got: object = None
    hint: str | None = None
    text: str = attrs.field(default="", kw_only=True)
    path: tuple[str, ...] = attrs.field(default=(), kw_only=True)

    def __str__(self) -> str:
        return f"{dotted(self.path)} {self.text or f'takes {self.takes}, got {typed(self.got)}'}".lstrip()


def convert(value: Any, kind: Any, *, files: bool = False) -> Any:
    """``value`` as ``kind``. In files records are tables, in programs they are objects of their class.

    A class with a method ``from_table`` converts a table by itself, in files and in programs.
    Raises: Mismatch; TypeError for a kind that a file cannot hold.
    """
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if kind is Any or kind is object or isinstance(kind, TypeVar):
        return value
    if origin in _PLAIN:
        return _PLAIN[origin](value)
    if origin in (Union, types.UnionType):
        return _of_union(value, inner, files)
    if origin is Literal:
        return _choice(value, inner)
    if origin is Annotated:
        return _annotated(value, inner, files)
    if origin in (dict, collections.abc.Mapping, collections.abc.MutableMapping):
        return _mapping(value, *(inner or (Any, Any)), files=files)
    if origin in _LISTS or origin in _ANY_ORDER:
        return _collection(value, origin, inner, files)
    if inspect.isclass(origin) and issubclass(origin, enum.Enum):
        return value if isinstance(value, origin) else origin(_choice(value, [member.value for member in origin]))
    if hasattr(origin, "from_table"):
        return value if isinstance(value, origin) else _built(lambda: origin.from_table(value))
    if files:
        if inspect.isclass(origin) and attrs.has(origin):
            return _record(value, origin)
        named = getattr(kind, "__name__", kind)
        takes = "int, float, bool, str, list, dict, attrs classes, or None beside one of them"
        raise TypeError(f"a field of type {named} cannot be read from a file: it takes {takes}")
    if inspect.isclass(kind):
        return _instance(value, kind, f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}")
    return value


def _item(place: str, value: Any, kind: Any, *, files: bool) -> Any:
    """``convert`` for what stands at ``place`` in another value."""
    try:
        return convert(value, kind, files=files)
    except Mismatch as error:
        error.path = (place, *error.path)
        raise


# --- single values ---------------------------------------------------------------------------------------------------


def _instance(value: Any, kind: Any, takes: str) -> Any:
    if not isinstance(value, kind):
        raise Mismatch(takes, value)
    return value


def _int(value: Any) -> int:
    if type(value) is int:
        return value
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):  # NumPy's integers, subclasses of int
        return int.__index__(operator.index(value))
    raise Mismatch("an integer", value)


def _number(value: Any) -> float:
    """A float; another number if float64 holds it exactly, because people write ``temperature = 1``."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            number = float.__float__(float(value))
        except (OverflowError, ValueError):
            number = math.nan
        if number == value:
            return number
    raise Mismatch("a finite number" if isinstance(value, float) else "a number", value)


def _string(value: Any) -> str:
    if isinstance(value, str):
        return str.__str__(value)
    hint = None
    if isinstance(value, bool | int | float):
        hint = f'quotes around it: "{str(value).lower() if isinstance(value, bool) else shown(value)}"'
    raise Mismatch("a string", value, hint)


def _path(value: Any) -> Any:
    """A path or its text, as it was given."""
    if not isinstance(os.fspath(value) if isinstance(value, os.PathLike) else value, str):
        raise Mismatch("a path", value)
    return value


_PLAIN: Mapping[Any, Callable[[Any], Any]] = {
    bool: lambda value: _instance(value, bool, "true or false"),
    int: _int,
    float: _number,
    str: _string,
    pathlib.Path: lambda value: pathlib.Path(_path(value)),
    os.PathLike: _path,
    collections.abc.Callable: lambda value: _instance(value, Callable, "a function"),
}


def _choice(value: Any, choices: Sequence[Any]) -> Any:
    for choice in choices:
        if type(choice) is type(value) and choice == value:  # True == 1, but 1 is not one of the choices
            return choice
    raise Mismatch(", ".join(map(repr, choices)), value, _nearest(value, choices))


def _nearest(value: Any, choices: Sequence[Any]) -> str | None:
    match = (
        nearest(value, [choice for choice in choices if isinstance(choice, str)]) if isinstance(value, str) else None
    )
    return repr(match) if match else None


@attrs.frozen
class Before:
    """In ``Annotated``: looks at a value before it is converted. Raises: Mismatch."""

    check: Callable[[Any], None]


def _annotated(value: Any, inner: Sequence[Any], files: bool) -> Any:
    """``Annotated[int, between(1, 8)]``: the validators of a field, for a parameter."""
    kind, *others = inner
    for other in others:
        if isinstance(other, Before):
            other.check(value)
    converted = convert(value, kind, files=files)
    for validator in others:
        if not isinstance(validator, Before):
            try:
                validator(None, types.SimpleNamespace(name=""), converted)
            except FieldError as error:
                raise Mismatch(error.takes, value, error.facts.get("try")) from None
    return converted


def _of_union(value: Any, members: Sequence[Any], files: bool) -> Any:
    """The first member that takes the value wins. ``None`` means an omitted key."""
    if value is None and type(None) in members:
        return None
    wrong: list[Mismatch] = []
    for member in members:
        if member is not type(None):
            try:
                return convert(value, member, files=files)
            except Mismatch as error:
                wrong.append(error)
    inside = [error for error in wrong if error.path or error.text]
    if len(inside) == 1 or len(inside) == len(wrong):  # one member has the value's shape: what is wrong is inside
        raise inside[0]
    others = [error for error in wrong if error not in inside]
    *firsts, last = dict.fromkeys(error.takes for error in others)
    hint = others[0].hint if len(others) == 1 else None
    raise Mismatch(f"{', '.join(firsts)} or {last}" if firsts else last, value, hint)


# --- values with items -----------------------------------------------------------------------------------------------


def _collection(value: Any, origin: Any, inner: Sequence[Any], files: bool) -> Any:
    """Lists, tuples and sets, all from a TOML list."""
    values = _items_of(value, origin in _ANY_ORDER)
    if origin is tuple and inner and inner[-1] is not ...:
        if len(values) != len(inner):
            raise Mismatch(f"a list of {len(inner)}", value)
        kinds = list(inner)
    else:
        kinds = [inner[0] if inner else Any] * len(values)
    if set(kinds) != {int} or not set(map(type, values)) <= {int}:  # a long prompt need not be read one by one
        pairs = enumerate(zip(values, kinds, strict=True))
        values = [_item(f"[{index}]", item, kind, files=files) for index, (item, kind) in pairs]
    return origin(values) if origin in (tuple, frozenset, set) else values


def _items_of(value: Any, any_order: bool) -> list[Any]:
    """The items of a list, another sequence or a 1-d array; with ``any_order`` of a set or an iterator as well.

    Raises: Mismatch.
    """
    if isinstance(value, str | bytes | bytearray | memoryview):
        raise Mismatch("a list", value)
    if isinstance(value, Sequence):
        return list(value)
    if any_order and isinstance(value, AbstractSet | Iterator):
        return list(value)
    if getattr(value, "ndim", None) == 1 and callable(getattr(value, "tolist", None)):  # NumPy's, torch's, JAX's
        return list(value.tolist())
    raise Mismatch("a list", value)


def _mapping(value: Any, key_kind: Any, value_kind: Any, *, files: bool) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise Mismatch("a table", value)
    converted = {}
    for key, item in value.items():
        place = f"[{key}]" if isinstance(key, int) else key if isinstance(key, str) else shown(key, 60)
        converted[_item(place, key, key_kind, files=files)] = _item(place, item, value_kind, files=files)
    return converted


@functools.cache
def hints_of(owner: Any) -> dict[str, Any]:
    """Annotations of a class or a function by name, read at the first use: modules are complete by then."""
    return get_type_hints(owner, include_extras=True)


def known_fields(kind: Any) -> list[str]:
    """The keys of a table with the fields of an attrs class; none of another kind."""
    return [key for field in fields_of(kind) if field.init and (key := _key(field))]


def _key(field: attrs.Attribute[Any]) -> str:
    """A field's key in a table: its name, unless its metadata has another; empty for none."""
    return field.metadata.get("key", field.name) or ""


def fields_of(kind: Any) -> Sequence[attrs.Attribute[Any]]:
    """The fields of an attrs class that does not convert tables by itself; none of another kind."""
    return attrs.fields(kind) if inspect.isclass(kind) and attrs.has(kind) and not hasattr(kind, "from_table") else ()


def _record(table: Any, kind: Any) -> Any:
    """An object of an attrs class, from a table with its fields."""
    keys = known_fields(kind)
    if not isinstance(table, Mapping):
        raise Mismatch("a table", table, f"{keys[0]} = ... inside the table" if keys else None)
    hints = hints_of(kind)
    takes = f"Known keys: {', '.join(keys)}." if keys else "There are no options."
    unknown = min(map(str, table.keys() - set(keys)), default=None)
    if unknown is not None:
        inner = min((f"{name}.{unknown}" for name in keys if unknown in known_fields(hints.get(name))), default=None)
        match = f" Did you mean {inner!r}?" if inner else did_you_mean(unknown, keys)
        raise Mismatch(text=f"is unknown.{match} {takes}", path=(unknown,))
    values: dict[Any, Any] = {}
    for field in fields_of(kind):
        key = _key(field)
        if key in keys and key in table:
            values[field.alias] = _item(key, table[key], hints.get(field.name, Any), files=True)
        elif key in keys and field.default is attrs.NOTHING:
            raise Mismatch(text="is required and missing", path=(key,))
    return _built(lambda: kind(**values))


def _built(make: Callable[[], Any]) -> Any:
    """``make()``, whose validators may refuse a value. Raises: Mismatch."""
    try:
        return make()
    except Mismatch:
        raise
    except FieldError as error:
        raise Mismatch(error.takes, error.got, error.facts.get("try"), path=(error.field,)) from error
    except ConfigError as error:
        raise Mismatch(text=f"cannot be used: {error.message}", hint=error.facts.get("try")) from error
    except Exception as error:  # a class's own validator: its text is more specific
        # attrs' own validators append the field and its settings to the message
        text = str(error.args[0] if error.args else error)
        raise Mismatch(text=f"cannot be used: {text or type(error).__name__}") from error


# --- arguments and fields --------------------------------------------------------------------------------------------


def checked(error_class: type[SpecdecError] = ConfigError) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Convert a function's arguments to their annotated types, as strictly as the keys of a configuration.

    The function raises ``error_class`` that names the first wrong argument, what was got and what would work. A missing
    or an unknown argument is Python's own TypeError.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        named = [name for name, parameter in signature.parameters.items() if parameter.kind not in variable]

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return function(*args, **kwargs)  # Python's own TypeError, with the function's name
            kinds = hints_of(function)
            for name in named:
                if name in bound.arguments and name in kinds:
                    try:
                        bound.arguments[name] = _item(name, bound.arguments[name], kinds[name], files=False)
                    except Mismatch as error:
                        raise error_class(f"argument {_in_words(str(error))}", try_=error.hint) from None
                    except Exception as error:  # of the caller's object: a sequence that raises
                        raise error_class(f"argument {name} cannot be used: {described(error)}") from error
            return function(*bound.args, **bound.kwargs)

        return call

    return decorate


def _in_words(text: str) -> str:
    """What a TOML type is called in Python."""
    return text.replace("a table", "a mapping").replace("true or false", "True or False")


def checked_fields(owner: type, fields: list[Any]) -> list[Any]:
    """A ``field_transformer`` of attrs that converts every field to its annotated type.

    A converter of the field's own runs first, and validators run afterwards. Raises, on construction: FieldError.
    """
    return [field if field.inherited or not field.init else field.evolve(converter=_strict(field)) for field in fields]


def _strict(field: attrs.Attribute[Any]) -> Any:
    own: Any = field.converter or (lambda value: value)

    def converted(value: Any, owner: Any, field: attrs.Attribute[Any]) -> Any:
        try:
            return _item(field.name, own(value), hints_of(owner.__class__)[field.name], files=False)
        except Mismatch as error:
            if error.takes:
                name = dotted(error.path)
                raise FieldError(owner, name, _in_words(error.takes), error.got, try_=error.hint) from None
            raise ConfigError(f"{type(owner).__name__}.{_in_words(str(error))}", try_=error.hint) from error
        except Exception as error:  # of a field's own converter
            raise ConfigError(f"{type(owner).__name__}.{field.name} cannot be used: {described(error)}") from error

    return attrs.Converter(converted, takes_self=True, takes_field=True)


def one_or_many(value: str | Sequence[str]) -> Sequence[str]:
    """A converter of a field with several texts: one alone is a list of one."""
    return (value,) if isinstance(value, str) else value


# --- validators -------------------------------------------------------------------------------------------------------


class FieldError(ConfigError):
    """A value that a field does not take. Keeps the parts, so that a loader can name the key's path instead."""

    def __init__(self, owner: object, field: str, takes: str, got: object, **facts: object) -> None:
        self.field, self.takes, self.got = field, takes, got
        super().__init__(f"{type(owner).__name__}.{field} takes {takes}, got {shown(got)}", **facts)


def rule(takes: str, holds: Callable[[Any], object], hint: Callable[[Any], str | None] | None = None) -> Validator:
    """An attrs validator for values of which ``holds`` is true; the error says what the field ``takes``."""

    def check(owner: object, field: attrs.Attribute[Any], value: object) -> None:
        if not holds(value):
            raise FieldError(owner, field.name, takes, value, try_=hint and hint(value))

    return check


def between(low: float, high: float) -> Validator:
    """An attrs validator for a closed range: integers if both ends are, else any finite number; never a bool."""
    kinds = (int,) if type(low) is int and type(high) is int else (int, float)  # NaN fails the comparison
    return rule(f"{shown(low)} to {shown(high)}", lambda value: type(value) in kinds and low <= value <= high)


def one_of(*choices: str) -> Validator:
    """An attrs validator for a fixed set of words; the error suggests the nearest one."""
    *others, last = map(repr, choices)
    takes = f"{', '.join(others)} or {last}" if others else last
    return rule(takes, lambda value: type(value) is str and value in choices, lambda value: _nearest(value, choices))


filled = rule("text of one character or more", bool)
"""An attrs validator."""


def each(validator: Validator) -> Validator:
    """An attrs validator that applies ``validator`` to every item of a list, or every value of a table."""

    def check(owner: object, field: attrs.Attribute[Any], value: Iterable[Any]) -> None:
        for item in value.values() if isinstance(value, dict) else value:
            validator(owner, field, item)

    return check
