"""``specdec schema``: the configuration's JSON Schema, for editors."""

from __future__ import annotations

from typing import Any

import attrs
import click

from specdec.cli import output
from specdec.config import PLUGIN_TABLES, GenerationConfig, TargetConfig
from specdec.config.schema import choice_schema, table_schema
from specdec.registry import Kind, registry


@attrs.frozen
class _Auto:
    """``name = "auto"``, which has no options."""


@click.command()
def schema() -> None:
    """Print the JSON Schema of a configuration.

    An editor with TOML support completes and checks keys with it, also those of the plugins that are installed here:
    write it to a file, and name that in the first line of the configuration, as in "#:schema specdec.schema.json".
    """
    output.print_json(configuration_schema())


def configuration_schema() -> dict[str, Any]:
    """The schema of a whole file (draft 7, which editors read)."""
    auto: dict[str, tuple[type, str]] = {"auto": (_Auto, "chosen by the checkpoint")}
    tables = {
        "drafter": choice_schema({**auto, **_plugins(Kind.DRAFTER)}, unnamed=("auto",)),
        "verifier": choice_schema(_plugins(Kind.VERIFIER), unnamed=("strict",)),
        "depth": choice_schema({**auto, **_plugins(Kind.DEPTH_POLICY)}, unnamed=("auto", "fixed")),
    }
    assert tables.keys() == set(PLUGIN_TABLES)
    generation = table_schema(GenerationConfig)
    generation["properties"]["processors"] = {"type": "array", "items": choice_schema(_plugins(Kind.PROCESSOR))}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "specdec",
        "type": "object",
        "additionalProperties": False,
        "properties": {"target": table_schema(TargetConfig), **tables, "generation": generation},
    }


def _plugins(kind: Kind) -> dict[str, tuple[type, str]]:
    specs: dict[str, tuple[type, str]] = {}
    for entry in registry().entries(kind):
        spec: Any = entry.spec
        specs[spec.name] = (spec.config, spec.help)
    return specs
