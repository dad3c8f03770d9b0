"""The plugin registry: loads plugins, finds what they registered, and calls their hooks.

Nothing is imported before the first look-up. A plugin that fails is recorded with its error, which is raised when the
plugin is requested. ``SPECDEC_STRICT_PLUGINS=1`` raises it at once (for plugin authors and CI).
"""

from __future__ import annotations

import importlib.metadata
import inspect
import types
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partialmethod
from types import TracebackType
from typing import TYPE_CHECKING, Any

import attrs
import pluggy

from specdec import hookspecs
from specdec.checking import checked
from specdec.config import structure_options
from specdec.contract import BackendSpec, CycleRecord, ForwardPass
from specdec.errors import (
    MESSAGE_LIMIT,
    NoMemoryError,
    PluginError,
    SpecdecError,
    UnknownNameError,
    cut,
    described,
    did_you_mean,
    nearest,
)
from specdec.locks import ForkSafeLock
from specdec.logs import get_logger
from specdec.registry.kinds import BUILT_INS, KINDS, PUBLISHED, Kind, Spec, check_specs, kind_of, names_of
from specdec.registry.plugins import Entry, Failure, Origin, Plugin, flag, of_entry_point, of_module

if TYPE_CHECKING:
    import click

    from specdec.config import Choice, TargetConfig


log = get_logger(__name__)


