"""Validators for configuration classes, including those of plugins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from specdec.errors import ConfigError, nearest, shown

Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]


class FieldError(ConfigError):
    """A value that a field does not take. Keeps the parts, so that a loader can name the key's path instead."""

    def __init__(self, owner: object, field: str, takes: str, got: object, **facts: object) -> None:
        self.field, self.takes, self.got = field, takes, got
        super().__init__(f"{type(owner).__name__}.{field} takes {takes}, got {shown(got)}", **facts)


@attrs.frozen(eq=False)
class Described:
    """A validator that also says what it takes.

    Attributes:
        check: raises FieldError.
        schema: JSON Schema of what it takes, beside the type.
    """

    check: Validator
    schema: Mapping[str, Any]

    def __call__(self, owner: Any, field: attrs.Attribute[Any], value: Any) -> None:
        self.check(owner, field, value)


def between(low: float, high: float) -> Validator:
    """An attrs validator for a closed range: integers if both ends are, else any finite number; never a bool.

    Raises: ConfigError when an end is not a number, or ``low`` is above ``high``.
    """
    for end in (low, high):
        if type(end) not in (int, float) or end != end:
            raise ConfigError(f"between() takes two numbers, got {shown(end)}")
    if low > high:
        raise ConfigError(f"between() takes the lower end first, got {shown(low)} and {shown(high)}")
    whole = type(low) is int and type(high) is int

    def check(owner: object, field: attrs.Attribute[Any], value: object) -> None:
        number = type(value) is int or (not whole and type(value) is float)
        if not number or not low <= value <= high:  # type: ignore[operator]  # NaN fails the comparison
            raise FieldError(owner, field.name, f"{shown(low)} to {shown(high)}", value)

    return Described(check, {"minimum": low, "maximum": high})


def one_of(*choices: str) -> Validator:
    """An attrs validator for a fixed set of words; the error suggests the nearest one.

    Raises: ConfigError when the choices are not strings, or there are none.
    """
    if not choices or not all(isinstance(choice, str) for choice in choices):
        raise ConfigError(f"one_of() takes one string or more, got {shown(choices)}")
    *others, last = (repr(choice) for choice in choices)
    takes = f"{', '.join(others)} or {last}" if others else last

    def check(owner: object, field: attrs.Attribute[Any], value: object) -> None:
        if type(value) is not str or value not in choices:
            hint = nearest(value, choices) if isinstance(value, str) else None
            raise FieldError(owner, field.name, takes, value, try_=repr(hint) if hint else None)

    return Described(check, {"enum": list(choices)})


def each(validator: Validator) -> Validator:
    """An attrs validator that applies ``validator`` to every item of a list, or every value of a table."""

    def check(owner: object, field: attrs.Attribute[Any], value: Iterable[Any]) -> None:
        for item in value.values() if isinstance(value, dict) else value:
            validator(owner, field, item)

    return Described(check, {"items": dict(getattr(validator, "schema", {}))})
