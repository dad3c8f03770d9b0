"""What the shell offers after a tab: names of plugins, keys of the configuration, models.

Each function takes click's context and parameter and the word that was begun. An error offers nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import click
from click.shell_completion import CompletionItem

from specdec.checking import known_fields

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def plugin_names(plural: str) -> Complete:
    """The names of a kind of plugin: "drafters", "verifiers", ..."""

    def complete(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
        from specdec.registry import KINDS, registry

        kind = next(kind for kind, info in KINDS.items() if info.plural == plural)
        with contextlib.suppress(Exception):
            specs: list[Any] = [entry.spec for entry in registry().entries(kind)]
            return [CompletionItem(spec.name, help=spec.help) for spec in specs if spec.name.startswith(begun)]
        return []

    return complete


def complete_key(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
    """``generation.seed=`` and the like."""
    return [CompletionItem(f"{key}=") for key in keys() if f"{key}=".startswith(begun)]


def keys() -> Iterator[str]:
    """Every key of the configuration, as ``-s`` takes it."""
    from specdec.config import PLUGIN_TABLES, GenerationConfig, RunConfig, TargetConfig

    for table in attrs.fields(RunConfig):
        if table.name in PLUGIN_TABLES:
            yield table.name
            yield f"{table.name}.name"
            continue
        for key in known_fields(TargetConfig if table.name == "target" else GenerationConfig):
            yield f"{table.name}.{key}"


def complete_model(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
    """ "demo", the models of the hub's cache, and files and folders by the shell itself."""
    return [
        *(CompletionItem(name) for name in ["demo", *_cached()] if name.startswith(begun)),
        CompletionItem(begun, type="file"),
    ]


def _cached() -> Iterator[str]:
    from huggingface_hub import constants

    with contextlib.suppress(OSError):
        for folder in sorted(os.listdir(constants.HF_HUB_CACHE)):
            if folder.startswith("models--"):
                yield folder.removeprefix("models--").replace("--", "/")
