"""Plugins, what they registered, and why one failed."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import attrs
import pluggy

from specdec.errors import PluginError, described
from specdec.registry.kinds import Kind, Spec


@attrs.frozen
class Origin:
    """The distribution or module that a plugin comes from."""

    distribution: str | None = None  # None: not from an installed distribution
    version: str = ""
    module: str = ""

    @property
    def built_in(self) -> bool:
        """Whether it is part of specdec itself."""
        return self.distribution is None and self.module.startswith("specdec.")

    def __str__(self) -> str:
        if self.distribution is not None:
            return f"{self.distribution} {self.version}".strip()
        return "built in" if self.built_in else f"registered by {self.module or 'this program'}"


@attrs.frozen(eq=False)
class Plugin:
    """A plugin: ``load`` imports it, ``plugin`` is what came of that, and ``hooks`` are its implementations."""

    name: str
    origin: Origin
    load: Callable[[], object]
    plugin: Any = None
    hooks: Mapping[str, pluggy.HookImpl] = attrs.field(factory=dict)

    def call(self, hook: str, **arguments: Any) -> Any:
        """Call its implementation of a hook, which may take fewer arguments than the hook gives."""
        implementation = self.hooks[hook]
        return implementation.function(*(arguments[name] for name in implementation.argnames))


@attrs.frozen(eq=False)
class Entry:
    """A spec and the plugin that registered it."""

    kind: Kind
    spec: Spec
    owner: Plugin

    @property
    def origin(self) -> Origin:
        """The origin of the plugin."""
        return self.owner.origin


@attrs.frozen(eq=False)
class Failure:
    """A plugin, or part of one, that does not work, and why."""

    name: str  # of the entry point, or the last part of a built-in's module
    origin: Origin
    error: Exception
    during: str  # "import", "registration", or the hook that raised

    @property
    def reason(self) -> str:
        """The error's type and text, on one line."""
        return described(self.error)

    def __str__(self) -> str:
        return f"{self.name} ({self.origin}): {self.reason}"

    @property
    def fatal(self) -> bool:
        """Whether the whole plugin is unavailable; otherwise only one of its hooks is off."""
        return self.during in ("import", "registration")

    def stands_for(self, name: str) -> bool:
        """Whether this plugin most likely provides ``name``."""
        return name == self.name or self.origin.distribution == f"specdec-{name}"

    def as_error(self, what: str = "", otherwise: str | None = None, **facts: Any) -> PluginError:
        """The error to raise: ``what`` failed, and what the user can do about it, or do ``otherwise``."""
        if isinstance(self.error, ModuleNotFoundError) and self.error.name:
            repair = f"install the missing module {self.error.name!r}"
        elif self.origin.distribution is not None:
            repair = f"upgrade {self.origin.distribution}, or report this to its author"
        else:
            repair = f"repair {self.origin.module or self.name}"
        return PluginError(
            what or f"the plugin {self.name!r} failed ({self.during})",
            **facts,
            plugin=f"{self.name} ({self.origin})",
            error=self.reason,
            try_=f"{repair}, or {otherwise}" if otherwise else repair,
        )


def flag(name: str) -> bool:
    """Whether an environment variable is set to a true value."""
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


def of_module(plugin: str | object) -> Plugin:
    """A module by its name, or a module or another object of this program."""
    if isinstance(plugin, str):
        load = functools.partial(importlib.import_module, plugin)
        return Plugin(plugin.rpartition(".")[2], Origin(module=plugin), load)
    module = plugin.__name__ if isinstance(plugin, ModuleType) else type(plugin).__module__
    return Plugin(module, Origin(module=module), lambda: plugin)


def of_entry_point(entry_point: importlib.metadata.EntryPoint) -> Plugin:
    distribution = entry_point.dist
    name, version = ("unknown distribution", "") if distribution is None else (distribution.name, distribution.version)
    return Plugin(entry_point.name, Origin(name, version, entry_point.module), entry_point.load)
