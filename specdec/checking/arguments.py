"""Checks what a caller gives to a function or an attrs class, by its annotations, as a configuration file is checked.

An annotation is the only place where an argument's type is written down, so a new parameter is checked as well.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import attrs

from specdec.checking.conversion import Mismatch, Problem, convert, dotted, error_of, hints_of
from specdec.checking.validators import FieldError
from specdec.errors import ConfigError, SpecdecError, described

P = ParamSpec("P")
R = TypeVar("R")


def checked(error_class: type[SpecdecError] = ConfigError) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Convert a function's arguments to their annotated types, as strictly as the keys of a configuration.

    The function raises ``error_class`` that names every wrong argument, what was got and what would work. A missing or
    an unknown argument is Python's own TypeError.
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
            wrong: list[Problem] = []
            kinds = hints_of(function)
            for name in named:
                if name in bound.arguments and name in kinds:
                    try:
                        bound.arguments[name] = convert(bound.arguments[name], kinds[name])
                    except Mismatch as error:
                        wrong += [problem.inside(name) for problem in error.problems]
                    except Exception as error:  # noqa: BLE001 - of the caller's object: a sequence that raises
                        wrong.append(Problem((name,), text=f"cannot be used: {described(error)}"))
            if wrong:
                who = f"{function.__qualname__.removesuffix('.__init__')}()"
                raise error_of(
                    wrong,
                    error_class,
                    lambda one: f"argument {dotted(one.path)} of {who} {_in_words(one.sentence())}",
                    f"arguments of {who}",
                )
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
            return convert(own(value), hints_of(owner.__class__)[field.name])
        except Mismatch as error:
            first = error.problems[0]
            name = dotted((field.name, *first.path))
            if first.takes:
                raise FieldError(owner, name, _in_words(first.takes), first.got, try_=first.hint) from None
            text = f"{type(owner).__name__}.{name} {_in_words(first.sentence())}"
            raise ConfigError(text, try_=first.hint) from error
        except Exception as error:  # of a field's own converter
            raise ConfigError(f"{type(owner).__name__}.{field.name} cannot be used: {described(error)}") from error

    return attrs.Converter(converted, takes_self=True, takes_field=True)
