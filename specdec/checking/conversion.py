"""Converts values to declared types without loss: 2.9 is not an integer, true is not 1, "7" is not 7.

What a TOML file can hold is taken from files and from callers alike. From a caller come other types as well, and they
are taken when nothing is lost: NumPy's numbers, subclasses of ``str`` and ``int``, sequences, 1-d arrays.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import inspect
import math
import numbers
import operator
import os
import pathlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import attrs
import cattrs
from cattrs.cols import is_any_set, is_mapping, list_structure_factory, mapping_structure_factory
from cattrs.errors import ClassValidationError, IterableValidationError
from cattrs.gen import make_dict_structure_fn

from specdec.checking.validators import FieldError
from specdec.errors import nearest, shown

Hook = Callable[[Any, Any], Any]
_LISTS = (list, tuple, collections.abc.Sequence, collections.abc.MutableSequence)
_ANY_ORDER = (set, frozenset, AbstractSet, collections.abc.Iterable, collections.abc.Collection)


class Mismatch(Exception):
    """A value of the wrong type; ``problems_of`` turns it into text."""

    def __init__(self, takes: str, got: object, hint: str | None = None) -> None:
        self.takes, self.got, self.hint = takes, got, hint
        super().__init__(takes)


@functools.cache
def converter_for(*, files: bool) -> cattrs.Converter:
    """The converter for data from files, where records are tables, or for values in a program, where they are objects.

    A class with a method ``from_table`` converts a table by itself, in files and in programs.
    """
    converter = (
        cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)
        if files
        else cattrs.Converter(structure_fallback_factory=_instance_factory)
    )
    converter.register_structure_hook(bool, _bool)
    converter.register_structure_hook(int, _int)
    converter.register_structure_hook(str, _string)
    converter.register_structure_hook(float, _number)
    converter.register_structure_hook(pathlib.Path, lambda value, _: pathlib.Path(_path(value)))
    if not files:
        converter.register_structure_hook_factory(_originates_in(collections.abc.Callable), lambda kind: _callable)
    for predicate, factory in (
        (_is_collection, _collection_factory),
        (_is_fixed_tuple, _fixed_tuple_factory),
        (is_mapping, _mapping_factory),
        (_originates_in(os.PathLike), lambda kind, _: lambda value, _: _path(value)),
        (lambda kind: inspect.isclass(kind) and issubclass(kind, enum.Enum), _enum_factory),
        (lambda kind: bool(attrs.has(kind)) or dataclasses.is_dataclass(kind), _record_factory if files else _object),
        (lambda kind: hasattr(kind, "from_table"), _own_factory),
        (_originates_in(Union, types.UnionType), _union_factory),
        (_originates_in(Literal), _literal_factory),
        (_originates_in(Annotated), _annotated_factory),
    ):
        converter.register_structure_hook_factory(predicate, factory)
    return converter


def _originates_in(*origins: Any) -> Callable[[Any], bool]:
    return lambda kind: (get_origin(kind) or kind) in origins


# --- single values ---------------------------------------------------------------------------------------------------


def _bool(value: Any, _: Any) -> bool:
    if type(value) is not bool:
        raise Mismatch("true or false", value)
    return value


def _int(value: Any, _: Any) -> int:
    if type(value) is int:
        return value
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):  # NumPy's integers, subclasses of int
        return int.__index__(operator.index(value))
    raise Mismatch("an integer", value)


def _number(value: Any, _: Any) -> float:
    """A float; another number if float64 holds it exactly, because people write ``temperature = 1``."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            number = float.__float__(float(value))
        except (OverflowError, ValueError):
            number = math.nan
        if number == value:
            return number
    raise Mismatch("a finite number" if isinstance(value, float) else "a number", value)


def _string(value: Any, _: Any) -> str:
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


def _callable(value: Any, _: Any) -> Any:
    if not callable(value):
        raise Mismatch("a function", value)
    return value


def _enum_factory(kind: Any, _: cattrs.Converter) -> Hook:
    members = {member.value: member for member in kind}

    def structure(value: Any, _: Any) -> Any:
        if isinstance(value, kind):
            return value
        for known, member in members.items():
            if type(known) is type(value) and known == value:
                return member
        raise Mismatch(", ".join(map(repr, members)), value)

    return structure


def _literal_factory(kind: Any, _: cattrs.Converter) -> Hook:
    choices = get_args(kind)

    def structure(value: Any, _: Any) -> Any:
        for choice in choices:
            if type(choice) is type(value) and choice == value:  # True == 1, but 1 is not one of the choices
                return choice
        hint = nearest(value, [c for c in choices if isinstance(c, str)]) if isinstance(value, str) else None
        raise Mismatch(", ".join(map(repr, choices)), value, repr(hint) if hint else None)

    return structure


