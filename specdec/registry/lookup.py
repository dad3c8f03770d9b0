"""The plugin registry: finds what plugins registered, builds it, and calls their hooks.

Nothing is imported before the first look-up. A plugin that fails is recorded with its error, which is raised when the
plugin is requested. ``SPECDEC_STRICT_PLUGINS=1`` raises it at once (for plugin authors and CI).
"""

from __future__ import annotations

import importlib.metadata
import operator
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from specdec.checking import checked
from specdec.config import structure_choice
from specdec.contract import BackendSpec, Context, CycleRecord, Draft, DraftNoise, ForwardPass, Verdict
from specdec.errors import (
    MESSAGE_LIMIT,
    ContractError,
    PluginError,
    SpecdecError,
    UnknownNameError,
    cut,
    described,
    did_you_mean,
    nearest,
    typed,
)
from specdec.locks import ForkSafeLock
from specdec.registry.kinds import BUILT_INS, KINDS, PUBLISHED, Kind, Spec, kind_of, names_of
from specdec.registry.plugins import Entry, Failure, Loader, Origin, Plugin, flag, module_of

if TYPE_CHECKING:
    import click

    from specdec.config import Choice, TargetConfig


def _finder(kind: Kind) -> Any:
    @checked()
    def find(self: Registry, name: str, asked_by: str | None = None) -> Any:
        """The spec called ``name``; ``asked_by`` says where the name comes from ("run.toml, key drafter.name").

        Raises: UnknownNameError when it is not registered, PluginError when its plugin failed or two claim the name.
        """
        return self._find(kind, name, asked_by)

    return find


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
        self._loader = Loader(built_ins, entry_points)
        self._observers: tuple[Hook, ...] = ()
        self._ready = False

    def load(self) -> None:
        """Load everything not loaded yet; every look-up does this.

        Raises: PluginError for the first failure or conflict, when strict.
        """
        if not self._ready:
            self._loader.advance(built_ins=True)
            self._find_observers()
            self._ready = True
        if self.strict:
            self._raise_failures()
            for kind, name, claims in self._conflicts():
                raise _conflict_error(kind, name, claims, "SPECDEC_STRICT_PLUGINS=1")

    @checked(PluginError)
    def register(self, plugin: object, name: str | None = None) -> None:
        """Add a plugin of this program: a module, or an object with ``@hookimpl`` methods.

        A script that is installed as a plugin too is registered already: then nothing is added.

        Raises: PluginError when it cannot be registered, or a name that it provides is taken.
        """
        self.load()
        module = module_of(plugin)
        if module == "__main__" and self._loader.holds_script(plugin):
            return
        with self._loader.lock.held:
            outcome = self._loader.admit(Plugin(name or module, Origin(module=module), lambda: plugin))
            if isinstance(outcome, Failure):
                raise outcome.as_error() from outcome.error
            for kind, taken, claims in self._conflicts():
                if any(claim.owner is outcome for claim in claims):
                    self._loader.remove(outcome)
                    raise _conflict_error(kind, taken, claims, None)
            self._find_observers()

    def origin_of(self, spec: Spec) -> Origin:
        """Where ``spec`` comes from; an unregistered spec belongs to this program."""
        self.load()
        return next((entry.origin for entry in self._loader.entries if entry.spec is spec), Origin())

    @checked()
    def entries(self, kind: Kind | None = None) -> list[Entry]:
        """Everything registered, conflicting specs included: by kind, built-ins first, then by name."""
        self.load()
        kinds = list(Kind)
        found = [entry for entry in self._loader.entries if kind is None or entry.kind is kind]
        return sorted(found, key=lambda entry: (kinds.index(entry.kind), not entry.origin.built_in, entry.spec.name))

    def conflicts(self) -> list[tuple[Kind, str, list[Entry]]]:
        """Names that more than one spec claims."""
        self.load()
        return self._conflicts()

    @property
    def failures(self) -> list[Failure]:
        """Failures so far: plugins that could not be loaded, and hooks that were switched off."""
        self.load()
        return list(self._loader.failures)

    @checked()
    def has_distribution(self, distribution: str) -> bool:
        """Whether a plugin of this distribution is loaded."""
        self.load()
        return any(plugin.origin.distribution == distribution for plugin in self._loader.plugins)

    def _conflicts(self) -> list[tuple[Kind, str, list[Entry]]]:
        return [
            (kind, name, claims) for kind in Kind for name, claims in self._by_name(kind).items() if len(claims) > 1
        ]

    def _by_name(self, kind: Kind) -> dict[str, list[Entry]]:
        found: dict[str, list[Entry]] = {}
        for entry in self._loader.entries:
            for name in names_of(entry.spec) if entry.kind is kind else ():
                found.setdefault(name, []).append(entry)
        return found

    def _raise_failures(self) -> None:
        for failure in self._loader.failures:
            raise failure.as_error() from failure.error

    def _find(self, kind: Kind, name: str, asked_by: str | None) -> Any:
        self.load()
        known, key = self._by_name(kind), KINDS[kind].key
        claims = known.get(name, [])
        if len(claims) == 1:
            return claims[0].spec
        if claims:
            raise _conflict_error(kind, name, claims, asked_by)
        broken = [failure for failure in self._loader.failures if failure.fatal]
        usual = KINDS[kind].usual if KINDS[kind].usual in known else None
        listed = ["auto"] * KINDS[kind].has_auto
        listed += (f"{name} ({' and '.join(str(c.origin) for c in claims)})" for name, claims in sorted(known.items()))
        facts: dict[str, Any] = {"asked_for_by": asked_by, "available": ", ".join(listed) or "nothing"}
        for failure in broken:
            if failure.stands_for(name):
                raise PluginError(
                    f"the plugin that should provide the {kind.value} {name!r} could not be loaded",
                    **facts,
                    plugin=f"{failure.name} ({failure.origin})",
                    error=failure.reason,
                    try_=failure.remedy(f'set {key} = "{usual}"' if key and usual else None),
                ) from failure.error
        match = nearest(name, known) or usual
        remedy = f'set {key} = "{match}", or install the plugin that provides {name!r}' if key and match else None
        plugin, why = PUBLISHED.get((kind, name)) or PUBLISHED.get((kind, None)) or ("", "")
        if plugin and not self.has_distribution(plugin):
            remedy = f"install {plugin} (plugins/ in specdec's repository), {why}"
        failed = sorted({word for failure in broken for word in (failure.name, *failure.provides)})
        raise UnknownNameError(
            f"no {kind.value} {'reads model_type' if kind is Kind.MODEL else 'is called'} {name!r}."
            f"{did_you_mean(name, [*known, *failed])}",
            **facts,
            not_loaded="; ".join(map(str, broken)) or None,
            try_=remedy,
        )

    drafter = _finder(Kind.DRAFTER)
    verifier = _finder(Kind.VERIFIER)
    depth_policy = _finder(Kind.DEPTH_POLICY)
    processor = _finder(Kind.PROCESSOR)
    backend = _finder(Kind.BACKEND)
    model = _finder(Kind.MODEL)  # by a ``model_type``

    # --- calls into plugins ------------------------------------------------------------------------------------------

    def chosen(self, kind: Kind, choice: Choice, table: str) -> tuple[Any, Any]:
        """The spec that ``choice`` names, and its options. Raises: as looking it up, and as ``options``."""
        asked_by = f"{choice.source}, key {table}.name" if choice.source else f"{table}.name"
        spec = self._find(kind, choice.name, asked_by)
        return spec, self.options(spec, choice, table)

    def options(self, spec: Any, choice: Choice, path: str) -> Any:
        """The options of ``choice`` as the config class of ``spec``; ``path`` is their table, such as "drafter".

        Raises: ConfigError for wrong options, PluginError when the class itself fails.
        """
        with calling(spec, "config"):
            return structure_choice(choice, spec.config, path)

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
        for plugin, call in reversed(self._loader.hooks("specdec_forward_pass")):  # pluggy's order: the last one first
            with calling(plugin, "specdec_forward_pass"):
                model: ForwardPass | None = call(target_config=target_config)
            if model is not None:
                return model
        return None

    def notify_cycle(self, record: CycleRecord) -> tuple[str, ...]:
        """Pass a cycle to every observer; one that raises is recorded and switched off, and the reason is returned."""
        reasons: tuple[str, ...] = ()
        for observer in self._observers:
            plugin, call = observer
            try:
                call(record=record)
            except Exception as error:  # an observer must not end a generation
                self._observers = tuple(other for other in self._observers if other is not observer)
                why = reason(plugin, "specdec_cycle", error)
                reasons = (*reasons, f"an observer was switched off: {why}")
                self._loader.fail(Failure(plugin.name, plugin.origin, error, "specdec_cycle"))
                if self.strict:
                    raise
        return reasons

    def hooks(self) -> list[tuple[str, Plugin]]:
        """What plugins do beside registering specs: a word for it, and the plugin."""
        self.load()
        return [(word, plugin) for hook, word in HOOKS.items() for plugin, _ in self._loader.hooks(hook)]

    def _find_observers(self) -> None:
        self._observers = tuple(self._loader.hooks("specdec_cycle"))

    def add_commands(self, cli: click.Group) -> None:
        """Let installed plugins add commands; one that raises or uses a taken name adds none."""
        self._loader.advance(built_ins=False)
        for plugin, call in self._loader.hooks("specdec_commands"):
            before = dict(cli.commands)
            try:
                call(cli=cli)
                taken = sorted(name for name, command in before.items() if cli.commands.get(name) is not command)
                if taken:
                    raise PluginError(f"the command {taken[0]!r} exists already")
            except Exception as error:  # noqa: BLE001 - a plugin must not break every command
                cli.commands.clear()
                cli.commands.update(before)
                self._loader.fail(Failure(plugin.name, plugin.origin, error, "specdec_commands"))
        if self.strict:
            self._raise_failures()


