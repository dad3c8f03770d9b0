"""Loading plugins and finding what they registered. Nothing is imported before somebody asks.

Every plugin is loaded on its own and all or nothing: one that fails is taken back and recorded with its error, and the
error is raised when the plugin is asked for. ``SPECDEC_STRICT_PLUGINS=1`` raises it at once (for authors and CI),
``SPECDEC_TRACE_PLUGINS=1`` logs every hook call.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import importlib.metadata
import inspect
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import attrs
import pluggy
import structlog

from specdec import hookspecs
from specdec.contract import (
    BackendSpec,
    CycleRecord,
    DepthPolicy,
    DepthPolicySpec,
    Drafter,
    DrafterEnv,
    DrafterSpec,
    ForwardPass,
    LogitsProcessor,
    ModelSpec,
    ProcessorEnv,
    ProcessorSpec,
    Verifier,
    VerifierSpec,
)
from specdec.errors import PluginError, SpecdecError, UnknownNameError, did_you_mean, nearest

if TYPE_CHECKING:
    import click

    from specdec.config import TargetConfig

log = structlog.get_logger()

Spec = DrafterSpec | VerifierSpec | DepthPolicySpec | ProcessorSpec | BackendSpec | ModelSpec
S = TypeVar("S", DrafterSpec, VerifierSpec, DepthPolicySpec, ProcessorSpec, BackendSpec, ModelSpec)

BUILT_INS = (
    "specdec.drafters.none",
    "specdec.drafters.ngram",
    "specdec.drafters.mtp",
    "specdec.drafters.draft_model",
    "specdec.drafters.first_of",
    "specdec.verifiers.strict",
    "specdec.verifiers.rejection",
    "specdec.verifiers.margin",
    "specdec.verifiers.typical",
    "specdec.policies.fixed",
    "specdec.policies.adaptive",
    "specdec.processors.grammar",
    "specdec.backends.cpu",
    "specdec.backends.cuda",
    "specdec.backends.metal",
    "specdec.models.qwen3_5",
    "specdec.models.qwen3_next",
    "specdec.models.llama",
    "specdec.models.glm4_moe",
    "specdec.models.deepseek_v3",
)
"""Modules that register through the same hooks as a stranger's plugin."""


class Kind(enum.Enum):
    """What a spec describes; the value is the word used in messages."""

    DRAFTER = "drafter"
    VERIFIER = "verifier"
    DEPTH_POLICY = "depth policy"
    PROCESSOR = "logits processor"
    BACKEND = "backend"
    MODEL = "model family"


@attrs.frozen
class _KindInfo:
    hook: str
    spec: type[Any]
    key: str | None  # where the configuration names one
    plural: str


KINDS: Mapping[Kind, _KindInfo] = {
    Kind.DRAFTER: _KindInfo("specdec_drafters", DrafterSpec, "drafter.name", "drafters"),
    Kind.VERIFIER: _KindInfo("specdec_verifiers", VerifierSpec, "verifier.name", "verifiers"),
    Kind.DEPTH_POLICY: _KindInfo("specdec_depth_policies", DepthPolicySpec, "depth.name", "depth_policies"),
    Kind.PROCESSOR: _KindInfo("specdec_logits_processors", ProcessorSpec, None, "logits_processors"),
    Kind.BACKEND: _KindInfo("specdec_backends", BackendSpec, "target.backend", "backends"),
    Kind.MODEL: _KindInfo("specdec_models", ModelSpec, None, "models"),
}


PUBLISHED: Mapping[tuple[Kind, str | None], tuple[str, str]] = {
    (Kind.BACKEND, "transformers"): ("specdec-transformers", "the plugin that brings 'transformers'"),
    (Kind.MODEL, None): ("specdec-transformers", "which runs every causal language model of transformers"),
}
"""The plugin of ours to install for a name that nothing brings, and why; None stands for every name of the kind."""


@attrs.frozen
class Origin:
    """Who registered something."""

    distribution: str | None = None  # None: not from an installed distribution
    version: str = ""
    module: str = ""

    @property
    def built_in(self) -> bool:
        """Whether it came with specdec itself."""
        return self.distribution is None and self.module.startswith("specdec.")

    def __str__(self) -> str:
        if self.distribution is not None:
            return f"{self.distribution} {self.version}".strip()
        return "built in" if self.built_in else f"registered by {self.module or 'this program'}"


