"""Loads plugins one by one, each completely or not at all; failures are recorded instead of raised."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar, copy_context
from types import ModuleType
from typing import Any

import attrs
import pluggy

from specdec import hookspecs
from specdec.errors import PluginError
from specdec.locks import ForkSafeLock
from specdec.logs import get_logger
from specdec.registry.guard import is_from_plugin
from specdec.registry.kinds import KINDS, check_fields, check_specs, names_of
from specdec.registry.origin import Entry, Failure, Origin, Plugin

log = get_logger(__name__)

_importing: ContextVar[Loader | None] = ContextVar("importing", default=None)
"""The loader that is importing a plugin. It is set in a context of its own, which no interruption can leave set."""


@attrs.frozen(eq=False)
class Candidate:
    """A plugin that is not imported yet."""

    name: str
    origin: Origin
    load: Callable[[], object]


class Loader:
    """Imports plugins, keeps what they registered, and calls their hooks.

    Installed plugins come first, then the built-ins, because commands need only the installed ones.
    """

    def __init__(
        self,
        built_ins: Iterable[str | ModuleType | object],
        entry_points: Iterable[importlib.metadata.EntryPoint] | None,
        *,
        trace: bool,
    ) -> None:
        self._built_ins = tuple(built_ins)
        self._entry_points = None if entry_points is None else tuple(entry_points)
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        if trace:
            self._manager.add_hookcall_monitoring(_trace_before, _trace_after)
        self.plugins: list[Plugin] = []
        self.entries: list[Entry] = []
        self.failures: list[Failure] = []
        self.lock = ForkSafeLock()
        self._sources: list[Callable[[], Iterable[Candidate]]] = [self._installed, self._shipped]
        self._queue: list[Candidate] = []
        self.admitting: Plugin | None = None  # what an interrupted admission may have left

    def advance(self, *, sources_left: int) -> None:
        """Admit candidates until only ``sources_left`` sources are left; can resume after an interruption."""
        with self.lock.held:
            if _importing.get() is self:
                raise PluginError("a plugin asked for the registry while it was being imported")
            copy_context().run(self._advance, sources_left)

    def _advance(self, sources_left: int) -> None:
        _importing.set(self)
        while self._queue or len(self._sources) > sources_left:
            if not self._queue:
                self.__dict__.update(_queue=list(self._sources[0]()), _sources=self._sources[1:])
                continue
            outcome = self.admit(self._queue[0])
            if isinstance(outcome, Failure):
                self._log(outcome)
            failed = [outcome] if isinstance(outcome, Failure) else []
            # one step: an interruption neither loses a plugin nor admits it twice
            self.__dict__.update(_queue=self._queue[1:], admitting=None, failures=[*self.failures, *failed])

    def admit(self, candidate: Candidate) -> Plugin | Failure:
        """Import, register and collect one plugin completely, or return a Failure."""
        name, origin, during = candidate.name, candidate.origin, "import"
        provides: list[str] = []
        if self.admitting is not None:
            self.remove(self.admitting)
        admitted: Plugin | None = None
        try:
            plugin = candidate.load()
            during = "registration"
            if inspect.isclass(plugin):
                plugin = plugin()
            self._check_registrable(plugin)
            admitted = self.admitting = Plugin(plugin, name, origin)
            label = str(admitted)
            self._manager.register(plugin, f"{label} #{id(plugin)}" if self._manager.has_plugin(label) else label)
            self._manager.check_pending()
            self._check_marks(plugin)
            entries = self._collect(admitted, provides)
        except BaseException as error:
            if admitted is not None:
                self.remove(admitted)
            if is_from_plugin(error):  # sys.exit() in a module must not end the host
                return Failure(name, origin, error, during, tuple(provides))
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
        known = self._manager.get_name(plugin.plugin)
        if known is not None:
            self._manager.unregister(name=known)
        self.plugins = [one for one in self.plugins if one is not plugin]
        self.entries = [entry for entry in self.entries if entry.owner is not plugin]

    def fail(self, failure: Failure) -> None:
        """Record a failure."""
        self.failures.append(failure)
        self._log(failure)

    @staticmethod
    def _log(failure: Failure) -> None:
        log.warning(
            "plugin_failed",
            plugin=failure.name,
            origin=str(failure.origin),
            during=failure.during,
            error=failure.reason,
        )

    def implementing(self, hook: str) -> list[Plugin]:
        """The plugins that implement a hook, in load order."""
        found = [impl.plugin for impl in getattr(self._manager.hook, hook).get_hookimpls()]
        return [plugin for plugin in self.plugins if any(plugin.plugin is one for one in found)]

    def caller(self, plugin: Plugin, hook: str) -> Callable[..., Any]:
        """The hook of one plugin, called through pluggy so that tracing sees it."""
        others = [other for other in self._manager.get_plugins() if other is not plugin.plugin]
        return self._manager.subset_hook_caller(hook, others)

    # --- candidates --------------------------------------------------------------------------------------------------

    def _shipped(self) -> Iterator[Candidate]:
        for built_in in self._built_ins:
            if isinstance(built_in, str):
                load = functools.partial(importlib.import_module, built_in)
                yield Candidate(built_in.rpartition(".")[2], Origin(module=built_in), load)
            else:
                module = getattr(built_in, "__name__", type(built_in).__name__)
                yield Candidate(module, Origin(module=module), functools.partial(lambda plugin: plugin, built_in))

    def _installed(self) -> Iterator[Candidate]:
        if self._entry_points is not None:
            for entry_point in self._entry_points:
                yield _candidate(entry_point, entry_point.dist)
            return
        seen: set[str] = set()
        for distribution in importlib.metadata.distributions():
            try:  # one distribution with a broken entry_points.txt must not hide all others
                mine = distribution.entry_points.select(group=hookspecs.ENTRY_POINT_GROUP)
                name = re.sub(r"[-_.]+", "-", distribution.name).lower() if mine else ""
            except Exception as error:  # noqa: BLE001 - broken metadata can raise anything
                where = str(getattr(distribution, "_path", "unknown distribution"))
                self.fail(Failure(where, Origin(where), error, "registration"))
                continue
            if mine and name not in seen:  # the first on the path shadows the others, as for imports
                seen.add(name)
                for entry_point in mine:
                    yield _candidate(entry_point, distribution)

    # --- checks ------------------------------------------------------------------------------------------------------

    def _check_registrable(self, plugin: object) -> None:
        if plugin is None:
            raise PluginError("the entry point names None")
        hash(plugin)  # pluggy keeps plugins in sets, where an unhashable one would break the calls of all others
        for loaded in self.plugins:
            if loaded.plugin is plugin:
                raise PluginError(f"the same plugin is registered as {loaded}")

    def _check_marks(self, plugin: object) -> None:
        """Raises: PluginError for a hook without ``@hookimpl``, which would silently never be called."""
        implemented = {caller.name for caller in self._manager.get_hookcallers(plugin) or []}
        for hook in vars(hookspecs):
            if hook.startswith("specdec_") and hook not in implemented:
                own = inspect.getattr_static(plugin, hook, None)
                if own is not None and getattr(own, "__module__", "") != hookspecs.__name__:
                    raise PluginError(f"{hook} is not marked @specdec.hookimpl")
        if not implemented:
            raise PluginError("it implements no hook; mark one with @specdec.hookimpl")

    def _collect(self, plugin: Plugin, provides: list[str]) -> list[Entry]:
        """Every spec of a plugin, checked; adds their names to ``provides`` as it goes, for use in a Failure."""
        entries: list[Entry] = []
        implemented = {caller.name for caller in self._manager.get_hookcallers(plugin.plugin) or []}
        for kind, info in KINDS.items():
            if info.hook not in implemented:
                continue
            for result in self.caller(plugin, info.hook)():  # one list per implementation; here there is one
                for spec in check_specs(info, result):
                    provides.append(str(spec.name))
                    check_fields(spec)
                    provides += names_of(spec)
                    entries.append(Entry(kind, spec, plugin))
        return entries


def flag(name: str) -> bool:
    """Whether an environment variable is set to a true value."""
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


def tracing() -> bool:
    """Whether SPECDEC_TRACE_PLUGINS asks for a log line per hook call."""
    return flag("SPECDEC_TRACE_PLUGINS")


def module_of(plugin: object) -> str:
    """The name of the module that a plugin is, or is made in."""
    return plugin.__name__ if isinstance(plugin, ModuleType) else type(plugin).__module__


def _file_of(module: str) -> str | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    return None if file is None else os.path.realpath(file)


def _candidate(
    entry_point: importlib.metadata.EntryPoint, distribution: importlib.metadata.Distribution | None
) -> Candidate:
    name = distribution.name if distribution is not None else "unknown distribution"
    version = distribution.version if distribution is not None else ""
    return Candidate(entry_point.name, Origin(name, version, entry_point.module), entry_point.load)


def _trace_before(hook_name: str, methods: Sequence[pluggy.HookImpl], kwargs: Mapping[str, object]) -> None:
    log.info("hook_call", hook=hook_name, plugins=[m.plugin_name for m in methods], arguments=sorted(kwargs))


def _trace_after(
    outcome: pluggy.Result[Any], hook_name: str, methods: Sequence[pluggy.HookImpl], kwargs: Mapping[str, object]
) -> None:
    error = outcome.exception
    log.info("hook_done", hook=hook_name, error=None if error is None else f"{type(error).__name__}: {error}")
