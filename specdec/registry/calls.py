"""Calls into plugins: what a plugin raises becomes an error that names the plugin, the method and the cause."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from specdec.errors import PluginError, SpecdecError, described
from specdec.registry.kinds import Kind, kind_of


class calling:  # noqa: N801 - read as a word: ``with calling(spec, "factory"): ...``
    """A block that calls one method of a plugin. Only exceptions are named; Ctrl-C and exits pass as they are.

    A SpecdecError that the plugin raises itself keeps its text and gets the plugin's name.

    Args:
        plugin: a spec, or kind and name.
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
        return f"{who} failed in {method}: {described(error)}"
    if not error.message.startswith(who):  # an error that the plugin raised itself
        return f"{who} failed in {method}: {type(error).__name__}: {error.message}"
    return f"{error.message}; it takes {error.facts['takes']}" if "takes" in error.facts else error.message


def _identified(plugin: Any) -> tuple[str, str, str]:
    """Kind, name, and the name with the distribution of a plugin that is not built in."""
    from specdec.registry.lookup import registry  # at a failure only

    if isinstance(plugin, tuple):
        kind, name = plugin
        entries = registry().entries(kind) if isinstance(kind, Kind) else []
        origin = next((entry.origin for entry in entries if entry.spec.name == name), None)
    else:
        kind, name, origin = kind_of(plugin), plugin.name, registry().origin_of(plugin)
    label = name if origin is None or origin.built_in else f"{name} ({origin})"
    return kind.value if isinstance(kind, Kind) else kind, name, label
