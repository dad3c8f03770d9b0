"""Plugins chosen by a configuration, ready to make what they register."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import attrs

from specdec.config import Choice
from specdec.contract import (
    DepthPolicy,
    DepthPolicySpec,
    Drafter,
    DrafterEnv,
    DrafterSnapshot,
    DrafterSpec,
    ForwardPass,
    Needs,
    PrepareEnv,
    State,
    Verifier,
)
from specdec.registry.kinds import Kind
from specdec.registry.lookup import calling, registry


@attrs.frozen(kw_only=True)
class _Part:
    """A spec with its configuration and what its ``prepare`` returned."""

    kind: ClassVar[Kind]
    table: ClassVar[str]
    spec: Any
    config: Any = None
    shared: Any = None

    @classmethod
    def of(cls, choice: Choice, table: str = "") -> Self:
        """The plugin that ``choice`` names, not prepared yet; ``table`` is the choice's, by default the kind's own.

        Raises: ConfigError, UnknownNameError, PluginError.
        """
        spec, config = registry().chosen(cls.kind, choice, table or cls.table)
        return cls(spec=spec, config=config)

    def prepared(self, env: PrepareEnv) -> Self:
        """Run the spec's ``prepare``, which may load a second model. Raises: SpecdecError."""
        if self.spec.prepare is None:
            return self
        with calling(self.spec, "prepare"):
            return attrs.evolve(self, shared=self.spec.prepare(self.config, env))


@attrs.frozen(kw_only=True)
class DrafterPart(_Part):
    """A configured drafter; makes one drafter object per sequence."""

    kind = Kind.DRAFTER
    table = "drafter"
    spec: DrafterSpec

    @property
    def needs(self) -> Needs:
        """What the drafter needs from its target; where that is a function, known after ``prepared``."""
        if isinstance(self.spec.needs, Needs):
            return self.spec.needs
        with calling(self.spec, "needs"):
            return self.spec.needs(self.config, self.shared)

    def make(self, target: ForwardPass, state: State, saved: DrafterSnapshot | None = None) -> Drafter:
        """A drafter for the sequence with ``state``. Raises: PluginError when its factory fails."""
        env = DrafterEnv(target=target, state=state, shared=self.shared, saved=saved)
        with calling(self.spec, "factory"):
            return self.spec.factory(self.config, env)


@attrs.frozen(kw_only=True)
class DepthPart(_Part):
    """A configured depth policy; makes one policy object per generation."""

    kind = Kind.DEPTH_POLICY
    table = "depth"
    spec: DepthPolicySpec

    def make(self) -> DepthPolicy:
        """A policy for one generation. Raises: PluginError when its factory fails."""
        arguments = (self.config,) if self.spec.prepare is None else (self.config, self.shared)
        with calling(self.spec, "factory"):
            return self.spec.factory(*arguments)


def make_verifier(choice: Choice) -> Verifier:
    """The verifier that ``choice`` names. Raises: ConfigError, UnknownNameError, PluginError."""
    spec, options = registry().chosen(Kind.VERIFIER, choice, "verifier")
    with calling(spec, "factory"):
        verifier: Verifier = spec.factory(options)
        verifier.guarantee  # noqa: B018 - a class without one is named here, not in the middle of a load
    return verifier
