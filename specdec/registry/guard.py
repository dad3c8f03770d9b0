"""Guards calls into plugins: every error names the plugin and the method, and what comes back is checked.

A plugin may raise anything, ``SystemExit`` and a library's panic included. Only Ctrl-C and what a signal handler of the
program raises are not the plugin's.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from typing import Any

from specdec.errors import ContractError, PluginError, SpecdecError, described
from specdec.logs import get_logger
from specdec.registry import watchdog
from specdec.registry.answers import Refused

log = get_logger(__name__)

Check = Callable[[Any], Any]
"""Returns an answer, converted if need be, or raises ``Refused``."""


class Guard:
    """Calls one plugin, in one thread at a time.

    Attributes:
        kind: the word used in messages, such as "drafter".
        name: the name that it is registered under, or the name of its class.
        origin: where it comes from; empty if unknown.
        inside: the method that runs now; empty between calls. For the watchdog.
        calls: how many began. For the watchdog.
    """

    __slots__ = ("__weakref__", "calls", "inside", "kind", "name", "origin")

    def __init__(self, kind: str, name: str, origin: object = "") -> None:
        self.kind = kind
        self.name = name
        self.origin = str(origin)
        self.inside = ""
        self.calls = 0
        watchdog.watch(self)

    def __str__(self) -> str:
        return f"the {self.kind} {self.name!r}"

    @property
    def label(self) -> str:
        """The name with its origin: ``echo (specdec-echo 0.3)``."""
        return f"{self.name} ({self.origin})" if self.origin else self.name

    def bind(self, method: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which calls ``method`` of the plugin and may check the answer, with its errors named.

        For calls in every cycle: it adds about a tenth of a microsecond. The returned function raises as ``call``.
        """

        def guarded(*arguments: Any) -> Any:
            self.calls += 1
            self.inside = method
            try:
                answer = function(*arguments)
            except BaseException as error:
                self.inside = ""
                named = self.named(method, error)
                if named is error:
                    raise
                raise named from error
            self.inside = ""
            return answer

        return guarded

    def call(self, owner: object, method: str, *arguments: Any, check: Check | None = None) -> Any:
        """``owner.method(*arguments)``, checked.

        Raises: PluginError when the plugin raises, ContractError when its answer is refused. A SpecdecError of the
        plugin's own passes through, with ``plugin`` set.
        """
        return self.bind(method, _ask)(owner, method, arguments, check)

    def named(self, method: str, error: BaseException) -> BaseException:
        """The error to raise for one that left ``method``: it names this plugin, unless it is not the plugin's."""
        if isinstance(error, Refused):
            refusal = ContractError(
                f"{self} returned {error.got} from {method}", takes=error.takes, plugin=self.label, try_=error.remedy
            )
            refusal.plugin = self.kind, self.name
            return refusal
        if isinstance(error, SpecdecError) and self._signed(method, error):
            return error
        if not is_from_plugin(error):
            return error
        failure = PluginError(
            f"{self} failed in {method}: {described(error)}",
            plugin=self.label,
            try_="its author's documentation; specdec -v shows the traceback",
        )
        failure.plugin = self.kind, self.name
        return failure

    def _signed(self, method: str, error: SpecdecError) -> bool:
        """Name this plugin in its own error, if it is one that can be read: a plugin's subclass may break it."""
        try:
            message: object = error.message
            facts: object = error.facts
            if not isinstance(message, str) or not isinstance(facts, dict):
                return False
            if error.plugin is None:
                error.plugin = self.kind, self.name
                if self.origin not in ("", "built in"):
                    facts.setdefault("plugin", f"{self.label}, in {method}")
            return error.plugin is not None
        except Exception:  # noqa: BLE001 - whatever the subclass does
            return False

    def reason(self, method: str, error: SpecdecError) -> str:
        """An error of ``call`` as one sentence that names the plugin."""
        if not error.message.startswith(str(self)):  # an error that the plugin raised itself
            return f"{self} failed in {method}: {type(error).__name__}: {error.message}"
        return f"{error.message}; it takes {error.facts['takes']}" if "takes" in error.facts else error.message


class Switch:
    """A plugin that can be done without: its first failure switches it off.

    Attributes:
        failure: why it was switched off; empty while it works.
    """

    __slots__ = ("failure", "guard")

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.failure = ""

    def bind(self, method: str, function: Callable[..., Any], otherwise: Any = None) -> Callable[..., Any]:
        """As ``Guard.bind``; the returned function gives ``otherwise`` once the plugin has failed.

        It raises the error of another plugin that this one called and that cannot be done without.
        """
        guard = self.guard

        def switched(*arguments: Any) -> Any:  # one function rather than one around ``Guard.bind``: it runs in cycles
            if self.failure:
                return otherwise
            guard.calls += 1
            guard.inside = method
            try:
                answer = function(*arguments)
            except BaseException as error:
                guard.inside = ""
                named = guard.named(method, error)
                needed = isinstance(named, SpecdecError) and named.plugin and named.plugin[0] == "logits processor"
                if needed or not isinstance(named, SpecdecError):
                    if named is error:
                        raise
                    raise named from error
                self.fail(guard.reason(method, named))
                return otherwise
            guard.inside = ""
            return answer

        return switched

    def call(
        self, owner: object, method: str, *arguments: Any, check: Check | None = None, otherwise: Any = None
    ) -> Any:
        """As ``Guard.call``; gives and raises what a function of ``bind`` does."""
        return self.bind(method, _ask, otherwise)(owner, method, arguments, check)

    def fail(self, reason: str) -> None:
        """Switch it off."""
        self.failure = reason
        log.warning("plugin_switched_off", kind=self.guard.kind, name=self.guard.name, reason=reason)


def _ask(owner: object, method: str, arguments: tuple[Any, ...], check: Check | None) -> Any:
    answer = getattr(owner, method)(*arguments)
    return answer if check is None else check(answer)


def is_from_plugin(error: BaseException) -> bool:
    """Whether a plugin is to blame for an error that left it, rather than Ctrl-C or a signal handler of the program."""
    if isinstance(error, KeyboardInterrupt):
        return False
    handlers = [getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()]
    return not any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))
