"""The origin of a plugin, its entries, and its failures."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

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
    """A loaded plugin."""

    plugin: object
    name: str
    origin: Origin

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

    def __str__(self) -> str:
        return f"{self.spec.name} ({self.origin})"


@attrs.frozen(eq=False)
class Failure:
    """A plugin, or part of one, that does not work, and why."""

    name: str  # of the entry point, or the last part of a built-in's module
    origin: Origin
    error: BaseException
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


def conflict_error(kind: Kind, name: str, claims: Sequence[Entry], asked_by: str | None) -> PluginError:
    """The error for a name that several plugins claim."""
    installed = [claim.origin.distribution for claim in claims if claim.origin.distribution is not None]
    return PluginError(
        f"{len(claims)} plugins provide a {kind.value} called {name!r}, and specdec does not choose between them",
        asked_for_by=asked_by,
        provided_by=" and ".join(f"{claim.origin} ({claim.origin.module})" for claim in claims),
        try_=f"pip uninstall {installed[-1]}" if installed else "give one of them another name",
    )
