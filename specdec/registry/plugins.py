"""Loads plugins one by one, each completely or not at all; failures are recorded, and raised when they matter."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import attrs
import pluggy

from specdec import hookspecs
from specdec.errors import PluginError, described
from specdec.locks import ForkSafeLock
from specdec.logs import get_logger
from specdec.registry.kinds import KINDS, Kind, Spec, check_specs, names_of

log = get_logger(__name__)


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
    """A plugin: ``load`` imports it, and ``plugin`` is what came of that."""

    name: str
    origin: Origin
    load: Callable[[], object]
    plugin: Any = None

    def __str__(self) -> str:
        return f"{self.name} ({self.origin})"


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
    provides: tuple[str, ...] = ()  # names of its specs, as far as they are known

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
        return name == self.name or name in self.provides or self.origin.distribution == f"specdec-{name}"

    def remedy(self, otherwise: str | None = None) -> str:
        """What the user can do about it."""
        if isinstance(self.error, ModuleNotFoundError) and self.error.name:
            repair = f"install the missing module {self.error.name!r}"
        elif self.origin.distribution is not None:
            repair = f"upgrade {self.origin.distribution}, or report this to its author"
        else:
            repair = f"repair {self.origin.module or self.name}"
        return f"{repair}, or {otherwise}" if otherwise else repair

    def as_error(self) -> PluginError:
        """The error to raise in strict mode."""
        return PluginError(
            f"the plugin {self.name!r} failed ({self.during})",
            plugin=f"{self.name} ({self.origin})",
            error=self.reason,
            try_=self.remedy(),
        )


class Loader:
    """Imports plugins, keeps what they registered, and calls their hooks.

    Installed plugins come first, then the built-ins, because commands need only the installed ones.
    """

    def __init__(
        self,
        built_ins: Iterable[str | ModuleType | object],
        entry_points: Iterable[importlib.metadata.EntryPoint] | None,
    ) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self.plugins: list[Plugin] = []
        self.entries: list[Entry] = []
        self.failures: list[Failure] = []
        self.lock = ForkSafeLock()
        self._importing = False
        installed = self._installed() if entry_points is None else map(_of_entry_point, entry_points)
        self._waiting: list[Iterable[Plugin]] = [installed, map(_of_built_in, tuple(built_ins))]

    def advance(self, *, built_ins: bool) -> None:
        """Admit the installed plugins, and the built-ins if asked; continues where an interruption ended it."""
        with self.lock.held:
            if self._importing:
                raise PluginError("a plugin asked for the registry while it was being imported")
            self._importing = True
            try:
                for number in range(1 + built_ins):
                    queue = list(self._waiting[number])
                    self._waiting[number] = queue
                    while queue:
                        outcome = self.admit(queue[0])
                        del queue[0]
                        if isinstance(outcome, Failure):
                            self.fail(outcome)
            finally:
                self._importing = False

    def admit(self, candidate: Plugin) -> Plugin | Failure:
        """Import, register and collect one plugin completely, or return a Failure."""
        during, provides, admitted = "import", list[str](), candidate
        try:
            loaded = candidate.load()
            during = "registration"
            loaded = loaded() if inspect.isclass(loaded) else loaded
            if self._manager.is_registered(loaded):
                raise PluginError("the same plugin is registered already")
            admitted = attrs.evolve(candidate, plugin=loaded)
            self._register(admitted)
            entries = self._collect(admitted, provides)
        except BaseException as error:
            self.remove(admitted)
            if isinstance(error, Exception):
                return Failure(candidate.name, candidate.origin, error, during, tuple(provides))
            raise
        self.plugins.append(admitted)
        self.entries += entries
        return admitted

    def holds_script(self, plugin: object) -> bool:
        """Whether ``plugin``, of the script that is running, was loaded from the script's file as a module too."""
        script, kind = _file_of("__main__"), type(plugin).__qualname__
        return script is not None and any(
            type(loaded.plugin).__qualname__ == kind and _file_of(module_of(loaded.plugin)) == script
            for loaded in self.plugins
        )

    def remove(self, plugin: Plugin) -> None:
        """Remove a plugin and everything it registered."""
        if self._manager.is_registered(plugin.plugin):
            self._manager.unregister(plugin.plugin)
        self.plugins = [loaded for loaded in self.plugins if loaded is not plugin]
        self.entries = [entry for entry in self.entries if entry.owner is not plugin]

    def fail(self, failure: Failure) -> None:
        """Record a failure."""
        self.failures.append(failure)
        log.warning(
            "plugin_failed",
            plugin=failure.name,
            origin=str(failure.origin),
            during=failure.during,
            error=failure.reason,
        )

    def hooks(self, name: str) -> list[tuple[Plugin, Callable[..., Any]]]:
        """The plugins that implement a hook, in load order, with their implementation."""
        implementations = [found.plugin for found in getattr(self._manager.hook, name).get_hookimpls()]
        return [
            (plugin, self._caller(plugin, name))
            for plugin in self.plugins
            if any(plugin.plugin is found for found in implementations)
        ]

    def _caller(self, plugin: Plugin, hook: str) -> Callable[..., Any]:
        others = [other for other in self._manager.get_plugins() if other is not plugin.plugin]
        return self._manager.subset_hook_caller(hook, others)

    def _installed(self) -> Iterator[Plugin]:
        names: set[str] = set()
        for distribution in importlib.metadata.distributions():
            try:  # one distribution with a broken entry_points.txt must not hide all others
                mine = distribution.entry_points.select(group=hookspecs.ENTRY_POINT_GROUP)
                name = re.sub(r"[-_.]+", "-", distribution.name).lower() if mine else ""
                plugins = [_of_entry_point(entry_point, distribution) for entry_point in mine]
            except Exception as error:  # noqa: BLE001 - broken metadata can raise anything
                where = str(getattr(distribution, "_path", "unknown distribution"))
                self.fail(Failure(where, Origin(where), error, "registration"))
                continue
            if name not in names:  # the first on the path shadows the others, as for imports
                yield from plugins
            names |= {name} if mine else set()

    def _register(self, plugin: Plugin) -> None:
        """Register with pluggy.

        Raises: PluginError for what has no hook, or one without ``@hookimpl``, which would silently never be called.
        """
        self._manager.register(plugin.plugin, f"{plugin} #{id(plugin)}")
        self._manager.check_pending()
        implemented = self._implemented(plugin)
        for hook in vars(hookspecs):
            if hook.startswith("specdec_") and hook not in implemented:
                function = inspect.getattr_static(plugin.plugin, hook, None)
                if function is not None and getattr(function, "__module__", "") != hookspecs.__name__:
                    raise PluginError(f"{hook} is not marked @specdec.hookimpl")
        if not implemented:
            raise PluginError("it implements no hook; mark one with @specdec.hookimpl")

    def _implemented(self, plugin: Plugin) -> set[str]:
        return {caller.name for caller in self._manager.get_hookcallers(plugin.plugin) or []}

    def _collect(self, plugin: Plugin, provides: list[str]) -> list[Entry]:
        """Every spec of a plugin; adds their names to ``provides`` as it goes, for use in a Failure."""
        entries: list[Entry] = []
        implemented = self._implemented(plugin)
        for kind, info in KINDS.items():
            results = self._caller(plugin, info.hook)() if info.hook in implemented else []
            for result in results:  # one list per implementation; here there is one
                for spec in check_specs(info, result):
                    provides += dict.fromkeys((spec.name, *names_of(spec)))
                    entries.append(Entry(kind, spec, plugin))
        return entries


def flag(name: str) -> bool:
    """Whether an environment variable is set to a true value."""
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


def module_of(plugin: object) -> str:
    """The name of the module that a plugin is, or is made in."""
    return plugin.__name__ if isinstance(plugin, ModuleType) else type(plugin).__module__


def _file_of(module: str) -> str | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    return None if file is None else os.path.realpath(file)


def _of_built_in(built_in: str | object) -> Plugin:
    if isinstance(built_in, str):
        load = functools.partial(importlib.import_module, built_in)
        return Plugin(built_in.rpartition(".")[2], Origin(module=built_in), load)
    module = getattr(built_in, "__name__", type(built_in).__name__)
    return Plugin(module, Origin(module=module), lambda: built_in)


def _of_entry_point(
    entry_point: importlib.metadata.EntryPoint, distribution: importlib.metadata.Distribution | None = None
) -> Plugin:
    distribution = distribution or entry_point.dist
    name, version = ("unknown distribution", "") if distribution is None else (distribution.name, distribution.version)
    return Plugin(entry_point.name, Origin(name, version, entry_point.module), entry_point.load)