HOOKS: Mapping[str, str] = {
    "specdec_cycle": "observer",
    "specdec_forward_pass": "forward pass",
    "specdec_commands": "commands",
}
"""The hooks that register no specs, and a word for what implements each."""

Hook = tuple[Plugin, Callable[..., Any]]
"""A plugin and its implementation of a hook."""


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

    Raises: PluginError for any other exception that leaves the block.
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
        failure = PluginError(
            f"the {kind_word} {name!r} failed in {self._method}: {described(error)}",
            plugin=label,
            try_="its author's documentation; specdec -v shows the traceback",
        )
        failure.plugin = kind_word, name
        raise failure from error


def reason(plugin: Any, method: str, error: Exception) -> str:
    """Why a plugin that can be done without was switched off: one sentence that names it."""
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


# --- what is checked of answers --------------------------------------------------------------------------------------

SUM_TOLERANCE = 1e-4  # of a draft distribution


def checked_draft(draft: Draft, depth: int, vocab_size: int, context: Context) -> tuple[Draft, str]:
    """A draft of plain ints, cut to ``depth`` tokens and before the first id outside the vocabulary.

    Returns it with the fault for which it was cut, or "".
    Raises: ContractError for what is no Draft, has ``probs`` of another shape, or, where a ratio test reads them,
        ``probs`` that are not the distributions its tokens were drawn from.
    """
    if not isinstance(draft, Draft):
        raise ContractError(f"propose returned {typed(draft)}", takes="a specdec.Draft")
    tokens = tuple(map(operator.index, draft.tokens[:depth]))
    probs, fault = draft.probs, "draft longer than asked for" if len(draft.tokens) > depth else ""
    outside = next((place for place, token in enumerate(tokens) if not 0 <= token < vocab_size), None)
    if outside is not None:
        tokens, fault = tokens[:outside], "draft token outside the vocabulary"
    if probs is None:
        return Draft(tokens, None, draft.drafter), fault
    if len(probs) < len(tokens) or probs.shape[1:] != (vocab_size,):
        raise ContractError(
            f"propose returned {len(tokens)} tokens with probs of the shape {list(probs.shape)}",
            takes=f"probs of shape [K, {vocab_size}] and dtype float32, or None",
        )
    probs = probs[: len(tokens)]
    if context.draft_noise is DraftNoise.INDEPENDENT and context.sampling.temperature > 0:
        import numpy as np

        sums = probs.sum(axis=1, dtype=np.float64)
        drawn = probs[np.arange(len(tokens)), list(tokens)]
        if not (np.all(probs >= 0) and np.all(np.abs(sums - 1) <= SUM_TOLERANCE) and np.all(drawn > 0)):
            raise ContractError(
                "propose returned probs that its tokens cannot have been drawn from",
                takes="rows of probs that are not negative, sum to 1, and give every drafted token more than 0",
            )
    return Draft(tokens, probs, draft.drafter), fault


def checked_verdict(verdict: Verdict, drafted: int, vocab_size: int) -> Verdict:
    """``verdict`` on a draft of ``drafted`` tokens, with plain numbers. Raises: ContractError when it is not one."""
    if not isinstance(verdict, Verdict):
        raise ContractError(f"verify returned {typed(verdict)}", takes="a specdec.Verdict")
    accepted, token = operator.index(verdict.accepted), operator.index(verdict.next_token)
    if not (0 <= accepted <= drafted and 0 <= token < vocab_size):
        raise ContractError(
            f"verify returned {typed(verdict)}",
            takes=f"a Verdict with 0 to {drafted} accepted tokens and a next_token of 0 to {vocab_size - 1}",
        )
    return Verdict(accepted, token, tuple((operator.index(at), float(gap)) for at, gap in verdict.deviations))


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
