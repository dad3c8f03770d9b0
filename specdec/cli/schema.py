"""``specdec schema``: the configuration's JSON Schema, for editors: types, bounds, choices and defaults of keys."""

from __future__ import annotations

import enum
import os
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import click

from specdec.checking import fields_of, is_required, known_fields
from specdec.cli import output
from specdec.config import PLUGIN_TABLES, GenerationConfig, TargetConfig
from specdec.registry import Kind, registry

AUTO = {"title": "auto", "description": "chosen by the checkpoint", "properties": {"name": {"const": "auto"}}}
_PLAIN: Mapping[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}
_LISTS = (list, tuple, set, frozenset, Sequence)


@click.command()
def schema() -> None:
    """Print the JSON Schema of a configuration.

    An editor with TOML support completes and checks keys with it, also those of the plugins that are installed here:
    write it to a file, and name that in the first line of the configuration, as in "#:schema specdec.schema.json".
    """
    output.print_json(configuration_schema())


def configuration_schema() -> dict[str, Any]:
    """The schema of a whole file (draft 7, which editors read)."""
    auto = {**AUTO, "type": "object", "additionalProperties": False}
    tables = {
        "drafter": {"type": "object", "anyOf": [auto, *_plugins(Kind.DRAFTER)]},
        "verifier": {"type": "object", "anyOf": _plugins(Kind.VERIFIER, unnamed="strict")},
        "depth": {"type": "object", "anyOf": [auto, *_plugins(Kind.DEPTH_POLICY, unnamed="fixed")]},
    }
    assert tables.keys() == set(PLUGIN_TABLES)
    generation = table_schema(GenerationConfig)
    processors = {"type": "object", "anyOf": _plugins(Kind.PROCESSOR)}
    generation["properties"]["processors"] = {"type": "array", "items": processors}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "specdec",
        "type": "object",
        "additionalProperties": False,
        "properties": {"target": table_schema(TargetConfig), **tables, "generation": generation},
    }


def _plugins(kind: Kind, unnamed: str = "") -> list[dict[str, Any]]:
    """A table for every plugin of a kind; the one called ``unnamed`` is meant by a table without a name."""
    tables = []
    for entry in registry().entries(kind):
        spec: Any = entry.spec
        table = table_schema(spec.config)
        table["properties"] = {"name": {"const": spec.name}, **table["properties"]}
        table["required"] = [*([] if spec.name == unnamed else ["name"]), *table.get("required", [])]
        tables.append({"title": spec.name, "description": spec.help, **table})
    return tables


def table_schema(kind: type) -> dict[str, Any]:
    """The schema of a table with the fields of an attrs class or dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    properties: dict[str, Any] = {}
    required = []
    for field in fields_of(kind):
        if field.name not in known_fields(kind):
            continue
        value = _bounded(_value_schema(hints[field.name]), getattr(field, "validator", None))
        if field.metadata.get("also_one"):
            value = {"anyOf": [value, value["items"]]}
        if is_required(field):
            required.append(field.name)
        elif isinstance(field.default, bool | int | float | str):
            value["default"] = field.default
        properties[field.name] = value
    table: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**table, "required": required} if required else table


def _value_schema(kind: Any) -> dict[str, Any]:
    """The schema of a value of a type; an empty one, which takes everything, for a type that only its class knows."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        value = _value_schema(arguments[0])
        for validator in arguments[1:]:
            value = _bounded(value, validator)
        return value
    if origin in (Union, types.UnionType):
        members = [_value_schema(member) for member in arguments if member is not type(None)]
        return members[0] if len(members) == 1 else {"anyOf": members}
    if origin is Literal:
        return {"enum": list(arguments)}
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    base = origin or kind
    if not isinstance(base, type):
        return {}
    if base is tuple and arguments and arguments[-1] is not ...:
        items = [_value_schema(item) for item in arguments]
        return {"type": "array", "items": items, "minItems": len(items), "maxItems": len(items)}
    if base in _LISTS:
        return {"type": "array", **({"items": _value_schema(arguments[0])} if arguments else {})}
    if issubclass(base, Mapping):
        return {"type": "object", **({"additionalProperties": _value_schema(arguments[1])} if arguments else {})}
    if issubclass(base, enum.Enum):
        return {"enum": [member.value for member in base]}
    if issubclass(base, os.PathLike):
        return {"type": "string"}
    return table_schema(base) if fields_of(base) else {}


def _bounded(value: dict[str, Any], validator: Any) -> dict[str, Any]:
    """``value``, with what a validator says about itself."""
    named = getattr(validator, "validator", validator)  # in attrs.validators.optional
    bounds: Mapping[str, Any] = getattr(named, "schema", {})
    of_items = "additionalProperties" if value.get("type") == "object" else "items"
    return {
        **value,
        **{of_items if key == "items" else key: bound for key, bound in bounds.items()},
        **({of_items: {**value[of_items], **bounds["items"]}} if "items" in bounds and of_items in value else {}),
    }