class Registry:
    """All plugins of a process, by what they provide.

    Installed plugins and built-ins are loaded on the first look-up. Commands load only the installed ones, so that
    ``specdec --help`` imports no tensor library.
    """

    def __init__(
        self,
        built_ins: Iterable[str | types.ModuleType | object] = BUILT_INS,
        entry_points: Iterable[importlib.metadata.EntryPoint] | None = None,
        *,
        strict: bool | None = None,
    ) -> None:
        """Nothing is loaded yet.

        Args:
            built_ins: module names or plugin objects.
            entry_points: None uses those of the installed distributions.
            strict: None reads SPECDEC_STRICT_PLUGINS.
        """
        self.strict = flag("SPECDEC_STRICT_PLUGINS") if strict is None else strict
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._plugins: list[Plugin] = []
        self._entries: list[Entry] = []
        self._failures: list[Failure] = []
        self._lock = ForkSafeLock()
        self._importing = False
        self._observers: tuple[Plugin, ...] = ()
        if entry_points is None:
            entry_points = importlib.metadata.entry_points(group=hookspecs.ENTRY_POINT_GROUP)
        self._waiting = deque(map(of_entry_point, entry_points)), deque(map(of_module, built_ins))

    def load(self) -> None:
        """Load everything not loaded yet; every look-up does this.

        Raises: PluginError for the first failure or conflict, when strict.
        """
        self._advance(built_ins=True)
        if self.strict:
            self._raise_failures()
            for kind, name, claims in self.conflicts():
                raise _conflict_error(kind, name, claims, "SPECDEC_STRICT_PLUGINS=1")

    @checked(PluginError)
    def register(self, plugin: object, name: str | None = None) -> None:
        """Add a plugin of this program: a module, or an object with ``@hookimpl`` methods.

        Raises: PluginError when it cannot be registered, or a name that it provides is taken.
        """
        self.load()
        made = of_module(plugin)
        with self._lock.held:
            outcome = self._admit(attrs.evolve(made, name=name or made.name))
            if isinstance(outcome, Failure):
                raise outcome.as_error() from outcome.error
            for kind, taken, claims in self.conflicts():
                if any(claim.owner is outcome for claim in claims):
                    self._remove(outcome)
                    raise _conflict_error(kind, taken, claims, None)

    def origin_of(self, spec: Spec) -> Origin:
        """Where ``spec`` comes from; an unregistered spec belongs to this program."""
        self.load()
        return next((entry.origin for entry in self._entries if entry.spec is spec), Origin())

    @checked()
    def entries(self, kind: Kind | None = None) -> list[Entry]:
        """Everything registered, conflicting specs included: by kind, built-ins first, then by name."""
        self.load()
        kinds = list(Kind)
        found = [entry for entry in self._entries if kind is None or entry.kind is kind]
        return sorted(found, key=lambda entry: (kinds.index(entry.kind), not entry.origin.built_in, entry.spec.name))

    def conflicts(self) -> list[tuple[Kind, str, list[Entry]]]:
        """Names that more than one loaded spec claims."""
        return [
            (kind, name, claims) for kind in Kind for name, claims in self._by_name(kind).items() if len(claims) > 1
        ]

    @property
    def failures(self) -> list[Failure]:
        """Failures so far: plugins that could not be loaded, and hooks that were switched off."""
        self.load()
        return list(self._failures)

    @checked()
    def has_distribution(self, distribution: str) -> bool:
        """Whether a plugin of this distribution is loaded."""
        self.load()
        return any(plugin.origin.distribution == distribution for plugin in self._plugins)

    def _by_name(self, kind: Kind) -> dict[str, list[Entry]]:
        found: dict[str, list[Entry]] = {}
        for entry in self._entries:
            for name in names_of(entry.spec) if entry.kind is kind else ():
                found.setdefault(name, []).append(entry)
        return found

    def _raise_failures(self) -> None:
        for failure in self._failures:
            raise failure.as_error() from failure.error

    @checked()
    def find(self, kind: Kind, name: str, asked_by: str | None = None) -> Any:
        """The spec called ``name``; ``asked_by`` says where the name comes from ("run.toml, key drafter.name").

        Raises: UnknownNameError when it is not registered, PluginError when its plugin failed or two claim the name.
        """
        self.load()
        known, key = self._by_name(kind), KINDS[kind].key
        claims = known.get(name, [])
        if len(claims) == 1:
            return claims[0].spec
        if claims:
            raise _conflict_error(kind, name, claims, asked_by)
        broken = [failure for failure in self._failures if failure.fatal]
        usual = KINDS[kind].usual if KINDS[kind].usual in known else None
        listed = ["auto"] * KINDS[kind].has_auto
        listed += (f"{name} ({' and '.join(str(c.origin) for c in claims)})" for name, claims in sorted(known.items()))
        facts: dict[str, Any] = {"asked_for_by": asked_by, "available": ", ".join(listed) or "nothing"}
        for failure in broken:
            if failure.stands_for(name):
                what = f"the plugin that should provide the {kind.value} {name!r} could not be loaded"
                otherwise = f'set {key} = "{usual}"' if key and usual else None
                raise failure.as_error(what, otherwise, **facts) from failure.error
        match = nearest(name, known) or usual
        remedy = f'set {key} = "{match}", or install the plugin that provides {name!r}' if key and match else None
        plugin, why = PUBLISHED.get((kind, name)) or PUBLISHED.get((kind, None)) or ("", "")
        if plugin and not self.has_distribution(plugin):
            remedy = f"install {plugin} (plugins/ in specdec's repository), {why}"
        raise UnknownNameError(
            f"no {kind.value} {'reads model_type' if kind is Kind.MODEL else 'is called'} {name!r}."
            f"{did_you_mean(name, [*known, *(failure.name for failure in broken)])}",
            **facts,
            not_loaded="; ".join(map(str, broken)) or None,
            try_=remedy,
        )

    drafter = partialmethod(find, Kind.DRAFTER)
    verifier = partialmethod(find, Kind.VERIFIER)
    depth_policy = partialmethod(find, Kind.DEPTH_POLICY)
    processor = partialmethod(find, Kind.PROCESSOR)
    backend = partialmethod(find, Kind.BACKEND)
    model = partialmethod(find, Kind.MODEL)  # by a ``model_type``

    # --- calls into plugins ------------------------------------------------------------------------------------------

    def chosen(self, kind: Kind, choice: Choice, table: str) -> tuple[Any, Any]:
        """The spec that ``choice`` names, and its options. Raises: as looking it up, and as ``options``."""
        source, key = choice.sources.get(f"{table}.name"), f"{table}.name"
        asked_by = f"{source}, key {key}" if source else key
        spec = self.find(kind, choice.name, asked_by)
        return spec, self.options(spec, choice, table)

    def options(self, spec: Any, choice: Choice, path: str) -> Any:
        """The options of ``choice`` as the config class of ``spec``; ``path`` is their table, such as "drafter".

        Raises: ConfigError for wrong options, PluginError when the class itself fails.
        """
        with calling(spec, "config"):
            return structure_options(choice.options, spec.config, path, choice.sources)

    def unavailable(self, spec: BackendSpec) -> str | None:
        """Why the backend of this spec cannot run here, its failure to say so included; None if it can."""
        try:
            return spec.available()
        except Exception as error:  # noqa: BLE001 - of another's code
            return reason(spec, "available", error)

    def forward_pass(self, target_config: TargetConfig) -> ForwardPass | None:
        """The model of the first plugin that takes this target, or None.

        Raises: PluginError when a plugin fails; continuing would run another engine than intended.
        """
        self.load()
        for plugin in reversed(self._with("specdec_forward_pass")):  # pluggy's order: the last one first
            with calling(plugin, "specdec_forward_pass"):
                model: ForwardPass | None = plugin.call("specdec_forward_pass", target_config=target_config)
            if model is not None:
                return model
        return None

    def notify_cycle(self, record: CycleRecord) -> tuple[str, ...]:
        """Pass a cycle to every observer; one that raises is recorded and switched off, and the reason is returned."""
        reasons: tuple[str, ...] = ()
        for plugin in self._observers:
            try:
                plugin.call("specdec_cycle", record=record)
            except Exception as error:  # an observer must not end a generation
                self._observers = tuple(other for other in self._observers if other is not plugin)
                why = reason(plugin, "specdec_cycle", error)
                reasons = (*reasons, f"an observer was switched off: {why}")
                self._fail(Failure(plugin.name, plugin.origin, error, "specdec_cycle"))
                if self.strict:
                    raise
        return reasons

    def hooks(self) -> list[tuple[str, Plugin]]:
        """What plugins do beside registering specs: a word for it, and the plugin."""
        self.load()
        return [(word, plugin) for hook, word in HOOKS.items() for plugin in self._with(hook)]

    def _with(self, hook: str) -> list[Plugin]:
        """The plugins that implement a hook, in load order."""
        return [plugin for plugin in self._plugins if hook in plugin.hooks]

    def add_commands(self, cli: click.Group) -> None:
        """Let installed plugins add commands; one that raises or uses a taken name adds none."""
        self._advance(built_ins=False)
        for plugin in self._with("specdec_commands"):
            before = dict(cli.commands)
            try:
                plugin.call("specdec_commands", cli=cli)
                taken = sorted(name for name, command in before.items() if cli.commands.get(name) is not command)
                if taken:
                    raise PluginError(f"the command {taken[0]!r} exists already")
            except Exception as error:  # noqa: BLE001 - a plugin must not break every command
                cli.commands.clear()
                cli.commands.update(before)
                self._fail(Failure(plugin.name, plugin.origin, error, "specdec_commands"))
        if self.strict:
            self._raise_failures()

    # --- loading ------------------------------------------------------------------------------------------------------

    def _advance(self, *, built_ins: bool) -> None:
        """Admit the installed plugins, and the built-ins if asked; continues where an interruption ended it."""
        with self._lock.held:
            if self._importing:
                raise PluginError("a plugin asked for the registry while it was being imported")
            self._importing = True
            try:
                for queue in self._waiting[: 1 + built_ins]:
                    while queue:
                        outcome = self._admit(queue[0])
                        queue.popleft()
                        if isinstance(outcome, Failure):
                            self._fail(outcome)
            finally:
                self._importing = False

    def _admit(self, candidate: Plugin) -> Plugin | Failure:
        """Import, register and collect one plugin completely, or return a Failure."""
        during, admitted = "import", candidate
        try:
            loaded = candidate.load()
            during = "registration"
            loaded = loaded() if inspect.isclass(loaded) else loaded
            if self._manager.is_registered(loaded):
                raise PluginError("the same plugin is registered already")
            admitted = attrs.evolve(candidate, plugin=loaded)
            admitted = attrs.evolve(admitted, hooks=self._register(loaded))
            entries = [
                Entry(kind, spec, admitted)
                for kind, info in KINDS.items()
                if info.hook in admitted.hooks
                for spec in check_specs(info, admitted.call(info.hook))
            ]
        except BaseException as error:
            self._remove(admitted)
            if isinstance(error, Exception):
                return Failure(candidate.name, candidate.origin, error, during)
            raise
        self._plugins.append(admitted)
        self._entries += entries
        if "specdec_cycle" in admitted.hooks:
            self._observers += (admitted,)
        return admitted

    def _remove(self, plugin: Plugin) -> None:
        """Remove a plugin and everything it registered."""
        if self._manager.is_registered(plugin.plugin):
            self._manager.unregister(plugin.plugin)
        self._plugins = [loaded for loaded in self._plugins if loaded is not plugin]
        self._entries = [entry for entry in self._entries if entry.owner is not plugin]
        self._observers = tuple(observer for observer in self._observers if observer is not plugin)

    def _fail(self, failure: Failure) -> None:
        """Record a failure."""
        self._failures.append(failure)
        log.warning(
            "plugin_failed",
            plugin=failure.name,
            origin=str(failure.origin),
            during=failure.during,
            error=failure.reason,
        )

    def _register(self, plugin: Any) -> dict[str, pluggy.HookImpl]:
        """Register with pluggy; returns the plugin's implementations by hook.

        Raises: PluginError for what has no hook, or one without ``@hookimpl``, which would silently never be called.
        """
        self._manager.register(plugin, f"#{id(plugin)}")
        self._manager.check_pending()
        callers = self._manager.get_hookcallers(plugin) or []
        hooks = {c.name: impl for c in callers for impl in c.get_hookimpls() if impl.plugin is plugin}
        for hook in vars(hookspecs):
            if hook.startswith("specdec_") and hook not in hooks:
                function = inspect.getattr_static(plugin, hook, None)
                if function is not None and getattr(function, "__module__", "") != hookspecs.__name__:
                    raise PluginError(f"{hook} is not marked @specdec.hookimpl")
        if not hooks:
            raise PluginError("it implements no hook; mark one with @specdec.hookimpl")
        return hooks