@attrs.frozen(eq=False)
class Failure:
    """A plugin, or a part of one, that does not work, and why."""

    name: str  # of the entry point, or the last part of a built-in's module
    origin: Origin
    error: BaseException
    during: str  # "import", "registration", or the hook that raised
    provides: tuple[str, ...] = ()  # names that its specs would have had, as far as they are known

    @property
    def reason(self) -> str:
        """The error's type and text, on one line."""
        return " ".join(f"{type(self.error).__name__}: {self.error}".split()).rstrip(": ")

    def __str__(self) -> str:
        return f"{self.name} ({self.origin}): {self.reason}"

    @property
    def fatal(self) -> bool:
        """Whether nothing of the plugin is there; otherwise only one hook of it is off."""
        return self.during in ("import", "registration")

    def stands_for(self, name: str) -> bool:
        """Whether who asks for ``name`` most likely wants this plugin."""
        return name == self.name or name in self.provides or self.origin.distribution == f"specdec-{name}"


@attrs.frozen(eq=False)
class _Loaded:
    plugin: object
    name: str
    origin: Origin


@attrs.frozen(eq=False)
class Entry:
    """A spec and the plugin that registered it."""

    kind: Kind
    spec: Spec
    owner: _Loaded

    @property
    def origin(self) -> Origin:
        """Who registered it."""
        return self.owner.origin

    def __str__(self) -> str:
        return f"{self.spec.name} ({self.origin})"


@attrs.frozen(eq=False)
class _Candidate:
    name: str
    origin: Origin
    load: Callable[[], object]


