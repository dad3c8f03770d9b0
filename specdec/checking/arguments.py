"""Checks what a caller gives to a function or an attrs class, by its annotations, as a configuration file is checked.

An annotation is the only place where an argument's type is written down, so a new parameter is checked as well.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, get_type_hints

import attrs

from specdec.checking.conversion import Mismatch, converter_for
from specdec.checking.problems import Problem, dotted, problems_of
from specdec.checking.validators import FieldError
from specdec.errors import ConfigError, SpecdecError, typed

P = ParamSpec("P")
R = TypeVar("R")


def checked(error_class: type[SpecdecError] = ConfigError) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Convert a function's arguments to their annotated types, as strictly as the keys of a configuration.

    The function raises ``error_class`` that names every wrong argument, what was got and what would work. A missing or
    an unknown argument is Python's own TypeError.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        named = {
            name: parameter
            for name, parameter in signature.parameters.items()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            and parameter.annotation is not parameter.empty
        }

        @functools.cache
        def kinds() -> dict[str, Any]:
            hints = get_type_hints(
                function, include_extras=True
            )  # not before the first call: modules are complete by then
            return {name: hints[name] for name in named}

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return function(*args, **kwargs)  # Python's own TypeError, with the function's name
            wrong: list[Problem] = []
            for name, kind in kinds().items():
                if name in bound.arguments:
                    try:
                        bound.arguments[name] = convert(bound.arguments[name], kind)
                    except Exception as error:  # noqa: BLE001 - of the caller's object: a sequence that raises
                        wrong += problems_of(error, (name,), kind, typed)
            if wrong:
                raise _error(error_class, f"{function.__qualname__.removesuffix('.__init__')}()", wrong)
            return function(*bound.args, **bound.kwargs)

        return call

    return decorate


def convert(value: Any, kind: Any) -> Any:
    """A caller's value as ``kind``. Raises: what ``problems_of`` reads."""
    return converter_for(files=False).structure(value, kind)


def _error(error_class: type[SpecdecError], who: str, wrong: list[Problem]) -> SpecdecError:
    def sentence(problem: Problem) -> str:
        return f"argument {dotted(problem.path)} of {who} {in_words(problem.text)}"

    if len(wrong) == 1:
        return error_class(sentence(wrong[0]), try_=wrong[0].hint)
    lines = (f"\n  {sentence(one)}{f' (try: {one.hint})' if one.hint else ''}" for one in wrong)
    return error_class(f"{len(wrong)} arguments of {who} cannot be used{''.join(lines)}")


def in_words(text: str) -> str:
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
        kind = _hints(owner.__class__)[field.name]
        try:
            return convert(own(value), kind)
        except Mismatch as error:
            raise FieldError(owner, field.name, in_words(error.takes), error.got, try_=error.hint) from None
        except Exception as error:
            wrong = list(problems_of(error, (field.name,), kind, typed))
            text = "; ".join(f"{type(owner).__name__}.{dotted(one.path)} {in_words(one.text)}" for one in wrong)
            raise ConfigError(text, try_=wrong[0].hint) from error

    return attrs.Converter(converted, takes_self=True, takes_field=True)


@functools.cache
def _hints(owner: type) -> dict[str, Any]:
    return get_type_hints(owner)
