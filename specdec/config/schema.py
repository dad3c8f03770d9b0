"""JSON Schema of configuration classes, for editors: types, bounds, choices and defaults of every key."""

from __future__ import annotations

import dataclasses
import enum
import os
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import attrs

from specdec.checking import known_fields

_PLAIN: Mapping[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}
_LISTS = (list, tuple, set, frozenset, Sequence)


def table_schema(kind: type) -> dict[str, Any]:
    """The schema of a table with the fields of an attrs class or dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    properties: dict[str, Any] = {}
    required = []
    fields: Any = attrs.fields(kind) if attrs.has(kind) else dataclasses.fields(kind)
    for field in fields:
        if field.name not in known_fields(kind):
            continue
        made = _bounded(_kind_schema(hints[field.name]), getattr(field, "validator", None))
        if field.metadata.get("also_one"):
            made = {"anyOf": [made, made["items"]]}
        default = _default(field)
        if default is _REQUIRED:
            required.append(field.name)
        elif default is not None:
            made["default"] = default
        properties[field.name] = made
    table: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**table, "required": required} if required else table


def _kind_schema(kind: Any) -> dict[str, Any]:
    """The schema of a value of a type; an empty one, which takes everything, for a type that only its class knows."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        made = _kind_schema(arguments[0])
        for one in arguments[1:]:
            made = _bounded(made, one)
        return made
    if origin in (Union, types.UnionType):
        members = [_kind_schema(one) for one in arguments if one is not type(None)]
        return members[0] if len(members) == 1 else {"anyOf": members}
    if origin is Literal:
        return {"enum": list(arguments)}
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    base = origin or kind
    if not isinstance(base, type):
        return {}
    if base is tuple and arguments and arguments[-1] is not ...:
        items = [_kind_schema(one) for one in arguments]
        return {"type": "array", "items": items, "minItems": len(items), "maxItems": len(items)}
    if base in _LISTS:
        return {"type": "array", **({"items": _kind_schema(arguments[0])} if arguments else {})}
    if issubclass(base, Mapping):
        return {"type": "object", **({"additionalProperties": _kind_schema(arguments[1])} if arguments else {})}
    if issubclass(base, enum.Enum):
        return {"enum": [one.value for one in base]}
    if issubclass(base, os.PathLike):
        return {"type": "string"}
    if (attrs.has(base) or dataclasses.is_dataclass(base)) and not hasattr(base, "from_table"):
        return table_schema(base)
    return {}


def _bounded(made: dict[str, Any], validator: Any) -> dict[str, Any]:
    """``made``, with what a validator says about itself."""
    named = getattr(validator, "validator", validator)  # in attrs.validators.optional
    said: Mapping[str, Any] = getattr(named, "schema", {})
    of_items = "additionalProperties" if made.get("type") == "object" else "items"
    return {
        **made,
        **{of_items if key == "items" else key: value for key, value in said.items()},
        **({of_items: {**made[of_items], **said["items"]}} if "items" in said and of_items in made else {}),
    }


_REQUIRED = object()


def _default(field: Any) -> Any:
    """As JSON; None if it cannot be written, or is nothing."""
    missing = (attrs.NOTHING, dataclasses.MISSING)
    factory = getattr(field, "default_factory", dataclasses.MISSING)
    if field.default in missing:
        return _REQUIRED if factory is dataclasses.MISSING else None
    return field.default if isinstance(field.default, bool | int | float | str) else None


def choice_schema(tables: Mapping[str, tuple[type, str]], *, unnamed: Sequence[str] = ()) -> dict[str, Any]:
    """The schema of a table that names a plugin.

    Args:
        tables: the plugins' configuration classes and what they do, by name.
        unnamed: those that the table means without ``name``.
    """
    kinds, free = [], set(unnamed)
    for name, (kind, about) in tables.items():
        table = table_schema(kind)
        table["properties"] = {"name": {"const": name}, **table["properties"]}
        table["required"] = [*([] if name in free else ["name"]), *table.get("required", [])]
        kinds.append({"title": name, "description": about, **table})
    return {"type": "object", "anyOf": kinds}