HOOKS: Mapping[str, str] = {
    "specdec_cycle": "observer",
    "specdec_forward_pass": "forward pass",
    "specdec_commands": "commands",
}
"""The hooks that register no specs, and a word for what implements each."""


def _conflict_error(kind: Kind, name: str, claims: Sequence[Entry], asked_by: str | None) -> PluginError:
    """The error for a name that several plugins claim."""
    installed = [claim.origin.distribution for claim in claims if claim.origin.distribution is not None]
    return PluginError(
        f"{len(claims)} plugins provide a {kind.value} called {name!r}, and specdec does not choose between them",
        asked_for_by=asked_by,
        provided_by=" and ".join(f"{claim.origin} ({claim.origin.module})" for claim in claims),
        try_=f"pip uninstall {installed[-1]}" if installed else "give one of them another name",
    )


# --- calls into plugins -----------------------------------------------------------------------------------------------


class calling:  # noqa: N801 - read as a word: ``with calling(spec, "factory"): ...``
    """A block that calls one method of a plugin. Only exceptions are named; Ctrl-C and exits pass as they are.

    A SpecdecError that the plugin raises itself keeps its text and gets the plugin's name.

    Args:
        plugin: a spec, a loaded plugin, or kind and name.
        method: what is called, for the message.

    Raises: NoMemoryError where memory ran out; PluginError for any other exception that leaves the block.
    """

    __slots__ = ("_method", "_plugin")

    def __init__(self, plugin: Any, method: str) -> None:
        self._plugin = plugin
        self._method = method

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not isinstance(error, Exception):
            return
        kind_word, name, label = _identified(self._plugin)
        if isinstance(error, SpecdecError):
            if error.plugin is None:
                error.plugin = kind_word, name
                if label != name:
                    error.facts.setdefault("plugin", f"{label}, in {self._method}")
            return
        refused = isinstance(error, RuntimeError | OSError) and "allocate" in str(error)  # as torch and MLX report it
        if refused or isinstance(error, MemoryError):
            raise NoMemoryError(
                "there is not enough memory",
                asked_for_by=f"the {kind_word} {name!r}, in {self._method}",
                reason=described(error),
                try_="a smaller or quantised checkpoint, target.weights = 'int8', or a smaller target.capacity",
            ) from error
        failure = PluginError(
            f"the {kind_word} {name!r} failed in {self._method}: {described(error)}",
            plugin=label,
            try_="its author's documentation; specdec -v shows the traceback",
        )
        failure.plugin = kind_word, name
        raise failure from error