@attrs.frozen
class Before:
    """In ``Annotated``: looks at a value before it is converted. Raises: Mismatch."""

    check: Callable[[Any], None]


def _annotated_factory(kind: Any, converter: cattrs.Converter) -> Hook:
    """``Annotated[int, between(1, 8)]``: the validators of a field, for a parameter."""
    inner, *others = get_args(kind)
    before = [other for other in others if isinstance(other, Before)]
    validators = [other for other in others if not isinstance(other, Before)]
    field: Any = types.SimpleNamespace(name="")

    def structure(value: Any, _: Any) -> Any:
        for one in before:
            one.check(value)
        made = converter.structure(value, inner)
        for validator in validators:
            try:
                validator(None, field, made)
            except FieldError as error:
                raise Mismatch(error.takes, value, error.facts.get("try")) from None
        return made

    return structure


# --- collections -----------------------------------------------------------------------------------------------------


def _is_collection(kind: Any) -> bool:
    origin = get_origin(kind) or kind
    return is_any_set(kind) or (origin in (*_LISTS, *_ANY_ORDER) and not _is_fixed_tuple(kind))


def _collection_factory(kind: Any, converter: cattrs.Converter) -> Hook:
    """Lists, tuples of one type, and sets, all from a TOML list."""
    origin = get_origin(kind) or kind
    build = next((build for build in (tuple, frozenset, set) if origin is build), list)
    item = (get_args(kind) or (Any,))[0]
    inner = list_structure_factory(list[item], converter)  # type: ignore[valid-type]

    def structure(value: Any, _: Any) -> Any:
        values = items_of(value, any_order=origin in _ANY_ORDER)
        if item is not int or not set(map(type, values)) <= {int}:  # a long prompt need not be read one by one
            values = inner(values, list[item])  # type: ignore[valid-type]
        return build(values)

    return structure


def items_of(value: Any, *, any_order: bool = False) -> list[Any]:
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


def _is_fixed_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple and get_args(kind)[-1:] != (...,)


def _fixed_tuple_factory(kind: Any, converter: cattrs.Converter) -> Hook:
    kinds = get_args(kind)

    def structure(value: Any, _: Any) -> Any:
        values = items_of(value)
        if len(values) != len(kinds):
            raise Mismatch(f"a list of {len(kinds)}", value)
        return tuple(converter.structure(item, wanted) for item, wanted in zip(values, kinds, strict=True))

    return structure


def _mapping_factory(kind: Any, converter: cattrs.Converter) -> Hook:
    inner = mapping_structure_factory(kind, converter)

    def structure(value: Any, wanted: Any) -> Any:
        if not isinstance(value, Mapping):
            raise Mismatch("a table", value)
        return inner(dict(value), wanted)

    return structure


# --- records ---------------------------------------------------------------------------------------------------------


def _record_factory(kind: Any, converter: cattrs.Converter) -> Hook:
    keys = known_fields(kind)
    hidden: Any = {name: cattrs.gen.override(omit=True) for name in _fields(kind) if name not in keys}
    inner = make_dict_structure_fn(kind, converter, _cattrs_forbid_extra_keys=True, **hidden)

    def structure(value: Any, wanted: Any) -> Any:
        if not isinstance(value, Mapping):
            raise Mismatch("a table", value, f"{keys[0]} = ... inside the table" if keys else None)
        return inner(value, wanted)

    return structure


def known_fields(kind: Any) -> list[str]:
    """The keys of a table with the fields of an attrs class or dataclass."""
    return [name for name, metadata in _fields(kind).items() if metadata.get("key", True)]


def _fields(kind: Any) -> dict[str, Mapping[Any, Any]]:
    fields: Any = attrs.fields(kind) if attrs.has(kind) else dataclasses.fields(kind)
    return {field.name: field.metadata for field in fields}


def _own_factory(kind: Any, _: cattrs.Converter) -> Hook:
    return lambda value, _: value if isinstance(value, kind) else kind.from_table(value)


def _instance_factory(kind: Any) -> Hook:
    """An object of a class that has no other form, unconverted."""
    checkable = inspect.isclass(kind)

    def structure(value: Any, _: Any) -> Any:
        if checkable and not isinstance(value, kind):
            raise Mismatch(f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}", value)
        return value

    return structure


def _object(kind: Any, _: cattrs.Converter) -> Hook:
    return _instance_factory(kind)


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
        inside: list[Exception] = []
        for member in members:
            try:
                return converter.structure(value, member)
            except Mismatch as error:
                takes += [error.takes] if error.takes not in takes else []
            except (ClassValidationError, IterableValidationError, FieldError) as error:
                inside.append(error)
        if len(inside) == 1:  # one member has the value's shape: what is wrong is inside
            raise inside[0]
        *others, last = takes or [str(kind)]
        raise Mismatch(f"{', '.join(others)} or {last}" if others else last, value)

    return structure