class Registry:
    """All plugins of a process, by what they provide.

    Installed plugins and built-ins are loaded on the first look-up; commands need the installed ones only, so that
    ``specdec --help`` imports no tensor library of ours.
    """

    def __init__(
        self,
        built_ins: Iterable[str | ModuleType | object] = BUILT_INS,
        entry_points: Iterable[importlib.metadata.EntryPoint] | None = None,
        *,
        strict: bool | None = None,
        trace: bool | None = None,
    ) -> None:
        """Load nothing yet.

        Args:
            built_ins: module names or plugin objects.
            entry_points: None takes those of the installed distributions.
            strict: None reads SPECDEC_STRICT_PLUGINS.
            trace: None reads SPECDEC_TRACE_PLUGINS.
        """
        self.strict = _flag("SPECDEC_STRICT_PLUGINS") if strict is None else strict
        self._built_ins = tuple(built_ins)
        self._entry_points = None if entry_points is None else tuple(entry_points)
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        if tracing() if trace is None else trace:
            self._manager.add_hookcall_monitoring(_trace_before, _trace_after)
        self._plugins: list[_Loaded] = []
        self._entries: list[Entry] = []
        self._failures: list[Failure] = []
        self._observers: tuple[tuple[_Loaded, Callable[..., Any]], ...] = ()
        self._lock = threading.RLock()
        self._sources: list[Callable[[], Iterable[_Candidate]]] = [self._installed, self._shipped]
        self._queue: list[_Candidate] = []
        self._loading = self._ready = False

    # --- look-up -----------------------------------------------------------------------------------------------------

    def drafter(self, name: str, asked_by: str | None = None) -> DrafterSpec:
        """The drafter called ``name``; ``asked_by`` says in errors who wants it: "run.toml, key drafter.name".

        Raises: UnknownNameError when nobody registered it, PluginError when its plugin failed or two claim the name.
        """
        return self._find(Kind.DRAFTER, DrafterSpec, name, asked_by)

    def verifier(self, name: str, asked_by: str | None = None) -> VerifierSpec:
        """The verifier called ``name``; errors as for ``drafter``."""
        return self._find(Kind.VERIFIER, VerifierSpec, name, asked_by)

    def depth_policy(self, name: str, asked_by: str | None = None) -> DepthPolicySpec:
        """The depth policy called ``name``; errors as for ``drafter``."""
        return self._find(Kind.DEPTH_POLICY, DepthPolicySpec, name, asked_by)

    def processor(self, name: str, asked_by: str | None = None) -> ProcessorSpec:
        """The logits processor called ``name``; errors as for ``drafter``."""
        return self._find(Kind.PROCESSOR, ProcessorSpec, name, asked_by)

    def backend(self, name: str, asked_by: str | None = None) -> BackendSpec:
        """The backend called ``name``; errors as for ``drafter``."""
        return self._find(Kind.BACKEND, BackendSpec, name, asked_by)

    def model(self, model_type: str, asked_by: str | None = None) -> ModelSpec:
        """The family that reads checkpoints of ``model_type``; errors as for ``drafter``."""
        return self._find(Kind.MODEL, ModelSpec, model_type, asked_by)

    def origin_of(self, spec: Spec) -> Origin:
        """Who registered ``spec``; a spec made by hand is this program's."""
        self.load()
        return next((entry.origin for entry in self._entries if entry.spec is spec), Origin())

    def entries(self, kind: Kind | None = None) -> list[Entry]:
        """Everything registered, built-ins first, then by name; conflicting specs are all in it."""
        self.load()
        found = [entry for entry in self._entries if kind is None or entry.kind is kind]
        return sorted(
            found, key=lambda entry: (list(Kind).index(entry.kind), not entry.origin.built_in, entry.spec.name)
        )

    def conflicts(self) -> list[tuple[Kind, str, list[Entry]]]:
        """Names that more than one spec claims."""
        self.load()
        return self._conflicts()

    def _conflicts(self) -> list[tuple[Kind, str, list[Entry]]]:
        return [
            (kind, name, claims)
            for kind in Kind
            for name, claims in _by_name(e for e in self._entries if e.kind is kind).items()
            if len(claims) > 1
        ]

    @property
    def failures(self) -> list[Failure]:
        """What failed so far: plugins that are not there, and single hooks that are switched off."""
        self.load()
        return list(self._failures)

    def _find(self, kind: Kind, spec_type: type[S], name: str, asked_by: str | None) -> S:
        self.load()
        known = _by_name(entry for entry in self._entries if entry.kind is kind)
        claims = known.get(name, [])
        if len(claims) == 1:
            return cast(S, claims[0].spec)
        if claims:
            raise _conflict(kind, name, claims, asked_by)
        key = KINDS[kind].key
        for failure in self._failures:
            if failure.fatal and failure.stands_for(name):
                other = _suggested(kind, known)
                raise PluginError(
                    f"the plugin that should bring the {kind.value} {name!r} could not be loaded",
                    asked_for_by=asked_by,
                    plugin=f"{failure.name} ({failure.origin})",
                    error=failure.reason,
                    available=_listed(known),
                    **{"try": _remedy(failure, f'set {key} = "{other}"' if key and other else None)},
                ) from failure.error
        raise self._unknown(kind, name, known, asked_by)

    def _unknown(
        self, kind: Kind, name: str, known: Mapping[str, list[Entry]], asked_by: str | None
    ) -> UnknownNameError:
        broken = [failure for failure in self._failures if failure.fatal]
        failed = {word for failure in broken for word in (failure.name, *failure.provides)}
        key = KINDS[kind].key
        match = nearest(name, known) or _suggested(kind, known)
        what = "reads model_type" if kind is Kind.MODEL else "is called"
        remedy = f'set {key} = "{match}", or install the plugin that brings {name!r}' if key and match else None
        return UnknownNameError(
            f"no {kind.value} {what} {name!r}.{did_you_mean(name, [*known, *sorted(failed)])}",
            asked_for_by=asked_by,
            available=_listed(known),
            not_loaded="; ".join(map(str, broken)) or None,
            **{"try": self._published(kind, name) or remedy},
        )

    def _published(self, kind: Kind, name: str) -> str | None:
        """What to install for ``name``, where a plugin that is not installed brings it."""
        distribution, what = PUBLISHED.get((kind, name)) or PUBLISHED.get((kind, None)) or ("", "")
        missing = bool(distribution) and not self.has_distribution(distribution)
        return f"pip install {distribution}, {what}" if missing else None

    def has_distribution(self, distribution: str) -> bool:
        """Whether a plugin of this distribution is loaded."""
        self.load()
        return any(loaded.origin.distribution == distribution for loaded in self._plugins)

    # --- building what specs describe --------------------------------------------------------------------------------

    def make_drafter(self, spec: DrafterSpec, config: Any, env: DrafterEnv) -> Drafter:
        """A drafter for one sequence; a factory that raises or returns something else is an error with its origin."""
        made: Drafter = self._make(Kind.DRAFTER, spec, Drafter, lambda: spec.factory(config, env))
        return made

    def make_verifier(self, spec: VerifierSpec, config: Any) -> Verifier:
        """A verifier; errors as for ``make_drafter``."""
        made: Verifier = self._make(Kind.VERIFIER, spec, Verifier, lambda: spec.factory(config))
        return made

    def make_depth_policy(self, spec: DepthPolicySpec, config: Any, shared: Any = None) -> DepthPolicy:
        """A depth policy for one generation; errors as for ``make_drafter``. ``shared`` is what ``prepare`` gave."""
        arguments = (config,) if spec.prepare is None else (config, shared)
        made: DepthPolicy = self._make(Kind.DEPTH_POLICY, spec, DepthPolicy, lambda: spec.factory(*arguments))
        return made

    def make_processor(self, spec: ProcessorSpec, config: Any, env: ProcessorEnv) -> LogitsProcessor:
        """A logits processor for one generation; errors as for ``make_drafter``."""
        made: LogitsProcessor = self._make(Kind.PROCESSOR, spec, LogitsProcessor, lambda: spec.factory(config, env))
        return made

    def _make(self, kind: Kind, spec: Spec, wanted: type, build: Callable[[], Any]) -> Any:
        facts = {"plugin": f"{spec.name} ({self.origin_of(spec)})"}
        try:
            made = build()
        except SpecdecError:
            raise
        except Exception as error:
            raise PluginError(
                f"the {kind.value} {spec.name!r} could not be built",
                **facts,
                error=f"{type(error).__name__}: {error}",
                **{"try": "its author's documentation; specdec -v shows the traceback"},
            ) from error
        if not isinstance(made, wanted):
            raise PluginError(
                f"the {kind.value} {spec.name!r} is no specdec.{wanted.__name__}: its factory returned "
                f"{type(made).__name__}",
                **facts,
                **{"try": f"derive {type(made).__name__} from specdec.{wanted.__name__}"},
            )
        return made

    # --- hooks that are called later ---------------------------------------------------------------------------------

    def forward_pass(self, target_config: TargetConfig) -> ForwardPass | None:
        """The first plugin's own model for this target, or None.

        Raises: PluginError when a plugin fails on it; going on would run another engine than intended.
        """
        self.load()
        for loaded in reversed(self._plugins):  # the order of pluggy: last registered, first called
            try:
                made = self._call(loaded, "specdec_forward_pass", target_config=target_config)
            except SpecdecError:
                raise
            except Exception as error:
                raise PluginError(
                    f"{loaded.name} ({loaded.origin}) failed in specdec_forward_pass on model {target_config.model!r}",
                    error=f"{type(error).__name__}: {error}",
                    **{"try": f"remove {loaded.origin.distribution or loaded.name}, or report this to its author"},
                ) from error
            if made is None:
                continue
            if not isinstance(made, ForwardPass):
                raise PluginError(
                    f"{loaded.name} ({loaded.origin}) returned {type(made).__name__} from specdec_forward_pass",
                    takes="a specdec.ForwardPass, or None to leave the target to others",
                )
            return made
        return None

    @property
    def has_observers(self) -> bool:
        """Whether any plugin sees cycles."""
        return bool(self._observers)

    def notify_cycle(self, record: CycleRecord) -> None:
        """Show a cycle to every observer; one that raises is recorded and switched off."""
        for loaded, call in self._observers:
            try:
                call(record=record)
            except Exception as error:  # an observer must not end a generation
                self._observers = tuple(pair for pair in self._observers if pair[0] is not loaded)
                self._fail(failure := Failure(loaded.name, loaded.origin, error, "specdec_cycle"))
                if self.strict:
                    raise _as_error(failure) from error

    def add_commands(self, cli: click.Group) -> None:
        """Let installed plugins add commands; one that raises, or takes a name in use, adds none."""
        self._advance(sources_left=1)
        for loaded in list(self._plugins):
            before = dict(cli.commands)
            try:
                self._call(loaded, "specdec_commands", cli=cli)
                taken = sorted(name for name, command in before.items() if cli.commands.get(name) is not command)
                if taken:
                    raise PluginError(f"the command {taken[0]!r} exists already")
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin must not break every command
                cli.commands.clear()
                cli.commands.update(before)
                self._fail(Failure(loaded.name, loaded.origin, error, "specdec_commands"))
        if self.strict:
            for failure in self._failures:
                raise _as_error(failure) from failure.error

    # --- loading -----------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Load what is not loaded yet; every look-up does.

        Raises: PluginError for the first failure or conflict, when strict.
        """
        if not self._ready:
            self._advance(sources_left=0)
            self._ready = True
        if self.strict:
            for failure in self._failures:
                raise _as_error(failure) from failure.error
            for kind, name, claims in self._conflicts():
                raise _conflict(kind, name, claims, "SPECDEC_STRICT_PLUGINS=1")

    def register(self, plugin: object, name: str | None = None) -> None:
        """Add a plugin of this program: a module, or an object with ``@hookimpl`` methods. Fails at once.

        Raises: PluginError when it cannot be registered, or a name that it brings is taken.
        """
        self.load()
        module = plugin.__name__ if isinstance(plugin, ModuleType) else type(plugin).__module__
        with self._lock:
            outcome = self._admit(_Candidate(name or module, Origin(module=module), lambda: plugin))
            if isinstance(outcome, Failure):
                raise _as_error(outcome) from outcome.error
            for kind, taken, claims in self._conflicts():
                if any(claim.owner is outcome for claim in claims):
                    self._remove(outcome)
                    raise _conflict(kind, taken, claims, None)

    def _advance(self, *, sources_left: int) -> None:
        """Admit candidates until so many sources are left; interrupted, it goes on where it was."""
        with self._lock:
            if self._loading:  # the lock is this thread's own, so we are inside an import that we started
                raise PluginError("a plugin asked for the registry while it was being imported")
            self._loading = True
            try:
                while self._queue or len(self._sources) > sources_left:
                    if not self._queue:
                        self._queue = list(self._sources[0]())
                        self._sources.pop(0)
                        continue
                    outcome = self._admit(self._queue[0])
                    self._queue.pop(0)
                    if isinstance(outcome, Failure):
                        self._fail(outcome)
            finally:
                self._loading = False

    def _shipped(self) -> Iterator[_Candidate]:
        for built_in in self._built_ins:
            if isinstance(built_in, str):
                load = functools.partial(importlib.import_module, built_in)
                yield _Candidate(built_in.rpartition(".")[2], Origin(module=built_in), load)
            else:
                module = getattr(built_in, "__name__", type(built_in).__name__)
                yield _Candidate(module, Origin(module=module), functools.partial(lambda plugin: plugin, built_in))

    def _installed(self) -> Iterator[_Candidate]:
        if self._entry_points is not None:
            for entry_point in self._entry_points:
                yield _candidate(entry_point, entry_point.dist)
            return
        seen: set[str] = set()
        for distribution in importlib.metadata.distributions():
            try:  # one distribution with a broken entry_points.txt must not hide all others
                mine = distribution.entry_points.select(group=hookspecs.ENTRY_POINT_GROUP)
                name = re.sub(r"[-_.]+", "-", distribution.name).lower() if mine else ""
            except Exception as error:  # noqa: BLE001 - whatever a stranger's metadata makes importlib raise
                where = str(getattr(distribution, "_path", "unknown distribution"))
                self._fail(Failure(where, Origin(where), error, "registration"))
                continue
            if mine and name not in seen:  # the first on the path shadows the others, as for imports
                seen.add(name)
                for entry_point in mine:
                    yield _candidate(entry_point, distribution)

    def _admit(self, candidate: _Candidate) -> _Loaded | Failure:
        """Import, register and collect one plugin: all of it, or nothing and a Failure."""
        name, origin, during = candidate.name, candidate.origin, "import"
        provides: list[str] = []
        loaded: _Loaded | None = None
        try:
            plugin = candidate.load()
            during = "registration"
            if inspect.isclass(plugin):
                plugin = plugin()
            self._check_registrable(plugin)
            loaded = _Loaded(plugin, name, origin)
            label = f"{name} ({origin})"
            self._manager.register(plugin, f"{label} #{id(plugin)}" if self._manager.has_plugin(label) else label)
            self._manager.check_pending()
            self._check_marks(plugin)
            entries = self._collect(loaded, provides)
        except BaseException as error:
            if loaded is not None:
                self._remove(loaded)
            if isinstance(error, Exception | SystemExit):  # sys.exit() in a module must not end the host
                return Failure(name, origin, error, during, tuple(provides))
            raise
        self._plugins.append(loaded)
        self._entries += entries
        self._find_observers()
        return loaded

    def _remove(self, loaded: _Loaded) -> None:
        known = self._manager.get_name(loaded.plugin)
        if known is not None:
            self._manager.unregister(name=known)
        self._plugins = [one for one in self._plugins if one is not loaded]
        self._entries = [entry for entry in self._entries if entry.owner is not loaded]
        self._find_observers()

    def _find_observers(self) -> None:
        observing = (one for one in self._plugins if self._implements(one, "specdec_cycle"))
        self._observers = tuple((one, self._caller(one, "specdec_cycle")) for one in observing)

    def _check_registrable(self, plugin: object) -> None:
        if plugin is None:
            raise PluginError("the entry point names None")
        hash(plugin)  # pluggy keeps plugins in sets, where an unhashable one would break all others' calls
        for loaded in self._plugins:
            if loaded.plugin is plugin:
                raise PluginError(f"the same plugin is registered as {loaded.name} ({loaded.origin})")

    def _check_marks(self, plugin: object) -> None:
        """A hook without ``@hookimpl`` would never be called, and nobody would say so."""
        implemented = {caller.name for caller in self._manager.get_hookcallers(plugin) or []}
        for hook in vars(hookspecs):
            if hook.startswith("specdec_") and hook not in implemented:
                own = inspect.getattr_static(plugin, hook, None)
                if own is not None and getattr(own, "__module__", "") != hookspecs.__name__:
                    raise PluginError(f"{hook} is not marked @specdec.hookimpl")
        if not implemented:
            raise PluginError("it implements no hook; mark one with @specdec.hookimpl")

    def _collect(self, loaded: _Loaded, provides: list[str]) -> list[Entry]:
        """Every spec of a plugin, checked; names go to ``provides`` as they are found, so that a failure knows them."""
        entries: list[Entry] = []
        for kind, info in KINDS.items():
            if not self._implements(loaded, info.hook):
                continue
            for result in self._call(loaded, info.hook):  # a list per implementation: here one
                if not isinstance(result, list | tuple):
                    raise PluginError(f"{info.hook} returns a list of {info.spec.__name__}, got {_kind_of(result)}")
                for spec in result:
                    if not isinstance(spec, info.spec):
                        raise PluginError(f"{info.hook} returns a list of {info.spec.__name__}, got {_kind_of(spec)}")
                    provides.append(str(spec.name))
                    _check_spec(spec)
                    entries.append(Entry(kind, cast(Spec, spec), loaded))
                    provides += _names_of(entries[-1])
        return entries

    def _implements(self, loaded: _Loaded, hook: str) -> bool:
        return any(impl.plugin is loaded.plugin for impl in getattr(self._manager.hook, hook).get_hookimpls())

    def _caller(self, loaded: _Loaded, hook: str) -> Callable[..., Any]:
        """The hook with every other plugin taken out; goes through pluggy, so that tracing sees it."""
        others = [plugin for plugin in self._manager.get_plugins() if plugin is not loaded.plugin]
        return self._manager.subset_hook_caller(hook, others)

    def _call(self, loaded: _Loaded, hook: str, **arguments: object) -> Any:
        return self._caller(loaded, hook)(**arguments)

    def _fail(self, failure: Failure) -> None:
        self._failures.append(failure)
        log.warning(
            "plugin_failed",
            plugin=failure.name,
            origin=str(failure.origin),
            during=failure.during,
            error=failure.reason,
        )


# --- one registry per process ----------------------------------------------------------------------------------------

_current: Registry | None = None
_current_lock = threading.Lock()


def registry() -> Registry:
    """The registry of this process, built on the first call."""
    global _current
    with _current_lock:
        if _current is None:
            _current = Registry()
        return _current


def use_registry(new: Registry | None) -> Registry | None:
    """Put another registry in place (None: built afresh when next asked for) and return the former; for tests."""
    global _current
    with _current_lock:
        former, _current = _current, new
        return former


def notify_cycle(record: CycleRecord) -> None:
    """Show a finished cycle to the plugins that observe cycles; one attribute read when there are none."""
    current = _current
    if current is not None and current.has_observers:
        current.notify_cycle(record)


def tracing() -> bool:
    """Whether SPECDEC_TRACE_PLUGINS asks for a log line per hook call."""
    return _flag("SPECDEC_TRACE_PLUGINS")


# --- helpers ---------------------------------------------------------------------------------------------------------


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")


def _candidate(
    entry_point: importlib.metadata.EntryPoint, distribution: importlib.metadata.Distribution | None
) -> _Candidate:
    name = distribution.name if distribution is not None else "unknown distribution"
    version = distribution.version if distribution is not None else ""
    return _Candidate(entry_point.name, Origin(name, version, entry_point.module), entry_point.load)


def _names_of(entry: Entry) -> Iterable[str]:
    """What people ask for: a family is asked for by the model_type of a checkpoint."""
    return entry.spec.model_types if isinstance(entry.spec, ModelSpec) else (entry.spec.name,)


def _by_name(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        for name in _names_of(entry):
            found.setdefault(name, []).append(entry)
    return found


def _listed(known: Mapping[str, list[Entry]]) -> str:
    names = (f"{name} ({' and '.join(str(c.origin) for c in claims)})" for name, claims in sorted(known.items()))
    return ", ".join(names) or "nothing"


def _suggested(kind: Kind, known: Mapping[str, list[Entry]]) -> str | None:
    """A name that works: a built-in one where there is one."""
    usable = {name: claims[0] for name, claims in known.items() if len(claims) == 1}
    return min(usable, key=lambda name: (not usable[name].origin.built_in, name == "none", name), default=None)


def _remedy(failure: Failure, otherwise: str | None) -> str:
    if isinstance(failure.error, ModuleNotFoundError) and failure.error.name:
        repair = f"install the missing module {failure.error.name!r}"
    elif failure.origin.distribution is not None:
        repair = f"upgrade {failure.origin.distribution}, or report this to its author"
    else:
        repair = f"repair {failure.origin.module or failure.name}"
    return f"{repair}, or {otherwise}" if otherwise else repair


def _conflict(kind: Kind, name: str, claims: Sequence[Entry], asked_by: str | None) -> PluginError:
    strangers = [claim.origin.distribution for claim in claims if claim.origin.distribution is not None]
    return PluginError(
        f"{len(claims)} plugins bring a {kind.value} called {name!r}, and specdec does not choose between them",
        asked_for_by=asked_by,
        brought_by=" and ".join(f"{claim.origin} ({claim.origin.module})" for claim in claims),
        **{"try": f"pip uninstall {strangers[-1]}" if strangers else "give one of them another name"},
    )


def _as_error(failure: Failure) -> PluginError:
    return PluginError(
        f"the plugin {failure.name!r} failed ({failure.during})",
        plugin=f"{failure.name} ({failure.origin})",
        error=failure.reason,
        **{"try": _remedy(failure, None)},
    )


def _kind_of(value: object) -> str:
    return f"the class {value.__name__}" if inspect.isclass(value) else f"{value!r:.60} ({type(value).__name__})"


def _check_spec(spec: Any) -> None:
    """What attrs does not check: the contents of a spec, so that a wrong one fails here and not in a generation."""
    who = f"{type(spec).__name__} {spec.name!r}"
    if not isinstance(spec.name, str) or not spec.name or spec.name != spec.name.strip() or spec.name == "auto":
        raise PluginError(f"{who}: a name is a word other than 'auto'")
    for field in ("factory", "available", "preference", "parse", "tensors", "build"):
        if hasattr(spec, field) and not callable(getattr(spec, field)):
            raise PluginError(f"{who}: {field} is called, got {_kind_of(getattr(spec, field))}")
    if isinstance(spec, ModelSpec):
        words: object = spec.model_types
        if not isinstance(words, tuple | list) or not all(isinstance(word, str) for word in words):
            raise PluginError(f"{who}: model_types is a tuple of strings, got {_kind_of(words)}")
    elif not inspect.isclass(spec.config) or not (attrs.has(spec.config) or dataclasses.is_dataclass(spec.config)):
        raise PluginError(f"{who}: config is an attrs class or a dataclass, got {_kind_of(spec.config)}")


def _trace_before(hook_name: str, methods: Sequence[pluggy.HookImpl], kwargs: Mapping[str, object]) -> None:
    log.info("hook_call", hook=hook_name, plugins=[m.plugin_name for m in methods], arguments=sorted(kwargs))


def _trace_after(
    outcome: pluggy.Result[Any], hook_name: str, methods: Sequence[pluggy.HookImpl], kwargs: Mapping[str, object]
) -> None:
    error = outcome.exception
    log.info("hook_done", hook=hook_name, error=None if error is None else f"{type(error).__name__}: {error}")


def constructed(kind: str, name: str, make: Any) -> Any:
    """Run a plugin's constructor; any failure of it names the plugin."""
    try:
        return make()
    except SpecdecError:
        raise
    except Exception as error:
        raise PluginError(f"the {kind} {name!r} failed to start: {type(error).__name__}: {error}") from error