def reason(plugin: Any, method: str, error: Exception) -> str:
    """Why a plugin that can be done without was switched off: one sentence that names it.

    Raises: the error of a logits processor that it called, which decides the output.
    """
    if isinstance(error, SpecdecError) and error.plugin and error.plugin[0] == Kind.PROCESSOR.value:
        raise error
    kind, name, _ = _identified(plugin)
    who = f"the {kind} {name!r}"
    if not isinstance(error, SpecdecError):
        return cut(f"{who} failed in {method}: {described(error)}", MESSAGE_LIMIT)
    if not error.message.startswith(who):  # an error that the plugin raised itself
        return f"{who} failed in {method}: {type(error).__name__}: {error.message}"
    return f"{error.message}; it takes {error.facts['takes']}" if "takes" in error.facts else error.message


def _identified(plugin: Any) -> tuple[str, str, str]:
    """Kind, name, and the name with the distribution of a plugin that is not built in."""
    kind: Kind | str
    origin: Origin | None
    if isinstance(plugin, Plugin):
        kind, name, origin = "plugin", plugin.name, plugin.origin
    elif isinstance(plugin, tuple):
        kind, name = plugin
        entries = registry().entries(kind) if isinstance(kind, Kind) else []
        origin = next((entry.origin for entry in entries if entry.spec.name == name), None)
    else:
        kind, name, origin = kind_of(plugin), plugin.name, registry().origin_of(plugin)
    label = name if origin is None or origin.built_in else f"{name} ({origin})"
    return kind.value if isinstance(kind, Kind) else kind, name, label


# --- one registry per process ----------------------------------------------------------------------------------------

_current: Registry | None = None
_current_lock = ForkSafeLock()


def registry() -> Registry:
    """The registry of this process, built on the first call."""
    global _current
    with _current_lock.held:
        if _current is None:
            _current = Registry()
        return _current


def use_registry(new: Registry | None) -> Registry | None:
    """Replace the registry of this process (None: build a new one on the next call); returns the old one. For tests."""
    global _current
    with _current_lock.held:
        former, _current = _current, new
        return former


def notify_cycle(record: CycleRecord) -> tuple[str, ...]:
    """Pass a finished cycle to the plugins that observe cycles; returns why any of them was switched off."""
    return () if _current is None else _current.notify_cycle(record)
